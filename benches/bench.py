#!/usr/bin/env python3
"""Measures the rows of docs/benchmarks.md: the release daemon beside its peers, interleaved in one run.

    benches/bench.py [--rows 1,2,3,4,5,6,7,8,9,10] [--rounds 40] [--sessions 100] [--seconds 4] [--json FILE] [--check]

Prints a table of ratios (the median of the pairwise ratios of each round) with floor and goal. Needs ../shared/bench, root
for what it is worth, and a machine with nothing else to do. With --check a missed floor is exit status 1.
"""
import argparse
import importlib.util
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import suites  # noqa: E402  the daemon under test is started and ended in one place

BENCH = os.path.join(suites.SHARED, "bench")
VENV_PYTHON = os.path.join(ROOT, "target/runtime/python/bin/python3")
SYSTEM_PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else shutil.which("python3")
NATIVE, KERNEL = {"AIO_CODE_BACKEND": "native"}, {"AIO_CODE_BACKEND": "kernel"}
PRINT, STATEFUL, JS = "print(1)", "print(x + 1)", "console.log(1)"
PANDAS = "import pandas as pd\ndf = pd.DataFrame({'a': range(10), 'b': range(10)})\nprint(df.describe().to_string())"
LOADED = "import pandas, matplotlib.pyplot\nprint(1)"
SETTLE_S, REFILL_S, BUILD_S = 2.5, 0.025, 900
now = time.perf_counter


class Left(Exception):
    """A row that cannot be measured here; the message says why."""


class Http:
    """One keep-alive connection on a raw socket: http.client would cost more than the call it times."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path, body):
        """(seconds, decoded body)"""
        data = json.dumps(body).encode()
        head = "POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (path, len(data))
        started, answer = now(), b""
        self.socket.sendall(head.encode() + data)
        while True:
            piece = self.socket.recv(65536)
            if not piece:
                raise ConnectionError("the server closed the connection")
            answer += piece
            header, found, rest = answer.partition(b"\r\n\r\n")
            if found and len(rest) >= int(header.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
                break
        took = now() - started
        if b" 200 " not in header.split(b"\r\n")[0]:
            raise RuntimeError("%s: %s %s" % (path, header.split(b"\r\n")[0].decode(), rest[:300].decode(errors="replace")))
        return took, json.loads(rest)

    def run(self, code, language="python", session=None):
        """Seconds of one cell that must print something."""
        body = {"language": language, "code": code}
        if session:
            body["session_id"] = session
        took, answer = self.post("/v2/code/execute", body)
        if not (answer.get("data") or answer).get("stdout"):
            raise RuntimeError("no output: %s" % json.dumps(answer)[:400])
        return took


# --- peers -------------------------------------------------------------------------------------------------------------


def peers():
    """The shared peers module: how bubblewrap is called stands there and nowhere else."""
    path = os.path.join(BENCH, "peers/peers.py")
    if not os.path.exists(path):
        raise Left("%s is absent" % path)
    os.environ["PY"] = VENV_PYTHON
    spec = importlib.util.spec_from_file_location("peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bwrap(argv):
    module = peers()
    found = module.tool("BWRAP", "bwrap")
    if not found:
        raise Left("bubblewrap is not installed")
    return module.spawn_job(module.wrap_bwrap(found), argv)


def bwrap_print():
    return bwrap([SYSTEM_PYTHON, "-c", PRINT])  # the bare interpreter: the peer's better case


def bwrap_pandas():
    return bwrap([VENV_PYTHON, "-c", PANDAS])


class Echo:
    """The axum floor of the shared folder, built in our target directory."""

    def __enter__(self):
        source, copy = os.path.join(BENCH, "floors/echo"), os.path.join(ROOT, "target/bench/echo")
        if not os.path.isdir(source):
            raise Left("%s is absent" % source)
        shutil.copytree(source, copy, dirs_exist_ok=True)
        subprocess.run(["chmod", "-R", "u+w", copy], check=True)
        built = subprocess.run(["cargo", "build", "--release", "-q", "--manifest-path", os.path.join(copy, "Cargo.toml"), "--target-dir",
                                os.path.join(copy, "target")], stdin=subprocess.DEVNULL, timeout=BUILD_S)
        if built.returncode:
            raise Left("the echo floor does not build")
        port = suites.free_port()
        argv = [os.path.join(copy, "target/release/echo"), str(port), SYSTEM_PYTHON, os.path.join(BENCH, "floors/repl.py")]
        self.process = suites.start(argv, subprocess.DEVNULL, suites.clean_env())
        for _ in range(100):
            try:
                self.http = Http(port)
                return lambda: self.http.post("/echo", {"language": "python", "code": STATEFUL})[0]
            except OSError:
                time.sleep(0.05)
        raise Left("the echo floor does not answer")

    def __exit__(self, *_):
        suites.end(self.process, grace_s=1)


JUPYTER = """
import sys, time
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="python3"); manager.start_kernel()
client = manager.client(); client.start_channels(); client.wait_for_ready(timeout=60)
client.execute_interactive("x = 20", timeout=60)
print("ready", flush=True)
for line in sys.stdin:
    got = []; started = time.perf_counter()
    client.execute_interactive("print(x + 1)", output_hook=got.append, timeout=60)
    took = time.perf_counter() - started
    assert got; print(took, flush=True)
client.stop_channels(); manager.shutdown_kernel(now=True)
"""


# A kernel for one cell, as the shared peers.py starts it.
JUPYTER_START = """
import sys, time
from jupyter_client import KernelManager
print("ready", flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    manager = KernelManager(kernel_name="python3"); manager.start_kernel()
    client = manager.client(); client.start_channels(); client.wait_for_ready(timeout=60)
    client.execute_interactive("print(1)", output_hook=lambda message: None, timeout=60)
    print(time.perf_counter() - started, flush=True)
    client.stop_channels(); manager.shutdown_kernel(now=True)
"""


class Jupyter:
    """jupyter_client with real ipykernels, in a process of its own under the product's environment."""

    def __init__(self, script=JUPYTER):
        self.script = script

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="caisson-bench-")
        env = suites.clean_env(JUPYTER_RUNTIME_DIR=self.folder, IPYTHONDIR=self.folder, HOME=self.folder, OPENBLAS_NUM_THREADS="1")
        self.process = subprocess.Popen([VENV_PYTHON, "-c", self.script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True, env=env, start_new_session=True)
        with suites.processes_lock:
            suites.processes.add(self.process)
        if self.process.stdout.readline().strip() != "ready":
            raise Left("jupyter_client does not start in %s" % VENV_PYTHON)
        return self.call

    def call(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        suites.end(self.process, grace_s=1)
        shutil.rmtree(self.folder, ignore_errors=True)


# --- measuring ---------------------------------------------------------------------------------------------------------


def interleave(jobs, rounds, pause_s=REFILL_S):
    """name → seconds of each round; all jobs of a round in random order, the first rounds thrown away."""
    got = {name: [] for name in jobs}
    for index in range(-3, rounds):
        names = list(jobs)
        random.shuffle(names)
        for name in names:
            took = jobs[name]()
            if index >= 0:
                got[name].append(took)
            time.sleep(pause_s)
    return got


def ratio(above, below):
    return statistics.median(a / b for a, b in zip(above, below))


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * q))]


def rate(make_job, clients, seconds):
    """Calls per second of a closed loop."""
    stop, counts, errors = now() + seconds, [0] * clients, []

    def work(index):
        try:
            job = make_job()
            while now() < stop:
                job()
                counts[index] += 1
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(clients)]
    started = now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts) / (now() - started)


def open_loop(make_job, per_second, seconds, clients=8):
    """Latencies from the moment each call was due, not from when a client came round to it."""
    due = iter(range(int(per_second * seconds)))
    lock, latencies, errors, zero = threading.Lock(), [], [], now() + 0.1

    def work():
        try:
            job = make_job()
            while True:
                with lock:
                    index = next(due, None)
                if index is None:
                    return
                at = zero + index / per_second
                time.sleep(max(0.0, at - now()))
                job()
                with lock:
                    latencies.append(now() - at)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return latencies


def descendants(pid):
    children = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/stat" % entry) as f:
                parent = int(f.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry))
    found, todo = set(), [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def pss_kib(pid):
    try:
        with open("/proc/%d/smaps_rollup" % pid) as f:
            return next(int(line.split()[1]) for line in f if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


class Report:
    def __init__(self):
        self.rows = []

    def add(self, row, what, value, floor, goal, unit="×", at_most=False, note=""):
        met = (value <= floor) if at_most else (value >= floor)
        reached = (value <= goal) if at_most else (value >= goal)
        self.rows.append({"row": row, "what": what, "value": value, "floor": floor, "goal": goal, "unit": unit, "at_most": at_most,
                          "verdict": "goal" if reached else "floor" if met else "MISSED", "note": note})
        self.show(self.rows[-1])

    def left(self, row, why):
        self.rows.append({"row": row, "what": why, "value": None, "verdict": "left out"})
        self.show(self.rows[-1])

    @staticmethod
    def show(it):
        print("row %s: %s" % (it["row"], it["what"] if it["value"] is None else
                              "%.2f%s (%s) %s; %s" % (it["value"], it["unit"], it["verdict"], it["what"], it["note"])), file=sys.stderr, flush=True)

    def table(self):
        lines = ["| row | what | measured | floor | goal | verdict | medians |", "|---|---|---|---|---|---|---|"]
        for it in self.rows:
            if it["value"] is None:
                lines.append("| %s | left out: %s | – | | | | |" % (it["row"], it["what"]))
            else:
                at_most, unit = "≤ " if it["at_most"] else "", it["unit"]
                digits = "%.0f%s" if it["value"] >= 100 else "%.2f%s" if it["at_most"] else "%.1f%s"
                lines.append("| %s | %s | %s | %s%g%s | %g%s | %s | %s |" % (
                    it["row"], it["what"], digits % (it["value"], unit), at_most, it["floor"], unit, it["goal"], unit, it["verdict"], it["note"]))
        return "\n".join(lines)


def ms(**named):
    return ", ".join("%s %.2f ms" % (name, statistics.median(values) * 1e3) for name, values in named.items())


def daemon(name, **env):
    return suites.Daemon("bench-" + name, {**NATIVE, **{k: str(v) for k, v in env.items()}})


# --- rows --------------------------------------------------------------------------------------------------------------


def row_1(report, args):
    with daemon("slots") as it:
        http, peer = Http(it.port), bwrap_print()
        time.sleep(SETTLE_S)
        got = interleave({"ours": lambda: http.run(PRINT), "peer": peer}, args.rounds)
    report.add("1", "one-off print(1), slots on, against bubblewrap", ratio(got["peer"], got["ours"]), 20, 40, note=ms(**got))


def row_2(report, args):
    with daemon("no-slots", CAISSON_SLOTS_MAX=0) as it:
        http, peer, cold = Http(it.port), bwrap_print(), bwrap_pandas()
        time.sleep(SETTLE_S)
        got = interleave({"ours": lambda: http.run(PRINT), "peer": peer}, args.rounds)
        report.add("2a", "one-off print(1), slots off, against bubblewrap", ratio(got["peer"], got["ours"]), 4.5, 8, note=ms(**got))
        got = interleave({"ours": lambda: http.run(PANDAS), "peer": cold}, max(8, args.rounds // 3))
        report.add("2b", "pandas job, slots off, against bubblewrap", ratio(got["peer"], got["ours"]), 15, 20, note=ms(**got))


def row_3(report, args):
    with daemon("slots-pandas") as it:
        http, cold = Http(it.port), bwrap_pandas()
        for _ in range(5):  # so that the daemon has seen which profile this tenant wants
            http.run(PANDAS)
            time.sleep(0.3)
        time.sleep(SETTLE_S)
        got = interleave({"ours": lambda: http.run(PANDAS), "peer": cold}, max(8, args.rounds // 3), pause_s=0.1)
    with daemon("slots-kernel", **KERNEL) as it:
        http = Http(it.port)
        for _ in range(5):
            http.run(PANDAS)
            time.sleep(0.3)
        time.sleep(SETTLE_S)
        kernel = interleave({"ours": lambda: http.run(PANDAS), "peer": cold}, max(8, args.rounds // 3), pause_s=0.1)
    report.add("3k", "the same in a kernel's slot", ratio(kernel["peer"], kernel["ours"]), 35, 60, note=ms(**kernel))
    report.add("3", "pandas job from a slot, against bubblewrap", ratio(got["peer"], got["ours"]), 35, 60, note=ms(**got))


def row_4(report, args):
    """`caisson bench-fork` answers one JSON line {"confined_us": […], "bare_us": […]} of interleaved forks of one zygote."""
    with tempfile.TemporaryDirectory(prefix="caisson-bench-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        done = subprocess.run([suites.BINARY, "bench-fork", "--rounds", str(args.rounds * 3), "--data-dir", os.path.join(folder, "data")],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, env=suites.clean_env())
    if done.returncode:
        raise Left("caisson bench-fork ended with status %d: %s" % (done.returncode, done.stderr.strip()[-200:]))
    got = json.loads(done.stdout.strip().splitlines()[-1])
    confined, bare = got["confined_us"], got["bare_us"]
    report.add("4", "confined fork against a bare fork of the same zygote", ratio(confined, bare), 1.2, 1.1, at_most=True,
               note="confined %.0f µs, bare %.0f µs" % (statistics.median(confined), statistics.median(bare)))


def row_5(report, args):
    with daemon("stateful") as it, Echo() as echo, Jupyter() as jupyter:
        http = Http(it.port)
        http.run("x = 20\nprint(x)", session="bench")
        jobs = {"ours": lambda: http.run(STATEFUL, session="bench"), "echo": echo, "jupyter": jupyter}
        # Without a pause, as the shared peers.py has it: with one, what is measured is how fast processors wake.
        got = interleave(jobs, args.rounds * 5, pause_s=0)
    report.add("5a", "stateful call against an axum echo", ratio(got["ours"], got["echo"]), 3, 2, at_most=True, note=ms(**got))
    report.add("5b", "stateful call against jupyter_client", ratio(got["jupyter"], got["ours"]), 30, 60)


def row_6(report, args):
    """A session's first cell, from nothing but what the daemon keeps ready, and a later cell; both against a real ipykernel."""
    with daemon("kernel", **KERNEL, AIO_KERNEL_MAX_SESSIONS=100000) as it, Jupyter() as jupyter, Jupyter(JUPYTER_START) as fresh:
        http, number = Http(it.port), iter(range(1 << 30))
        http.run("x = 20\nprint(x)", session="bench")
        time.sleep(SETTLE_S)
        start = lambda: http.run(PRINT, session="start-%d" % next(number))
        got = interleave({"ours": start, "ipykernel": fresh}, max(8, args.rounds // 3), pause_s=0.2)
        report.add("6a", "kernel session's start and first cell against a fresh ipykernel", ratio(got["ipykernel"], got["ours"]), 25, 60,
                   note=ms(**got))
        got = interleave({"ours": lambda: http.run(STATEFUL, session="bench"), "ipykernel": jupyter}, args.rounds * 5, pause_s=0)
    report.add("6b", "stateful call of a kernel session against jupyter_client", ratio(got["ipykernel"], got["ours"]), 6, 10, note=ms(**got))


def row_7(report, args):
    idle = (("7a", "idle Python sessions per GiB", PRINT, 750, 1000, NATIVE),
            ("7b", "the same with pandas and pyplot loaded", LOADED, 300, 400, NATIVE),
            ("7c", "idle IPython sessions per GiB", PRINT, 170, 250, KERNEL))
    for row, what, code, floor, goal, backend in idle:
        count = args.sessions
        most = {"AIO_CODE_MAX_SESSIONS": count + 8, "AIO_KERNEL_MAX_SESSIONS": count + 8}
        with daemon("idle-" + row, CAISSON_SLOTS_MAX=0, **backend, **most) as it:
            http = Http(it.port)
            http.run(code, session="first")  # whatever is made once is there before we count
            time.sleep(SETTLE_S)
            before = descendants(it.process.pid)
            for index in range(count):
                http.run(code, session="idle-%d" % index)
            time.sleep(SETTLE_S)
            each_kib = sum(map(pss_kib, descendants(it.process.pid) - before)) / count
        if each_kib <= 0:
            raise Left("the sessions' smaps_rollup cannot be read (needs root)")
        report.add(row, what, 1024 * 1024 / each_kib, floor, goal, unit="", note="%.2f MiB each, init included, n = %d" % (each_kib / 1024, count))


def row_8(report, args):
    with daemon("sustained") as it:
        time.sleep(SETTLE_S)
        for row, code, make_peer, what, floor, goal in (("8a", PRINT, bwrap_print, "fresh print(1) per second", 3.5, 6),
                                                        ("8b", PANDAS, bwrap_pandas, "fresh pandas per second", 12, 18)):
            for clients in (2, 8):
                ours, theirs = [], []
                for _ in range(2):  # in turns, so that drift hits both
                    ours.append(rate(lambda: (lambda http: lambda: http.run(code))(Http(it.port)), clients, args.seconds))
                    time.sleep(1)
                    theirs.append(rate(make_peer, clients, args.seconds))
                    time.sleep(1)
                report.add(row, "%s, c = %d, against bubblewrap" % (what, clients), ratio(ours, theirs), floor, goal,
                           note="%.0f/s, %.1f/s" % (statistics.median(ours), statistics.median(theirs)))


def row_9(report, args):
    node = shutil.which("node") or os.path.join(ROOT, "target/runtime/node/bin/node")
    if not os.path.exists(node):
        raise Left("node is missing")
    with daemon("node") as it:
        http, peer = Http(it.port), peers().spawn_job([], [node, "-e", JS])
        http.run(JS, "javascript")
        time.sleep(SETTLE_S)
        # A Node slot takes a Node start to refill: with less of a pause this would measure the refill.
        got = interleave({"ours": lambda: http.run(JS, "javascript"), "peer": peer}, args.rounds, pause_s=0.15)
    report.add("9", "one-off console.log(1) against node -e", ratio(got["peer"], got["ours"]), 15, 40, note=ms(**got))


def row_10(report, args):
    with daemon("tail") as it:
        def job():
            http = Http(it.port)
            return lambda: http.run(PRINT)
        time.sleep(SETTLE_S)
        sustained, tails = rate(job, 4, args.seconds), []
        for _ in range(3):
            time.sleep(1)
            latencies = open_loop(job, sustained / 2, args.seconds + 2)
            tails.append((quantile(latencies, 0.99) / quantile(latencies, 0.5), quantile(latencies, 0.5), quantile(latencies, 0.99)))
    value, p50, p99 = sorted(tails)[1]
    report.add("10", "one-off p99 against p50 at half the sustained rate", value, 5, 2.5, at_most=True,
               note="%.0f/s of %.0f/s, p50 %.2f ms, p99 %.2f ms, middle of three" % (sustained / 2, sustained, p50 * 1e3, p99 * 1e3))


GO = 'package main\nimport "fmt"\nfunc main() { fmt.Println("hi") }\n'
CPP = '#include <iostream>\nint main() { std::cout << "hi\\n"; }\n'


def bare_compile(folder, name, source, words):
    """The toolchain alone, with whatever cache it has: source to output, as its users would type it."""
    path = os.path.join(folder, name)
    with open(path, "w") as f:
        f.write(source)
    # A Go of our own where the system has none, as a sandbox sees it.
    env = suites.clean_env(HOME=folder, GOCACHE=os.path.join(folder, "go-cache"), GO111MODULE="off")
    env["PATH"] = os.path.join(ROOT, "target/runtime/toolchains/go/bin") + os.pathsep + env["PATH"]
    words = [word.format(source=path, binary=os.path.join(folder, name + ".out")) for word in words]

    def job():
        started = now()
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, cwd=folder, timeout=120)
        took = now() - started
        if done.stdout.strip() != "hi":
            raise Left("%s: %s" % (words[0], (done.stderr or done.stdout).strip()[-200:]))
        return took
    return job


def row_11(report, args):
    """One program with its files over `/exec`, beside the same command under bubblewrap or the bare toolchain."""
    node = shutil.which("node") or os.path.join(ROOT, "target/runtime/node/bin/node")
    with daemon("exec", **KERNEL) as it, Jupyter() as jupyter, tempfile.TemporaryDirectory(prefix="caisson-bench-") as folder:
        http = Http(it.port)

        def exec_(lang, code, **more):
            def job():
                took, answer = http.post("/exec", {"lang": lang, "code": code, **more})
                if not answer["stdout"]:
                    raise RuntimeError("%s: %s" % (lang, json.dumps(answer)[:400]))
                return took
            return job

        compiled = {
            "go": bare_compile(folder, "main.go", GO, ["sh", "-c", "go build -o {binary} {source} && {binary}"]),
            "cpp": bare_compile(folder, "main.cpp", CPP, ["sh", "-c", "g++ -std=c++17 -O2 -o {binary} {source} && {binary}"]),
        }
        ours = {"py": exec_("py", PRINT), "bash": exec_("bash", "echo hi"), "js": exec_("js", JS),
                "ts": exec_("ts", "const n: number = 1; console.log(n)"), "go": exec_("go", GO), "cpp": exec_("cpp", CPP),
                "entity": exec_("py", STATEFUL, entity_id="bench")}
        http.post("/exec", {"lang": "py", "code": "x = 20", "entity_id": "bench"})
        for job in ours.values():  # so that the daemon has seen what is asked for
            job()
        time.sleep(SETTLE_S)
        rounds = max(8, args.rounds // 2)
        got = interleave({"ours": ours["py"], "peer": bwrap_print()}, args.rounds)
        report.add("11a", "/exec Python one-off against bubblewrap", ratio(got["peer"], got["ours"]), 20, 40, note=ms(**got))
        got = interleave({"ours": ours["entity"], "jupyter": jupyter}, args.rounds * 5, pause_s=0)
        report.add("11b", "/exec Python in an entity's session against jupyter_client", ratio(got["jupyter"], got["ours"]), 6, 10, note=ms(**got))
        got = interleave({"ours": ours["bash"], "peer": bwrap(["bash", "-c", "echo hi"])}, args.rounds)
        report.add("11c", "/exec Bash one-off against bubblewrap + bash", ratio(got["peer"], got["ours"]), 2, 4, note=ms(**got))
        got = interleave({"js": ours["js"], "ts": ours["ts"], "peer": peers().spawn_job([], [node, "-e", JS])}, rounds, pause_s=0.15)
        report.add("11d", "/exec JavaScript one-off against node -e", ratio(got["peer"], got["js"]), 15, 40, note=ms(**got))
        report.add("11e", "/exec TypeScript against JavaScript", ratio(got["ts"], got["js"]), 2, 1.5, at_most=True)
        for row, lang, what in (("11f", "go", "/exec Go hello against the bare toolchain"), ("11g", "cpp", "/exec C++ hello against the bare toolchain")):
            compiled[lang]()
            got = interleave({"ours": ours[lang], "peer": compiled[lang]}, max(5, rounds // 3), pause_s=0.1)
            report.add(row, what, ratio(got["ours"], got["peer"]), 1.1, 0.8, at_most=True, note=ms(**got))


ROWS = {"1": row_1, "2": row_2, "3": row_3, "4": row_4, "5": row_5, "6": row_6, "7": row_7, "8": row_8, "9": row_9, "10": row_10, "11": row_11}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sessions", type=int, default=100, help="idle sessions of row 7; what they share is divided by their number")
    parser.add_argument("--seconds", type=float, default=4, help="length of each stretch of rows 8 and 10")
    parser.add_argument("--json", help="also write the rows there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a floor is missed")
    args = parser.parse_args()
    if unknown := [row for row in args.rows.split(",") if row not in ROWS]:
        parser.error("no row %s" % ", ".join(unknown))
    if not os.access(suites.BINARY, os.X_OK):
        parser.error("%s is missing: make build" % suites.BINARY)
    os.makedirs(suites.LOGS, exist_ok=True)
    suites.signal.signal(suites.signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report()
    try:
        for row in args.rows.split(","):
            try:
                ROWS[row](report, args)
            except (Left, suites.Failed, RuntimeError, OSError, subprocess.SubprocessError, AssertionError, ValueError, KeyError) as error:
                report.left(row, " ".join(str(error).split())[:300] or type(error).__name__)
    except KeyboardInterrupt:
        return 130
    finally:
        suites.end_all()
    print("\n%s %s, %d cores\n\n%s" % (os.uname().sysname, os.uname().release, os.cpu_count(), report.table()))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(report.rows, f, indent=1)
    missed = any(it["verdict"] in ("MISSED", "left out") for it in report.rows)
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
