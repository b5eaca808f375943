#!/usr/bin/env python3
"""What this machine cannot show, under other kernels: posture, isolation tests and attack corpus in ../shared/vm/vmrun.

    tests/vm.py [--quick] [--only ROW[,ROW]] [--list]

Each row boots a virtual machine (about 15 s; everything inside is 20 to 40 times slower) and prints
`suite vm-ROW-WHAT: N passed, N failed`. --quick is the cgroup v2 row with a part of the tests and of the corpus, in under
ten minutes. Inside, CAISSON_TEST_TIME_SCALE lengthens the time limits of the isolation tests (and nothing else of them),
and CAISSON_THROWAWAY_MACHINE allows those that change what is the whole machine's.
Postures uid and process need Landlock ABI 6, which Debian's 6.1 lacks: tests/isolation/postures.rs asks at them.
Where ../shared or qemu is absent it says so and passes; under CI that is a failure.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys

import suites

VMRUN = os.path.join(suites.SHARED, "vm/vmrun")
# One number for all: sent to the corpus, and to the isolation tests as CAISSON_TEST_TIME_SCALE.
TIME_SCALE, MEMORY_MIB = 30, 4096
START_S = 300  # a zygote imports the data stack, 30 times slower
EXIT_ISOLATION = 3
ACCOUNT_UID = 12345
# The machine is thrown away: tests may change what is the whole machine's.
ISOLATION = {"CAISSON_TEST_TIME_SCALE": str(TIME_SCALE), "CAISSON_THROWAWAY_MACHINE": "1"}
# A group that systemd would give to the account, and the shell in it.
HAND_OVER = """
set -e
cd /sys/fs/cgroup
echo +memory +pids +cpu >cgroup.subtree_control
mkdir handed
chown %d handed handed/cgroup.procs handed/cgroup.threads handed/cgroup.subtree_control
echo $$ >handed/cgroup.procs
cd "$0"
exec "$@"
""" % ACCOUNT_UID
# Without delegated cgroups nobody bounds what several processes take together; the posture table says so.
UNBOUNDED = "^(res_memory_children|res_memory_touch|res_shared_anon|res_memfd_fill|res_tmpfs_fill|res_pipe_buffers|res_cpu_hog|res_fork_bomb|res_thread_bomb|sys_swap_acct_quota)$"
# Without a file system of their own there is no limit on the sum; init has the guest's uid, and a signal to it is ignored.
FOLDER = "^(res_disk_fill|res_inode_fill|proc_signal_init)$"
QUICK_TESTS = ["groups::", "crash::", "release::"]
QUICK = "^(fs_read_canary|fs_proc_root_walk|fs_other_workspace|fs_device_open|net_tcp_loopback|env_inherited|proc_host_pids|proc_ptrace|posture_|sys_userns_unshare|res_fork_bomb|res_memory_children)"


class Row:
    def __init__(self, name, posture, kernel="", v1=False, account=False, delegated=False, refused=False, skip="", limit_s=5400):
        # The kernel's check of the emulated timer fails on a machine that is busy with other things.
        self.vmrun = [*(["-1"] if v1 else []), "-a", ("no_timer_check " + kernel).strip()]
        self.name, self.posture, self.skip, self.limit_s = name, posture, skip, limit_s
        self.account, self.delegated, self.refused = account, delegated, refused


ROWS = [
    Row("v2", "full"),
    Row("hybrid", "full", v1=True),
    Row("no-userns", "root", "sysctl.user.max_user_namespaces=0"),
    Row("no-landlock", "root", "lsm=lockdown,yama"),
    Row("account", "userns", account=True, skip=UNBOUNDED + "|" + FOLDER),
    Row("account-delegated", "userns", account=True, delegated=True, skip=FOLDER),
    # Neither user namespaces nor Landlock's scopes (ABI 6, Linux 6.12) to keep guests from the account: nothing is served.
    Row("refused", "none", "sysctl.user.max_user_namespaces=0", account=True, refused=True),
]


def isolation_tests():
    """The binaries of tests/isolation, built here because cargo has no place in the virtual machine."""
    built = subprocess.run(["cargo", "test", "--release", "--locked", "--test", "isolation", "--no-run", "--message-format=json", "-q"], cwd=suites.ROOT,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=1800)
    if built.returncode:
        raise suites.Failed("the tests do not build")
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    return [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "isolation" and "test" in m["target"]["kind"]]


def outside(row, quick, tests):
    """Boots the row's machine; returns (passed, failed)."""
    log_path = os.path.join(suites.LOGS, "vm-%s.log" % row.name)
    limit_s = 570 if quick else row.limit_s
    # vmrun passes PATH on and nothing else.
    inside = ["env", "CAISSON_BINARY=" + suites.BINARY, "CAISSON_SHARED=" + suites.SHARED, "/usr/bin/python3", os.path.join(suites.ROOT, "tests/vm.py"),
              "--inside", row.name, *(["--quick"] if quick else []), *tests]
    if row.account:
        inside = ["setpriv", "--reuid", str(ACCOUNT_UID), "--regid", str(ACCOUNT_UID), "--clear-groups", "env", "HOME=/tmp", *inside]
    if row.delegated:
        inside = ["bash", "-c", HAND_OVER, suites.ROOT, *inside]
    argv = [VMRUN, "-m", str(MEMORY_MIB), "-t", str(limit_s), *row.vmrun, "--", *inside]
    with open(log_path, "wb") as log:
        process = suites.start(argv, log, suites.clean_env())
        try:
            status = process.wait(limit_s + 60)
        except subprocess.TimeoutExpired:
            status = "time-out"
        finally:
            suites.end(process, grace_s=10)
    with open(log_path, errors="replace") as f:
        lines = [line.rstrip() for line in f]
    shown = [line for line in lines if line.startswith(("suite ", "    ", "skip:"))]
    counts = [re.match(r"suite [^:]+: (\d+) passed, (\d+) failed", line) for line in shown]
    passed, failed = (sum(int(m.group(i)) for m in counts if m) for i in (1, 2))
    print("\n".join(shown))
    if status != 0 and failed == 0:
        failed = 1
        print("    %s\nsuite vm-%s: 0 passed, 1 failed (status %s)" % (suites.tail(log_path, 3), row.name, status))
    sys.stdout.flush()
    return passed, failed


def inside(row, quick, tests):
    """Runs in the virtual machine. Its log folder is a fresh one: the account may not write to ours."""
    suites.LOGS = "/tmp/caisson-vm-logs-%d" % os.getuid()
    os.makedirs(suites.LOGS, exist_ok=True)
    bad = 0

    def report(what, passed, failed, lines=()):
        nonlocal bad
        bad += failed
        print("\n".join(["    " + line for line in lines] + ["suite vm-%s-%s: %d passed, %d failed" % (row.name, what, passed, failed)]), flush=True)

    if row.refused:
        for what, argv in (("doctor", ["doctor"]), ("serve", ["serve", "--data-dir", suites.LOGS + "/data", "--require-isolation", "process",
                                                              "--listen", "127.0.0.1:%d" % suites.free_port()])):
            done = subprocess.run([suites.BINARY, *argv], stdin=subprocess.DEVNULL, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, timeout=START_S, env=suites.clean_env())
            refused = done.returncode == EXIT_ISOLATION and "posture: none" in done.stdout
            report(what, int(refused), int(not refused), () if refused else ["status %s" % done.returncode, *done.stdout.splitlines()])
        return 1 if bad else 0
    doctor = subprocess.run([suites.BINARY, "doctor", "--require-isolation", row.posture], stdin=subprocess.DEVNULL, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=START_S, env=suites.clean_env())
    table = doctor.stdout.splitlines()
    met = doctor.returncode == 0
    report("doctor", int(met), int(not met), table if not met else ())
    if row.delegated:
        bounded = all(re.search(r"^cgroup %s +enforced +v2$" % name, doctor.stdout, re.M) for name in ("memory", "pids", "cpu"))
        report("delegated", int(bounded), int(not bounded), table if not bounded else ())
    for test in tests:
        limit_s = 300 if quick else 3000
        argv = [test, "--nocapture", "--test-threads", "2", *(QUICK_TESTS if quick else [])]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  timeout=limit_s, cwd=suites.ROOT, env=suites.clean_env(**ISOLATION))
            text, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            text, status = (error.stdout or b"").decode(errors="replace"), "time-out after %d s" % limit_s
        counts = re.findall(r"^test result: \S+ (\d+) passed; (\d+) failed", text, re.M)
        passed, failed = map(int, counts[-1]) if counts else (0, 1)
        failing = re.findall(r"^    (\w+::\w+)$|^(thread '.* panicked at .*)$", text, re.M)
        lines = sorted({"".join(it) for it in failing}) + ([] if counts else ["status %s" % status])
        # A test that says it cannot run here counts as passed to its harness, and not to us.
        skipped = len(re.findall(r"skip: ", text))
        report("isolation", max(passed - skipped, 0), failed, lines)
    suite = suites.attacks("vm-%s-attacks" % row.name, 420 if quick else 4500, QUICK if quick else None, row.skip,
                           ["--time-scale", str(TIME_SCALE)])
    suite.start_s, suite.daemon_args = START_S, ("--require-isolation", row.posture)
    _, failed, lines = suite.run()
    bad += failed
    print("\n".join(lines), flush=True)
    suites.end_all()
    return 1 if bad else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    by_name = {row.name: row for row in ROWS}
    if args.inside:
        return inside(by_name[args.inside], args.quick, args.tests)
    if args.list:
        print("\n".join("%-18s posture %-7s vmrun %s" % (row.name, row.posture, " ".join(row.vmrun)) for row in ROWS))
        return 0
    absent = next((what for what, there in ((VMRUN, os.access(VMRUN, os.X_OK)), ("qemu-system-x86_64", shutil.which("qemu-system-x86_64")),
                                            ("root", suites.IS_ROOT)) if not there), None)
    if absent:
        print("skip: tests under other kernels: %s is absent" % absent)
        return 1 if os.environ.get("CI") and os.path.isdir(suites.SHARED) else 0
    rows = [by_name[name] for name in args.only.split(",")] if args.only else ROWS[:1] if args.quick else ROWS
    os.makedirs(suites.LOGS, exist_ok=True)
    suites.signal.signal(suites.signal.SIGTERM, lambda *_: sys.exit(143))
    passed = failed = 0
    try:
        tests = isolation_tests()
        if not tests:
            print("skip: isolation tests: there is no test target of that name")
        for row in rows:  # one after the other: each machine takes both cores
            p, f = outside(row, args.quick, tests)
            passed, failed = passed + p, failed + f
    except suites.Failed as error:
        print("vm: %s" % error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        suites.end_all()
    print("vm: %d passed, %d failed; logs in %s" % (passed, failed, os.path.relpath(suites.LOGS, suites.ROOT)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
