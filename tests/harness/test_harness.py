#!/usr/bin/python3
"""What both harnesses promise, without a sandbox: `/usr/bin/python3 tests/harness/test_harness.py [-k NAME]`."""

import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from driver import JS_ARGV, PY_ARGV, Dead, Harness  # noqa: E402


class Case(unittest.TestCase):
    argv = PY_ARGV

    def setUp(self):
        self.h = Harness(self.argv)
        self.addCleanup(self.close)

    def close(self):
        try:
            self.h.close()
        except ChildProcessError:
            pass  # it was reaped when it died

    def ok(self, code, stdout=None, result=None, **more):
        got = self.h.call(code, **more)
        self.assertIsNone(got["error"], got)
        if stdout is not None:
            self.assertEqual(got["stdout"], stdout)
        if result is not None:
            self.assertEqual(got["result"], result)
        return got

    def fails(self, code, ename, evalue=None):
        got = self.h.call(code)
        self.assertIsNotNone(got["error"], got)
        self.assertEqual(got["error"]["ename"], ename, got)
        if evalue is not None:
            self.assertEqual(got["error"]["evalue"], evalue)
        self.assertTrue(all(isinstance(line, str) for line in got["error"]["traceback"]))
        self.assertNotIn("harness.py", "\n".join(got["error"]["traceback"]))
        self.assertNotIn("harness.js", "\n".join(got["error"]["traceback"]))
        return got


class Python(Case):
    def test_prints_come_with_their_order(self):
        got = self.ok("import sys\nprint(1)\nprint('e', file=sys.stderr)\nprint('é', 2)", "1\né 2\n")
        self.assertEqual(got["stderr"], "e\n")
        self.assertEqual(got["order"], [["o", 2], ["e", 2], ["o", 5]])

    def test_last_expression_is_the_result(self):
        self.ok("40 + 2", "", "42")
        self.assertIsNone(self.ok("x = 1")["result"])
        self.assertIsNone(self.ok("None")["result"])
        self.ok("x = 5\n'a' * x", result="'aaaaa'")
        self.ok("_", result="'aaaaa'")

    def test_underscore_of_the_user_stays(self):
        self.ok("_ = lambda s: s.upper()")
        self.ok("_('x')", result="'X'")
        self.ok("_('y')", result="'Y'")

    def test_repr_that_raises_is_an_error(self):
        self.fails("class R:\n  def __repr__(self): raise KeyError('no')\nR()", "KeyError", "'no'")

    def test_names_persist_and_main_is_a_module(self):
        self.ok("n = 41\ndef f(): return n + 1")
        self.ok("f()", result="42")
        self.ok("__name__, '__file__' in globals(), __import__('sys').modules['__main__'].n", result="('__main__', False, 41)")
        self.ok("import pickle\nclass P: pass\npickle.loads(pickle.dumps(P())).__class__ is P", result="True")
        self.ok("from dataclasses import dataclass\n@dataclass\nclass D:\n  a: int\nD(3)", result="D(a=3)")
        self.ok("if __name__ == '__main__': print('main')", "main\n")

    def test_namespace_starts_with_nothing_of_ours(self):
        got = self.ok("sorted(k for k in globals())")
        self.assertEqual(
            got["result"], "['__builtins__', '__doc__', '__loader__', '__name__', '__package__', '__spec__']"
        )
        self.ok("import sys; 'harness' in sys.modules, sys.argv, sys.path[0]", result="(False, [''], '')")

    def test_warming_leaves_no_trace(self):
        got = self.h.call(warm="import sys\nprint('w'); sys.stderr.write('v'); wx = 3; wx")
        self.assertEqual((got["stdout"], got["stderr"], got["result"], got["error"], got["order"]), ("", "", None, None, []))
        self.ok("'wx' in globals(), '_' in globals()", result="(False, False)")
        got = self.h.call("3", warm="1/0", setup={"cwd": "/usr"})
        self.assertEqual((got["result"], got["error"]), ("3", None))
        self.ok("import os, linecache; os.getcwd(), [k for k in linecache.cache if 'warm' in k]", result="('/usr', [])")

    def test_a_bad_cwd_is_refused_and_nothing_runs(self):
        got = self.h.call("print(1)", setup={"cwd": "/no/such"})
        self.assertEqual(got["refused"], {"what": "cwd", "errno": 2})
        self.assertEqual((got["stdout"], got["result"]), ("", None))

    def test_traceback_shows_the_cell(self):
        self.ok("def deep(d):\n    return d['missing']")
        got = self.fails("deep({})", "KeyError", "'missing'")
        text = got["error"]["traceback"]
        self.assertEqual(text[-1], "KeyError: 'missing'")
        self.assertTrue(text[0].startswith("Traceback (most recent"), text)
        self.assertIn("return d['missing']", text[2])
        self.assertIn('File "<cell 1>", line 2, in deep', text[2])
        self.assertIn("deep({})", text[1])

    def test_chained_and_grouped_errors(self):
        got = self.fails("try:\n  1/0\nexcept Exception as e:\n  raise ValueError('two\\nlines') from e", "ValueError", "two\nlines")
        text = "\n".join(got["error"]["traceback"])
        self.assertIn("direct cause", text)
        self.assertIn("1/0", text)
        if self.h.call("ExceptionGroup")["error"] is None:
            self.fails("raise ExceptionGroup('g', [ValueError(1), KeyError(2)])", "ExceptionGroup")

    def test_syntax_error_shows_its_line(self):
        got = self.fails("x = 1\ny = = 2", "SyntaxError")
        text = "\n".join(got["error"]["traceback"])
        self.assertIn("y = = 2", text)
        self.assertIn('File "<cell 1>", line 2', text)
        self.assertNotIn("Traceback", text)

    def test_exit_ends_the_cell_and_keeps_the_names(self):
        self.fails("kept = 7\nimport sys\nsys.exit(3)", "SystemExit", "3")
        self.fails("sys.exit()", "SystemExit", "0")
        self.fails("exit()", "SystemExit", "0")
        self.fails("sys.exit('bye')", "SystemExit", "bye")
        self.ok("print(kept, repr(sys.stdin.read()))", "7 ''\n")

    def test_input_fails_at_once(self):
        got = self.fails("print('before')\nname = input('your name? ')", "EOFError")
        self.assertEqual(got["stdout"], "before\nyour name? ")
        self.ok("import sys; sys.stdin.read()", result="''")

    def test_strange_errors(self):
        self.fails("class E(Exception):\n  def __str__(self): raise RuntimeError\nraise E()", "E", "<unprintable E object>")
        self.fails("def r(): return r()\nr()", "RecursionError")
        self.fails("raise MemoryError", "MemoryError")
        self.fails("raise KeyboardInterrupt", "KeyboardInterrupt")
        self.fails("import signal, os; os.kill(os.getpid(), signal.SIGINT)\nfor _i in range(10**9): pass", "KeyboardInterrupt")
        self.fails("class S(str): pass\nclass E2(Exception):\n  def __str__(self): return S('odd')\nraise E2", "E2", "odd")
        self.assertIsNotNone(self.h.call("a\0b")["error"])
        self.assertIsNotNone(self.h.call("x = '\ud800'")["error"])
        self.ok("1", result="1")

    def test_surrogates_and_bytes(self):
        self.ok("'\\ud800x'", result=r"'\ud800x'")
        self.ok("class R:\n  def __repr__(self): return 'a\\ud800b'\nR()", result="a\ufffdb")
        self.fails("raise ValueError('a\\ud800b')", "ValueError", "a\ufffdb")
        self.ok("print('a\\ud800b')", "a\\ud800b\n")
        self.ok("import os,sys\nos.write(1, b'begin \\xff end\\n')\nprint('after')", "begin \ufffd end\nafter\n")

    def test_raw_descriptors_and_children_in_order(self):
        code = (
            "import os, subprocess, sys\nprint('a', end='')\nos.write(1, b'b')\nsys.stdout.write('c')\n"
            "subprocess.run(['sh', '-c', 'printf d; printf w >&2'])\nos.system('printf e')\n"
            "sys.stdout.buffer.write(b'f')\nsubprocess.run(['printf', 'g'], stdout=sys.stdout)\nprint('h')"
        )
        self.assertEqual(self.ok(code, "abcdefgh\n")["stderr"], "w")

    def test_c_stdio_is_not_late(self):
        self.ok("import ctypes\nctypes.CDLL(None).printf(b'from C')\nprint(' then')", "from C then\n")

    def test_streams_look_like_streams(self):
        self.ok(
            "import sys\n(sys.stdout.fileno(), sys.stderr.fileno(), sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.name, sys.stdout.writable())",
            result="(1, 2, 'utf-8', False, '<stdout>', True)",
        )
        self.ok("sys.stdout.reconfigure(line_buffering=True); print('x', flush=True)", "x\n")
        self.ok("sys.stdout.reconfigure(write_through=False); sys.stdout.write('tail'); None", "tail")
        self.ok("import io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint('wrapped')", "wrapped\n")

    def test_print_keeps_its_manners(self):
        self.ok("print(1, 2, sep='-', end='!\\n')", "1-2!\n")
        self.ok("print()", "\n")
        self.ok("import io\nb = io.StringIO()\nprint('x', file=b)\nb.getvalue()", "", "'x\\n'")
        self.fails("print(1, sep=3)", "TypeError")
        self.ok("import contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as c: print('in')\nc.getvalue()", "", "'in\\n'")
        self.ok("import sys; sys.stdout = None\nprint('lost')", "")
        self.ok("print('back')", "back\n")
        self.ok("print.__name__, print.__module__", result="('print', 'builtins')")

    def test_closed_streams_come_back(self):
        self.ok("import sys; sys.stdout.close()")
        self.ok("print('again')", "again\n")
        self.ok("sys.stdout.detach(); None")
        self.ok("print('again')", "again\n")
        self.ok("import os; os.close(1)")
        self.ok("print('again')", "again\n")
        self.ok("6 * 7", result="42")

    def test_descriptors_of_streams_come_back(self):
        self.ok("import os, sys, subprocess")
        for code in (
            "os.close(1); os.close(2)",
            "os.close(1)\nprint('nowhere')",
            "sys.stdout.close(); os.close(1)",
            "for fd in (1, 2): os.dup2(os.open('/dev/null', os.O_WRONLY), fd)\nprint('nowhere')",
            "r, w = os.pipe(); os.dup2(w, 1); os.dup2(1, 2)\nprint('nowhere')",
            "os.dup2(2, 1)",
        ):
            self.h.call(code)
            self.ok("print('out')\nsubprocess.call(['echo', 'child'])", "out\nchild\n", "0")
            self.assertEqual(self.ok("print('err', file=sys.stderr)", "")["stderr"], "err\n")
        # The spare ones are two, and no child's.
        self.ok("subprocess.call('ls /proc/self/fd', shell=True)", "0\n1\n2\n3\n", "0")
        self.ok("sorted(set(map(int, os.listdir('/proc/self/fd'))) & set(range(20, 100)))", result="[62, 63]")
        # Whoever takes those away as well has no stream, and the next cell is answered all the same.
        self.ok("os.closerange(60, 70); os.close(1)")
        self.fails("print('nowhere')", "OSError")
        self.ok("taken = [os.dup(0) for _ in range(80)]; os.fstat(62).st_rdev == os.fstat(0).st_rdev", result="True")
        self.assertEqual(self.ok("6 * 7", result="42")["stdout"], "")

    def test_a_nonblocking_pipe_loses_nothing(self):
        got = self.ok("import os\nos.set_blocking(1, False); os.set_blocking(4, False); os.set_blocking(3, False)\nprint('x' * 1000000)")
        self.assertEqual(len(got["stdout"]), 1000001)
        self.ok("1", result="1")

    def test_long_texts_stay_below_the_frame(self):
        got = self.ok("'\\0' * 3000000")
        self.assertIn("cut by the harness", got["result"])
        self.assertGreater(len(got["result"]), 2_000_001)
        self.ok("class L:\n  def __repr__(self): return '\\x01' * 9000000\nL()")
        self.fails("raise ValueError('\\x01' * 20000000)", "ValueError")

    def test_long_order_is_left_out(self):
        got = self.ok("import sys\nfor i in range(6000): print(1); print(2, file=sys.stderr)")
        self.assertNotIn("order", got)
        self.ok("for i in range(20000): print(f'row {i:05d}')")
        self.assertEqual(self.ok("print(1)")["order"], [["o", 2]])

    def test_top_level_await(self):
        self.ok("import asyncio\nasync def f(x):\n  await asyncio.sleep(0.01)\n  return x\nawait f(42)", result="42")
        self.ok("q = asyncio.Queue(); loop = asyncio.get_event_loop(); await q.put(9)\nt = asyncio.create_task(f(8))")
        self.ok("await q.get(), await t, asyncio.get_running_loop() is loop", result="(9, 8, True)")
        self.ok("print(asyncio.run(f(19)))", "19\n")
        self.ok("t = asyncio.create_task(f(5))\nawait t", result="5")
        self.ok("await f(1)", result="1")
        got = self.fails("async def bad():\n  await asyncio.sleep(0)\n  raise KeyError('late')\nawait bad()", "KeyError")
        self.assertNotIn("asyncio", "\n".join(got["error"]["traceback"]))
        self.ok("async with asyncio.Lock(): print('in')", "in\n")

    def test_future_imports_stay(self):
        self.ok("from __future__ import annotations")
        self.ok("def f(x: nowhere): pass\nf.__annotations__", result="{'x': 'nowhere'}")

    def test_patched_modules_do_not_matter(self):
        self.ok("import os, json, sys, traceback, linecache\nos.write = os.read = json.loads = None\njson.JSONEncoder = None\nsys.modules.clear()")
        self.ok("1 + 1", result="2")
        self.fails("1/0", "ZeroDivisionError")
        self.ok("import builtins; builtins.print = builtins.repr = builtins.str = builtins.compile = builtins.len = builtins.type = None; 3", result="3")
        self.ok("1 + 1", result="2")
        self.fails("1/0", "ZeroDivisionError")

    def test_garbage_on_the_event_pipe_does_not_hang(self):
        self.ok("import os\nos.write(4, b'garbage\\n{\"nonce\":\"n9\"}\\n\\xff\\xfe[[[\\n')\n1", result="1")

    def test_half_a_frame_of_a_cell_hides_no_reply(self):
        self.ok("import os\nos.write(4, b'{\"nonce\":\"')\n1", result="1")
        self.ok("os.write(4, b'\\0' * 1000)", result="1000")

    def test_closing_everything_ends_the_session_only(self):
        with self.assertRaises(Dead):
            self.h.call("import os; os.closerange(3, 200)")

    def test_a_single_line_is_what_it_is_among_others(self):
        self.ok("x = 5", result=None)
        for line, result in (("x == 5", "True"), ("(y := x + 1)", "6"), ("f'{x=}'", "'x=5'"), ("'a\\tb'", r"'a\tb'"), ("x  # five", "5"),
                             ("await __import__('asyncio').sleep(0, 7)", "7"), ("dict(a=1)", "{'a': 1}"), ("x;", "5"), ("# nothing", None)):
            self.assertEqual(self.ok(line)["result"], result, line)
        self.ok("print(1); print(2)", "1\n2\n")
        for line in (" x", "\tx"):
            self.fails(line, "IndentationError")
        for line in ("x =", "print(", "1 2", "yield x"):
            self.fails(line, "SyntaxError")
        self.ok("import warnings; warnings.simplefilter('always')")
        self.assertEqual(self.ok("z = '\\d'")["stderr"].count("invalid escape sequence"), 1)

    def test_traces_and_limits_of_a_cell(self):
        self.ok("import sys\ndef t(*a): raise RuntimeError('trace')\nsys.setrecursionlimit(40)")
        self.ok("1", result="1")
        self.ok("sys.getrecursionlimit()", result="40")
        self.ok("sys.setrecursionlimit(1000); hits = []\nsys.setprofile(lambda *a: hits.append(a[1]))")
        self.ok("abs(1)", result="1")
        self.ok("sys.setprofile(None); len(hits) > 0", result="True")
        self.h.call("sys.settrace(t)")
        self.h.call("def g(): pass\ng()")
        self.h.call("sys.settrace(None)")
        self.ok("2", result="2")

    def test_a_leftover_signal_handler_does_not_kill_the_session(self):
        self.ok("import signal, time\ndef h(*a): raise TimeoutError('alarm')\nsignal.signal(signal.SIGALRM, h); signal.setitimer(signal.ITIMER_REAL, 0.05, 0.01)")
        import time

        time.sleep(0.2)
        for _ in range(20):
            self.h.call("1")
        for _ in range(20):
            if not self.h.call("signal.setitimer(signal.ITIMER_REAL, 0)")["error"]:
                break
        self.ok("1", result="1")

    def test_a_forked_child_never_speaks(self):
        got = self.ok("import os\npid = os.fork()\nif pid == 0: print('child')\nelse: print(os.waitpid(pid, 0)[1])")
        self.assertEqual(got["stdout"], "child\n0\n")
        got = self.ok("pid = os.fork()\nif pid == 0: 1/0\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])", result="1")
        self.assertIn("ZeroDivisionError", got["stderr"])
        self.ok("import sys\npid = os.fork()\nif pid == 0: sys.exit(5)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])", result="5")

    def test_worker_processes(self):
        self.ok("import multiprocessing as mp\nfrom concurrent.futures import *\ndef sq(x): return x * x")
        self.ok("with mp.get_context('fork').Pool(2) as p: print(p.map(sq, [1, 2, 3]))", "[1, 4, 9]\n")
        self.ok("with mp.get_context('spawn').Pool(1) as p: print(p.map(abs, [-1, 2]))", "[1, 2]\n")
        self.ok("with mp.get_context('forkserver').Pool(1) as p: print(p.map(abs, [-1, 2]))", "[1, 2]\n")
        self.ok("with ProcessPoolExecutor(2, mp_context=mp.get_context('fork')) as p: print(list(p.map(sq, [3])))", "[9]\n")
        self.ok("with ThreadPoolExecutor(2) as p: print(list(p.map(sq, [4])))", "[16]\n")
        self.ok("p = mp.get_context('fork').Process(target=print, args=('from child',)); p.start(); p.join()", "from child\n")
        self.ok("import asyncio\nasync def s():\n  p = await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1)\n  return await p.communicate()\nasyncio.run(s())[0]", result="b'hi\\n'")
        self.ok("(await s())[0]", result="b'hi\\n'")

    def test_threads_may_print_later(self):
        self.ok("import threading, time\nt = threading.Thread(target=lambda: (time.sleep(0.1), print('late')))\nt.start()", "")
        self.ok("t.join()", "late\n")

    def test_warnings_name_the_cell(self):
        got = self.ok("import warnings\nwarnings.warn('careful')")
        self.assertIn("<cell 1>:2: UserWarning: careful\n  warnings.warn('careful')", got["stderr"])

    def test_leaves_at_end_of_file(self):
        h = Harness(PY_ARGV)
        h.call("1")
        self.assertEqual(h.close(), 0)

    def test_a_module_in_the_working_directory_is_importable(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "mine.py"), "w") as out:
                out.write("value = 5\n")
            self.assertEqual(self.h.call("import mine; mine.value", setup={"cwd": folder})["result"], "5")

    def test_descriptors_are_not_inherited(self):
        self.ok("import os; [os.get_inheritable(fd) for fd in range(5)]", result="[True, True, True, False, False]")


class JavaScript(Case):
    argv = JS_ARGV

    def test_output_and_order(self):
        got = self.ok("console.log('é', 1); console.error('e'); process.stdout.write('x')", "é 1\nx")
        self.assertEqual(got["stderr"], "e\n")
        self.assertEqual(got["order"], [["o", 5], ["e", 2], ["o", 1]])
        self.ok("process.stdout.isTTY === undefined && process.stdout.fd", result="1")
        self.ok("await new Promise((r) => process.stdout.write('cb', r)); 1", "cb", "1")
        self.ok("await new Promise((r) => process.stdout.write(Buffer.from('cb'), r)); 1", "cb", "1")
        self.ok("const w = process.stdout.write; let cap = ''; process.stdout.write = (t) => { cap += t; return true }; console.log('in'); process.stdout.write = w; cap", "", "'in\\n'")
        self.ok("process.stdout.end('last\\n'); 1", "last\n")
        self.ok("console.log('again'); console.table([{a: 1}]); console.dir(1)")

    def test_results(self):
        self.ok("globalThis.n = 41", "", "41")
        for code in ("undefined", "const x = 1", "function f() { return 7 }", "class A {}", "", "// nothing", "if (0) {}"):
            self.assertIsNone(self.ok(code)["result"], code)
        self.ok("const x = 2; x + f()", result="9")
        self.ok("new A()", result="A {}")
        self.ok("'s'", result="'s'")
        self.ok("[-0, NaN, 5n, Symbol('q'), null]", result="[ -0, NaN, 5n, Symbol(q), null ]")
        for code, result in (("-0", "-0"), ("5n", "5n"), ("Symbol('q')", "Symbol(q)"), ("null", "null"), ("({a: 1})", "{ a: 1 }"), ("f", "[Function: f]"), ("Promise.resolve(3)", "3"), ("true", "true")):
            self.ok(code, result=result)

    def test_names_are_declared_anew(self):
        self.ok("const c = 1; let l = 1; var v = 1; class K {}")
        self.ok("const c = 2; let l = 2; var v = 2; class K { x = 1 }\n[c, l, v, new K().x]", result="[ 2, 2, 2, 1 ]")
        self.ok("const { a, b: [d] } = { a: 3, b: [4] }; a + d", result="7")

    def test_top_level_await_and_modules(self):
        self.ok("const y = await Promise.resolve(5); y", result="5")
        self.ok("const fs2 = require('fs'); const { join } = await import('path'); typeof fs2.readFileSync + join('a', 'b')", result="'functiona/b'")
        self.ok("const os = require('os'); os.cpus().length > 0", result="true")
        self.ok("const s = `import(${(await import('node:url')).URL.name})`; s + \"import('x')\" /* import('y') */", result="\"import(URL)import('x')\"")
        self.ok("const re = /import\\('(/.source.length; re" if 0 else "/imp[/]ort\\(/.test('imp/ort(') && 4 / 2 / (await import('os')).cpus().length > 0", result="true")
        self.ok("async function lazy() { return (await import('util')).inspect(1) }\nawait lazy()", result="'1'")
        self.ok("await new Promise((r) => setTimeout(r, 20)); for await (const z of [1]) console.log(z)", "1\n")
        self.ok("require.main === module", result="true")
        self.ok("typeof path.join", result="'function'")

    def test_modules_of_the_working_directory(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("a.js", "module.exports = 6"), ("b.mjs", "export default 7"), ("node_modules/dep/index.js", "exports.q = 8")):
                os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
                with open(os.path.join(folder, name), "w") as out:
                    out.write(text)
            got = self.h.call("[require('./a'), (await import('./b.mjs')).default, require('dep').q, (await import('dep')).q]", setup={"cwd": folder})
            self.assertEqual(got["result"], "[ 6, 7, 8, 8 ]", got)
        got = self.h.call("console.log(1)", setup={"cwd": "/no/such"})
        self.assertEqual((got["refused"], got["stdout"]), ({"what": "cwd", "errno": 2}, ""))

    def test_errors(self):
        self.ok("function deep() {\n  throw new RangeError('far') }")
        got = self.fails("deep()", "RangeError", "far")
        self.assertEqual(got["error"]["traceback"][0], "RangeError: far")
        self.assertIn("at deep (evalmachine.<anonymous>:2:9)", got["error"]["traceback"][1])
        self.assertNotIn("inspector", "\n".join(got["error"]["traceback"]))
        got = self.fails("const ok = 1\nlet let = 2", "SyntaxError")
        self.assertIn("evalmachine.<anonymous>:2", got["error"]["traceback"][0])
        self.fails("throw 'text'", "Error", "'text'")
        self.fails("throw null", "Error", "null")
        self.fails("throw undefined", "Error", "undefined")
        self.fails("class My extends Error { name = 'My' }\nthrow new My('m')", "My", "m")
        self.fails("const o = { [require('util').inspect.custom]() { throw new TypeError('no') } }; o", "TypeError", "no")
        self.fails("function r() { return r() }\nr()", "RangeError")
        self.fails("throw Object.defineProperty(new Error('x'), 'message', { get() { throw 1 } })", "Error", "")
        got = self.fails("throw new Error('top', { cause: new Error('below') })", "Error", "top")
        self.assertIn("below", "\n".join(got["error"]["traceback"]))
        self.fails("await Promise.any([Promise.reject(new Error('one'))])", "AggregateError")
        self.fails("require('no-such-module')", "Error")
        self.fails("await import('no-such-module')", "Error")
        self.ok("1", result="1")

    def test_what_nobody_caught(self):
        self.fails("Promise.reject(new TypeError('lost')); 1", "TypeError", "lost")
        self.fails("(async () => { await null; throw new Error('soon') })()", "Error", "soon")
        self.ok("const p = Promise.reject(new Error('later')); p.catch(() => {}); 2", result="2")
        self.fails("await new Promise(() => setTimeout(() => { throw new Error('timer') }, 5))", "Error", "timer")
        import time

        self.ok("setTimeout(() => { throw new Error('between') }, 5); setTimeout(() => Promise.reject(new Error('cells')), 6)")
        time.sleep(0.2)
        got = self.ok("await new Promise((r) => setTimeout(r, 50)); 3", result="3")
        self.ok("4", result="4")
        del got

    def test_a_promise_as_value_is_awaited(self):
        self.ok("(async () => { await new Promise((r) => setTimeout(r, 50)); console.log('in'); return 5 })()", "in\n", "5")
        self.assertIsNone(self.ok("async function main() { await null }\nmain()")["result"])
        self.ok("class P extends Promise {}\nnew P((r) => setTimeout(() => r(NaN), 10))", result="NaN")
        self.fails("Promise.reject(new TypeError('no'))", "TypeError", "no")
        self.fails("new Promise((_, reject) => setTimeout(() => reject('late'), 10))", "Error", "'late'")
        self.fails("new Promise(() => setTimeout(() => { throw new Error('beside') }, 10))", "Error", "beside")
        self.fails("Promise.resolve({ [require('util').inspect.custom]() { throw new TypeError('no') } })", "TypeError", "no")
        # Work that no list of active resources shows: the thread pool's, the compiler's, a worker's, a child's.
        self.ok("new Promise((r) => require('crypto').pbkdf2('a', 'b', 2e5, 64, 'sha512', (e, k) => r(k.length)))", result="64")
        self.ok("new Promise((r) => require('zlib').gzip(Buffer.alloc(1e7), (e, b) => r(e)))", result="null")
        self.ok("WebAssembly.compile(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0])).then((m) => m instanceof WebAssembly.Module)", result="true")
        self.ok("new Promise((r) => new (require('worker_threads').Worker)('require(\"worker_threads\").parentPort.postMessage(9)', { eval: true }).on('message', r))", result="9")
        self.ok("new Promise((r) => require('child_process').exec('sleep 0.1; echo hi', (e, out) => r(out)))", result="'hi\\n'")

    def test_a_promise_that_nothing_can_settle_is_shown(self):
        self.ok("new Promise(() => {})", result="Promise { <pending> }")
        self.ok("setInterval(() => {}, 1000).unref(); new Promise(() => {})", result="Promise { <pending> }")
        self.ok("const p = new Promise(() => {}); p.then(() => 1)", result="Promise { <pending> }")
        self.ok("globalThis.settle = null; const q = new Promise((r) => { settle = r }); 1", result="1")
        self.ok("settle(4); q", result="4")
        self.ok("new Promise(() => {})", warm="(async () => 1)()", result="Promise { <pending> }")
        # What an earlier cell left running may settle it.
        self.ok("let pinged; setInterval(() => pinged?.('tick'), 20); 1", result="1")
        self.ok("new Promise((r) => { pinged = r })", result="'tick'")

    def test_timers_and_servers_hold_no_cell(self):
        self.ok("setTimeout(() => {}, 60000); require('net').createServer().listen(0, '127.0.0.1'); 1", result="1")
        self.ok("2", result="2")

    def test_timers_run_between_cells(self):
        import time

        self.ok("setTimeout(() => { globalThis.ran = true }, 5); 1", "", "1")
        time.sleep(0.1)
        self.ok("ran", result="true")

    def test_surrogates_bytes_and_lengths(self):
        self.ok("({ toString() { return 1 }, [require('util').inspect.custom]() { return 'a\\ud800b' } })", result="a\ufffdb")
        self.fails("throw new Error('a\\ud800b')", "Error", "a\ufffdb")
        self.ok("console.log('a\\ud800b')", "a\ufffdb\n")
        self.assertLess(len(self.ok("'\\0'.repeat(4e6)")["result"]), 2_200_000)
        self.assertEqual(len(self.ok("console.log('x'.repeat(3e6))")["stdout"]), 3_000_001)
        self.assertEqual(len(self.ok("for (let i = 0; i < 20000; i++) console.log('row ' + String(i).padStart(5, '0'))")["stdout"]), 200_000)
        self.assertNotIn("order", self.ok("for (let i = 0; i < 6000; i++) { console.log(1); console.error(1) }"))

    def test_warming_leaves_no_trace(self):
        got = self.h.call(warm="console.log('w'); const wx = 1; wx")
        self.assertEqual((got["stdout"], got["result"], got["error"], got["order"]), ("", None, None, []))
        self.ok("typeof wx", result="'undefined'")
        self.ok("console.log(1)", "1\n", warm="throw 1")
        self.ok("[typeof harness, Object.keys(globalThis).includes('require'), process.argv.length]", result="[ 'undefined', false, 1 ]")

    def test_libraries_work(self):
        self.ok("require('child_process').execSync('echo hi').toString()", result="'hi\\n'")
        self.ok("require('child_process').spawnSync('sh', ['-c', 'echo child; echo w >&2'], { stdio: 'inherit' }).status", "child\n", "0")
        self.ok("const { Worker } = require('worker_threads')\nawait new Promise((r) => new Worker('require(\"worker_threads\").parentPort.postMessage(9)', { eval: true }).on('message', r))", result="9")
        self.ok("require('zlib').gunzipSync(require('zlib').gzipSync('z')).toString()", result="'z'")
        self.ok("require('crypto').createHash('sha256').update('x').digest('hex').length", result="64")
        self.ok("const srv = require('http').createServer((q, a) => a.end('pong')); await new Promise((r) => srv.listen(0, '127.0.0.1', r)); const t = await (await fetch('http://127.0.0.1:' + srv.address().port)).text(); srv.close(); t", result="'pong'")
        self.ok("new WebAssembly.Module(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0])) instanceof WebAssembly.Module", result="true")
        self.ok("require('fs').readFileSync(0, 'utf8')", result="''")

    def test_mistakes_do_not_end_the_session(self):
        self.ok("process.removeAllListeners('uncaughtException'); JSON.stringify = JSON.parse = Buffer.from = null; 1")
        self.ok("2", result="2")
        self.ok("require('fs').writeSync(4, 'garbage\\n{\"nonce\":\"n3\"}\\n'); 3", result="3")
        self.ok("require('inspector').close(); 4", result="4")
        self.ok("require('events').EventEmitter.prototype.emit = () => {}; 5", result="5")
        self.ok("6", result="6")

    def test_half_a_frame_of_a_cell_hides_no_reply(self):
        self.ok("require('fs').writeSync(4, '{\"nonce\":\"'); 3", result="3")

    def test_a_lost_evaluator_ends_the_interpreter(self):
        # Node closes its inspector although the signal is ignored.
        with self.assertRaises(Dead) as caught:
            self.h.call("process.kill(process.pid, 'SIGWINCH'); 1")
        self.assertEqual(os.waitstatus_to_exitcode(caught.exception.args[0]), 70)
        self.assertIn(b"evaluator of this interpreter is gone", caught.exception.args[1])

    def test_an_exit_beside_an_await_keeps_its_code(self):
        with self.assertRaises(Dead) as caught:
            self.h.call("setTimeout(() => process.exit(4), 10); await new Promise(() => {})")
        self.assertEqual(os.waitstatus_to_exitcode(caught.exception.args[0]), 4)

    def test_a_huge_message_is_cut(self):
        got = self.fails("throw new Error('x'.repeat(20e6))", "Error")
        self.assertLess(len(got["error"]["evalue"]), 500_000)

    def test_exit_is_an_exit(self):
        with self.assertRaises(Dead) as caught:
            self.h.call("console.log('bye'); process.exit(3)")
        self.assertEqual(os.waitstatus_to_exitcode(caught.exception.args[0]), 3)

    def test_sigusr1_opens_no_inspector(self):
        self.ok("process.kill(process.pid, 'SIGUSR1'); await new Promise((r) => setTimeout(r, 100)); require('inspector').url()")
        self.assertNotIn("Debugger listening", self.h.call("1")["stderr"])

    def test_leaves_at_end_of_file(self):
        h = Harness(JS_ARGV)
        h.call("setInterval(() => {}, 10)")
        self.assertEqual(h.close(), 0)


if __name__ == "__main__":
    unittest.main()
