#!/usr/bin/env python3
"""Guests that misbehave, processes that are killed, clients that vanish: each against the real daemon.

    tests/faults.py [--only TEXT] [--rounds N] [--seed N]

Every guest fault must end with HTTP 200 and an answer that names the reason, within its limit; the session's id
must go on (with an empty namespace if its interpreter was lost); and a neighbour of another tenant, who prints
ten times a second all the while, must get every answer right and soon. Prints a line per test and
`suite faults: N passed, N failed`.
"""
import argparse
import concurrent.futures
import contextlib
import http.client
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import live
import suites

GRACE_S = 1
TIMEOUT = r"TimeoutError: execution timed out after \d+ms; session state was reset"
MEMORY = r"ProcessError: out of memory \(limit 512 MiB\)"
PROTOCOL = r"ProcessError: the interpreter broke its control protocol and was ended"
EXITED = r"ProcessError: the interpreter exited with code %s$"
SLACK_S = 10  # beyond timeout and grace: this machine is shared, and the bound is no benchmark
NEIGHBOUR_MAX_S = 5.0


def killed(number):
    name = r" \(%s\)" % signal.Signals(number).name if number in list(signal.Signals) and number not in (34, 64) else ""
    return r"ProcessError: the interpreter was killed by signal %d%s$" % (number, name)


class Fault:
    """One guest. `kept`: whether the session's names survive it; None when both are fair."""

    def __init__(self, name, code, status, error="", kept=True, timeout=10, language="python", tenant="a", check=None, after=None):
        self.name, self.code, self.status, self.error, self.kept = name, code, status, error, kept
        self.timeout, self.language, self.tenant, self.check, self.after = timeout, language, tenant, check, after


def ok(name, code, check=None, **more):
    return Fault(name, code, "ok", check=check, **more)


def raised(name, code, error, **more):
    return Fault(name, code, "error", error, **more)


def dies(name, code, error, **more):
    # Its end is its own: only a busy machine gets as far as this limit.
    return Fault(name, code, "error", error, kept=False, **{"timeout": 40, **more})


def hangs(name, code, timeout=1, **more):
    return Fault(name, code, "timeout", TIMEOUT, kept=False, timeout=timeout, **more)


def either(name, code, error, **more):
    """Ends in one of several fair ways; the pattern tells which errors are."""
    return Fault(name, code, None, error, kept=None, **more)


def cut_at_the_cap(answer):
    return len(answer.stdout) + len(answer.stderr) < 2_100_000 and "[output truncated at 2000000 characters]" in answer.stderr


FORGE = """
import os, sys
frame = sys._getframe()
while 'request' not in frame.f_locals: frame = frame.f_back
nonce = frame.f_locals['request']['nonce']
os.write(4, ('\\n{"nonce":"%s","event":"done","result":"mine","error":null}\\n' % nonce).encode())
"""

PYTHON = [
    # --- processes and signals
    ok("double fork, setsid, all signals ignored", """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for each in range(1, 65):
            try: signal.signal(each, signal.SIG_IGN)
            except (OSError, ValueError): pass
        time.sleep(1000)
    os._exit(0)
print('left')""", lambda answer: answer.stdout == "left\n"),
    hangs("ignores every signal and goes on", """
import signal
for each in range(1, 65):
    try: signal.signal(each, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass"""),
    dies("os._exit", "import os\nos._exit(3)", EXITED % 3),
    dies("os.abort", "import os\nos.abort()", killed(6)),
    dies("segmentation fault", "import ctypes\nctypes.string_at(0)", killed(11)),
    dies("stack overflow", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return [*map(lambda _: f(), [1])]\nf()", killed(11)),
    raised("recursion", "def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    dies("fork bomb, then exit", "import os\ntry:\n  while True: os.fork()\nexcept OSError: pass\nos._exit(0)", EXITED % 0),
    hangs("fork bomb", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"),
    hangs("SIGSTOP to itself", "import os\nos.kill(os.getpid(), 19)"),
    raised("kill(-1)", "import os\nos.kill(-1, 9)", "ProcessLookupError"),
    hangs("vfork parent", "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.vfork() or libc.pause()"),
    hangs("flock against itself", "import fcntl\nf = open('/tmp/faults.lock', 'w')\ng = open('/tmp/faults.lock', 'w')\nfcntl.flock(f, 2); fcntl.flock(g, 2)"),
    hangs("a FIFO nobody writes", "import os\nos.path.exists('/tmp/faults.fifo') or os.mkfifo('/tmp/faults.fifo')\nopen('/tmp/faults.fifo').read()"),
    hangs("traces a child that it never lets go", """
import ctypes, os, time
pid = os.fork()
if pid == 0:
    time.sleep(1000)
ctypes.CDLL(None).ptrace(16, pid, 0, 0)
time.sleep(1000)"""),
    # --- memory
    dies("memory: bytearrays", "kept = []\nwhile True: kept.append(bytearray(b'x') * (16 << 20))", MEMORY, tenant="m"),
    dies("memory: children", """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(b'x') * (100 << 20); time.sleep(60)
time.sleep(60)""", MEMORY, tenant="m"),
    raised("memory: /dev/shm to its limit", "with open('/dev/shm/x', 'wb') as f:\n  for _ in range(600): f.write(b'x' * (1 << 20))", "OSError: .Errno 28. No space left", tenant="m"),
    raised("memory: one memfd", "import os\nfd = os.memfd_create('x')\nfor _ in range(600): os.write(fd, b'x' * (1 << 20))", "OSError: .Errno 27. File too large", tenant="m"),
    dies("memory: memfds", "import os\nfds = [os.memfd_create('x') for _ in range(4)]\nfor n in range(800): os.write(fds[n % 4], b'x' * (1 << 20))", MEMORY, tenant="m"),
    either("memory: shared mapping", "import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor at in range(0, 1 << 30, 4096): m[at] = 1", MEMORY, tenant="m"),
    either("memory: pipes", "import os\nkept = []\nwhile True:\n  p = os.pipe(); kept.append(p); os.set_blocking(p[1], False)\n  try: os.write(p[1], b'x' * (1 << 20))\n  except BlockingIOError: pass", "OSError: .Errno 24. Too many open files|" + MEMORY, tenant="m"),
    # --- disk, inodes, pids, descriptors
    raised("disk: one file", "try:\n  with open('/tmp/full', 'wb') as f:\n    for _ in range(600): f.write(b'x' * (1 << 20))\nfinally:\n  import os; os.remove('/tmp/full')", "OSError: .Errno (27|28).", tenant="d", timeout=40),
    raised("disk: many files", "import os, shutil\nos.makedirs('/tmp/fill')\ntry:\n  for n in range(80):\n    with open('/tmp/fill/%d' % n, 'wb') as f: f.write(b'x' * (8 << 20))\nfinally: shutil.rmtree('/tmp/fill')", "OSError: .Errno 28. No space left", tenant="d", timeout=40),
    raised("disk: inodes", "import os, shutil\nos.makedirs('/tmp/many')\ntry:\n  for n in range(30000): os.close(os.open('/tmp/many/%d' % n, 65, 0o600))\nfinally: shutil.rmtree('/tmp/many')", "OSError: .Errno 28. No space left", tenant="d", timeout=40),
    raised("pids", "import os, time\nwhile True:\n  if os.fork() == 0: time.sleep(60); os._exit(0)", "BlockingIOError: .Errno 11."),
    raised("threads", "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "RuntimeError: can't start new thread"),
    raised("descriptors", "import os\nwhile True: os.open('/dev/null', 0)", "OSError: .Errno 24. Too many open files"),
    # --- output
    ok("stdout: 1 GB in large writes", "for _ in range(1024): print('x' * (1 << 20))", cut_at_the_cap, timeout=60),
    hangs("stdout: tiny writes for ever", "import os\nwhile True: os.write(1, b'x')", timeout=2, check=lambda answer: 0 < len(answer.stdout) <= 2_000_000),
    ok("stderr: 1 GB in large writes", "import sys\nfor _ in range(1024): sys.stderr.write('x' * (1 << 20))", cut_at_the_cap, timeout=60),
    ok("stdout: 1 GB from a child", "import subprocess\nsubprocess.run(['head', '-c', '1073741824', '/dev/zero']).returncode", cut_at_the_cap, timeout=60),
    ok("a child that writes on after the cell", "import subprocess\nchild = subprocess.Popen(['yes'])\nprint('mine')", timeout=10, after="import os; os.kill(child.pid, 9)"),
    # --- its own descriptors
    dies("closes every descriptor", "import os\nos.closerange(0, 1024)", EXITED % 0),
    dies("dup2 over every descriptor", "import os\nfd = os.open('/dev/null', 2)\nfor n in range(1024):\n  if n != fd:\n    try: os.dup2(fd, n)\n    except OSError: pass", EXITED % 0),
    ok("garbage to the control pipe", "import os\nos.write(4, os.urandom(100000) + b'\\0' * 100 + b'\\xff\\xfe'); print(1)", lambda answer: answer.stdout == "1\n"),
    ok("a forged frame without the nonce", "import os\nos.write(4, b'\\n{\"nonce\":\"x\",\"event\":\"done\",\"result\":\"forged\",\"error\":null}\\n'); 5", lambda answer: answer.result == "5"),
    ok("a forged frame with its own nonce", FORGE, lambda answer: answer.result == "mine"),
    ok("half a frame", "import os\nos.write(4, b'{\"nonce\":\"'); 5", lambda answer: answer.result == "5"),
    dies("a line of 100 MB to the control pipe", "import os\nfor _ in range(100): os.write(4, b'x' * (1 << 20))", PROTOCOL),
    dies("lines without end to the control pipe", "import os\nfor _ in range(100): os.write(4, b'x\\n' * (1 << 19))", PROTOCOL),
    ok("deep brackets to the control pipe", "import os\nos.write(4, b'[' * 5000000 + b'\\n'); 5", lambda answer: answer.result == "5"),
    ok("deep JSON with the frame's keys", "import os\nos.write(4, b'{\"nonce\":' * 1000000 + b'\\n'); 5", lambda answer: answer.result == "5"),
    hangs("reads the request pipe", "import os\nos.read(3, 1)"),
    # --- its own interpreter
    ok("replaces os, json and builtins", "import builtins, json, os, sys\nos.write = os.read = json.dumps = None\nbuiltins.print = builtins.repr = builtins.str = None\n1"),
    ok("replaces sys.stdout by an object", "import sys\nsys.stdout = object()\n1"),
    ok("deletes sys.modules", "import sys\nsys.modules.clear()\n1"),
    hangs("a repr without end", "class R:\n  def __repr__(self):\n    while True: pass\nR()"),
    ok("a result of 50 MB", "'x' * 50_000_000", lambda answer: 1_900_000 < len(answer.result) < 2_200_000, tenant="m"),
    raised("an error text of 50 MB", "raise ValueError('x' * 50_000_000)", "ValueError: x+", tenant="m"),
    raised("a str() that raises", "class E(Exception):\n  def __str__(self): raise RuntimeError\nraise E", "E: <unprintable E object>"),
    either("a traceback hook of its own", "import sys, traceback\ntraceback.TracebackException = None\nsys.excepthook = None\n1/0", "ZeroDivisionError"),
    raised("deep nested JSON", "import json\njson.loads('[' * 1000000)", "RecursionError"),
    ok("an alarm that raises between cells", "import signal\ndef late(*_): raise KeyError('late')\nsignal.signal(14, late); signal.setitimer(signal.ITIMER_REAL, 0.01); 1", after="import time; time.sleep(0.1)"),
] + [
    dies("signal %d to itself" % each, "import os, signal, time\ntry: signal.signal(%d, signal.SIG_DFL)\nexcept (OSError, ValueError): pass\nos.kill(os.getpid(), %d); time.sleep(5)" % (each, each), killed(each))
    for each in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 25, 26, 27, 29, 30, 31, 34, 50, 64)
] + [
    ok("signal %d to itself" % each, "import os, signal, time\nsignal.signal(%d, signal.SIG_DFL)\nos.kill(os.getpid(), %d); time.sleep(0.05); print('lives')" % (each, each), lambda answer: answer.stdout == "lives\n")
    for each in (17, 18, 20, 21, 22, 23, 28)
]


def js(make, name, *rest, **more):
    return make("js: " + name, *rest, language="javascript", **more)


JAVASCRIPT = [
    js(hangs, "while (true)", "while (true);"),
    js(hangs, "promises without end", "(function f() { Promise.resolve().then(f) })(); new Promise(() => {})"),
    js(hangs, "ticks without end", "(function f() { process.nextTick(f) })()"),
    js(dies, "process.kill", "process.kill(process.pid, 'SIGKILL')", killed(9)),
    js(dies, "process.kill(-1)", "process.kill(-1, 'SIGKILL')", EXITED % 70),
    js(dies, "process.abort", "process.abort()", killed(6)),
    js(dies, "process.exit", "process.exit(3)", EXITED % 3),
    js(dies, "process.exit in a timer", "setTimeout(() => process.exit(4), 10); await new Promise(() => {})", EXITED % 4),
    js(hangs, "SIGSTOP to itself", "process.kill(process.pid, 'SIGSTOP')"),
    js(either, "two hundred busy workers", "const { Worker } = require('worker_threads'); for (let i = 0; i < 200; i++) new Worker('while (1);', { eval: true }); 1",
       TIMEOUT + "|" + MEMORY + "|killed by|Error: ", timeout=2, tenant="m"),
    js(raised, "three hundred children", "const cp = require('child_process'); for (let i = 0; i < 300; i++) cp.spawnSync('sh', ['-c', 'sleep 100 &'], { stdio: 'ignore' }).status !== 0 && (() => { throw new Error('no more') })(); 1", "Error: no more", timeout=30),
    js(dies, "heap", "let all = []; while (true) all.push(new Array(1e5).fill(1.5))", MEMORY, timeout=30, tenant="m"),
    js(dies, "buffers", "let all = []; while (true) all.push(Buffer.alloc(16 << 20, 1))", MEMORY, timeout=30, tenant="m"),
    js(raised, "a string too long", "'x'.repeat(2 ** 29)", "RangeError: Invalid string length"),
    js(ok, "a result of 50 MB", "'x'.repeat(50e6)", lambda answer: "more characters" in answer.result, timeout=30, tenant="m"),
    js(either, "an error text of 50 MB", "throw new Error('x'.repeat(50e6))", "Error: x+|" + MEMORY, timeout=30, tenant="m"),
    js(ok, "stdout: 1 GB", "for (let i = 0; i < 1024; i++) process.stdout.write('x'.repeat(1 << 20))", cut_at_the_cap, timeout=60),
    js(ok, "streams destroyed", "process.stdout.destroy(); process.stderr.destroy(); console.log(1)", lambda answer: answer.stdout == "1\n"),
    js(ok, "JSON, Promise and console replaced", "JSON.parse = JSON.stringify = null; globalThis.Promise = null; 1"),
    js(ok, "emitters replaced", "require('events').EventEmitter.prototype.emit = () => {}; 1"),
    js(either, "prototypes broken", "Array.prototype.push = Function.prototype.bind = String.prototype.split = null; 1", "ProcessError|Error|" + TIMEOUT, timeout=2),
    js(either, "everything is thenable", "Object.prototype.then = function (r) { r(1) }; 1", TIMEOUT + "|Error", timeout=2),
    js(raised, "a storm of rejections", "for (let i = 0; i < 20000; i++) Promise.reject(new Error('e' + i)); 1", "Error: e0", timeout=30),
    js(ok, "rejections between cells", "const storm = setInterval(() => Promise.reject(new Error('between')), 1); 1", after="clearInterval(storm)"),
    js(hangs, "an inspect without end", "({ [Symbol.for('nodejs.util.inspect.custom')]() { while (1); } })"),
    js(raised, "recursion", "(function f() { f() })()", "RangeError: Maximum call stack size exceeded"),
    js(ok, "a deep object", "let o = {}; for (let i = 0; i < 1e5; i++) o = { o }; o"),
    js(raised, "deep JSON", "let deep = []; for (let i = 0; i < 1e5; i++) deep = [deep]; JSON.stringify(deep)", "RangeError"),
    js(dies, "closes every descriptor", "for (let i = 0; i < 1024; i++) try { require('fs').closeSync(i) } catch {}", "ProcessError"),
    js(ok, "half a frame", "require('fs').writeSync(4, '{\"nonce\":\"'); 5", lambda answer: answer.result == "5"),
    js(dies, "100 MB to the control pipe", "for (let i = 0; i < 100; i++) require('fs').writeSync(4, 'x'.repeat(1 << 20))", PROTOCOL),
    js(dies, "no listener left", "process.removeAllListeners(); new Promise(() => {})", EXITED % 0),
    js(hangs, "Atomics.wait", "Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)"),
    js(hangs, "execSync", "require('child_process').execSync('sleep 100')"),
    js(ok, "a proxy that throws", "new Proxy({}, { get() { throw 1 }, ownKeys() { throw 1 }, getPrototypeOf() { throw 1 } })"),
]

# --- reporting ---------------------------------------------------------------------------------------------------------


class Report:
    def __init__(self):
        self.passed = self.failed = 0
        self.lock = threading.Lock()

    def note(self, name, trouble, seconds=None):
        with self.lock:
            self.passed, self.failed = self.passed + (not trouble), self.failed + bool(trouble)
            took = "" if seconds is None else " (%.1f s)" % seconds
            print(("FAILED %s%s: %s" % (name, took, trouble)) if trouble else "ok     %s%s" % (name, took), flush=True)

    def run(self, name, test, *args):
        started = time.monotonic()
        try:
            trouble = test(*args)
        except Exception as error:  # a test that cannot be carried out has failed as well
            trouble = "%s: %s" % (type(error).__name__, error)
        self.note(name, trouble, time.monotonic() - started)


def judge(answer, fault):
    if answer.http != 200:
        return "no HTTP 200"
    if fault.status is not None and answer.status != fault.status:
        return "status is not %s" % fault.status
    if answer.status != "ok" and not re.match(fault.error, answer.error) and not (fault.status is None and re.search(fault.error, answer.error)):
        return "error is not %r" % fault.error
    if answer.seconds > fault.timeout + GRACE_S + SLACK_S:
        return "later than its limit of %d s" % fault.timeout
    if fault.check and not fault.check(answer):
        return "not what was to come"
    return ""


SET = {"python": "marked = 1", "javascript": "var marked = 1"}
ASK = {"python": "'marked' in globals()", "javascript": "typeof marked === 'number'"}


def guest(client, number, fault):
    session = "fault-%d" % number
    try:
        first = client.run(SET[fault.language], fault.language, session)
        if first.status != "ok":
            return "before: %s" % first
        answer = client.run(fault.code, fault.language, session, timeout=fault.timeout)
        trouble = judge(answer, fault)
        if trouble:
            return "%s: %s" % (trouble, answer)
        if fault.after:
            client.run(fault.after, fault.language, session)
        answer = client.run(ASK[fault.language], fault.language, session, timeout=5)
        if fault.kept is None and answer.status != "ok":
            answer = client.run(ASK[fault.language], fault.language, session)  # a broken interpreter is replaced once noticed
        kept = (answer.result or "").lower() == "true"
        if answer.http != 200 or answer.status != "ok" or (fault.kept is not None and kept != fault.kept):
            return "afterwards, names %s: %s" % ("kept" if kept else "gone", answer)
        return ""
    finally:
        client.end_session(session)


class Neighbour(threading.Thread):
    """Prints ten times a second in another tenant's session and looks at the clock."""

    def __init__(self, client):
        super().__init__(daemon=True)
        self.client, self.seconds, self.wrong, self.over = client, [], [], threading.Event()

    def run(self):
        count = 0
        while not self.over.is_set():
            count += 1
            answer = self.client.run("print(%d)" % count, session="neighbour", timeout=20)
            self.seconds.append(answer.seconds)
            if answer.stdout != "%d\n" % count or answer.data.get("execution_count") != count:
                self.wrong.append("%d: %s" % (count, answer))
            self.over.wait(0.1)

    def p95(self, since=0):
        ordered = sorted(self.seconds[since:])
        return ordered[int(len(ordered) * 0.95)] if ordered else 0.0


# --- guests ------------------------------------------------------------------------------------------------------------

ENV = {"CODE_INTERPRETER_API_KEYS": "a=KEYA,b=KEYB,d=KEYD,m=KEYM", "CAISSON_GRACE_SECS": str(GRACE_S), "CAISSON_SLOTS_MAX": "0"}


def guests(report, only):
    chosen = [it for it in PYTHON + JAVASCRIPT if only in it.name]
    if not chosen:
        return
    with live.Daemon("faults", ENV) as daemon:
        clients = {name: daemon.client("KEY" + name.upper()) for name in "abdm"}
        before = daemon.figures()
        neighbour = Neighbour(clients["b"])
        neighbour.start()
        time.sleep(3)
        quiet, quiet_count = neighbour.p95(), len(neighbour.seconds)
        # Those that fill a space or the machine's memory go one after the other, the rest two at a time beside them.
        groups = {name: [it for it in chosen if it.tenant == name] for name in "adm"}
        numbers = {id(fault): n for n, fault in enumerate(chosen)}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            def series(faults):
                for fault in faults:
                    if not suites.ending.is_set():
                        report.run("guest: " + fault.name, guest, clients[fault.tenant], numbers[id(fault)], fault)
            middle = len(groups["a"]) // 2
            list(pool.map(series, [groups["a"][:middle], groups["a"][middle:], groups["d"], groups["m"]]))
        busy = neighbour.p95(quiet_count)
        neighbour.over.set()
        neighbour.join(30)
        report.note("neighbour: every answer right (%d)" % len(neighbour.seconds), "; ".join(neighbour.wrong[:3]))
        bound, worst = 10 * quiet + 0.5, max(neighbour.seconds)
        said = "p95 %.0f ms, quiet %.0f ms, worst %.0f ms" % (busy * 1000, quiet * 1000, worst * 1000)
        late = busy > bound or worst > NEIGHBOUR_MAX_S
        report.note("neighbour: soon (%s)" % said, late and "p95 above %.0f ms or worst above %d s" % (bound * 1000, NEIGHBOUR_MAX_S))
        for client in clients.values():
            client.request("DELETE", "/v2/code/sessions")
        report.run("a connection is kept for ten seconds without a key, with one for longer", strangers, daemon)
        report.run("figures return to the start", figures_return, daemon, before)


# What a kernel publishes, in floods: each costs its own cell at most.
PUBLISH = "publish = get_ipython().display_pub.publish\n"
FLOODS = [
    ok("displays without content", PUBLISH + "for n in range(100000): publish({}, transient={'display_id': str(n)})", lambda answer: "truncated at" in answer.stderr, timeout=60),
    ok("updates of one display", PUBLISH + "for n in range(100000): publish({'text/plain': 'x'}, transient={'display_id': 'd'}, update=n > 0)", lambda answer: "[displays and their updates truncated at 60000]" in answer.stderr, timeout=60),
    ok("clearings", "from IPython.display import clear_output\nfor n in range(100000): clear_output()\nprint('end')", lambda answer: "end\n" in answer.stdout, timeout=60),
    ok("names of a megabyte", PUBLISH + "for n in range(14): publish({'text/plain': 'x'}, transient={'display_id': 'n' * 1000000 + str(n)})", lambda answer: len(answer.data["outputs"]) >= 14, timeout=60),
    ok("threads that publish at once", PUBLISH + """
import threading
def work(letter):
    for n in range(20): publish({'text/plain': letter * 40000})
threads = [threading.Thread(target=work, args=(letter,)) for letter in 'abc']
for thread in threads: thread.start()
for thread in threads: thread.join()""", lambda answer: 10 < len(answer.data["outputs"]) and all(len(set(it["data"]["text/plain"])) == 1 for it in answer.data["outputs"] if "data" in it), timeout=60),
    dies("lines without end", "import os\nwhile True: os.write(4, b'x\\n' * 2048)", PROTOCOL),
    dies("lines that cost least", "import os\nwhile True: os.write(4, b'\\n' * 512)", PROTOCOL),
    Fault("lines without a pause, until its time is up", "import os, time\nwhile True:\n    os.write(4, b'x' * 20_000 + b'\\n')\n    time.sleep(0.002)", "timeout", "TimeoutError", kept=None, timeout=3),
]


def floods(report):
    with live.Daemon("floods", {**ENV, "AIO_CODE_BACKEND": "kernel"}) as daemon:
        client, neighbour = daemon.client("KEYA"), Neighbour(daemon.client("KEYB"))
        neighbour.start()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda it: report.run("flood: " + it.name, flood, client, it), FLOODS))
        neighbour.over.set()
        neighbour.join(30)
        report.note("floods: the neighbour's every answer right (%d)" % len(neighbour.seconds), "; ".join(neighbour.wrong[:3]))
        worst = max(neighbour.seconds)
        report.note("floods: the neighbour answered within %.1f s" % worst, worst > NEIGHBOUR_MAX_S and "above %d s" % NEIGHBOUR_MAX_S)


def flood(client, fault):
    answer = client.run(fault.code, timeout=fault.timeout)
    trouble = judge(answer, fault)
    return trouble and "%s: %s" % (trouble, answer)


def figures_return(daemon, before):
    """Ready shells linger a minute after the last request, and their spaces another."""
    # Not the files: spaces have been made. Not the memory: that is the soak's.
    leave = ("files", "rss KiB")
    differ = {}

    def settled():
        now = daemon.figures()
        differ.clear()
        differ.update({name: (was, now[name]) for name, was in before.items() if not name.endswith(leave) and now[name] > was})
        return not differ

    live.wait_until(settled, 140, every=1)
    if "daemon fds" in differ:
        print("       descriptors of the daemon: %s" % " ".join(sorted(live.descriptors(daemon.tree().daemon))), flush=True)
    # Threads for blocking work come and go with the runtime.
    if differ.get("daemon threads", (0, 0))[1] <= before["daemon threads"] + 4:
        differ.pop("daemon threads", None)
    return ", ".join("%s %s -> %s" % (name, *values) for name, values in sorted(differ.items()))


# --- clients -----------------------------------------------------------------------------------------------------------


def clients_that_misbehave(report, daemon):
    report.run("a vanished client ends its one-off", vanished, daemon)
    report.run("100 one-offs at once, both languages", hundred, daemon)
    report.run("slow and oversized heads hold nobody up", slow_heads, daemon)


def raw_request(daemon, body, close_after):
    text = ("POST /v2/code/execute HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)).encode()
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as connection:
        connection.sendall(text)
        time.sleep(close_after)


def vanished(daemon):
    client = daemon.client()
    code = "import time\\nwhile True:\\n  open('/tmp/tick', 'w').write(str(time.time())); time.sleep(0.05)"
    raw_request(daemon, '{"language":"python","timeout":60,"code":"%s"}' % code, 1.5)
    time.sleep(1)
    read = lambda: client.run("import os\nprint(os.path.getmtime('/tmp/tick'))").stdout
    first = read()
    time.sleep(0.5)
    return "" if first and first == read() else "it still writes: %r" % first


def hundred(daemon):
    client = daemon.client()

    def one(n):
        language = "python" if n % 2 else "javascript"
        answer = client.run(("print(%d * 3)" if n % 2 else "console.log(%d * 3)") % n, language, timeout=60)
        return "" if answer.stdout == "%d\n" % (n * 3) and answer.status == "ok" else str(answer)

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        wrong = [it for it in pool.map(one, range(100)) if it]
    return "%d wrong, such as %s" % (len(wrong), wrong[0]) if wrong else ""


def slow_heads(daemon):
    connections = []
    try:
        for n in range(60):
            connection = socket.create_connection(("127.0.0.1", daemon.port), timeout=30)
            connection.sendall(b"POST /v2/code/execute HTTP/1.1\r\nHost: 127.0.0.1\r\nX-%d: " % n)
            connections.append(connection)
        for connection in connections[:10]:
            try:
                connection.sendall(b"a" * 200_000)
            except OSError:
                pass  # refused while we wrote, as it should
        answer = daemon.client().run("print(1)", timeout=10)
        if answer.stdout != "1\n" or answer.seconds > 5:
            return str(answer)
        status = connections[0].recv(12)
        return "" if status[9:10] == b"4" else "an oversized head got %r" % status
    finally:
        for connection in connections:
            connection.close()


def strangers(daemon):
    """Both open a connection for the next request; only one of them has shown a key."""
    answers = []
    with contextlib.ExitStack() as opened:
        connections = {}
        for name, headers in (("stranger", {}), ("known", {"X-API-Key": "KEYA"})):
            connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=30)
            opened.callback(connection.close)
            connections[name] = (connection, headers)
            connection.request("GET", "/health", headers=headers)
            response = connection.getresponse()
            response.read()
            answers.append(response.status)
        stranger, _ = connections["stranger"]
        stranger.sock.settimeout(20)
        started = time.monotonic()
        left = stranger.sock.recv(1)
        seconds = time.monotonic() - started
        known, headers = connections["known"]
        socket_before = known.sock
        known.request("GET", "/health", headers=headers)
        answers.append(known.getresponse().status)
        if answers != [200, 200, 200] or known.sock is not socket_before:
            return "answers %s" % answers
    return "" if left == b"" and 9 < seconds < 12 else "closed after %.1f s with %r" % (seconds, left)


# --- kills -------------------------------------------------------------------------------------------------------------


class Load:
    """One-offs that leave a mark when their code starts, so that a refusal can be held against it."""

    def __init__(self, client, seed):
        self.client, self.seed, self.over = client, seed, threading.Event()
        self.answers, self.lock = [], threading.Lock()
        self.threads = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(2)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join(100)

    def work(self, lane):
        count = 0
        while not self.over.is_set():
            count += 1
            mark = "%s-%d-%d" % (self.seed, lane, count)
            code = {0: "open('/tmp/marks/%s', 'w').close(); print(7)", 1: "require('fs').writeFileSync('/tmp/marks/%s', ''); console.log(7)"}[(lane + count) % 3 == 0]
            answer = self.client.run(code % mark, "javascript" if (lane + count) % 3 == 0 else "python", timeout=20)
            with self.lock:
                self.answers.append((mark, answer))
            if answer.http != 200:
                self.over.wait(0.2)


# What happens to a cell that runs when one of them is killed; and whether memory of idle sessions survives.
KILLS = {
    "zygote python": ("ok", True),
    "zygote python-data": ("ok", True),
    "launcher": ("error", False),
    "daemon": ("dropped", False),
    "supervisor": ("dropped", False),
}


def kills(report, rounds, seed):
    rng = random.Random(seed)
    print("kills: seed %d" % seed, flush=True)
    with live.Daemon("faults-kills", {"CAISSON_GRACE_SECS": str(GRACE_S)}) as daemon:
        client = daemon.client()
        client.run("import os\nos.makedirs('/tmp/marks', exist_ok=True)\nos.makedirs('/tmp/kept', exist_ok=True)")
        report.run("clients: nothing in the way", lambda: "" if client.run("print(1)").stdout == "1\n" else "no")
        clients_that_misbehave(report, daemon)
        victims = list(KILLS)
        for number in range(rounds):
            victim = victims[number % len(victims)]
            report.run("kill -9 %s, round %d" % (victim, number), one_kill, daemon, client, victim, number, rng)
        report.run("nothing is left by the last of them", lambda: graceful_end(daemon))


def one_kill(daemon, client, victim, number, rng):
    running, memory_kept = KILLS[victim]
    session, busy = "idle-%d" % number, "busy-%d" % number
    wrote = client.run("marked = 1\nopen('/tmp/kept/%d', 'w').write('%d' * 1000)" % (number, number), session=session)
    if wrote.status != "ok":
        return "before: %s" % wrote
    long = {}

    def run_long():
        long["answer"] = client.run("import time\nopen('/tmp/marks/busy-%d', 'w').close()\ntime.sleep(3)\nprint('end')" % number, session=busy, timeout=30)

    with Load(client, "m%d" % number) as load:
        thread = threading.Thread(target=run_long, daemon=True)
        thread.start()
        time.sleep(0.5 + rng.random())
        tree = daemon.tree()
        old = {it.pid for it in tree.guests + tree.inits}
        pid = tree.zygote(victim.split()[1]) if victim.startswith("zygote") else {"daemon": tree.daemon, "launcher": tree.launcher, "supervisor": tree.supervisor}[victim]
        if not pid:
            return "no %s to kill" % victim
        live.kill(pid)
        at = time.monotonic()
        if not memory_kept:
            gone = lambda: not [it for it in live.processes() if it.pid in old and it.state != "Z" and tree.ids[0] <= it.uid < tree.ids[1]]
            if not live.wait_until(gone, 10):
                return "guests outlive the %s" % victim
        if victim == "supervisor":
            live.wait_until(lambda: not daemon.leftovers(), 8)
            suites.end(daemon.process, grace_s=0)
            daemon.start_again()
            at = time.monotonic()
        back = live.wait_until(lambda: client.run("print(1)", timeout=10, wait_s=15).stdout == "1\n", 15, every=0.2)
        if not back:
            return "no answer within 15 s after the %s died" % victim
        recovered = time.monotonic() - at
        thread.join(60)
    answer = long.get("answer")
    said = "none" if answer is None else {0: "dropped"}.get(answer.http, answer.status if answer.http == 200 else "HTTP %d" % answer.http)
    if said != running:
        return "the running cell was to be %s: %s" % (running, answer)
    first = client.run("print('marked' in globals())", session=session)
    if first.stdout != "%s\n" % memory_kept or ("session was reset" in first.hint) == memory_kept:
        return "the idle session: %s" % first
    if "session was reset" in client.run("1", session=session).hint:
        return "the hint came twice"
    kept = client.run("import os\nprint(all(open('/tmp/kept/%d' % n).read() == str(n) * 1000 for n in range({0} + 1)), *os.listdir('/tmp/marks'))".format(number))
    files, *marks = kept.stdout.split() or [""]
    if files != "True":
        return "files are lost: %s" % kept
    for mark, answer in load.answers:
        if answer.http >= 500 and mark in marks:
            return "HTTP %d although code had started: %s" % (answer.http, answer)
        if answer.http == 200 and answer.status == "ok" and (answer.stdout != "7\n" or mark not in marks):
            return "a wrong answer: %s" % answer
        if answer.http not in (0, 200, 503) or (answer.http == 0 and running != "dropped"):
            return "an answer of no kind: %s" % answer
    for each in (session, busy):
        client.end_session(each)
    return "" if recovered < 15 else "it took %.1f s to come back" % recovered


def graceful_end(daemon):
    live.kill(daemon.process.pid, signal.SIGTERM)
    status = daemon.process.wait(40)
    left = live.wait_until(lambda: not daemon.leftovers(), 5) or daemon.leftovers()
    return "exit status %d" % status if status else "" if left is True else "left: " + "; ".join(left)


# --- folders -----------------------------------------------------------------------------------------------------------

ACCOUNT_UID = 54321
FOLDER_LIMITS = {"CAISSON_SPACE_BYTES": "20000000", "CAISSON_SPACE_INODES": "200"}
OVERFULL = "ProcessError: the files exceed the space's limit; the sandbox was ended, delete some in the next call"
FILL = {
    "bytes": "for n in range(4): open('/mnt/data/%d' % n, 'wb').write(b'x' * 9_000_000)",
    "files": "for n in range(300): open('/mnt/data/%d' % n, 'w').close()",
    "depth": "import os\nfor n in range(150): os.mkdir('d'); os.chdir('d')",
}


def folders(report):
    """As an ordinary account a space is a folder, which nothing bounds but a look now and then."""
    may = subprocess.run([*suites.as_account(ACCOUNT_UID), "test", "-x", suites.BINARY], check=False).returncode == 0
    if not may:
        print("skip: an ordinary account cannot reach %s" % suites.BINARY, flush=True)
        return
    daemon = live.Daemon("faults-folders", {"CODE_INTERPRETER_API_KEYS": "a=KEYA,b=KEYB", "CAISSON_SLOTS_MAX": "0", **FOLDER_LIMITS})
    daemon.account = ACCOUNT_UID
    with daemon:
        client, neighbour = daemon.client("KEYA"), daemon.client("KEYB")
        neighbour.run("kept = 41", session="n")
        for what, code in FILL.items():
            report.run("a folder over its limit of %s" % what, overfull, client, code)
        report.run("a neighbour of such folders", lambda: "" if neighbour.run("kept + 1", session="n").result == "42" else "lost")


def overfull(client, code):
    held = client.run("import os\nos.chdir('/mnt/data')\n%s\nimport time; time.sleep(30)" % code, session="s", timeout=40)
    if held.status != "error" or held.error != OVERFULL or held.seconds > 20:
        return "while it is over: %s" % held
    emptied = client.run("import os, shutil\nfor name in os.listdir('/mnt/data'):\n  path = '/mnt/data/' + name\n  shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)\nos.listdir('/mnt/data')", session="s")
    if emptied.result != "[]":
        return "emptying it: %s" % emptied
    after = client.run("import time; time.sleep(7); print('lives')", session="s")
    return "" if after.stdout == "lives\n" else "below its limit again: %s" % after


# --- stopping ----------------------------------------------------------------------------------------------------------


def stops(report):
    report.run("SIGTERM: running cells are answered, new ones refused, nothing is left", graceful)
    report.run("a second SIGTERM hurries", hurried)


def graceful():
    with live.Daemon("faults-stop", {"CAISSON_GRACE_SECS": str(GRACE_S)}) as daemon:
        client, long = daemon.client(), {}
        client.run("1", session="other")
        thread = threading.Thread(target=lambda: long.update(answer=client.run("import time; time.sleep(3); print('end')", session="s")))
        thread.start()
        time.sleep(1)
        live.kill(daemon.process.pid, signal.SIGTERM)
        time.sleep(0.5)
        refused = client.run("print(1)")
        if refused.http != 503:
            return "a new cell was to get 503: %s" % refused
        thread.join(30)
        if long["answer"].stdout != "end\n":
            return "the running cell: %s" % long["answer"]
        status = daemon.process.wait(30)
        left = daemon.leftovers() if not live.wait_until(lambda: not daemon.leftovers(), 5) else []
        return "exit status %d" % status if status else "left: " + "; ".join(left) if left else ""


def hurried():
    with live.Daemon("faults-hurry", {"CAISSON_GRACE_SECS": str(GRACE_S)}) as daemon:
        client = daemon.client()
        threading.Thread(target=client.run, args=("import time; time.sleep(25)",), daemon=True).start()
        time.sleep(1)
        live.kill(daemon.process.pid, signal.SIGTERM)
        time.sleep(1)
        if daemon.process.poll() is not None:
            return "it did not wait for its cell"
        started = time.monotonic()
        live.kill(daemon.process.pid, signal.SIGTERM)
        status = daemon.process.wait(30)
        took = time.monotonic() - started
        left = daemon.leftovers() if not live.wait_until(lambda: not daemon.leftovers(), 5) else []
        if took > 8 or status:
            return "exit status %d after %.1f s" % (status, took)
        return "left: " + "; ".join(left) if left else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="guests whose name holds this text; `kills`, `floods`, `stops` or `folders` for those parts")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if os.geteuid() != 0:
        print("skip: fault tests judge posture `full`, which needs root")
        print("suite faults: 0 passed, 0 failed")
        return 0
    report = Report()
    parts = {"guests": lambda: guests(report, "" if args.only == "guests" else args.only), "kills": lambda: kills(report, args.rounds, args.seed), "floods": lambda: floods(report), "stops": lambda: stops(report), "folders": lambda: folders(report)}
    chosen = list(parts) if not args.only else [args.only if args.only in parts else "guests"]
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            running = [pool.submit(lambda: [parts[it]() for it in ("kills", "stops") if it in chosen])]
            running += [pool.submit(parts[it]) for it in ("guests", "floods", "folders") if it in chosen]
            for each in running:
                each.result()
    except suites.Failed as error:
        report.note("daemon", str(error))
    finally:
        suites.end_all()
    print("suite faults: %d passed, %d failed" % (report.passed, report.failed))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
