"""A daemon under test from outside: its processes, its figures, and a client that never raises for an answer.

Used by `faults.py`, `workloads.py` and `soak.py`. What is measured belongs to one daemon: others may run on the host.
"""

import collections
import fcntl
import glob
import http.client
import json
import os
import re
import signal
import time

import suites

ZYGOTE_IDS = 1 << 16  # the first ids of a range are zygotes' (src/launcher/leases.rs)


# --- client ------------------------------------------------------------------------------------------------------------


class Answer:
    """What came back: `http` 0 means that the connection ended without an answer."""

    def __init__(self, http_status, body, seconds):
        self.http, self.body, self.seconds = http_status, body, seconds
        data = body.get("data") if isinstance(body, dict) else None
        data = data if isinstance(data, dict) else {}
        self.data, self.status = data, data.get("status")
        self.stdout, self.stderr = data.get("stdout") or "", data.get("stderr") or ""
        outputs = data.get("outputs") or []
        errors = ["%s: %s" % (it["ename"], it["evalue"]) for it in outputs if it.get("output_type") == "error"]
        self.error = errors[-1] if errors else ""
        results = [it["data"].get("text/plain") for it in outputs if it.get("output_type") == "execute_result"]
        self.result = results[-1] if results else None
        self.hint = (body.get("hint") if isinstance(body, dict) else None) or data.get("hint") or ""

    def __str__(self):
        said = self.body if self.http != 200 else ""
        return "HTTP %d %s after %.2f s; error %r; stdout %r; stderr %r; hint %r %s" % (
            self.http, self.status, self.seconds, self.error[:200], self.stdout[:100], self.stderr[-100:], self.hint, str(said)[:200])


class Client:
    def __init__(self, port, key=None):
        self.port, self.key = port, key

    def request(self, method, path, body=None, wait_s=90):
        started = time.monotonic()
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["X-API-Key"] = self.key
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=wait_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
            return Answer(response.status, json.loads(text) if text else {}, time.monotonic() - started)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(0, {"dropped": repr(error)}, time.monotonic() - started)
        finally:
            connection.close()

    def run(self, code, language="python", session=None, timeout=30, wait_s=90, **more):
        body = {"language": language, "code": code, "timeout": timeout, **more}
        if session is not None:
            body["session_id"] = session
        return self.request("POST", "/v2/code/execute", body, wait_s)

    def end_session(self, session):
        return self.request("DELETE", "/v2/code/sessions/" + session)

    def health(self):
        return self.request("GET", "/health", wait_s=10).body


# --- processes ---------------------------------------------------------------------------------------------------------


Process = collections.namedtuple("Process", "pid parent uid state words")


def processes():
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % entry) as f:
                stat = f.read().rpartition(")")[2].split()
            with open("/proc/%s/cmdline" % entry, "rb") as f:
                words = f.read().decode(errors="replace").split("\0")[:-1]
            with open("/proc/%s/status" % entry) as f:
                uid = int(re.search(r"^Uid:\s+(\d+)", f.read(), re.M).group(1))
            found.append(Process(int(entry), int(stat[1]), uid, stat[0], words))
        except (OSError, AttributeError, IndexError):
            continue  # it ended meanwhile
    return found


def is_below(pid, top, parents):
    while pid and pid != top:
        pid = parents.get(pid)
    return bool(pid)


class Tree:
    """The processes of one daemon, looked at once. `ids` is its range of host user ids: by the launcher of the
    moment, since one that died leaves its range to whoever comes, and that may be another daemon of this host."""

    def __init__(self, supervisor):
        everyone = processes()
        self.supervisor = supervisor
        children = [it for it in everyone if it.parent == supervisor]
        stage = lambda name: next((it.pid for it in children if it.words[1:2] == [name]), None)
        self.daemon, self.launcher = stage("daemon"), stage("launcher")
        self.ids = self.launcher and id_range(self.launcher)
        parents = {it.pid: it.parent for it in everyone}
        inside = [it for it in everyone if self.ids and self.ids[0] <= it.uid < self.ids[1] and is_below(it.pid, self.launcher, parents)]
        first_guest = self.ids[0] + ZYGOTE_IDS if self.ids else 0
        self.zygotes = [it for it in inside if it.uid < first_guest]
        self.inits = [it for it in inside if it.words[:1] == ["caisson-init"]]
        self.guests = [it for it in inside if it.uid >= first_guest and it.words[:1] != ["caisson-init"]]

    def zygote(self, profile):
        return next((it.pid for it in self.zygotes if it.words[-1:] == [profile]), None)

    def everyone(self):
        ours = [self.supervisor, self.daemon, self.launcher]
        return [pid for pid in ours if pid] + [it.pid for it in self.zygotes + self.inits + self.guests]


def id_range(launcher):
    """Read off the lock file that the launcher holds."""
    for path in glob.glob("/proc/%d/fd/*" % launcher):
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if re.search(r"/ids-\d+\.lock$", target):
            with open(path) as f:
                first, end = map(int, f.read().split())
            return first, end
    return None


def count_of(pattern):
    return len(glob.glob(pattern))


def descriptors(pid):
    found = []
    for path in glob.glob("/proc/%s/fd/*" % pid):
        try:
            found.append(os.readlink(path))
        except OSError:
            continue
    return found


def rss_kib(pid):
    try:
        with open("/proc/%d/status" % pid) as f:
            return int(re.search(r"^VmRSS:\s+(\d+)", f.read(), re.M).group(1))
    except (OSError, AttributeError, TypeError):
        return 0


def namespaces(pids):
    found = set()
    for pid in pids:
        for path in glob.glob("/proc/%d/ns/*" % pid):
            try:
                found.add(os.readlink(path))
            except OSError:
                continue
    return len(found)


def range_number(ids):
    return (ids[0] - 0x7000_0000) >> 24


def is_taken(number):
    """Whether a launcher holds this range of ids now."""
    try:
        with open("/run/caisson/ids-%d.lock" % number) as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def cgroup_bases(launcher, number):
    """Where the launcher's groups lie: caisson-N below its own group, in every tree."""
    found = set()
    with open("/proc/%d/cgroup" % launcher) as f:
        for line in f:
            _, controllers, own = line.rstrip("\n").split(":", 2)
            mounted = [it for it in controllers.split(",") + [controllers] if it] or [".", "unified"]
            found.update(os.path.normpath("/sys/fs/cgroup/%s/%s/caisson-%d" % (it, own, number)) for it in mounted)
    return {os.path.realpath(path) for path in found if os.path.isdir(path)}


def cgroup_dirs(bases):
    return {path for base in bases for path, _, _ in os.walk(base)}


def loops(below):
    found = []
    for path in glob.glob("/sys/block/loop*/loop/backing_file"):
        try:
            with open(path) as f:
                backing = f.read().strip()
        except OSError:
            continue
        if below in backing:
            found.append(backing)
    return found


def mounts(pid):
    try:
        with open("/proc/%d/mountinfo" % pid) as f:
            return len(f.readlines())
    except (OSError, TypeError):
        return 0


# --- a daemon ----------------------------------------------------------------------------------------------------------


class Daemon(suites.Daemon):
    """One that can be killed, started again over its data and looked into."""

    def __init__(self, name, env=None, args=(), start_s=suites.START_S):
        os.makedirs(suites.LOGS, exist_ok=True)
        super().__init__(name, {"AIO_CODE_BACKEND": "native", **(env or {})}, args, start_s)
        self.ranges, self.cgroups = set(), {}  # of all launchers it has had; groups by number of the range

    def __enter__(self):
        super().__enter__()
        self.learn()
        return self

    def __exit__(self, *_):
        super().__exit__()
        wait_until(lambda: not self.leftovers(), 10)

    def learn(self):
        self.tree()

    def start_again(self):
        """After its supervisor was killed: the same data, the same address."""
        with open(self.log_path, "ab") as log:
            argv = [suites.BINARY, "serve", "--data-dir", os.path.join(self.scratch, "data"), "--listen", "127.0.0.1:%d" % self.port]
            self.process = suites.start([*argv, *self.args], log, suites.clean_env(**self.env))
        self.wait_until_healthy()
        self.learn()

    def client(self, key=None):
        return Client(self.port, key)

    def tree(self):
        tree = Tree(self.process.pid)
        if tree.ids and tree.ids not in self.ranges:
            self.ranges.add(tree.ids)
            self.cgroups[range_number(tree.ids)] = cgroup_bases(tree.launcher, range_number(tree.ids))
        return tree

    def leftovers(self):
        """What should be gone once it has ended."""
        free = [ids for ids in self.ranges if not is_taken(range_number(ids))]  # else another daemon has it by now
        found = ["process %d %s" % (it.pid, " ".join(it.words)[:80]) for it in processes() if any(low <= it.uid < high for low, high in free)]
        found += ["cgroup " + path for ids in free for path in cgroup_dirs(self.cgroups[range_number(ids)])]
        found += ["loop device of " + path for path in loops(self.scratch)]
        with open("/proc/self/mountinfo") as f:
            found += ["mount " + line.split()[4] for line in f if self.scratch in line]
        return found

    def figures(self):
        tree = self.tree()
        health = self.client().health()
        files = sum(len(names) + len(dirs) for _, dirs, names in os.walk(os.path.join(self.scratch, "data")))
        each = (("supervisor", tree.supervisor), ("daemon", tree.daemon), ("launcher", tree.launcher))
        figures = {}
        for name, pid in each:
            figures[name + " fds"] = count_of("/proc/%s/fd/*" % pid)
            figures[name + " threads"] = count_of("/proc/%s/task/*" % pid)
            figures[name + " rss KiB"] = rss_kib(pid)
        figures.update({
            "zygotes": len(tree.zygotes),
            "sandboxes live": health.get("sandboxes", {}).get("live"),
            "inits": len(tree.inits),
            "guest processes": len(tree.guests),
            "guest uids": len({it.uid for it in tree.guests + tree.inits}),
            "namespaces": namespaces(tree.everyone()),
            "cgroup dirs": len(cgroup_dirs(self.cgroups[range_number(tree.ids)] if tree.ids else ())),
            "mounts": mounts(tree.launcher),
            "loop devices": len(loops(self.scratch)),
            "files": files,
        })
        return figures


def wait_until(what, seconds, every=0.1):
    """The first true value of `what()`, or its last one."""
    deadline = time.monotonic() + seconds
    while True:
        value = what()
        if value or time.monotonic() >= deadline:
            return value
        time.sleep(every)


def kill(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except (ProcessLookupError, TypeError):
        pass
