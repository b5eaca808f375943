#!/usr/bin/python3
"""Program mode of the Python harness, without a sandbox: `test_program.py [-k NAME]`; HARNESS_PYTHON for plots."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from driver import PY_ARGV, PYTHON, Harness  # noqa: E402

# What an ordinary script's interpreter says to the same text. Threads, lines and columns are the versions' own.
PLAIN = [PYTHON, "-s", "-B"]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.realpath(folder.name)

    def start(self):
        h = Harness(PY_ARGV, cwd=self.folder)
        self.addCleanup(self.end, h)
        return h

    def end(self, h):
        try:
            h.kill()
            h.reap()
        except (ProcessLookupError, ChildProcessError):
            pass
        for fd in (h.req, h.events, h.out, h.err):
            os.close(fd)

    def run_program(self, code, **more):
        return self.start().program(code, **more)

    def ok(self, code, stdout, **more):
        got = self.run_program(code, **more)
        self.assertEqual((got["exit"], got["stdout"]), (0, stdout), got)
        self.assertEqual(got["stderr"], "")
        return got

    def fails(self, code, status, **more):
        got = self.run_program(code, **more)
        self.assertEqual(got["exit"], status, got)
        self.assertNotRegex(got["stderr"], r"harness\.py|program\.py|\x1b|asyncio/")
        return got

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w") as out:
            out.write(text)

    def read(self, name):
        with open(os.path.join(self.folder, name)) as text:
            return text.read()


class Script(Case):
    def test_it_looks_like_a_script(self):
        code = "import sys\nprint(sys.argv, __name__, __file__, sys.path[0], __cached__, __spec__, '_' in globals())"
        args = ["one", "two words", "", "$HOME", "'", "ü"]
        self.ok(code, "%r __main__ %s/main.py %s None None False\n" % (["main.py"] + args, self.folder, self.folder), args=args)

    def test_nothing_is_displayed(self):
        self.ok("40 + 2\n'text'", "")
        self.ok("", "")

    def test_a_byte_order_mark_and_foreign_line_ends_are_no_errors(self):
        self.ok("\ufeffx = '''a\r\nb'''\r\nif x:\r\n    print(repr(x))\r\n", "'a\\nb'\n")
        self.assertIn('line 2, in <module>\n    1/0\n', self.fails("x = 1\r1/0\r", 1)["stderr"])
        self.ok("\ufeff#!/usr/bin/python3\n# -*- coding: latin-1 -*-\nprint('ü')", "ü\n")

    def test_modules_beside_it_are_found_whatever_it_does_to_its_directory(self):
        self.write("mine.py", "value = 5\n")
        self.ok("import os; os.chdir('/'); import mine; print(mine.value)", "5\n")

    def test_one_named_like_it_is_another(self):
        self.write("main.py", "def f():\n    raise KeyError('of the file')\n")
        got = self.fails("import main\ndef g():\n    main.f()\ng()", 1)
        self.assertIn("raise KeyError('of the file')", got["stderr"])
        self.assertIn("    main.f()\n", got["stderr"])

    def test_its_source_can_be_asked_for(self):
        self.ok("import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))", "def f():\n    return 1\n\n")

    def test_classes_can_be_pickled(self):
        self.ok("import pickle\nclass P: pass\nprint(type(pickle.loads(pickle.dumps(P()))) is P)", "True\n")

    def test_input_fails_at_once(self):
        got = self.fails("input('name? ')", 1)
        self.assertTrue(got["stderr"].endswith("EOFError: EOF when reading a line\n"), got)
        self.assertEqual(got["stdout"], "name? ")

    def test_children_and_raw_writes_fall_in_place(self):
        self.ok("import os, subprocess\nprint('a', end='')\nos.write(1, b'b')\nsubprocess.run(['printf', 'c'])\nprint('d')", "abcd\n")

    def test_no_name_of_ours_is_there(self):
        self.ok("import sys\nprint(sorted(n for n in globals() if n[:2] != '__' and n != 'sys'), [m for m in sys.modules if 'caisson' in m or m in ('harness', 'program')])", "[] []\n")


class Ends(Case):
    def test_forms_of_exit(self):
        for code, status, stderr in (
            ("import sys; sys.exit(7)", 7, ""),
            ("import sys; sys.exit()", 0, ""),
            ("import sys; sys.exit(None)", 0, ""),
            ("import sys; sys.exit('a text')", 1, "a text\n"),
            ("import sys; sys.exit(-1)", 255, ""),
            ("import sys; sys.exit(256)", 0, ""),
            ("import sys; sys.exit(True)", 1, ""),
            ("import sys; sys.exit((1, 2))", 1, "(1, 2)\n"),
            ("raise SystemExit(3)", 3, ""),
            ("exit(4)", 4, ""),
            ("quit()", 0, ""),
            ("import asyncio\nawait asyncio.sleep(0)\nexit(5)", 5, ""),
            ("raise KeyboardInterrupt", 130, "Traceback (most recent call last):\n  File \"main.py\", line 1, in <module>\n    raise KeyboardInterrupt\nKeyboardInterrupt\n"),
            ("def f(): yield\nfor _ in f(): raise SystemExit(6)", 6, ""),
        ):
            got = self.run_program(code)
            self.assertEqual((got["exit"], got["stderr"], got["done"]), (status, stderr, True), code)

    def test_a_real_exit_is_left_to_the_launcher(self):
        got = self.run_program("import os; print('x'); os._exit(3)")
        self.assertEqual((got["exit"], got["done"], got["stdout"]), (3, False, "x\n"))
        self.assertEqual(self.run_program("import os; os.kill(os.getpid(), 9)")["exit"], -signal.SIGKILL)
        self.assertEqual(self.run_program("import os; os.abort()")["exit"], -signal.SIGABRT)

    def test_the_order_of_the_end(self):
        code = (
            "import atexit, threading, time\natexit.register(print, 'at exit')\nclass C:\n    def __del__(self): print('let go')\nc = C()\n"
            "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')\n"
        )
        self.ok(code, "main\nthread\nat exit\nlet go\n")
        self.assertEqual(self.fails(code + "1/0", 1)["stdout"], "main\nthread\nat exit\nlet go\n")

    def test_files_that_nobody_closed_are_written(self):
        self.ok("f = open('a.txt', 'w')\nf.write('global')", "")
        self.ok("class Box: pass\nb = Box(); b.b = b; b.f = open('b.txt', 'w'); b.f.write('cycle'); del b\nimport gc; gc.disable()", "")
        self.write("holder.py", "f = open('c.txt', 'w')\nf.write('module')\n")
        self.ok("import holder", "")
        self.ok("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nf = open('d.txt', 'w')\nf.write('thread')", "")
        self.assertEqual([self.read(name) for name in ("a.txt", "b.txt", "c.txt", "d.txt")], ["global", "cycle", "module", "thread"])

    def test_daemon_threads_say_nothing_at_the_end(self):
        # The last name would hold the end of the others for a while, were they let go.
        code = "import threading, time\nx = [1]\ndef f():\n    while True:\n        x[0]; time.sleep(0.001)\nclass Slow:\n    def __del__(self, sleep=time.sleep): sleep(0.2)\n"
        self.ok(code + "threading.Thread(target=f, daemon=True).start()\nprint('end')\nslow = Slow()", "end\n")

    def test_pools_are_ended(self):
        self.ok("from concurrent.futures import ThreadPoolExecutor\np = ThreadPoolExecutor(2)\nf = p.submit(print, 'in pool')", "in pool\n")

    def test_a_child_left_behind_holds_nothing(self):
        before = time.monotonic()
        self.ok("import subprocess\nsubprocess.Popen(['sleep', '30'])\nprint('end')", "end\n")
        self.assertLess(time.monotonic() - before, 10)

    def test_what_fails_at_exit_is_told_and_changes_nothing(self):
        got = self.run_program("import atexit, sys\natexit.register(lambda: 1/0)\nsys.exit(3)")
        self.assertEqual(got["exit"], 3)
        self.assertIn("ZeroDivisionError", got["stderr"])
        self.assertEqual(self.run_program("import atexit, os\natexit.register(os._exit, 5)")["exit"], 5)

    def test_a_fork_ends_for_itself(self):
        got = self.ok("import os, sys\npid = os.fork()\nif pid == 0:\n    print('child')\n    sys.exit(5)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))", "child\n5\n")
        self.assertTrue(got["done"])
        got = self.run_program("import os\npid = os.fork()\nif pid == 0:\n    1/0\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))")
        self.assertEqual((got["exit"], got["stdout"]), (0, "1\n"))
        self.assertEqual(got["stderr"].count("ZeroDivisionError"), 1)

    def test_descriptors_that_it_closes_or_takes(self):
        got = self.run_program("import os, sys\nos.closerange(3, 200)\nsys.exit(9)")
        self.assertEqual((got["exit"], got["done"]), (9, False))
        got = self.run_program("import os, sys\nos.closerange(3, 200)\na, b = open('a', 'w'), open('b', 'w')\nprint(a.fileno(), b.fileno())\nsys.exit(9)")
        self.assertEqual((got["exit"], got["done"], got["stdout"], self.read("b")), (9, False, "3 4\n", ""))
        got = self.run_program("import os, sys\nos.closerange(3, 200)\nprint([os.open(name, os.O_RDWR | os.O_CREAT) for name in 'cd'])\nsys.exit(9)")
        self.assertEqual((got["exit"], got["done"], got["stdout"], self.read("d")), (9, False, "[3, 4]\n", ""))
        self.assertEqual(self.run_program("import sys\nsys.stdout.close()\nsys.stderr.close()\n1/0")["exit"], 1)
        self.assertEqual(self.run_program("import sys\nsys.stdout = sys.stderr = None\nprint(1)\n1/0")["exit"], 1)
        self.assertEqual(self.run_program("import os\nos.close(1); os.close(2)\nsys = None\n1/0")["exit"], 1)
        self.ok("import os\nos.set_blocking(1, False); os.set_blocking(4, False)\nprint('x' * 300000)", "x" * 300000 + "\n")

    def test_what_it_leaves_in_the_interpreter_does_not_hold_the_end(self):
        self.ok("import sys\nsys.setrecursionlimit(60)\nsys.setprofile(lambda *a: None)", "")
        lowest = "import sys\nn = 1\nwhile True:\n    try:\n        sys.setrecursionlimit(n)\n        break\n    except RecursionError:\n        n += 1\n"
        self.ok("class C:\n    def __del__(self): print('let go')\nc = C()\n" + lowest, "let go\n")
        ring = "class Box: pass\nb = Box(); b.b = b; b.f = open('ring', 'w'); b.f.write('x'); del b\nimport builtins\n"
        self.ok(ring + "builtins.any = builtins.isinstance = builtins.int = None", "")
        self.assertEqual(self.read("ring"), "x")
        self.ok("import builtins, os, gc, sys\nprint('x')\nbuiltins.len = builtins.str = builtins.print = builtins.type = None\nos.fstat = os.write = gc.collect = None", "x\n")
        code = "import signal\ndef h(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, h)\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.002)\ntry:\n    while True: pass\nexcept TimeoutError: pass\n"
        self.assertIn(self.run_program(code)["exit"], (0, 1))

    def test_garbage_on_the_event_pipe_hides_no_end(self):
        got = self.run_program("import os\nos.write(4, b'{\"nonce\":\"')\nos.write(4, b'\\xff[[\\n{\"nonce\":\"n')\nraise SystemExit(2)")
        self.assertEqual((got["exit"], got["done"]), (2, True))


class Errors(Case):
    def plainly(self, code):
        """What the interpreter itself says of the same text."""
        self.write("main.py", code)
        got = subprocess.run(PLAIN + [os.path.join(self.folder, "main.py")], cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        os.remove(os.path.join(self.folder, "main.py"))
        return got.returncode, got.stdout, got.stderr.replace(self.folder + "/main.py", "main.py")

    def test_they_are_told_as_always(self):
        for code in (
            "def deep(d):\n    return d['missing']\n\ndeep({})\n",
            "x = 1\ny = = 2\n",
            "def f(:\n    pass\n",
            "try:\n    1/0\nexcept Exception as e:\n    raise ValueError('two\\nlines') from e\n",
            "try:\n    1/0\nexcept Exception:\n    raise ValueError('while')\n",
            "class E(Exception):\n    pass\nraise E('own')\n",
            "def r(): return r()\nr()\n",
            "import json\njson.loads('{')\n",
            "assert 1 == 2, 'unequal'\n",
            "x = '\\ud800'\nraise ValueError('ü')\n",
            "import warnings\nwarnings.warn('careful')\n",
            "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t.__name__, v, tb.tb_lineno)\n\n1/0\n",
            "async def f():\n    await g()\nimport asyncio\nasync def g():\n    raise KeyError('late')\ntry:\n    asyncio.run(f())\nexcept KeyError as e:\n    print(e)\n1/0\n",
            "exec('1/0')\n",
            "class C:\n    def __str__(self): return 'text'\n    __repr__ = None\nprint(C())\nraise SystemExit(C())\n",
        ):
            got = self.run_program(code)
            # A cell of ours lies a few calls deep.
            stderr, plainly = [re.sub(r"repeated \d+ more", "repeated so many more", text) for text in (got["stderr"], self.plainly(code)[2])]
            self.assertEqual((got["exit"], got["stdout"], stderr), self.plainly(code)[:2] + (plainly,))

    def test_a_group_is_told_as_always(self):
        if sys.version_info >= (3, 11):
            code = "raise ExceptionGroup('g', [ValueError(1), KeyError(2)])\n"
            got = self.run_program(code)
            self.assertEqual(got["stderr"], self.plainly(code)[2])

    def test_threads_show_their_lines(self):
        got = self.run_program("import threading\ndef f():\n    1/0\nt = threading.Thread(target=f, name='T'); t.start(); t.join()\nprint('on')")
        self.assertEqual((got["exit"], got["stdout"]), (0, "on\n"))
        self.assertIn("Exception in thread T:\n", got["stderr"])
        self.assertIn("    1/0\n", got["stderr"])

    def test_strange_ones(self):
        got = self.fails("class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E()", 1)
        self.assertIn("E: <exception str() failed>", got["stderr"])
        got = self.fails("import sys\nsys.excepthook = lambda *a: 1/0\nraise KeyError('first')", 1)
        self.assertIn("Error in sys.excepthook", got["stderr"])
        self.assertIn("KeyError: 'first'", got["stderr"])
        self.fails("a\0b", 1)
        self.fails("raise MemoryError", 1)
        self.fails("x = [" + "(" * 5000, 1)


class Asynchronous(Case):
    def test_a_loop_of_its_own_and_top_level_await(self):
        self.ok("import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return x\nprint(asyncio.run(f(1)), asyncio.run(f(2)))", "1 2\n")
        self.ok("import asyncio\nt = asyncio.create_task(asyncio.sleep(0.01, 3))\nprint(await t)\nasync with asyncio.Lock(): print('in')", "3\nin\n")

    def test_both_in_one_program(self):
        self.ok("import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x\nprint(await f(1), asyncio.run(f(2)), await f(3))", "1 2 3\n")
        got = self.run_program("import asyncio\nasync def f():\n    raise KeyError('inner')\nawait asyncio.sleep(0)\nasyncio.run(f())")
        self.assertIn("KeyError: 'inner'", got["stderr"])

    def test_the_traceback_of_an_await_begins_in_the_program(self):
        got = self.fails("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    raise KeyError('late')\nawait f()", 1)
        self.assertEqual(re.findall(r"File .*", got["stderr"]), ['File "main.py", line 5, in <module>', 'File "main.py", line 4, in f'])

    def test_tasks_left_over_are_cancelled(self):
        self.ok("import asyncio\nasync def f():\n    try:\n        await asyncio.sleep(60)\n    finally:\n        print('cancelled')\nt = asyncio.create_task(f())\nawait asyncio.sleep(0)", "cancelled\n")


class Workers(Case):
    def test_started_afresh_they_import_the_program_and_not_the_harness(self):
        for method in ("spawn", "forkserver"):
            code = (
                "import multiprocessing as mp, os\nprint('import', __name__, flush=True)\ndef square(x):\n    return x * x, __name__\n"
                "if __name__ == '__main__':\n    with mp.get_context(%r).Pool(1) as pool:\n        print(pool.map(square, [1, 2, 3]))\n" % method
            )
            names = "[(1, '__mp_main__'), (4, '__mp_main__'), (9, '__mp_main__')]\n"
            self.ok(code, "import __main__\nimport __mp_main__\n" + names)

    def test_a_file_of_the_programs_name_is_not_taken_for_it(self):
        self.write("main.py", "print('wrong')\n")
        self.ok("import multiprocessing as mp\ndef f(x): return -x\nif __name__ == '__main__':\n    with mp.get_context('spawn').Pool(1) as p: print(p.map(f, [1]))", "[-1]\n")

    def test_one_that_awaits_can_still_start_them(self):
        self.ok("import multiprocessing as mp, asyncio\nawait asyncio.sleep(0)\nwith mp.get_context('spawn').Pool(1) as p: print(p.map(abs, [-1]))", "[1]\n")

    def test_forked_ones(self):
        self.ok("import multiprocessing as mp\ndef square(x): return x * x\nwith mp.get_context('fork').Pool(2) as p: print(p.map(square, [1, 2]))", "[1, 4]\n")
        self.ok("from concurrent.futures import ProcessPoolExecutor\ndef square(x): return x * x\nif __name__ == '__main__':\n    with ProcessPoolExecutor(2) as p: print(list(p.map(square, [3])))", "[9]\n")


def echo(calls):
    return [{"id": call["id"], "result": call["input"]} for call in calls]


WEATHER = [("get-weather", "get_weather"), ("add", "add")]


class Tools(Case):
    def test_one_call_after_the_other(self):
        got = self.ok("print('start')\nfor i in range(3):\n    print(await add(a=i, b='ü'))", "".join(["start\n"] + ["{'a': %d, 'b': 'ü'}\n" % i for i in range(3)]), tools=WEATHER, answer=echo)
        self.assertEqual([[call["name"] for call in round] for round in got["calls"]], [["add"]] * 3)
        self.assertEqual(len({call["id"] for round in got["calls"] for call in round}), 3)

    def test_calls_made_together_go_together(self):
        code = "import asyncio\nasync def late(c):\n    await asyncio.sleep(0)\n    return await get_weather(city=c)\nprint(await asyncio.gather(get_weather(city='a'), late('b'), late('c')))"
        got = self.ok(code, "[{'city': 'a'}, {'city': 'b'}, {'city': 'c'}]\n", tools=WEATHER, answer=echo)
        self.assertEqual([[call["input"]["city"] for call in round] for round in got["calls"]], [["a", "b", "c"]])
        self.assertEqual({call["name"] for call in got["calls"][0]}, {"get-weather"})

    def test_answers_in_any_order_and_of_no_call(self):
        def answer(calls):
            return [{"id": "call_999", "result": 1}, {"id": 5}] + echo(calls)[::-1] + echo(calls)

        self.ok("import asyncio\nprint(await asyncio.gather(add(a=1), add(a=2)))", "[{'a': 1}, {'a': 2}]\n", tools=WEATHER, answer=answer)

    def test_a_loop_of_its_own_may_call_too(self):
        self.ok("import asyncio\nasync def main():\n    return await add(a=1)\nprint(asyncio.run(main()), asyncio.run(main()))", "{'a': 1} {'a': 1}\n", tools=WEATHER, answer=echo)
        self.ok("import asyncio\nasync def main():\n    return await add(a=1)\nprint(await add(a=2), asyncio.run(main()))", "{'a': 2} {'a': 1}\n", tools=WEATHER, answer=echo)

    def test_an_error_is_an_exception(self):
        def answer(calls):
            return [{"id": call["id"], "error": "no such city"} for call in calls]

        self.ok("try:\n    await add(a=1)\nexcept Exception as e:\n    print(type(e).__name__, e)", "ToolError no such city\n", tools=WEATHER, answer=answer)
        got = self.fails("await add(a=1)", 1, tools=WEATHER, answer=answer)
        self.assertTrue(got["stderr"].endswith("ToolError: no such city\n"), got)

    def test_results_are_what_json_says(self):
        values = [None, True, 1.5, "text", [1, {"b": 2, "a": [None]}], "x" * 300_000]
        for value in values:
            self.ok("print(await add())", "%s\n" % (value,), tools=WEATHER, answer=lambda calls: [{"id": calls[0]["id"], "result": value}])

    def test_only_registered_tools_and_only_named_arguments(self):
        self.ok("print([n for n in globals() if n[0] != '_'])", "['get_weather', 'add']\n", tools=WEATHER)
        self.ok("print([n for n in globals() if n[0] != '_'])", "[]\n", tools=[])
        self.assertIn("NameError", self.fails("await other()", 1, tools=WEATHER)["stderr"])
        self.assertIn("TypeError: add() takes keyword arguments only", self.fails("await add(1, 2)", 1, tools=WEATHER)["stderr"])
        self.ok("print(await add({'a': 1}))", "{'a': 1}\n", tools=WEATHER, answer=echo)

    def test_what_is_no_json_is_the_callers_error(self):
        for value in ("object()", "float('nan')", "{1, object()}"):
            self.fails("await add(a=%s)" % value, 1, tools=WEATHER)
        self.assertIn("too large", self.fails("await add(a='x' * 5000000)", 1, tools=WEATHER)["stderr"])
        self.ok("import datetime\nprint(await add(a={1}, b=datetime.date(2026, 1, 2), c='\\ud800'))", "{'a': [1], 'b': '2026-01-02', 'c': '\\ud800'}\n", tools=WEATHER, answer=echo)

    def test_one_that_gives_up_waiting_goes_on(self):
        self.ok("import asyncio\ntry:\n    await asyncio.wait_for(add(a=1), 0.05)\nexcept asyncio.TimeoutError:\n    print('gave up')", "gave up\n", tools=WEATHER)
        self.ok("import asyncio\nt = asyncio.create_task(add(a=1))\nawait asyncio.sleep(0.05)", "", tools=WEATHER)
        self.ok("import asyncio\nt = asyncio.create_task(add(a=1))\nawait asyncio.sleep(0)", "", tools=WEATHER)

    def test_other_tasks_run_meanwhile(self):
        def answer(calls):
            time.sleep(0.3)
            return echo(calls)

        code = "import asyncio\nn = 0\nasync def count():\n    global n\n    while True:\n        n += 1\n        await asyncio.sleep(0.01)\nt = asyncio.create_task(count())\nawait add(a=1)\nprint(n > 5)"
        self.ok(code, "True\n", tools=WEATHER, answer=answer)

    def test_a_busy_loop_does_not_hold_a_call(self):
        code = "import asyncio\nasync def spin():\n    while True: await asyncio.sleep(0)\nt = asyncio.create_task(spin())\nprint(await add(a=1))"
        self.ok(code, "{'a': 1}\n", tools=WEATHER, answer=echo)

    def test_what_it_prints_is_no_call(self):
        got = self.ok("import sys\nprint('{\"nonce\":\"n1\",\"event\":\"call\",\"calls\":[{\"id\":\"call_001\",\"name\":\"add\",\"input\":{}}]}')", '{"nonce":"n1","event":"call","calls":[{"id":"call_001","name":"add","input":{}}]}\n', tools=WEATHER)
        self.assertEqual(got["calls"], [])

    def test_a_closed_descriptor_fails_the_call(self):
        self.assertEqual(self.run_program("import os\nos.close(3)\nawait add(a=1)", tools=WEATHER)["exit"], 1)
        self.assertEqual(self.run_program("import os\nos.close(4)\nawait add(a=1)", tools=WEATHER)["exit"], 1)

    def test_a_daemon_that_leaves_fails_the_call(self):
        h = self.start()

        def leave(calls):
            nowhere = os.open("/dev/null", os.O_WRONLY)
            os.dup2(nowhere, h.req)
            os.close(nowhere)
            return []

        got = h.program("try:\n    await add(a=1)\nexcept Exception as e:\n    print(e)", tools=WEATHER, answer=leave)
        self.assertEqual(got["stdout"], "tools cannot be called any more: their answers' descriptor is closed\n")

    def test_a_fork_has_no_tools(self):
        self.ok("import asyncio, os\npid = os.fork()\nif pid == 0:\n    try: asyncio.run(add(a=1))\n    except Exception as e: print(e)\n    os._exit(0)\nos.waitpid(pid, 0)", "tools can only be called in the program's own process\n", tools=WEATHER)


class Cells(Case):
    def test_a_cell_has_its_arguments(self):
        h = self.start()
        self.assertEqual(h.call("import sys; sys.argv", argv=["a", "b c"])["result"], "['', 'a', 'b c']")
        self.assertEqual(h.call("sys.argv")["result"], "['']")
        self.assertEqual(h.call("sys.argv = ['mine']; sys.argv", argv=["a"])["result"], "['mine']")
        self.assertEqual(h.call("sys.argv")["result"], "['mine']")
        self.assertEqual(h.call("sys.argv", argv=[])["result"], "['']")
        self.assertEqual(h.call("1/0", argv=["a"])["error"]["ename"], "ZeroDivisionError")
        self.assertEqual(h.call("sys.argv")["result"], "['mine']")


class Warmed:
    """The same of an interpreter that has been waiting for its program."""

    def start(self):
        h = super().start()
        got = h.call(warm="import sys\nprint('w'); sys.stderr.write('v'); wx = 3", programs=True)
        self.assertEqual((got["stdout"], got["stderr"], got["error"]), ("", "", None))
        return h

    def test_nothing_is_left_of_the_warming(self):
        seen = "import linecache, sys\nprint(sorted(globals()), sys.argv, sys.path, sorted(linecache.cache), hasattr(sys, 'last_value'), sys.meta_path)"
        cold, warm = super().start().program(seen), self.start().program(seen)
        self.assertEqual(re.sub("0x[0-9a-f]+", "", warm["stdout"]), re.sub("0x[0-9a-f]+", "", cold["stdout"]))
        self.assertNotIn("wx", warm["stdout"])


class WarmedScript(Warmed, Script):
    pass


class WarmedEnds(Warmed, Ends):
    pass


class WarmedErrors(Warmed, Errors):
    pass


class WarmedAsynchronous(Warmed, Asynchronous):
    pass


class WarmedWorkers(Warmed, Workers):
    pass


class WarmedTools(Warmed, Tools):
    pass


@unittest.skipUnless("HARNESS_PYTHON" in os.environ, "matplotlib is the product's, not the bare interpreter's")
class Plots(Case):
    START = "import matplotlib.pyplot as plt\n"

    def plots(self, code, **more):
        got = self.run_program(self.START + code, **more)
        self.assertEqual((got["exit"], got["stderr"]), (0, ""), got)
        names = sorted(name for name in os.listdir(self.folder) if name.endswith(".png"))
        for name in names:
            with open(os.path.join(self.folder, name), "rb") as image:
                self.assertIn(image.read(4), (b"\x89PNG", b""))
        return names

    def size(self, name):
        return os.path.getsize(os.path.join(self.folder, name))

    def test_what_is_shown_is_a_file(self):
        self.assertEqual(self.plots("plt.plot([1, 2])\nplt.show()"), ["plot_1.png"])
        self.assertGreater(self.size("plot_1.png"), 5000)

    def test_each_show_makes_its_own_and_overwrites_none(self):
        self.write("plot_2.png", "")
        self.assertEqual(self.plots("plt.plot([1])\nplt.show()\nplt.plot([2])\nplt.show()\nplt.show()"), ["plot_1.png", "plot_2.png", "plot_3.png"])
        self.assertEqual(self.size("plot_2.png"), 0)

    def test_all_open_figures_are_shown(self):
        self.assertEqual(self.plots("plt.figure(); plt.plot([1])\nplt.figure(); plt.bar([1], [2])\nplt.figure()\nplt.show()"), ["plot_1.png", "plot_2.png"])

    def test_one_that_has_been_saved_is_not_kept_twice(self):
        self.assertEqual(self.plots("plt.plot([1])\nplt.savefig('mine.png')\nplt.show()"), ["mine.png"])
        self.assertEqual(self.plots("f, a = plt.subplots()\na.plot([1])\nf.savefig(open('mine.png', 'wb'))\nplt.show()"), ["mine.png"])

    def test_one_that_is_saved_after_it_was_shown_is_not_empty(self):
        self.assertEqual(self.plots("plt.plot([1, 2])\nplt.show()\nplt.savefig('late.png')"), ["late.png", "plot_1.png"])
        self.assertEqual(self.size("late.png"), self.size("plot_1.png"))

    def test_one_that_is_not_shown_is_none(self):
        self.assertEqual(self.plots("plt.plot([1])"), [])

    def test_what_is_drawn_after_a_show_that_does_not_block_is_in_its_file(self):
        self.assertEqual(self.plots("plt.plot([1, 2])\nplt.show(block=False)"), ["plot_1.png"])
        plain = self.size("plot_1.png")
        os.remove(os.path.join(self.folder, "plot_1.png"))
        self.assertEqual(self.plots("plt.plot([1, 2])\nplt.show(block=False)\nplt.title('a long title of it')"), ["plot_1.png"])
        self.assertGreater(self.size("plot_1.png"), plain)
        os.remove(os.path.join(self.folder, "plot_1.png"))
        self.assertEqual(self.plots("f = plt.figure()\nf.gca().plot([1])\nf.show()"), ["plot_1.png"])

    def test_a_program_without_plots_loads_nothing(self):
        self.ok("import sys\nprint('matplotlib' in sys.modules)", "False\n")

    def test_pandas_and_star_imports(self):
        self.assertEqual(self.plots("import pandas as pd\npd.DataFrame({'a': [1, 2]}).plot()\nplt.show()"), ["plot_1.png"])
        self.assertEqual(self.plots("from pylab import *\nplot([1])\nshow()"), ["plot_1.png", "plot_2.png"])

    def test_a_full_folder_is_told_and_no_error(self):
        got = self.run_program(self.START + "import os\nplt.plot([1])\nos.chmod('.', 0o755)\nplt.gcf().savefig\nimport matplotlib.figure as f\nplt.gcf().draw = lambda *a: 1/0\nplt.show()\nprint('on')")
        self.assertEqual((got["exit"], got["stdout"]), (0, "on\n"))
        self.assertIn("could not draw", got["stderr"])


class Broken(Case):
    """Programs that break what the harness has to tell their end with."""

    def test_what_a_program_replaces_changes_nothing_of_its_end(self):
        for broken in (
            "import os\nos._exit = os.write = os.getpid = os.fstat = None",
            "import json\njson.dumps = json.loads = json.JSONEncoder = None",
            "import builtins\nbuiltins.len = builtins.isinstance = builtins.map = builtins.sum = builtins.getattr = None",
            "import io\nio.TextIOWrapper = io.BufferedWriter = None\nf = open('kept', 'w')\nf.write('x')",
            "import sys\nsys._current_frames = sys.getrecursionlimit = sys.gettrace = None",
            "import sys\nsys.modules = {}",
            "import sys\ndel sys.stdout",
            "import sys\ndel sys.stderr",
            "import sys\nsys.stdout = object()",
            "import sys\ndel sys.excepthook",
            "import atexit, threading\natexit._run_exitfuncs = threading._shutdown = None" if sys.version_info < (3, 13) else "import atexit\natexit._run_exitfuncs = None",
            "globals()[5] = 6",
        ):
            for ending, status in (("", 0), ("\nraise SystemExit(7)", 7)):
                with self.subTest(broken=broken, status=status):
                    got = self.run_program("print('said', flush=True)\n" + broken + ending)
                    self.assertEqual((got["exit"], got["stdout"], got["done"]), (status, "said\n", True), got)
                    self.assertEqual(got["stderr"], "")
        self.assertEqual(self.read("kept"), "x")

    def test_a_status_is_what_python_makes_of_it(self):
        for code in ("True", "-1", "256", "2**32 + 7", "2**63", "-2**70", "type('I', (int,), {'__and__': lambda *_: 'x'})(9)"):
            text = "import sys\nsys.exit(%s)" % code
            plain = subprocess.run([*PLAIN, "-c", text], capture_output=True).returncode
            self.assertEqual(self.run_program(text)["exit"], plain, code)

    def test_a_handler_that_raises_again_and_again_does_not_hold_the_end_back(self):
        code = "import signal\ndef handler(*_): raise TimeoutError\nsignal.signal(14, handler)\nsignal.setitimer(0, 0.0003, 0.0003)\n"
        self.assertIn(self.run_program(code + "raise SystemExit(7)")["exit"], (1, 7))


if __name__ == "__main__":
    unittest.main()
