#!/usr/bin/python3
"""The kernel inside a harness, exec'd and forked from a zygote: `HARNESS_PYTHON=… test_kernel.py [-k NAME]`.

HARNESS_PYTHON is the product's environment: what the cells show there is compared by tests/gallery.py.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import test_zygote  # noqa: E402
from driver import PY_ARGV, PYTHON, TOP, Harness  # noqa: E402

CACHES = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(PYTHON))), "python-caches")
ENVIRONMENT = {"MPLCONFIGDIR": os.path.join(CACHES, "matplotlib"), "IPYTHONDIR": os.path.join(CACHES, "ipython")}
PLAIN_PYTHON = "/usr/bin/python3"


class Cells:
    """What holds of a kernel however its interpreter came to be. `self.h` is that interpreter."""

    def run_cell(self, code, **more):
        return self.h.call(code, kernel=True, **more)

    def ok(self, code, result=None, stdout=None):
        got = self.run_cell(code)
        self.assertIsNone(got["error"], got)
        self.assertIsNone(got["result"], got)
        if stdout is not None:
            self.assertEqual(got["stdout"], stdout)
        if result is not None:
            self.assertEqual(self.texts(got, "result"), [result])
        return got

    def test_threads_that_publish_at_once_do_not_cut_each_other(self):
        got = self.ok("""
import threading
from IPython.display import display
def work(letter):
    for _ in range(20):
        display({"text/plain": letter * 150000}, raw=True)
threads = [threading.Thread(target=work, args=(letter,)) for letter in "abc"]
for thread in threads: thread.start()
for thread in threads: thread.join()""")
        shown = self.texts(got, "display")
        self.assertEqual((len(shown), [len(text) for text in shown if len(set(text)) == 1]), (60, [150000] * 60))

    def test_a_frame_that_a_signal_breaks_off_is_whole_in_the_end(self):
        got = self.ok("""
import signal
from IPython.display import display
count, armed = 0, False
def handler(*_):
    global count, armed
    if armed:
        count += 1
        display({"text/plain": "h" * 50000}, raw=True)
        if armed and count % 2:
            armed = False
            raise KeyError
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
for _ in range(60):
    try:
        armed = True
        display({"text/plain": "m" * 150000}, raw=True)
        armed = False
    except KeyError: pass
signal.setitimer(signal.ITIMER_REAL, 0)""")
        shown = self.texts(got, "display")
        lengths = {"m": 150000, "h": 50000}
        self.assertEqual([text[:1] for text in shown if len(set(text)) != 1 or len(text) != lengths[text[0]]], [])
        # All that it tells of have come, but for what was raised in between the telling and the sending.
        told = sum(count for key, count in got["order"] if key == "r")
        self.assertLessEqual(told - len(shown), 2)

    def test_a_child_that_was_forked_while_a_frame_was_sent_ends(self):
        self.ok("""
import os, threading
from IPython.display import display
over = False
def work():
    while not over: display({"text/plain": "x" * 20000}, raw=True)
thread = threading.Thread(target=work)
thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        display("of the child")
        os._exit(0)
    os.waitpid(pid, 0)
over = True
thread.join()""")

    def test_what_is_published_is_bounded_in_number(self):
        got = self.ok("publish = get_ipython().display_pub.publish\nfor n in range(60100): publish({})")
        self.assertEqual([it["event"] for it in got["events"][-2:]], ["display", "dropped"])
        self.assertEqual(len(got["events"]), 60001)

    def fails(self, code, ename, evalue=None):
        got = self.run_cell(code)
        self.assertIsNotNone(got["error"], got)
        self.assertEqual(got["error"]["ename"], ename, got)
        if evalue is not None:
            self.assertEqual(got["error"]["evalue"], evalue)
        return got

    def texts(self, got, event):
        return [frame["data"].get("text/plain") for frame in got["events"] if frame["event"] == event]

    def interrupt_after(self, text, *pauses):
        """SIGINT once the cell that is about to run has printed `text`, after each of the pauses, in seconds."""
        pid = int(self.texts(self.ok("import os\nos.getpid()"), "result")[0])

        def wait():
            end = time.monotonic() + 15
            while text not in self.h.stdout and time.monotonic() < end:
                time.sleep(0.01)
            for pause in pauses or (0.05,):
                time.sleep(pause)
                os.kill(pid, signal.SIGINT)

        thread = threading.Thread(target=wait)
        thread.start()
        self.addCleanup(thread.join)
        return pid

    def test_what_is_published_stands_in_the_order(self):
        got = self.ok("import sys\nprint('a')\ndisplay(1)\nprint('e', file=sys.stderr)\ndisplay(2)\n3")
        self.assertEqual([frame["event"] for frame in got["events"]], ["display", "display", "result"])
        self.assertEqual(got["order"], [["o", 2], ["r", 1], ["e", 2], ["r", 2]])
        self.assertEqual(got["events"][0], {"event": "display", "data": {"text/plain": "1"}, "metadata": {}})
        self.assertEqual(got["events"][2], {"event": "result", "data": {"text/plain": "3"}, "metadata": {}})

    def test_what_is_published_tells_its_place(self):
        """What it follows of each stream: the interpreter's own bytes, and what lies in the pipe."""
        self.h.open -= {self.h.out, self.h.err}  # nobody reads meanwhile
        self.ok("import subprocess, sys\nprint('a')\ndisplay(1)\nprint('é')\nsubprocess.run(['echo', 'child'])\ndisplay(2)\nprint('e', file=sys.stderr)\n3")
        self.assertEqual([place[:4] for place in self.h.places], [[2, 2, 0, 0], [5, 11, 0, 0], [5, 11, 2, 2]])
        self.h.open |= {self.h.out, self.h.err}
        self.ok("print('b')\ndisplay(1)")
        self.assertEqual(self.h.places[0][:4:2], [2, 0], "counted anew")

    def test_names_updates_and_clearings(self):
        code = "from IPython.display import clear_output, update_display\nh = display('a', display_id='d')\nh.update('b')\nclear_output(wait=True)\nclear_output()"
        got = self.ok(code)
        self.assertEqual([frame["event"] for frame in got["events"]], ["display", "update", "clear", "clear"])
        self.assertEqual([frame.get("id") for frame in got["events"]], ["d", "d", None, None])
        self.assertEqual([frame.get("wait") for frame in got["events"]], [None, None, True, False])
        self.assertEqual(self.ok("update_display('c', display_id=5)")["events"][0]["id"], "5")

    def test_descriptors_of_streams_come_back(self):
        for code in ("import os\nos.close(1)", "os.close(2)", "os.dup2(os.open('/dev/null', os.O_WRONLY), 1)"):
            self.ok(code)
            self.assertEqual(self.ok("import subprocess, sys\nprint('out')\nsubprocess.call(['echo', 'child']);\nprint('err', file=sys.stderr)", stdout="out\nchild\n")["stderr"], "err\n")

    def memory(self):
        """KiB that the interpreter has, as a cell finds them."""
        got = self.ok("next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmRSS'))")
        return int(self.texts(got, "result")[0])

    def test_what_was_printed_and_shown_is_let_go(self):
        for code in (
            "print('x' * 200_000)",
            "import sys\nsys.stderr.write('e' * 200_000)",
            "display({'text/plain': 'd' * 200_000}, raw=True)",
            "class Shown:\n    def __repr__(self): return 'r' * 200_000\nShown()",
            "raise ValueError('v' * 200_000)",
        ):
            for _ in range(5):
                self.run_cell(code)
            before = self.memory()
            for _ in range(200):
                self.run_cell(code)
            # 40 MB went through; the texts of results are bounded, by 8 MB.
            self.assertLess(self.memory() - before, 16_000, code)
        before = self.memory()
        self.ok("for n in range(200): print('x' * 200_000)")
        self.assertLess(self.memory() - before, 8_000)
        self.ok("41", "41")
        self.ok("_ + 1, len(In) > 1000, Out[max(Out)]", "(42, True, 41)")

    def test_the_code_of_the_latest_cells_is_kept(self):
        self.ok("def early(): 1 / 0")
        self.ok("early_names = lambda: list(get_ipython().compile._filename_map)")
        self.assertIn("\x1b[36mearly", "\n".join(self.fails("early()", "ZeroDivisionError")["error"]["traceback"]))
        for n in range(10):
            self.ok("#%d %s" % (n, "x" * 1_000_000))
        self.ok("def late(): 1 / 0")
        got = self.ok("import linecache\nlen(early_names()), sum(linecache.cache[n][0] for n in early_names()) < 9_000_000")
        self.assertEqual(self.texts(got, "result"), ["(9, True)"])
        self.fails("early()", "ZeroDivisionError")
        self.assertIn("Cell", "\n".join(self.fails("late()", "ZeroDivisionError")["error"]["traceback"]))

    def test_an_error_is_published_and_told(self):
        got = self.fails("print('before')\n1/0", "ZeroDivisionError", "division by zero")
        self.assertEqual(got["events"], [{"event": "error", "error": got["error"]}])
        self.assertEqual(got["order"], [["o", 7], ["r", 1]])
        self.assertFalse(any("harness.py" in line or "kernel.py" in line for line in got["error"]["traceback"]))
        got = self.fails("%no_such_magic", "UsageError")
        self.assertEqual((got["events"], got["error"]["traceback"]), ([], []))
        self.ok("1", "1")

    def test_what_is_too_large_is_dropped_and_what_comes_later_is_not(self):
        got = self.run_cell("for size in (8, 9, 9): display({'text/plain': 'x' * (size * 1000000)}, raw=True)\ndisplay('small')\n1/0")
        self.assertEqual([frame["event"] for frame in got["events"]], ["display", "dropped", "display", "error"])
        self.assertEqual(self.texts(got, "display")[1], "'small'")
        self.assertEqual(got["order"], [["r", 3]])
        got = self.ok("for _ in range(20): display({'text/plain': 'y' * 1000000}, raw=True)")
        self.assertEqual([frame["event"] for frame in got["events"]], ["display"] * 14 + ["dropped"])

    def test_an_error_that_is_too_large_is_cut(self):
        got = self.fails("raise ValueError('z' * 16000000)", "ValueError")
        self.assertEqual([frame["event"] for frame in got["events"]], ["error"])
        self.assertIn("[cut by the harness: 15600000 characters left out]", got["error"]["evalue"])
        self.assertLess(sum(map(len, got["error"]["traceback"])), 2_000_000)
        self.ok("'next'", "'next'")

    def test_a_forged_frame_hides_no_reply(self):
        got = self.ok("import os\nos.write(4, b'{\"nonce\":\"other\",\"event\":\"display\"}\\n\\xff[[\\n{\"nonce\":')\ndisplay('mine')")
        self.assertEqual(self.texts(got, "display"), ["'mine'"])
        self.ok("1", "1")

    def test_bundles_are_json_whatever_is_in_them(self):
        odd = "{'n': float('nan'), 'i': float('inf'), 'b': b'xyz', 't': (1, 2), 's': '\\ud800'}"
        got = self.ok("import warnings\nwarnings.simplefilter('ignore')\ndisplay({'text/plain': 'p', 'application/json': %s}, raw=True, metadata=%s)" % (odd, odd))
        packed = {"n": "nan", "i": "inf", "b": "eHl6", "t": [1, 2], "s": "\ud800"}
        self.assertEqual((got["events"][0]["data"]["application/json"], got["events"][0]["metadata"]), (packed, packed))
        self.fails("display({'text/plain': object}, raw=True)", "ValueError")
        self.ok("1", "1")

    def test_an_interrupt_ends_the_cell_and_keeps_the_names(self):
        self.interrupt_after(b"go")
        got = self.fails("kept = 5\nimport time\nprint('go')\ntime.sleep(15)", "KeyboardInterrupt")
        self.assertEqual([frame["event"] for frame in got["events"]], ["error"])
        self.ok("kept", "5")
        self.interrupt_after(b"go")
        self.fails("print('go')\nwhile True: pass", "KeyboardInterrupt")
        self.ok("kept", "5")

    def test_an_interrupt_between_two_cells_is_lost(self):
        pid = int(self.texts(self.ok("import os\nos.getpid()"), "result")[0])
        for n in range(20):
            os.kill(pid, signal.SIGINT)
            time.sleep(0.02)
            got = self.ok("print(%d)\n'r'" % n, "'r'", "%d\n" % n)
            self.assertEqual(got["stderr"], "")

    def test_an_interrupt_of_a_cell_that_awaits(self):
        self.interrupt_after(b"go")
        got = self.run_cell("import asyncio\nprint('go')\nawait asyncio.sleep(15)")
        self.assertIn(got["error"]["ename"], ("KeyboardInterrupt", "CancelledError"))
        self.ok("await asyncio.sleep(0, 'after')", "'after'")
        self.interrupt_after(b"go")
        got = self.run_cell("async def spin():\n    print('go')\n    while True: await asyncio.sleep(0)\nawait spin()")
        self.assertIn(got["error"]["ename"], ("KeyboardInterrupt", "CancelledError"))
        self.ok("await asyncio.sleep(0, 'after')", "'after'")

    def test_a_cell_that_swallows_the_interrupt(self):
        self.interrupt_after(b"go")
        self.ok("import time\ntry:\n    print('go')\n    time.sleep(15)\nexcept KeyboardInterrupt:\n    print('went on')\n'end'", "'end'", "go\nwent on\n")

    def test_a_hail_of_interrupts_costs_no_reply(self):
        self.interrupt_after(b"", *[0.004] * 250)
        for n in range(60):
            # Each has its reply. What its error is called is IPython's affair where its own code was hit.
            self.run_cell("x = %d\nprint('line')\ndisplay(x)\nx" % n)
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(20)
        self.ok("'calm'", "'calm'")

    def test_nobody_answers_questions(self):
        self.fails("print('before')\ninput('name? ')", "StdinNotImplementedError")
        self.fails("import getpass\ngetpass.getpass()", "StdinNotImplementedError")
        self.fails("input = None\nimport builtins\nbuiltins.input()", "StdinNotImplementedError")
        self.ok("import sys\nsys.stdin.read()", "''")

    def test_leaving_ends_the_cell_and_keeps_the_names(self):
        self.fails("kept = 7\nimport sys\nsys.exit(3)", "SystemExit", "3")
        self.fails("exit()", "SystemExit")
        self.fails("quit()", "SystemExit")
        self.fails("raise SystemExit", "SystemExit")
        self.ok("kept", "7")

    def test_a_forked_child_never_speaks(self):
        code = "import os\npid = os.fork()\nif pid == 0:\n    display('child')\nelse:\n    os.waitpid(pid, 0)\n    display('parent')\nos.getpid() == {}"
        self.ok("import os\nme = os.getpid()")
        got = self.ok(code.format("me"), "True")
        self.assertEqual(self.texts(got, "display"), ["'parent'"])
        got = self.ok("pid = os.fork()\nif pid == 0: 1/0\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
        self.assertEqual(len(self.texts(got, "result")), 1)
        self.ok("import sys\npid = os.fork()\nif pid == 0: sys.exit(5)\nTrue", "True")
        self.ok("1", "1")

    def test_workers_of_a_cell(self):
        self.ok("import multiprocessing as mp\ndef square(x): return x * x\nwith mp.get_context('fork').Pool(2) as pool: print(pool.map(square, [1, 2]))", stdout="[1, 4]\n")
        self.ok("from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool: list(pool.map(display, 'ab'))")

    def test_threads_that_outlive_their_cell(self):
        got = self.ok("import threading, time\ngo = threading.Event()\ndef late():\n    go.wait()\n    display('late')\nt = threading.Thread(target=late)\nt.start()")
        self.assertEqual(got["events"], [])
        got = self.ok("go.set()\nt.join()\n'joined'", "'joined'")
        self.assertEqual(self.texts(got, "display"), ["'late'"])
        # And between two cells: nobody's.
        self.ok("t = threading.Timer(0.1, lambda: display('nowhere'))\nt.start()")
        time.sleep(0.4)
        self.assertEqual(self.texts(self.ok("t.join()\n1", "1"), "display"), [])

    def test_streams_that_a_cell_breaks_come_back(self):
        for code in ("import sys\nsys.stdout.close()", "sys.stdout.detach(); None", "sys.stderr.close()", "sys.stdin.close()"):
            self.run_cell(code)
            self.ok("print('again')\n'r'", "'r'", "again\n")
        self.ok("sys.stdout = None")
        self.run_cell("print('lost')\ndisplay('seen')")
        self.ok("sys.stdout = sys.__stdout__")
        self.ok("print('back')\ndisplay(1)", stdout="back\n")
        self.ok("class Mine:\n    def write(self, text): raise ValueError('no')\n    def flush(self): raise ValueError('no')\nkeep, sys.stdout = sys.stdout, Mine()")
        self.run_cell("sys.stdout = keep")
        self.ok("print('kept')", stdout="kept\n")

    def test_closing_descriptor_1_leaves_the_rest(self):
        self.run_cell("import os\nos.close(1)\nos.close(2)")
        self.ok("6 * 7", "42")

    def test_modules_that_a_cell_ruins(self):
        ruin = (
            "import json, os, warnings, getpass, asyncio\n"
            "json.dumps = json.JSONEncoder.encode = json.JSONEncoder.default = None\n"
            "os.write = os.read = os._exit = None\nwarnings.warn = None\ngetpass.getpass = None\nasyncio.set_event_loop_policy = None"
        )
        self.ok(ruin)
        self.ok("display({'text/plain': 'd', 'application/json': {'k': [1]}}, raw=True)\nprint('p')\n'r'", "'r'", "p\n")
        self.fails("1/0", "ZeroDivisionError")

    def test_builtins_that_a_cell_ruins(self):
        for name in ("print", "repr", "isinstance", "len", "str", "Exception"):
            # IPython may be past running cells, as it would be anywhere; each request has its reply all the same.
            self.run_cell("import builtins\nkeep = builtins.%s\nbuiltins.%s = None" % (name, name))
            self.run_cell("display(1)")
            self.run_cell("import builtins\nbuiltins.%s = keep" % name)

    def test_a_shell_that_is_reset(self):
        self.ok("x = 1\n'one'", "'one'")
        self.ok("get_ipython().reset()")
        self.fails("x", "NameError")
        self.ok("Out", "{}")
        self.ok("display(1)\n2", "2")
        self.ok("__name__, In[-1]", "('__main__', '__name__, In[-1]')")
        self.ok("Out[5], sorted(Out)", "(2, [5, 6])")

    def test_numbers_of_cells_are_the_requests(self):
        self.ok("'a'", "'a'")
        self.ok("   \n")
        self.ok("'c'", "'c'")
        self.ok("Out[1], Out[3], In[1], In[3]", "('a', 'c', \"'a'\", \"'c'\")")
        # A cell that runs others as history takes their numbers; the next cell has its own again.
        self.ok("r = get_ipython().run_cell('9', store_history=True)")
        self.ok("get_ipython().execution_count, In[6][:13]", "(7, 'get_ipython()')")

    def test_cells_in_cells(self):
        got = self.ok("r = get_ipython().run_cell('display(1)\\nget_ipython().run_cell(\"display(2)\\\\n3\")\\n4')\nr.success")
        self.assertEqual(self.texts(got, "display"), ["1", "2"])
        self.assertEqual(self.texts(got, "result"), ["3", "4", "True"])
        got = self.run_cell("code = 'get_ipython().run_cell(code)'\nget_ipython().run_cell(code)")
        self.assertIsNotNone(got, "a recursion of cells has its reply")
        self.ok("'after'", "'after'")

    def test_loops_that_a_cell_closes_or_leaves(self):
        self.ok("import asyncio\nasyncio.get_event_loop().close()")
        self.ok("await asyncio.sleep(0, 1)", "1")
        self.ok("async def f(): return 3\nasyncio.run(f())", "3")
        self.ok("task = asyncio.get_event_loop().create_task(f())")
        self.ok("await task", "3")
        self.ok("loop = asyncio.new_event_loop()\nloop.run_until_complete(f()), loop.close()", "(3, None)")

    def test_traces_and_limits_of_a_cell(self):
        self.ok("import sys\nsys.setprofile(lambda *a: None)")
        self.ok("1", "1")
        self.ok("sys.setprofile(None)\ndef trace(*a): raise RuntimeError('trace')")
        self.run_cell("sys.settrace(trace)")
        self.run_cell("def g(): pass\ng()")
        self.run_cell("sys.settrace(None)")
        self.ok("2", "2")
        self.run_cell("sys.setrecursionlimit(80)")
        self.run_cell("sys.setrecursionlimit(1000)")
        self.fails("def r(): return r()\nr()", "RecursionError")

    def test_signal_handlers_left_behind(self):
        self.ok("import signal\ndef h(*a): raise TimeoutError('alarm')\nsignal.signal(signal.SIGALRM, h)\nsignal.setitimer(signal.ITIMER_REAL, 0.05, 0.03)")
        time.sleep(0.2)
        for _ in range(20):
            self.run_cell("1")
        for _ in range(30):
            if not self.run_cell("signal.setitimer(signal.ITIMER_REAL, 0)")["error"]:
                break
        self.ok("1", "1")

    def test_a_bad_cwd_is_refused_and_nothing_runs(self):
        got = self.h.call("print(1)", kernel=True, setup={"cwd": "/no/such"})
        self.assertEqual((got["refused"], got["stdout"], got["events"]), ({"what": "cwd", "errno": 2}, "", []))
        self.ok("'later'", "'later'")

    def test_the_first_frame_fixes_the_kernel(self):
        self.ok("x = 3\nx", "3")
        got = self.h.call("x + 1")
        self.assertEqual((got["result"], self.texts(got, "result")), (None, ["4"]))


# Run by the product's Python: cells of its standard library and of random pieces, by the short way and by IPython's.
TRANSFORMS = r"""
import glob, os, random, sys
sys.path.insert(0, sys.argv[1])
import kernel
from IPython.core.inputtransformer2 import TransformerManager

short, whole = TransformerManager(), TransformerManager()
kernel.spare_plain_cells(short)
random.seed(5)
PIECES = ["%", "!", "?", "/", ",", ";", ">>> ", "... ", "In [1]: ", "\t", " ", "\n", "\\", "'", '"', '\"\"\"', "(", ")", "[", "x", "=", "x = ",
          "def f():\n    ", "if 1:\n", "#", "a?", "!ls", "%time", "\x0c", "\r\n", "é", "f('a')", "await x", "class A: pass", "ls", "print(1)"]

def attempt(manager, cell):
    try:
        return manager.transform_cell(cell)
    except Exception as error:
        return type(error)

def cells():
    for path in sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:60]:
        with open(path, encoding="utf-8", errors="replace") as source:
            lines = source.read().splitlines(True) or [""]
        for _ in range(30):
            start = random.randrange(len(lines))
            yield "".join(lines[start:start + random.randint(1, 12)])
    for _ in range(8000):
        yield "".join(random.choices(PIECES, k=random.randint(0, 8)))

spared = 0
for cell in cells():
    spared += not kernel.SPECIAL.search(cell)
    assert attempt(short, cell) == attempt(whole, cell), (cell, attempt(short, cell), attempt(whole, cell))
short.cleanup_transforms.append(lambda lines: ["changed"])
assert short.transform_cell("print(1)") == "changed", "a transformer that a cell has added is heeded"
print(spared)
"""


class Transforms(unittest.TestCase):
    def test_a_cell_that_is_spared_the_transformers_is_as_they_would_leave_it(self):
        argv = [PYTHON, "-s", "-B", "-c", TRANSFORMS, os.path.join(TOP, "harness")]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr[-1500:])
        self.assertGreater(int(done.stdout), 500, "and there are such cells")


class Executed(Cells, unittest.TestCase):
    def setUp(self):
        self.h = Harness(PY_ARGV, env=dict({"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp/nohome", "MPLBACKEND": "Agg"}, **ENVIRONMENT))
        self.addCleanup(self.h.close)


class Served(test_zygote.Served):
    def serve_data(self, *arguments):
        process, channel = self.start("python-data", *arguments, **ENVIRONMENT)
        hello = channel.recv(65536)
        self.assertTrue(hello, process.stderr.read() if not hello else "")
        return channel, hello

    def fork(self, channel):
        fork = test_zygote.Fork(channel)
        self.addCleanup(fork.close)
        return fork


class Forked(Cells, Served):
    def setUp(self):
        channel, hello = self.serve_data()
        self.assertNotIn(b"there is no kernel", hello)
        self.h = self.fork(channel)


# What a native cell can see of the process, as text: one line for each thing.
VIEW = """
import asyncio, builtins, getpass, linecache, logging, os, pdb, signal, sys, threading, warnings
print('builtins', sorted(vars(builtins)))
print('displayhook', sys.displayhook is sys.__displayhook__, sys.excepthook is sys.__excepthook__)
print('sys', [n for n in ('ps1', 'ps2', 'ps3', 'last_type', 'last_exc') if hasattr(sys, n)], sys.argv, sys.path, type(sys.stdout).__name__)
print('environment', sorted(os.environ.items()))
print('filters', sorted(f for f in map(str, warnings.filters) if 'numpy' not in f))
print('input', input.__module__, getpass.getpass.__module__, pdb.Pdb.__module__, print.__module__)
print('signals', [n.name for n in signal.Signals if callable(signal.getsignal(n))], signal.pthread_sigmask(signal.SIG_BLOCK, []))
print('loggers', logging.getLogger().handlers, logging.getLogger().level)
print('descriptors', len(os.listdir('/proc/self/fd')), threading.active_count())
print('globals', sorted(n for n in globals() if not n[0].islower()))
print('lines', [n for n in linecache.cache if 'ipykernel' in n or 'ipython' in n])
try:
    asyncio.get_event_loop_policy()._local._loop
    print('loop', asyncio.get_event_loop_policy()._local._loop)
except AttributeError:
    print('loop', None)
try:
    import pandas
    print('pandas', pandas.get_option('display.max_columns'), pandas.io.formats.console.in_ipython_frontend())
except ImportError:
    pass
import matplotlib, matplotlib.pyplot as plt
print('matplotlib', matplotlib.get_backend().lower(), plt.isinteractive(), plt.get_fignums(), {k: v for k, v in matplotlib.rcParams.items() if v != matplotlib.rcParamsDefault[k]})
"""


class Native(Served):
    maxDiff = 20_000

    def test_native_cells_see_no_trace_of_a_kernel(self):
        with_kernel, without = self.serve_data()[0], self.serve_data("--without", "IPython")[0]
        seen, expected = [self.fork(channel).call(VIEW) for channel in (with_kernel, without)]
        self.assertIsNone(expected["error"], expected)
        self.assertEqual(seen["stdout"].split("\n"), expected["stdout"].split("\n"))
        fork = self.fork(with_kernel)
        self.assertEqual(fork.call("from IPython import get_ipython; get_ipython() is None")["result"], "True")
        self.assertEqual(fork.call("display(1)")["error"]["ename"], "NameError")
        self.assertEqual(fork.call("input()")["error"]["ename"], "EOFError")
        self.assertEqual(fork.call("import asyncio\nasync def f(): return 4\nasyncio.run(f())")["result"], "4")
        self.assertEqual(fork.call("import pandas as pd; pd.DataFrame({'a': [1]})")["result"], "   a\n0  1")
        self.assertEqual(fork.call("import matplotlib.pyplot as plt; plt.plot([1]); plt.get_fignums()")["events"], [])

    def test_forks_share_no_shell(self):
        channel = self.serve_data()[0]
        one, native, two = self.fork(channel), self.fork(channel), self.fork(channel)
        self.assertIsNone(one.call("x = 1\nimport matplotlib.pyplot as plt\nplt.plot([1])", kernel=True)["error"])
        self.assertEqual(native.call("'x' in globals(), 'get_ipython' in globals()")["result"], "(False, False)")
        got = two.call("'x' in globals(), In, Out, get_ipython().execution_count", kernel=True)
        self.assertEqual(got["events"][0]["data"]["text/plain"].replace("\n", ""), "(False, ['', \"'x' in globals(), In, Out, get_ipython().execution_count\"], {}, 2)")

    def test_an_interpreter_without_ipykernel_says_so(self):
        harness = Harness([PLAIN_PYTHON, *PY_ARGV[1:]])
        self.addCleanup(harness.close)
        if harness.call("import importlib.util; importlib.util.find_spec('ipykernel') is None")["result"] != "True":
            self.skipTest("%s has an ipykernel of its own" % PLAIN_PYTHON)
        harness = Harness([PLAIN_PYTHON, *PY_ARGV[1:]])
        self.addCleanup(harness.close)
        for _ in range(2):
            got = harness.call("print('ran')", kernel=True)
            self.assertEqual((got["stdout"], got["stderr"], got["events"]), ("", "", []))
            self.assertEqual(got["error"]["ename"], "ImportError")
            self.assertEqual(got["error"]["evalue"], "this interpreter has no kernel: No module named 'ipykernel'")
        self.assertEqual(harness.call("1")["result"], "1")


if __name__ == "__main__":
    unittest.main()
