#!/usr/bin/python3
"""The zygote with a stand-in for the launcher and its library: `HARNESS_PYTHON=… test_zygote.py`."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from driver import PYTHON, TOP, Harness, high  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))


class Fork(Harness):
    """A harness that a zygote forks. The launcher's part: pipes and one packet."""

    def __init__(self, channel):
        req_r, self.req = map(high, os.pipe())
        self.events, ev_w = map(high, os.pipe())
        self.out, out_w = map(high, os.pipe())
        self.err, err_w = map(high, os.pipe())
        null = high(os.open("/dev/null", os.O_RDWR))
        ends = [null, out_w, err_w, req_r, ev_w]
        socket.send_fds(channel, [b"x"], ends)
        for fd in ends:
            os.close(fd)
        for fd in (self.events, self.out, self.err):
            os.set_blocking(fd, False)
        self.count, self.buffer, self.stdout, self.stderr = 0, b"", b"", b""
        self.open = {self.events, self.out, self.err}
        self.pid = 0

    def close(self):
        for fd in (self.req, self.events, self.out, self.err):
            os.close(fd)


class Served(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        for name in ("harness.py", "kernel.py", "program.py", "zygote.py"):
            shutil.copy(os.path.join(TOP, "harness", name), cls.folder)
        target = os.path.join(cls.folder, "libcaisson.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", target, os.path.join(HERE, "fake_caisson.c")], check=True)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def start(self, *arguments, **environment):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs_fd = high(os.dup(theirs.fileno()))
        theirs.close()
        env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "PYTHONMALLOC": "malloc"}
        env.update(GLIBC_TUNABLES="glibc.malloc.hugetlb=1", **environment)
        argv = [PYTHON, "-s", "-B", os.path.join(self.folder, "zygote.py"), *arguments]
        process = subprocess.Popen(
            ["/bin/bash", "-c", 'exec 3<&%d %d<&-; exec "$@"' % (theirs_fd, theirs_fd), "sh", *argv],
            env=env, cwd="/", pass_fds=[theirs_fd], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )
        os.close(theirs_fd)
        self.addCleanup(ours.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(ours.shutdown, socket.SHUT_RDWR)
        return process, ours

    def serve(self, *arguments):
        process, channel = self.start(*arguments)
        hello = channel.recv(65536)
        self.assertTrue(hello, process.stderr.read() if not hello else "")
        return channel, json.loads(hello)


class Zygote(Served):
    def test_forks_are_ordinary_sessions(self):
        channel, hello = self.serve("python")
        self.assertEqual((hello["profile"], hello["loaded"], hello["warnings"]), ("python", [], []))
        one, two = Fork(channel), Fork(channel)
        self.assertEqual(one.call("x = 1\nprint(x)")["stdout"], "1\n")
        self.assertEqual(two.call("'x' in globals(), 'harness' in __import__('sys').modules")["result"], "(False, False)")
        got = two.call("import os, subprocess\nsorted(os.environ), subprocess.run(['env'], capture_output=True, text=True).stdout.count('=')")
        names = "['HOME', 'LANG', 'LOGNAME', 'MPLBACKEND', 'OPENBLAS_NUM_THREADS', 'PATH', 'SHELL', 'TMPDIR', 'USER']"
        self.assertTrue(got["result"].startswith("(" + names), got)
        self.assertEqual(one.call("1/0")["error"]["traceback"][-1], "ZeroDivisionError: division by zero")
        self.assertEqual(one.call("import sys; repr(sys.stdin.read()), sys.argv")["result"], "(\"''\", [''])")
        self.assertEqual(one.call("import multiprocessing as mp\np = mp.get_context('spawn').Pool(1); print(p.map(abs, [-1])); p.terminate()")["stdout"], "[1]\n")
        self.assertEqual(one.call("import ctypes; ctypes.CDLL(None).getenv(b'PYTHONMALLOC')")["result"], "0")
        one.close()
        two.close()

    def test_forks_run_programs(self):
        for profile in ("python", "python-data"):
            channel, _ = self.serve(profile)
            fork = Fork(channel)
            code = "import sys, atexit, threading\natexit.register(print, 'at exit')\nthreading.Thread(target=print, args=('thread',)).start()\nprint(sys.argv, __name__)\nsys.exit(3)"
            got = fork.program(code, args=["a"])
            self.assertEqual((got["exit"], got["stderr"]), (3, ""), got)
            self.assertEqual(sorted(got["stdout"].splitlines()), ["['main.py', 'a'] __main__", "at exit", "thread"])
            fork.close()
            fork = Fork(channel)
            got = fork.program("import asyncio\nprint(await asyncio.gather(add(a=1), add(a=2)))\n1/0", tools=[("add", "add")], answer=lambda calls: [{"id": call["id"], "result": call["input"]["a"]} for call in calls])
            self.assertEqual((got["exit"], got["stdout"], len(got["calls"])), (1, "[1, 2]\n", 1), got)
            self.assertTrue(got["stderr"].startswith("Traceback (most recent call last):\n  File \"main.py\", line 3"), got)
            fork.close()

    def test_no_two_forks_draw_the_same(self):
        channel, _ = self.serve("python")
        code = (
            "import random, ssl, tempfile, uuid, secrets, multiprocessing as mp\n"
            "print(random.random(), ssl.RAND_bytes(8).hex(), next(tempfile._get_candidate_names()), uuid.uuid4(), uuid.uuid1(), secrets.token_hex(4), mp.current_process().authkey.hex(), sep='\\n')"
        )
        seen = set()
        for _ in range(10):
            fork = Fork(channel)
            drawn = fork.call(code)["stdout"].split("\n")[:-1]
            fork.close()
            self.assertEqual(len(drawn), 7)
            self.assertFalse(seen & set(drawn))
            seen.update(drawn)

    def test_forks_of_the_data_profile_draw_differently(self):
        channel, hello = self.serve("python-data")
        if "numpy" not in hello["loaded"]:
            self.skipTest("no numpy")
        code = "import numpy as np, random, ssl\nprint(np.random.random(), np.random.normal(), random.gauss(0, 1), ssl.RAND_bytes(8).hex(), sep='\\n')"
        seen = set()
        for _ in range(4):
            fork = Fork(channel)
            drawn = fork.call(code)["stdout"].split("\n")[:-1]
            self.assertFalse(seen & set(drawn))
            self.assertTrue(0 <= float(drawn[0]) < 1 and abs(float(drawn[1])) < 10)
            seen.update(drawn)
            fork.close()

    def test_programs_inherit_no_control_pipe(self):
        channel, _ = self.serve("python")
        fork = Fork(channel)
        self.assertEqual(fork.call("import os; [os.get_inheritable(fd) for fd in range(5)]")["result"], "[True, True, True, False, False]")
        fork.close()

    def test_a_guest_that_forks_finds_the_hooks_in_place(self):
        channel, _ = self.serve("python")
        fork = Fork(channel)
        code = (
            "import logging, os, random, threading\n"
            "t = threading.Thread(target=threading.Event().wait, daemon=True); t.start()\n"
            "r, w = os.pipe()\n"
            "if os.fork() == 0:\n"
            "    logging.getLogger('x').warning('alive')\n"
            "    os.write(w, repr((threading.active_count(), random.random())).encode()); os._exit(0)\n"
            "count, drawn = eval(os.read(r, 100))\n"
            "count, drawn != random.random()"
        )
        self.assertEqual(fork.call(code)["result"], "(1, True)")
        fork.close()

    def test_nothing_of_the_rehearsal_is_left(self):
        channel, _ = self.serve("python")
        fork = Fork(channel)
        self.assertEqual(fork.call("import linecache\n[name for name in linecache.cache if 'cell' in name]")["result"], "['<cell 1>']")
        self.assertEqual(fork.call("sorted(name for name in globals() if not name.startswith('__'))")["result"], "['_', 'linecache']")
        self.assertEqual(fork.call("import sys; sys.stdin.read(), sys.stdin.name, sys.argv, hasattr(sys, 'last_value')")["result"], "('', 0, [''], False)")
        fork.close()

    def test_a_fork_has_little_for_itself(self):
        channel, _ = self.serve("python")
        fork = Fork(channel)
        if fork.call("import ctypes; hasattr(ctypes.CDLL(None), 'mallinfo2')")["result"] != "True":
            self.skipTest("another libc")
        fork.close()
        fork = Fork(channel)
        fork.call("print(1)")
        code = "sum(int(line.split()[1]) for line in open('/proc/self/smaps_rollup') if line.startswith('Private_Dirty'))"
        kib = int(fork.call(code)["result"])
        fork.close()
        self.assertLess(kib, 1200, "0.7 MiB in November 2026, 1.6 before memory was plugged")

    def test_data_profile_degrades_to_what_is_there(self):
        channel, hello = self.serve("python-data", "--without", "IPython")
        self.assertEqual(len(hello["loaded"]) + len(hello["warnings"]), 4)
        self.assertIn("IPython is left out: it ended the zygote", hello["warnings"])
        fork = Fork(channel)
        self.assertEqual(fork.call("6 * 7")["result"], "42")
        fork.close()

    def test_it_refuses_to_serve_what_would_be_shared(self):
        sabotage = {
            "descriptor": "f = __import__('os').open('/etc/passwd', 0)",
            "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
            "shared mapping": "import mmap\nm = mmap.mmap(-1, 4096)",
        }
        for reason, code in sabotage.items():
            with tempfile.TemporaryDirectory() as folder:
                with open(os.path.join(folder, "sitecustomize.py"), "w") as out:
                    out.write(code + "\nimport builtins; builtins.kept = dir()\n")
                process, _ = self.start("python", PYTHONPATH=folder)
                self.assertEqual(process.wait(20), 70, reason)
                self.assertIn(reason, process.stderr.read().decode())

    def test_it_leaves_with_the_launcher(self):
        process, channel = self.start("python")
        channel.recv(65536)
        channel.shutdown(socket.SHUT_RDWR)
        self.assertEqual(process.wait(10), 0)


if __name__ == "__main__":
    unittest.main()
