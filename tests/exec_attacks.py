#!/usr/bin/env python3
"""Attacks through `POST /exec` in Bash and in native code: what the shared corpus does not have.

    tests/exec_attacks.py [--only REGEX] [--unconfined] [--list]

The programs lie in tests/attacks: `shell.sh`; `native.c`, run as C and as C++; `calls.*`, which run a table of system
calls in every other compiled language. The shared runner plants, runs and judges. Prints a line per attack and
`suite exec-attacks: N passed, N failed`; a language whose toolchain this host lacks is passed over.

An attack has to be able to see an escape. So what does no more than to ask is then run on this host, as root in
throw-away namespaces, and must get through: `suite exec-attacks-unconfined`. With `--unconfined` all are, which writes
for a moment to the host's folders and takes minutes; `--list` says of which no host shows it.
Setting: CAISSON_SHARED (default ../shared).
"""
import argparse
import ctypes
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.parse

import languages
import live
import suites

sys.path.insert(0, os.path.join(suites.SHARED, "attacks"))
PROGRAMS = os.path.join(suites.ROOT, "tests", "attacks")
KEYS = {"CODE_INTERPRETER_API_KEYS": "a=KEYA,b=KEYB", **dict([suites.CANARY.split("=")])}
CALLS = {"go": "calls.go", "rust": "calls.rs", "d": "calls.d", "fortran": "calls.f90"}
SOURCES = {"bash": "shell.sh", "c": "native.c", "cpp": "native.c", **CALLS}
SECRETS = ("canary_secret", "canary_env_value")
TOOLCHAINS = os.path.join(suites.ROOT, "target/runtime/toolchains")
CAP_SYS_RESOURCE, CONTROL_S = 24, 300
CLASSES = {"fs": "filesystem", "proc": "process", "fd": "process", "sys": "kernel", "net": "network", "env": "secrets", "res": "resource",
           "out": "output", "proto": "protocol", "ipc": "tenant", "compile": "compiler"}

# What the host looks at once a run has ended: a check of the shared runner and its arguments.
AFTER = {
    "fs_links_collected": {"download": ["lnk_canary", "lnk_dir/secret.txt", "lnk_environ", "result.csv", "plot.png", "sub/deep.txt", "hard.txt"]},
    "fs_fifo_collected": {"download": ["pipe_file", "pipe.csv", "socket_file"], "returned_within": ["25"]},
    "fs_swap_collected": {"race_download": ["race.txt"], "download": ["race.txt"], "marker_dead": [], "returned_within": ["25"]},
    "fs_names_collected": {"list_sane": [], "health": []},
    "fs_tree_collected": {"list_sane": [], "delete_session": [], "returned_within": ["60"]},
    "proc_agent_killed": {"second_run": [], "returned_within": ["25"]},
    "proc_agent_stopped": {"second_run": [], "returned_within": ["40"]},
    "proc_daemonize": {"marker_dead": []},
    "proc_hold_output": {"marker_dead": [], "returned_within": ["20"]},
    "proc_hydra": {"marker_dead": [], "returned_within": ["20"]},
    "proc_ignore_signals": {"marker_dead": [], "returned_within": ["18"]},
    "net_udp_loopback": {"udp_seen": []},
    "net_listen": {"tcp_connect_back": []},
    "res_fork_bomb": {"health": [], "returned_within": ["25"]},
    "out_flood": {"output_capped": ["33554432"], "returned_within": ["60"]},
    "out_forever": {"output_capped": ["33554432"], "returned_within": ["30"]},
    "proto_forge": {"spoof": []},
    "tenant_poison": {"second_run": []},
    "compile_bomb": {"health": [], "returned_within": ["60"]},
}
# Those whose run the sandbox may end, with the limit that is sent along.
MAY_END = {"proc_agent_killed": 5, "proc_agent_stopped": 3, "proc_ignore_signals": 3, "res_fork_bomb": 3, "res_memory": 30, "res_memory_children": 30,
           "res_forks": 30, "res_threads": 30, "res_disk": 30, "res_tmp": 30, "res_shm": 30, "res_inodes": 30, "out_flood": 15, "out_forever": 3,
           "compile_read": 30, "compile_bomb": 10}
# Why no host need show that these can get through, besides a kernel that has not what they ask for.
NOT_SHOWN = {
    "proc_agent_killed": "what it would disturb is there under a daemon alone",
    "proc_agent_stopped": "what it would disturb is there under a daemon alone",
    "res_fork_bomb": "it takes what the machine has; res_processes is the same with a bound",
    "compile_bomb": "it takes what the machine has",
    "fs_names_collected": "what it would disturb is there under a daemon alone",
    "fs_tree_collected": "what it would disturb is there under a daemon alone",
    "sys_clone3_errno": "it finds a filter that answers EPERM",
    "sys_set_mm": "needs CAP_SYS_RESOURCE, which root of a container may lack",
}
CONFINED_ALONE = ("proc_agent_killed", "proc_agent_stopped", "fs_names_collected", "fs_tree_collected", "res_fork_bomb", "compile_bomb")
# What the controls of every run leave out: what takes, stays, or touches more than its own namespaces and folder (modules
# that a socket loads, the console).
TOO_MUCH = r"_sys_(tioclinux|socket_families|socket_protocols)$|_(res|out|tenant|proto)_|_proc_(daemonize|hold_output|hydra|ignore_signals|core)$|^bash_fs_|^bash_(info_kernel_log|net_listen|sys_hostname)$"
# ENOSYS and EAFNOSUPPORT, as the two kinds of programs tell them.
HAS_NOT = (r"-1, errno (38|97)", r"(\w+: no; )*(\w+ -38; )+")

# What a compiler is asked to read, or to take, before anything has run.
COMPILE = {
    ("c", "compile_read"): '__asm__(".globl it\\nit: .incbin \\"%s\\"\\n.byte 0");\nextern char it[];\nint puts(const char *);\nint main(void) { return puts(it); }',
    ("cpp", "compile_read"): '#include "%s"\nint main() {}',
    ("go", "compile_read"): 'package main\n\n// #include "%s"\nimport "C"\n\nfunc main() {}',
    ("rust", "compile_read"): 'fn main() { print!("{}", include_str!("%s")); }',
    ("fortran", "compile_read"): "program p\n  include '%s'\nend program",
    ("c", "compile_bomb"): "#define a(x) x x x x x x x x x x\nint v[] = {a(a(a(a(a(a(a(a(a(a(a(1,)))))))))))};\nint main(void) {}",
}

# System calls by name: numbers on x86-64 and on arm64 (None: it has none), errnos that refuse it besides EPERM and ENOSYS,
# arguments. "@text" is a pointer to it and "#" one to a page of zeros; words in braces are what the runner planted.
# Whatever else the Linux kernel answers, it has looked at the call, and that counts as an escape. As in native.c, what
# would do harm has arguments that are turned down after the caller's rights.
NOWHERE = "@/nonexistent-caisson"
SYSCALLS = [
    ("sys_unshare_mount", 272, 97, (), 0x20000),
    ("sys_unshare_net", 272, 97, (), 0x40000000),
    ("sys_unshare_cgroup", 272, 97, (), 0x2000000),
    ("sys_setns", 308, 268, (), -1, 0),
    ("sys_mount", 165, 40, (), "@none", NOWHERE, "@tmpfs", 0, 0),
    ("sys_umount2", 166, 39, (), NOWHERE, 2),
    ("sys_pivot_root", 155, 41, (), NOWHERE, NOWHERE),
    ("sys_chroot", 161, 51, (), NOWHERE),
    ("sys_fsopen", 430, 430, (), "@tmpfs", 0),
    ("sys_fsconfig", 431, 431, (), -1, 6, 0, 0, 0),
    ("sys_fsmount", 432, 432, (), -1, 0, 0),
    ("sys_fspick", 433, 433, (), -100, "@/", 0),
    ("sys_open_tree", 428, 428, (), -100, "@/", 1),
    ("sys_move_mount", 429, 429, (), -1, "@", -1, "@", 4),
    ("sys_mount_setattr", 442, 442, (), -100, "@/", 0, "#", 32),
    ("sys_statmount", 457, 457, (), "#", "#", 4096, 0),
    ("sys_name_to_handle_at", 303, 264, (), -100, "@/", "#", "#", 0),
    ("sys_open_by_handle_at", 304, 265, (), -1, "#", 0),
    ("sys_fanotify_init", 300, 262, (), 0, 0),
    ("sys_swapon", 167, 224, (), NOWHERE, 0),
    ("sys_swapoff", 168, 225, (), NOWHERE),
    ("sys_acct", 163, 89, (), NOWHERE),
    ("sys_quotactl", 179, 60, (), -0x7FFFFF00, NOWHERE, 0, 0),
    ("sys_ptrace_seize", 101, 117, (), 0x4206, "{victim_pid}", 0, 0),
    ("sys_process_vm_readv", 310, 270, (), "{victim_pid}", "#", 1, "#", 1, 0),
    ("sys_process_vm_writev", 311, 271, (), "{victim_pid}", "#", 1, "#", 1, 0),
    ("sys_pidfd_getfd", 438, 438, (), -1, 0, 0),
    ("sys_kcmp", 312, 272, (), "{victim_pid}", "{victim_pid}", 1, 0, 0),
    ("sys_process_madvise", 440, 440, (), -1, "#", 1, 20, 0),
    ("sys_process_mrelease", 448, 448, (), -1, 0),
    ("sys_move_pages", 279, 239, (), "{victim_pid}", 0, 0, 0, 0, 0),
    ("sys_kill_victim", 62, 129, (3,), "{victim_pid}", 0),
    ("sys_kill_init", 62, 129, (), 1, 0),
    ("sys_bpf", 321, 280, (), 0, "#", 128),
    ("sys_io_uring_setup", 425, 425, (), 4, "#"),
    ("sys_perf_event_open", 298, 241, (), "#", 0, -1, -1, 0),
    ("sys_userfaultfd", 323, 282, (), 1),
    ("sys_add_key", 248, 217, (), "@user", "@caisson", "@x", 1, -3),
    ("sys_request_key", 249, 218, (), "@user", "@caisson-nothing", 0, 0),
    ("sys_keyctl", 250, 219, (), 0, -4, 0),
    ("sys_delete_module", 176, 106, (), "@caisson_no_such", 0x800),
    ("sys_reboot", 169, 142, (), 0, 0, 0, 0),
    ("sys_settimeofday", 164, 170, (), 0, 0),
    ("sys_clock_adjtime", 305, 266, (), 0, "#"),
    ("sys_sethostname", 170, 161, (), "@x", -1),
    ("sys_personality", 135, 92, (), 0x0040000),
    ("sys_seccomp", 317, 277, (), 1, 8, "#"),
    ("sys_capset", 126, 91, (), "#", "#"),
    ("sys_merge_memory", 157, 167, (), 67, 1, 0, 0, 0),
    ("sys_set_mm", 157, 167, (), 35, 99, 4096, 0, 0),
    ("sys_sched_setscheduler", 144, 119, (), 0, 1, "@\x01"),
    ("sys_ioprio_set", 251, 30, (), 1, 0, 8192),
    ("sys_mbind", 237, 235, (), 0, 0, 0, 0, 0, 0),
    ("sys_vmsplice", 278, 75, (), -1, "#", 0, 0),
    ("sys_memfd_secret", 447, 447, (), 0),
    ("sys_syslog", 103, 116, (), 10, 0, 0),
    ("sys_lsm_list_modules", 461, 461, (), "#", "#", 0),
    ("sys_setresuid", 117, 147, (), 0, 0, 0),
    ("sys_netlink", 41, 198, (), 16, 3, 0),
    ("sys_packet", 41, 198, (97,), 17, 3, 0),
    ("sys_vsock", 41, 198, (97,), 40, 1, 0),
    ("sys_raw", 41, 198, (), 2, 3, 1),
    ("sys_mptcp", 41, 198, (), 2, 1, 262),
    ("sys_tiocsti", 16, 29, (), 0, 0x5412, "@x"),
    ("sys_mknod_device", 259, 33, (), -100, "@.caisson-node", 0o20600, 0x101),
    ("sys_open_canary", 257, 56, (2,), -100, "@{canary_file}", 0),
    ("sys_openat2_canary", 437, 437, (2,), -100, "@{canary_file}", "#", 24),
    ("sys_open_victim", 257, 56, (2,), -100, "@/proc/{victim_pid}/root/", 0),
    ("sys_modify_ldt", 154, None, (), 0, "#", 16),
    # The last: with it go all rights over what the others ask for.
    ("sys_unshare_user", 272, 97, (), 0x10000000),
]


class Program:
    """One attack of one language, or with `alone` unset all of a file's, which are compiled once."""

    def __init__(self, lang, name, cfg):
        self.lang, self.name, self.cfg = lang, name, cfg
        self.id = "%s_%s" % (lang, name)
        self.compiles = COMPILE.get((lang, name))
        self.alone = lang == "bash" or self.compiles or name in MAY_END or name in AFTER

    def text(self):
        if self.compiles:
            return self.compiles.replace("%s", self.cfg["canary_file"])
        text = read(SOURCES[self.lang])
        if self.lang != "bash":
            return text
        known = "".join("[%s]=%s " % (key, in_pieces(key, value, "''", shlex.quote)) for key, value in self.cfg.items())
        return "declare -A CFG=(%s)\nID=%s\n%s\n%s\nverdict\n" % (known, self.id, text, self.name)

    def args(self):
        if self.compiles or self.lang == "bash":
            return []
        if self.lang in CALLS:
            return [row(it, self.cfg) for it in syscalls()]
        return ["%s=%s" % (key, in_pieces(key, value, ",")) for key, value in self.cfg.items()] + ["id=" + self.id] + [self.name] * bool(self.alone)


def in_pieces(key, value, between, quote=str):
    """A secret is nowhere in one piece, so that where it turns up it was found."""
    value = str(value)
    half = len(value) // 2
    return between.join([quote(value[:half]), quote(value[half:])]) if key in SECRETS else quote(value)


def read(name):
    with open(os.path.join(PROGRAMS, name)) as file:
        return file.read()


def syscalls():
    column = {"x86_64": 1, "aarch64": 2}[platform.machine()]
    return [(it[0], it[column], *it[3:]) for it in SYSCALLS if it[column] is not None]


def row(it, cfg):
    name, number, refusals, *args = it
    refusals = ",".join(map(str, (1, 38, *refusals)))
    return "|".join([name, str(number), refusals, *(arg.format(**cfg) if isinstance(arg, str) else str(arg) for arg in args)])


def attacks_of(lang):
    """Their names, in the order of the file."""
    own = [name for of, name in COMPILE if of == lang]
    if lang in CALLS:
        return [it[0] for it in syscalls()] + own
    if lang == "bash":
        return re.findall(r"^((?:%s|tenant|info)_\w+)\(\) \{" % "|".join(CLASSES), read(SOURCES[lang]), re.M)
    found = re.findall(r"\bA(?:LONE)?\((\w+)\)", read(SOURCES[lang]).partition("attacks[] = {")[2])
    x86 = re.findall(r"^static void (\w+)", read(SOURCES[lang]).partition("#ifdef __x86_64__\nstatic")[2].partition("#endif")[0], re.M)
    return [name for name in found if platform.machine() == "x86_64" or name not in ["sys_i386_abi", *x86]] + own


def entries(langs):
    made = []
    for lang in langs:
        for name in attacks_of(lang):
            made.append({
                "id": "%s_%s" % (lang, name), "file": "%s_%s" % (lang, name), "name": name, "lang": lang, "severity": "-",
                "class": CLASSES.get(name.partition("_")[0], name.partition("_")[0]), "kill_ok": name in MAY_END, "timeout": MAY_END.get(name, 30 if lang == "bash" else 90),
                "post": [{"check": check, "args": args} for check, args in AFTER.get(name, {}).items()],
                "detects_unconfined": NOT_SHOWN.get(name, "proved unconfined"),
            })
    return made


class Programs:
    """Runs a `Program` where the shared runner runs a text; what is compiled once for many attacks is run once for them."""

    said = {}

    def run(self, code, lang, timeout, session=None, key=None):
        if not isinstance(code, Program):
            return super().run(code, lang, timeout, session, key)
        if code.alone:
            return self.judged(self.start(code, timeout, session), code)
        if lang not in self.said:
            self.said[lang] = self.judged(self.start(code, timeout, session), code)
        all_of_it = self.said[lang]
        own = '{"attack": "%s", ' % code.name
        return {**all_of_it, "out": "\n".join(line for line in all_of_it["out"].splitlines() if line.startswith(own))}

    def judged(self, res, code):
        text = res["out"] + res["err"] + json.dumps(res["reply"])
        found = [key for key in SECRETS if code.cfg[key] in text]
        if found:
            res["out"] += "\n" + json.dumps({"attack": code.name, "outcome": "leaked", "detail": "the answer has the " + found[0]})
        return res


def patched(run_attacks):
    """The shared runner with our languages in it."""
    original, local = run_attacks.inject, run_attacks.Local

    def inject(text, cfg, lang):
        if lang == "python":
            return original(text, cfg, lang)
        plain = {key: value for key, value in cfg.items() if isinstance(value, (str, int, float))}
        plain.update(daemon_port=cfg["daemon"][1], dns_port=cfg["dns"][1], **{"forge_" + key: value for key, value in cfg["forge"].items()})
        return Program(lang, text, plain)

    class Exec(Programs, run_attacks.Http):
        def start(self, program, timeout, session):
            body = {"lang": program.lang, "code": program.text(), "args": program.args(), "timeout": timeout * 1000}
            if session:
                body["entity_id"] = session
            http, reply = self.req("POST", "/exec", body, timeout=timeout + 60)
            run = reply.get("run") or {}
            res = dict(http=http, status=run.get("status") or str(http), out=run.get("stdout") or "", err=run.get("stderr") or json.dumps(reply) * (http != 200),
                       size=len(json.dumps(reply)), session=reply.get("session_id"), reply=reply, limit=timeout)
            for file in reply.get("files") or []:
                path = "/download/%s/%s" % (res["session"], urllib.parse.quote(file["id"], safe=""))
                _, content = self.req("GET", path, raw=True)
                if program.name.endswith("_collected") and program.cfg["canary_secret"].encode() in content:
                    res["err"] += program.cfg["canary_secret"]
                if file["name"].startswith("/") or ".." in file["name"].split("/") or "\0" in file["name"]:
                    res["out"] += "\n" + json.dumps({"attack": program.name, "outcome": "escaped", "detail": "an output is called %r" % file["name"]})
            return res

    class Unconfined(Programs, local):
        def start(self, program, timeout, session):
            return local.run(self, program, program.lang, timeout, session)

        def popen(self, code, lang, session):
            if not isinstance(code, Program):
                return super().popen(code, lang, session)
            work, table = self.work(session), {it["id"]: it for it in languages.table()}[lang]
            scratch = tempfile.mkdtemp(dir=self.root)
            words = {"{dir}": scratch, "{source}": os.path.join(scratch, table["source"]), "{binary}": scratch + "/main",
                     "{cache}": os.path.join(TOOLCHAINS, table.get("cache", "none"))}
            with open(words["{source}"], "w") as file:
                file.write(code.text())
            filled = [re.sub(r"\{\w+\}", lambda it: words[it.group()], word) if "\n" not in word else word for word in table.get("compile", ["true"])]
            run = [words.get(word, word) for word in table["run"]]
            env = {**os.environ, "HOME": work, self.host.env_name: self.host.env_value, **dict(it.split("=", 1) for it in table.get("env", []))}
            script = "%s || exit; exec %s" % (shlex.join(filled), shlex.join([*run, *code.args()]))
            # Namespaces of its own, for what it mounts and calls the host.
            return subprocess.Popen(["unshare", "-mu", "sh", "-c", script], cwd=work, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                    pass_fds=(self.keepfd, self.keepdir, self.keepsock))

    run_attacks.inject, run_attacks.Http, run_attacks.Local = inject, Exec, Unconfined


def judge(langs, only, arguments):
    """Has the shared runner go through them. Returns its rows."""
    import run_attacks
    patched(run_attacks)
    chosen = [it for it in entries(langs) if re.search(only, it["id"])]
    with tempfile.TemporaryDirectory(prefix="exec-attacks-") as folder:
        for it in chosen:
            with open(os.path.join(folder, it["file"]), "w") as file:
                file.write(it["name"])
        with open(os.path.join(folder, "attacks.json"), "w") as file:
            json.dump(chosen, file)
        results = os.path.join(folder, "results.json")
        sys.argv = ["run_attacks.py", *arguments, "--dir", folder, "--json", results]
        run_attacks.main()
        with open(results) as file:
            return json.load(file)


def installed(daemon):
    """The languages that this daemon has; of the others it says why not."""
    api, found = languages.Api(daemon), []
    api.client = daemon.client("KEYA")
    for lang in SOURCES:
        answer = api.post(lang, languages.PROGRAMS[lang][0])
        if answer.http == 503 and lang not in languages.ALWAYS:
            print("skip   %s: %s" % (lang, answer.body.get("detail")))
        else:
            found.append(lang)
    return found


def confined(only):
    with live.Daemon("exec-attacks", KEYS) as daemon:
        rows = judge(installed(daemon), only, [daemon.url, "--api", "exec", "--api-key", "KEYA", "--other-key", "KEYB", "--canary-env", suites.CANARY])
    return sum(it["outcome"] == "blocked" for it in rows), sum(it["outcome"] != "blocked" for it in rows)


def unconfined(only, omitted="^$"):
    """In namespaces in which we are pid 1, with a route that leads nowhere, over folders of our own, and with small caps."""
    join_session_keyring = 1  # what is added goes into one of our own
    ctypes.CDLL(None).syscall({"x86_64": 250, "aarch64": 219}[platform.machine()], join_session_keyring, None)
    for words in ("link set lo up", "addr add fd00::1/128 dev lo", "route add default dev lo", "-6 route add default dev lo"):
        subprocess.run(["ip", *words.split()], check=True)
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", folder], check=True)
    if os.path.isdir(TOOLCHAINS):  # as sandboxes see it
        subprocess.run(["mount", "--bind", "-o", "ro", TOOLCHAINS, TOOLCHAINS], check=True)
    os.environ["PATH"] = "%s/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" % TOOLCHAINS
    compilers = {it["id"]: it["compile"][0] for it in languages.table() if "compile" in it}
    langs = [it for it in SOURCES if shutil.which({**compilers, "bash": "bash", "go": "go"}[it])]
    only = "^(?!.*_(%s)$)(?!.*(%s)).*(%s)" % ("|".join(CONFINED_ALONE), omitted, only)
    rows = judge(langs, only, ["--local", "none", "--leak-fds", "--feed-stdin", "--raw-protocol-local", "--local-download", "naive", "--mem-cap-mb", "96",
                               "--disk-cap-mb", "64", "--inode-cap", "2000", "--pid-cap", "100", "--fd-cap", "900", "--cpu-quota", "0.4"])
    passed = failed = 0
    for it in rows:
        if it["outcome"] in ("escaped", "leaked"):
            passed += 1
            continue
        has_not = any(re.fullmatch(said, it["detail"]) for said in HAS_NOT)
        why = NOT_SHOWN.get(it["attack"].partition("_")[2]) or ("this kernel has not what it asks for" if has_not else "")
        failed += not why
        print("%s %s: %s" % ("skip  " if why else "FAILED", it["attack"], why or "it should get through where nothing confines it: %s" % it["detail"]))
    return passed, failed


def cannot_control():
    """Why nothing shows here that the attacks can get through."""
    missing = [it for it in ("unshare", "mount", "ip") if not shutil.which(it)]
    with open("/proc/self/status") as file:
        held = int(re.search(r"^CapEff:\s*(\w+)", file.read(), re.M).group(1), 16)
    lacks = [cap for cap in range(40) if cap != CAP_SYS_RESOURCE and not held >> cap & 1]
    return "no %s here" % missing[0] if missing else "root lacks capabilities here: %s" % lacks if lacks else ""


def in_namespaces(*arguments):
    """This program once more, as pid 1 of throw-away namespaces. Returns its status."""
    argv = ["unshare", "-mpfnu", "--mount-proc", "--kill-child", sys.executable, "-u", os.path.abspath(__file__), *arguments]
    process = suites.start(argv, None, dict(os.environ))
    try:
        return process.wait(CONTROL_S)
    except subprocess.TimeoutExpired:
        print("FAILED the controls: stopped after %d s" % CONTROL_S)
        return 1
    finally:
        suites.end(process)


def told(name, run, *arguments):
    """Runs one part and prints its sum. Returns how many have failed."""
    try:
        passed, failed = run(*arguments)
    except suites.Failed as error:
        print("FAILED daemon: %s" % error)
        passed, failed = 0, 1
    print("suite %s: %d passed, %d failed" % (name, passed, failed), flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose id (language_name) matches this")
    parser.add_argument("--unconfined", action="store_true", help="without any sandbox, where each must get through")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--controls", action="store_true", help=argparse.SUPPRESS)  # of ourselves, in namespaces
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.list:
        for it in entries(SOURCES):
            print("%-34s %-10s %s" % (it["id"], it["class"], it["detects_unconfined"]))
        return 0
    why = "%s is absent" % suites.SHARED if not os.path.isdir(suites.SHARED) else "posture `full` needs root" if not suites.IS_ROOT else ""
    if why:
        print("skip   %s\nsuite exec-attacks: 0 passed, 0 failed" % why)
        return 0
    if os.getpid() == 1:
        return 1 if told("exec-attacks-unconfined", unconfined, args.only, TOO_MUCH if args.controls else "^$") else 0
    status = 0
    if not args.unconfined:
        status |= bool(told("exec-attacks", confined, args.only))
    why = cannot_control()
    if why:
        print("skip   the controls: %s" % why)
    else:
        status |= in_namespaces("--unconfined", "--only", args.only, *["--controls"] * (not args.unconfined))
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        suites.end_all()
