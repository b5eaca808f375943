#!/usr/bin/env python3
"""Runs the shared suites against the real binary on loopback: one daemon per suite, two suites at a time.

    tests/suites.py [--only NAME[,NAME]] [--jobs N] [--list] [--with-node]

Prints `suite NAME: N passed, N failed` for each and a total; logs lie in target/suites. Exit status 0 when nothing
failed, 1 when something did, 2 when nothing could be run. Where ../shared is absent it says so and passes.
Settings: CAISSON_SHARED (default ../shared), CAISSON_BINARY (default target/release/caisson), CAISSON_SUITE_LOGS.
"""
import argparse
import concurrent.futures
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED = os.path.abspath(os.environ.get("CAISSON_SHARED", os.path.join(ROOT, "..", "shared")))
BINARY = os.path.abspath(os.environ.get("CAISSON_BINARY", os.path.join(ROOT, "target/release/caisson")))
LOGS = os.path.abspath(os.environ.get("CAISSON_SUITE_LOGS", os.path.join(ROOT, "target/suites")))
CLIENTS = os.path.join(ROOT, "target/runtime/suites")
REQUIREMENTS = os.path.join(ROOT, "tests/suites-requirements.txt")
IS_ROOT = os.geteuid() == 0
# Set by whatever runs the tests of every change: what a test needs is there, or it fails.
IS_CI = os.environ.get("CI") == "true"

START_S, STOP_S, PIP_S = 90, 20, 600
CANARY = "CAISSON_CANARY_API_KEY=k0123456789abcdef"
NATIVE, KERNEL = {"AIO_CODE_BACKEND": "native"}, {"AIO_CODE_BACKEND": "auto"}
LIBRECHAT_ENV = {"CODE_INTERPRETER_API_KEYS": "a=conformance-key,b=conformance-key-b", "CODE_INTERPRETER_URL_KEYS": "true"}
# What a daemon of root's does not show, and one of another account's.
ROOTS, ACCOUNTS = " and not auth and not nonroot", " and not auth and not root"
WITHOUT_KERNEL = "not kernel and not jupyter and not pandas and not matplotlib"

processes = set()  # everything started and not yet ended, so that no way out leaves one behind
processes_lock = threading.Lock()
ending = threading.Event()


class Failed(Exception):
    """A suite that could not be run; the message says why."""


def start(argv, log, env, cwd=ROOT):
    """A process in a group of its own, ended with this program at the latest."""
    with processes_lock:
        if ending.is_set():
            raise Failed("interrupted")
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=cwd,
                                   start_new_session=True)
        processes.add(process)
    return process


def end(process, grace_s=STOP_S):
    """SIGTERM to the leader, then SIGKILL to its whole group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
    with processes_lock:
        processes.discard(process)


def end_all(*_):
    ending.set()
    with processes_lock:
        left = list(processes)
    for process in left:
        try:
            process.terminate()
        except ProcessLookupError:
            pass
    for process in left:
        end(process, grace_s=5)


def clean_env(**extra):
    """Ours without what would configure a daemon or a suite by accident."""
    ours = ("AIO_", "CODE_INTERPRETER_", "CODEAPI_", "CAISSON_", "PYTEST_", "BASE_URL", "API_KEY", "STRICT")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env.update(PYTHONDONTWRITEBYTECODE="1", **extra)
    node = os.path.join(ROOT, "target/runtime/node/bin")
    env["PATH"] = env.get("PATH", "/usr/bin:/bin") + os.pathsep + node
    return env


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def as_account(uid):
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--"]


class Daemon:
    """`caisson serve` on a free loopback port with a data directory of its own."""

    account = None  # the user id of an ordinary account to serve as

    def __init__(self, name, env, args=(), start_s=START_S, before=(), account=None):
        self.name, self.env, self.args, self.start_s, self.before = name, env, args, start_s, before
        self.account = account or self.account
        self.process = self.scratch = None

    def __enter__(self):
        # /var/tmp and not /tmp: space images want a real file system. Open to enter: the daemon is not root for long.
        self.scratch = tempfile.mkdtemp(prefix="caisson-suite-", dir="/var/tmp")
        os.chmod(self.scratch, 0o755)
        self.port = free_port()
        self.url = "http://127.0.0.1:%d" % self.port
        self.log_path = os.path.join(LOGS, self.name + ".daemon.log")
        open(self.log_path, "wb").close()
        try:
            if self.account:
                os.chown(self.scratch, self.account, self.account)
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        """Also once more, over the same data."""
        with open(self.log_path, "ab") as log:
            argv = [*self.before, BINARY, "serve", "--data-dir", os.path.join(self.scratch, "data"), "--listen", "127.0.0.1:%d" % self.port]
            if self.account:
                argv = [*as_account(self.account), *argv]
            self.process = start([*argv, *self.args], log, clean_env(**self.env))
        self.wait_until_healthy()

    def wait_until_healthy(self):
        deadline = time.monotonic() + self.start_s
        while time.monotonic() < deadline and not ending.is_set():
            if self.process.poll() is not None:
                raise Failed("the daemon ended with status %d: %s" % (self.process.returncode, tail(self.log_path, 3)))
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except urllib.error.HTTPError as error:
                raise Failed("/health answered %d" % error.code) from error
            except OSError:
                time.sleep(0.1)
        raise Failed("/health did not answer within %d s: %s" % (self.start_s, tail(self.log_path, 3)))

    def __exit__(self, *_):
        if self.process:
            end(self.process)
        shutil.rmtree(self.scratch, ignore_errors=True)


def tail(path, lines):
    try:
        with open(path, errors="replace") as f:
            return " / ".join(line.strip() for line in f.readlines()[-lines:])
    except OSError:
        return "(no log)"


# --- the suites --------------------------------------------------------------------------------------------------------


def pytest_counts(text):
    # The last line of pytest: "3 failed, 182 passed, 203 deselected, 1 error in 61.20s".
    last = next((line for line in reversed(text.splitlines()) if re.search(r" in [\d.]+s", line)), "")
    n = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped|xfailed)", last)}
    return n.get("passed", 0), n.get("failed", 0) + n.get("error", 0), n.get("skipped", 0)


def cases_counts(text):
    found = re.findall(r"^passed (\d+), failed (\d+), skipped (\d+)$", text, re.M)
    return tuple(map(int, found[-1])) if found else (0, 0, 0)


def node_counts(text):
    n = dict(re.findall(r"^\S+ (pass|fail|skipped) (\d+)$", text, re.M))
    return int(n.get("pass", 0)), int(n.get("fail", 0)), int(n.get("skipped", 0))


def attacks_counts(text):
    found = re.findall(r"^\d+ attacks: (.*)$", text, re.M)
    n = {word: int(count) for word, count in re.findall(r"([a-z ]+?) (\d+)(?:, |$)", found[-1])} if found else {}
    return n.get("blocked", 0), sum(n.get(word, 0) for word in ("escaped", "leaked", "error")), n.get("not judged", 0)


class Suite:
    def __init__(self, name, limit_s, daemon_env, argv, counts, failing, env=None, cwd=None):
        self.name, self.limit_s, self.daemon_env, self.argv = name, limit_s, daemon_env, argv
        self.counts, self.failing, self.env, self.cwd = counts, re.compile(failing), env or (lambda daemon: {}), cwd
        self.start_s, self.daemon_args, self.before, self.account = START_S, (), (), None

    def run(self):
        """(passed, failed, lines to print)"""
        started, path = time.monotonic(), os.path.join(LOGS, self.name + ".log")
        trouble = None
        try:
            with Daemon(self.name, {**NATIVE, **self.daemon_env}, self.daemon_args, self.start_s, self.before, self.account) as daemon, open(path, "wb") as log:
                process = start(self.argv(daemon), log, clean_env(**self.env(daemon)), self.cwd or ROOT)
                try:
                    status = process.wait(self.limit_s)
                except subprocess.TimeoutExpired:
                    trouble = "stopped after %d s" % self.limit_s
                finally:
                    end(process, grace_s=5)
                if not trouble and daemon.process.poll() is not None:
                    trouble = "the daemon ended with status %d during the suite" % daemon.process.returncode
            with open(path, errors="replace") as f:
                text = f.read()
            passed, failed, skipped = self.counts(text)
            lines = [line.rstrip()[:300] for line in text.splitlines() if self.failing.match(line)][:60]
            if not trouble and status != 0 and failed == 0:
                trouble = "ended with status %d: %s" % (status, tail(path, 3))
            if not trouble and passed + failed == 0:
                trouble = "ran nothing: " + tail(path, 3)
        except Failed as error:
            passed, failed, skipped, lines, trouble = 0, 0, 0, [], str(error)
        if trouble:
            failed += 1
            lines.append(trouble)
        what = "suite %s: %d passed, %d failed" % (self.name, passed, failed)
        what += ", %d skipped or not judged" % skipped if skipped else ""
        return passed, failed, ["    " + line for line in lines] + ["%s (%d s)" % (what, time.monotonic() - started)]


def conformance(name, limit_s, selection, daemon_env=None, key=None, account=None):
    suite = Suite(
        name, limit_s, daemon_env or {},
        lambda daemon: [os.path.join(CLIENTS, "bin/python3"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
                        "--color=no", "-m", selection],
        pytest_counts, r"(FAILED|ERROR) ",
        env=lambda daemon: {"BASE_URL": daemon.url, "AIO_TEST_TIMEOUT": "90", **({"AIO_API_KEY": key} if key else {})},
        cwd=os.path.join(SHARED, "conformance/aio"))
    suite.account = account
    return suite


def librechat(name, account=None):
    """The contract of the LibreChat family, over HTTP."""
    suite = Suite(
        name, 900, LIBRECHAT_ENV,
        lambda daemon: [os.path.join(CLIENTS, "bin/python3"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--color=no"],
        pytest_counts, r"(FAILED|ERROR) ", env=librechat_client, cwd=os.path.join(SHARED, "conformance/librechat/http"))
    suite.account = account
    return suite


def librechat_client(daemon):
    return {"BASE_URL": daemon.url, "API_KEY": "conformance-key"}


def librechat_node(name):
    """The same through both generations of the real client: some 700 MB from the npm registry."""
    here = os.path.join(ROOT, "target/runtime/librechat-node")
    shared = os.path.join(SHARED, "conformance/librechat/node")
    shutil.copytree(shared, here, dirs_exist_ok=True)
    install = "npm install --no-audit --no-fund --loglevel=error >npm.log 2>&1 || { tail -n 5 npm.log; exit 1; }; npm test"
    key = subprocess.run(["node", os.path.join(shared, "print-public-key.mjs")], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    tokens = {"CODEAPI_JWT_PUBLIC_KEY": key.stdout, "CODEAPI_JWT_KID": "lc-codeapi-2026-05"}
    return Suite(name, 1500, {**LIBRECHAT_ENV, **tokens}, lambda daemon: ["sh", "-c", install], node_counts, r"\u2716 ",
                 env=librechat_client, cwd=here)


def cases(name, daemon_env):
    return Suite(
        name, 600, daemon_env, lambda daemon: [sys.executable, "-u", os.path.join(SHARED, "cases/run_cases.py")],
        cases_counts, r"(FAIL|SKIP) |        ", env=lambda daemon: {"BASE_URL": daemon.url, "STRICT": "1"})


def attacks(name, limit_s, only=None, skip="", extra=(), daemon_env=None, api="v1"):
    """The corpus on one plane, from one tenant against another. `skip` is a regular expression."""
    # sys_memfd_exec is policy and not an escape: compilers make it moot.
    skip = "^sys_memfd_exec$" + ("|" + skip if skip else "")
    chosen = ["--skip", skip, *(["--only", only] if only else []), *extra]
    return Suite(
        name, limit_s, {"CODE_INTERPRETER_API_KEYS": "a=KEYA,b=KEYB", **dict([CANARY.split("=")]), **(daemon_env or {})},
        lambda daemon: [sys.executable, "-u", os.path.join(SHARED, "attacks/run_attacks.py"), daemon.url, "--api", api,
                        "--api-key", "KEYA", "--other-key", "KEYB", "--canary-env", CANARY,
                        "--json", os.path.join(LOGS, name + ".json"), *chosen],
        attacks_counts, r"(ESCAPED|LEAKED|ERROR|error:|not judged) ?")


def attacks_through_commands(name, limit_s):
    """The same programs as commands, which a caller starts from a shell's seat and not an interpreter's."""
    suite = attacks(name, limit_s)
    argv = suite.argv
    suite.argv = lambda daemon: [*argv(daemon)[:2], os.path.join(ROOT, "tests/attack_commands.py"), *argv(daemon)[3:]]
    return suite


def attacks_below(posture, lacks, escapes, account=None, tenants=2):
    """The corpus on a daemon that a filter makes believe its host has less. `escapes` is what docs/security.md says gets through."""
    suite = attacks("attacks-" + posture, 1500, skip="^(%s)$" % "|".join(escapes) if escapes else "")
    suite.daemon_args, suite.account = ("--require-isolation", posture), account
    suite.before = ("/usr/bin/python3", os.path.join(ROOT, "tests/probe/without.py"), *lacks, "--") if lacks else ()
    if tenants == 1:
        argv = suite.argv
        suite.daemon_env["CODE_INTERPRETER_API_KEYS"] = "a=KEYA"
        suite.argv = lambda daemon: [word for word in argv(daemon) if word not in ("--other-key", "KEYB")]
    return suite


# What each posture does not stop: rows of the table in docs/security.md.
# No cgroup; how much of the processor a guest gets depends on what else runs.
UNBOUNDED = ("res_memory_touch", "res_memory_children", "res_shared_anon", "res_memfd_fill", "res_cpu_hog")
IN_A_FOLDER = ("res_disk_fill", "res_inode_fill")  # found out within seconds, not refused
OF_THE_HOST = ("fs_sysfs", "info_hostname")  # no namespace: names can be asked for
ESCAPES = {
    "root": (),
    "userns": ("proc_signal_init", *UNBOUNDED, *IN_A_FOLDER),
    "uid": (*OF_THE_HOST, *IN_A_FOLDER),
    "process": ("sys_capset", *OF_THE_HOST, *UNBOUNDED, *IN_A_FOLDER),
}
ORDINARY = 1234567


def suites(with_node):
    all_of_them = [
        *([librechat_node("librechat-node")] if with_node else []),
        # The longest first, so that two at a time end together.
        conformance("aio-native", 1200, WITHOUT_KERNEL + (ROOTS if IS_ROOT else ACCOUNTS)),
        conformance("aio-kernel", 1200, "not native" + (ROOTS if IS_ROOT else ACCOUNTS), KERNEL),
        *([conformance("aio-account", 1200, WITHOUT_KERNEL + ACCOUNTS, account=ORDINARY)] if IS_ROOT else []),
        attacks("attacks-v1", 1500),
        attacks("attacks-exec", 1500, api="exec"),
        attacks_through_commands("attacks-commands", 1500),
        attacks("attacks-kernel", 1500, daemon_env=KERNEL),
        attacks_below("root", ["--user-namespaces"], ESCAPES["root"]),
        attacks_below("userns", [], ESCAPES["userns"], account=ORDINARY),
        attacks_below("uid", ["--namespaces"], ESCAPES["uid"]),
        attacks_below("process", ["--namespaces"], ESCAPES["process"], account=ORDINARY, tenants=1),
        librechat("librechat"),
        *([librechat("librechat-account", account=ORDINARY)] if IS_ROOT else []),
        cases("cases", NATIVE),
        cases("cases-kernel", KERNEL),
        conformance("aio-auth", 300, "auth", {"AIO_API_KEY": "suite-key-0123456789"}, "suite-key-0123456789"),
    ]
    if not IS_ROOT:
        print("skip: the attack corpus: its postures are made by root")
        all_of_them = [s for s in all_of_them if not s.name.startswith("attacks-")]
    return all_of_them


def make_clients():
    """The venv with the published clients, remade when its list or the interpreter changes."""
    with open(REQUIREMENTS, "rb") as f:
        stamp = hashlib.sha256(f.read() + sys.version.encode() + ROOT.encode()).hexdigest()
    stamp_path = CLIENTS + ".stamp"
    if os.path.exists(stamp_path) and open(stamp_path).read() == stamp:
        return
    print("suites: making %s" % os.path.relpath(CLIENTS, ROOT), flush=True)
    shutil.rmtree(CLIENTS, ignore_errors=True)
    pip = [os.path.join(CLIENTS, "bin/python3"), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install"]
    for argv in ([sys.executable, "-m", "venv", CLIENTS], [*pip, "--no-deps", "--only-binary", ":all:", "-r", REQUIREMENTS]):
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=PIP_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise Failed("%s took more than %d s" % (argv[2], PIP_S)) from error
        if done.returncode:
            raise Failed("could not make the clients' environment (%s, status %d)" % (" ".join(argv[1:4]), done.returncode))
    with open(stamp_path, "w") as f:
        f.write(stamp)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--with-node", action="store_true", help="also both real LibreChat clients: a large download")
    args = parser.parse_args()
    if not os.path.isdir(SHARED):
        print("skip: the shared suites: %s is absent" % SHARED)
        return 0
    chosen = [s for s in suites(args.with_node or os.environ.get("CAISSON_NODE_SUITE") == "1") if not args.only or s.name in args.only.split(",")]
    if args.list:
        print("\n".join(s.name for s in chosen))
        return 0
    if not chosen or not os.access(BINARY, os.X_OK):
        print("suites: %s" % ("%s is missing: make build" % BINARY if chosen else "no suite of that name"), file=sys.stderr)
        return 2
    os.makedirs(LOGS, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    passed = failed = 0
    try:
        make_clients()
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            try:
                for run in concurrent.futures.as_completed([pool.submit(s.run) for s in chosen]):
                    p, f, lines = run.result()
                    passed, failed = passed + p, failed + f
                    print("\n".join(lines), flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                end_all()
                raise
    except Failed as error:
        print("suites: %s" % error, file=sys.stderr)
        print("suites: 0 passed, 1 failed")
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        end_all()
    print("suites: %d passed, %d failed; logs in %s" % (passed, failed, os.path.relpath(LOGS, ROOT)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
