"""Starts a harness without any sandbox and speaks its protocol, as the daemon would."""

import fcntl
import json
import os
import select
import signal
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PYTHON = os.environ.get("HARNESS_PYTHON", "/usr/bin/python3")
NODE = os.environ.get("HARNESS_NODE", "/usr/bin/node")
PY_ARGV = [PYTHON, "-s", "-P", "-B", os.path.join(TOP, "harness", "harness.py")]
if "HARNESS_PYTHON" in os.environ:
    PY_ARGV.remove("-P")  # before 3.11 there is no -P
JS_ARGV = [NODE, "--experimental-vm-modules", os.path.join(TOP, "harness", "harness.js")]


def high(fd):
    """The same pipe end on a number that is none of 0 to 4."""
    new = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(fd)
    return new


class Dead(Exception):
    """The harness exited; carries its wait status."""


class Harness:
    """One interpreter and its four pipes."""

    def __init__(self, argv, env=None, cwd="/tmp"):
        req_r, self.req = map(high, os.pipe())
        self.events, ev_w = map(high, os.pipe())
        self.out, out_w = map(high, os.pipe())
        self.err, err_w = map(high, os.pipe())
        null = high(os.open("/dev/null", os.O_RDWR))
        actions = [(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate((null, out_w, err_w, req_r, ev_w))]
        env = env or {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp/nohome"}
        old = os.getcwd()
        os.chdir(cwd)
        self.pid = os.posix_spawn(argv[0], argv, env, file_actions=actions)
        os.chdir(old)
        for fd in (req_r, ev_w, out_w, err_w, null):
            os.close(fd)
        for fd in (self.events, self.out, self.err):
            os.set_blocking(fd, False)
        self.count, self.buffer, self.stdout, self.stderr = 0, b"", b"", b""
        self.open = {self.events, self.out, self.err}

    def pump(self, seconds):
        ready, _, _ = select.select(list(self.open), [], [], seconds)
        for fd in ready:
            self.drain(fd)

    def drain(self, fd):
        while fd in self.open:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.open.discard(fd)
            elif fd == self.events:
                self.buffer += data
            elif fd == self.out:
                self.stdout += data
            else:
                self.stderr += data

    def call(self, code=None, seconds=20, **more):
        """One request and its done frame, with `stdout`, `stderr` and `events`, its other frames, as read until then."""
        self.count += 1
        nonce = "n%d" % self.count
        request = dict(more, nonce=nonce, timeout_ms=30000)
        if code is not None:
            request["code"] = code
        self.stdout = self.stderr = b""
        self.published, self.places = [], []
        self.put(request)
        end = time.monotonic() + seconds
        while True:
            frame = self.frame(nonce)
            if frame is not None:
                break
            if self.events not in self.open:
                self.drain(self.err)
                raise Dead(self.reap(), self.stderr)
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(code)
            self.pump(0.5)
        self.drain(self.out)
        self.drain(self.err)
        frame["stdout"] = self.stdout.decode("utf-8", "replace")
        frame["events"] = self.published
        frame["stderr"] = self.stderr.decode("utf-8", "replace")
        return frame

    def program(self, code, seconds=20, tools=None, answer=None, **more):
        """Runs a program to its end: `stdout`, `stderr`, `exit`, `done` (whether a frame told it) and the rounds of `calls`,
        each answered by `answer`, which makes a list of answers of a list of calls."""
        self.count += 1
        nonce = "n%d" % self.count
        program = dict(more, code=code)
        if tools is not None:
            program["tools"] = [{"name": name, "function": function} for name, function in tools]
        self.put({"nonce": nonce, "program": program, "timeout_ms": 30000})
        self.stdout = self.stderr = b""
        self.published, self.places, rounds = [], [], []
        end = time.monotonic() + seconds
        while True:
            frame = self.frame(nonce)
            while self.published:
                calls = self.published.pop(0)["calls"]
                rounds.append(calls)
                if answer is not None:
                    self.put({"nonce": nonce, "answers": answer(calls)})
            if frame is not None or self.events not in self.open:
                break
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(code, self.stdout, self.stderr)
            self.pump(0.5)
        told = frame is not None
        if not told:
            status = self.reap()
            frame = {"exit": None if status is None else os.waitstatus_to_exitcode(status)}
        self.drain(self.out)
        self.drain(self.err)
        return dict(frame, calls=rounds, done=told, stdout=self.stdout.decode("utf-8", "replace"), stderr=self.stderr.decode("utf-8", "replace"))

    def put(self, request):
        data = json.dumps(request).encode() + b"\n"
        while data:
            data = data[os.write(self.req, data) :]

    def reap(self):
        """The wait status. A zygote's fork is no child of ours: it has no pid here, and -1 would mean everybody."""
        return os.waitpid(self.pid, 0)[1] if self.pid > 0 else None

    def kill(self):
        if self.pid > 0:
            os.kill(self.pid, signal.SIGKILL)

    def frame(self, nonce):
        while b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            assert len(line) < 16 << 20, "frame above 16 MiB"
            try:
                frame = json.loads(line)
            except ValueError:
                continue
            if not isinstance(frame, dict) or frame.pop("nonce", None) != nonce:
                continue
            if frame.get("event") == "done":
                return frame
            self.places.append(frame.pop("at", None))
            self.published.append(frame)
        return None

    def close(self):
        for fd in (self.req, self.events, self.out, self.err):
            os.close(fd)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            time.sleep(0.005)
        self.kill()
        self.reap()
        raise TimeoutError("the harness did not leave at end of file")
