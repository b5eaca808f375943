#!/usr/bin/python3
"""Programs in harness.js beside `node` itself, without a sandbox: `tests/harness/test_node.py [-k NAME]`.

Every program of `SAME` is run by both, and what it prints, how it ends and what node says of its errors must be equal;
the frames of node's own code are left out. TypeScript needs the libraries that scripts/setup.sh made.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from driver import NODE, TOP, Harness  # noqa: E402

TOOLCHAINS = os.environ.get("CAISSON_TOOLCHAINS", os.path.join(TOP, "target", "runtime", "toolchains"))
FLAG = "--experimental-vm-modules"
VERSION = tuple(map(int, subprocess.check_output([NODE, "-p", "process.versions.node"], text=True).split(".")[:2]))
OLD = VERSION < (20, 12)  # its loader serves nobody but files: packages are found as `require` finds them

# name: (file that node would run, code)
SAME = {
    "hello": ("main.js", "console.log('hi', process.argv.slice(2), require.main === module, __dirname, __filename, this === module.exports)"),
    "no names of ours": ("main.js", "console.log(typeof fs, typeof globalThis.require, typeof globalThis.module, process.execArgv, Object.keys(globalThis).sort().join())"),
    "an error": ("main.js", "function f() {\n  throw new TypeError('no')\n}\nf()"),
    "an error with properties": ("main.js", "throw Object.assign(new Error('x'), { code: 'E1' })"),
    "a text is thrown": ("main.js", "throw 'text'"),
    "null is thrown": ("main.js", "throw null"),
    "a syntax error": ("main.js", "const a = 1\nlet let = 2"),
    "an end too early": ("main.js", "const a = {\n"),
    "a syntax error beside await": ("main.js", "async function f() { await 1 }\nconst = 3"),
    "a rejection": ("main.js", "Promise.reject(new Error('lost'))"),
    "a text as rejection": ("main.js", "Promise.reject('lost')"),
    "an error in main()": ("main.js", "async function main() { await null; throw new RangeError('in') }\nmain()"),
    "an error of a timer": ("main.js", "setTimeout(() => { console.log('t'); throw new Error('timer') }, 5); console.log('a')"),
    "order": ("main.js", "process.nextTick(() => console.log(1)); Promise.resolve().then(() => console.log(2)); console.log(0); setImmediate(() => console.log(3))"),
    "listeners of the end": ("main.js", "process.on('exit', (c) => console.log('exit', c)); process.on('beforeExit', () => console.log('before'))"),
    "exit": ("main.js", "process.on('exit', (c) => console.log('bye', c)); process.exit(7)"),
    "an exit code": ("main.js", "process.exitCode = 5"),
    "an exit code changed at the end": ("main.js", "process.on('exit', () => { process.exitCode = 9 })"),
    "a late exit": ("main.js", "setTimeout(() => process.exit(3), 10); setInterval(() => {}, 1000)"),
    "work holds it": ("main.js", "require('fs').readFile(__dirname + '/pkg.json', 'utf8', (e, t) => setTimeout(() => console.log(t), 20))"),
    "no such module": ("main.js", "require('nope')"),
    "no such file": ("main.js", "require('./nope')"),
    "a module beside it": ("main.js", "console.log(require('./dep').value, require('./pkg.json'), require('dep2'))"),
    "a shebang": ("main.js", "#!/usr/bin/env node\nconsole.log('sb'); null.x"),
    "a mark of byte order": ("main.js", "\ufeffconsole.log('bom')"),
    "a listener of uncaught errors": ("main.js", "process.on('uncaughtException', (e) => console.log('caught', e.message)); setTimeout(() => console.log('on'), 10); throw new Error('q')"),
    "a listener of rejections": ("main.js", "process.on('unhandledRejection', (e) => console.log('caught', e.message)); Promise.reject(new Error('r'))"),
    "warnings": ("main.js", "process.emitWarning('careful')"),
    "stdin": ("main.js", "console.log(JSON.stringify(require('fs').readFileSync(0, 'utf8'))); process.stdin.on('data', () => {}).on('end', () => console.log('end'))"),
    "a child": ("main.js", "console.log(require('child_process').spawnSync('sh', ['-c', 'echo c; exit 3'], { stdio: 'inherit' }).status)"),
    "dynamic import": ("main.js", "import('fs').then((m) => console.log(typeof m.readFileSync)); import('./dep.mjs').then((m) => console.log(m.value)); import('./nope.mjs').catch((e) => console.log(e.code))"),
    "recursion without end": ("main.js", "function r() { return r() }\nr()"),
    "a thread of itself": ("main.js", "const { Worker, isMainThread, parentPort, workerData } = require('worker_threads');\nif (isMainThread) new Worker(__filename, { workerData: 3 }).on('message', (m) => console.log(m)); else parentPort.postMessage(workerData * require('./dep').value)"),
    "a process of itself": ("main.js", "const cp = require('child_process'); if (process.argv[2] === 'kid') process.send('kid'); else cp.fork(__filename, ['kid']).on('message', (m) => console.log(m))"),
    "a cluster": ("main.js", "const cluster = require('cluster'); if (cluster.isPrimary) { const w = cluster.fork(); w.on('message', (m) => { console.log(m); w.kill() }) } else process.send('w')"),
    "a module": ("main.mjs", "import fs, { readFileSync } from 'fs';\nimport { join } from 'node:path';\nimport { value } from './dep.mjs';\nimport dep from './dep.js';\nconst x = await Promise.resolve(4);\nconsole.log(x, typeof readFileSync, join('a', 'b'), value, dep, import.meta.url, import.meta.filename, import.meta.dirname, typeof require, this, process.argv.slice(1), import.meta.resolve('./x.mjs'), import.meta.resolve('fs'))"),
    "a package has a module": ("main.mjs", "import d2 from 'dep2';\nconsole.log(d2, (await import('dep2')).default)"),
    "an error in a module": ("main.mjs", "import 'fs';\nfunction f() { throw new Error('x') }\nf()"),
    "an error in a module, later": ("main.mjs", "import 'fs';\nawait null;\nthrow new Error('x')"),
    "a rejection in a module": ("main.mjs", "import 'fs';\nPromise.reject(new Error('z'))"),
    "a syntax error in a module": ("main.mjs", "import x from 'fs';\nlet let = 1"),
    "exit amid await": ("main.mjs", "import 'fs';\nawait 1; process.exit()"),
    "exit 4 amid await": ("main.mjs", "import process from 'process';\nawait 1; process.exit(4)"),
    "a thread of a module": ("main.mjs", "import { Worker, isMainThread, parentPort } from 'worker_threads';\nif (isMainThread) new Worker(new URL(import.meta.url)).on('message', (m) => console.log(m)); else parentPort.postMessage(5)"),
    "imports run in their order": ("main.mjs", "import './slow.mjs';\nimport './dep.js';\nconsole.log('main')"),
    "JSON is imported": ("main.mjs", "import p from './pkg.json' with { type: 'json' };\nconsole.log(p)"),
    "names of CommonJS declared": ("main.mjs", "import { createRequire } from 'module';\nconst require = createRequire(import.meta.url), __dirname = 'mine';\nconsole.log(require('./dep').value, __dirname)"),
    "await without an import": ("main.mjs", "const x = await Promise.resolve(3);\nconsole.log(x, await 4)\nfor await (const y of [1]) console.log(y)"),
    "await of a call": ("main.mjs", "await (async () => { console.log('in'); await null })()\nconsole.log('out')"),
}
BESIDE = {
    "pkg.json": '{"a":1}',
    "dep.js": "console.log('dep'); exports.value = 6",
    "dep.mjs": "export const value = 7",
    "slow.mjs": "import { a } from './slow2.mjs'; console.log('slow', a)",
    "slow2.mjs": "import './dep.mjs'; import 'http'; import 'zlib'; export const a = 1",
    "node_modules/dep2/package.json": '{"name":"dep2","exports":{"import":"./m.mjs","require":"./c.js"}}',
    "node_modules/dep2/m.mjs": "export default 'm'",
    "node_modules/dep2/c.js": "module.exports = 'c'",
    "util.ts": "export function half(x: number): number {\n  return x / 2;\n}\nexport enum Kind { A = 'a' }\nexport function bad(): never {\n  throw new Error('in util');\n}\n",
    "other.ts": "interface Q { q: number }\nexport default 'other' as string;\n",
    "deco.ts": "namespace N { export const n = 8 }\nexport const n = N.n;\n",
}


def home():
    """The harness as it lies in a sandbox, the folder of toolchains beside it."""
    folder = tempfile.mkdtemp(prefix="harness-")
    shutil.copy(os.path.join(TOP, "harness", "harness.js"), folder)
    os.symlink(TOOLCHAINS, os.path.join(folder, "toolchains"))
    return folder


class Case(unittest.TestCase):
    maxDiff = None
    kept_for_programs = True  # as every interpreter is that waits for one

    @classmethod
    def setUpClass(cls):
        cls.home = home()
        cls.addClassCleanup(shutil.rmtree, cls.home)

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="work-")
        self.addCleanup(shutil.rmtree, self.folder)
        for name, text in BESIDE.items():
            os.makedirs(os.path.dirname(os.path.join(self.folder, name)), exist_ok=True)
            with open(os.path.join(self.folder, name), "w") as out:
                out.write(text)

    def program(self, code, home=None, **more):
        """Exit status, stdout, stderr; and the code in the frame, if one came."""
        h = Harness([NODE, FLAG, os.path.join(home or self.home, "harness.js")])
        h.call(warm="console.log('warm')", programs=self.kept_for_programs)
        request = {"nonce": "P", "setup": {"cwd": self.folder}, "program": {"code": code, "args": ["x", "a b"], **more}, "timeout_ms": 1000}
        h.stdout = h.stderr = b""
        data, frame = json.dumps(request).encode() + b"\n", None
        while data:
            data = data[os.write(h.req, data):]
        for _ in range(60):
            h.pump(0.5)
            if frame is None and (frame := h.frame("P")) is not None:
                os.close(h.req)  # it stands still until the daemon ends it, or has gone
            if not h.open:
                break
        else:
            h.kill()
            self.fail("it does not end: %r %r" % (h.stdout, h.stderr))
        status = os.waitstatus_to_exitcode(h.reap())
        for fd in (h.events, h.out, h.err) if frame else (h.req, h.events, h.out, h.err):
            os.close(fd)
        if frame is not None:
            self.assertEqual(frame, {"event": "done", "exit": status})
        return status, h.stdout.decode(), h.stderr.decode()


def plain(text):
    """What node says without its own frames, and without the number of the process."""
    lines = re.sub(r"\(node:\d+\)", "(node)", text).split("\n")
    return "\n".join(line for line in lines if not re.match(r"\s+at .*node:", line))


class Same(Case):
    pass


def same(name, code):
    def check(self):
        path = os.path.join(self.folder, name)
        with open(path, "w") as out:
            out.write(code)
        env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp/nohome"}
        real = subprocess.run([NODE, path, "x", "a b"], cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
        os.unlink(path)
        status, stdout, stderr = self.program(code)
        self.assertEqual((status, stdout, plain(stderr)), (real.returncode, real.stdout, plain(real.stderr)))
        self.assertNotIn("harness", stderr)

    return check


if OLD:
    del SAME["a package has a module"]
for title, (name, code) in SAME.items():
    setattr(Same, "test_" + re.sub(r"\W+", "_", title), same(name, code))


class SameWithoutWaiting(Same):
    kept_for_programs = False


class Programs(Case):
    def test_await_in_commonjs_has_its_names(self):
        self.assertEqual(self.program("const fs = require('fs');\nconsole.log(await 1, typeof fs.readFileSync, __filename.endsWith('main.js'), require.main === module)"), (0, "1 function true true\n", ""))

    def test_an_await_that_nothing_can_settle_is_13(self):
        for code in ("import 'fs';\nconsole.log(1)\nawait new Promise(() => {})", "console.log(1)\nawait new Promise(() => {})"):
            status, stdout, stderr = self.program(code)
            self.assertEqual((status, stdout), (13, "1\n"))
            self.assertIn("Detected unsettled top-level await", stderr)

    def test_a_missing_import_is_named(self):
        status, _, stderr = self.program("import x from 'nope';\n")
        self.assertEqual(status, 1)
        self.assertRegex(stderr, "Cannot find module 'nope'\n.*\n- %s/main.mjs" % self.folder if OLD else "Cannot find package 'nope' imported from %s/main.mjs" % self.folder)
        self.assertNotIn("harness", stderr)
        status, _, stderr = self.program("import { nope } from 'fs';\n")
        self.assertIn("file://%s/main.mjs:1\nimport { nope } from 'fs';\n         ^^^^\n" % self.folder, stderr)

    def test_nothing_is_left_in_the_working_directory(self):
        before = sorted(os.listdir(self.folder))
        self.program("new (require('worker_threads').Worker)(__filename).on('error', () => {})\nif (!require('worker_threads').isMainThread) process.exit()")
        self.program("import 'fs'", typescript=True)
        self.assertEqual(sorted(os.listdir(self.folder)), before)

    def test_a_setup_that_fails_is_refused(self):
        h = Harness([NODE, FLAG, os.path.join(self.home, "harness.js")])
        got = h.call(setup={"cwd": "/no/such"}, program={"code": "console.log(1)", "args": []})
        self.assertEqual((got["refused"], got["stdout"]), ({"what": "cwd", "errno": 2}, ""))
        h.close()

    def test_vm_shows_nothing_of_ours(self):
        code = "const vm = require('vm'); console.log(Object.keys(vm).includes('SourceTextModule'), typeof vm.SourceTextModule)"
        self.assertEqual(self.program(code), (0, "false undefined\n", ""))


class Broken(Case):
    """Programs that break what the harness has to tell their end with."""

    def test_what_a_program_replaces_changes_nothing_of_its_end(self):
        for broken in (
            "Atomics.wait = JSON.stringify = JSON.parse = Number = String = null",
            "Object.prototype.toJSON = () => 'x'; Array.prototype.toJSON = () => 'x'; String.prototype.toJSON = () => 'x'",
            "for (const name of ['push', 'map', 'slice', 'join', 'shift']) Array.prototype[name] = undefined",
            "Buffer.from = Buffer.concat = Buffer.prototype.toString = Buffer.prototype.write = null",
            "Object.defineProperty(Object.getPrototypeOf(Uint8Array.prototype), 'length', { get: () => 0 })",
            "process.exit = process.on = process.listenerCount = process.reallyExit = () => 0",
            "require('fs').writeSync = null",
        ):
            for ending, status in (("", 0), ("; process.exitCode = 7", 7), ("; process.exitCode = 263", 7)):
                with self.subTest(broken=broken, status=status):
                    self.assertEqual(self.program("console.log('said'); " + broken + ending), (status, "said\n", ""))


@unittest.skipUnless(os.path.exists(os.path.join(TOOLCHAINS, "typescript", "sucrase.js")), "scripts/setup.sh has made no libraries")
class TypeScript(Case):
    def runs(self, code, stdout, status=0):
        self.assertEqual(self.program(code, typescript=True), (status, stdout, ""), code)

    def fails(self, code, *wanted):
        status, _, stderr = self.program(code, typescript=True)
        self.assertEqual(status, 1, stderr)
        for text in wanted:
            self.assertIn(text.replace("MAIN", self.folder + "/main.ts"), stderr)
        self.assertNotIn("harness", stderr)
        return stderr

    def test_types_go(self):
        self.runs("const a: string = 'hi'; console.log(a, process.argv.slice(2), require.main === module)", "hi [ 'x', 'a b' ] true\n")
        self.runs("import type { Stats } from 'fs';\nimport { readFileSync, type PathLike } from 'fs';\nimport { Nope } from './types';\nlet s: Stats | Nope; const p: PathLike = '/'; console.log(typeof readFileSync, p)", "function /\n")
        self.runs("const id = <T,>(x: T): T => x; class S<T> { private items: T[] = []; push(i: T): this { this.items.push(i); return this } get n() { return this.items.length } }\nconsole.log(id<number>(3), new S<string>().push('a').n, (<any>1), 'x' satisfies string, ({} as any)?.y!)", "3 1 1 x undefined\n")
        self.runs("abstract class P { constructor(private readonly x: number, public y = 2) {} abstract m(): void; declare q: string; sum() { return this.x + this.y } }\nclass Q extends P { constructor() { super(5); } m() {} }\nconsole.log(new Q().sum())", "7\n")
        self.runs("process.exit(4 as number)", "", 4)

    def test_enums_and_namespaces(self):
        self.runs("enum E { A, B = 'x' }\nconst enum F { Q = 3 }\nconsole.log(E.A, E[0], E.B, F.Q)", "0 A x 3\n")
        self.runs("namespace Foo {\n  export const x = 1;\n  export namespace Bar { export const y = 2 }\n}\nimport B = Foo.Bar;\nconsole.log(Foo.x, B.y)", "1 2\n")

    def test_both_kinds_of_decorators(self):
        self.runs("function log(value: any, context: ClassMethodDecoratorContext) {\n  return function (this: any, ...a: any[]) { console.log('call', String(context.name)); return value.apply(this, a) }\n}\nclass A { @log m(a: number): number { return a + 1 } accessor z = 1 }\nconsole.log(new A().m(1), new A().z)", "call m\n2 1\n")
        self.runs("function log(target: any, propertyKey: string, descriptor: PropertyDescriptor) {\n  const old = descriptor.value; descriptor.value = function (...a: any[]) { console.log('call', propertyKey); return old.apply(this, a) }\n}\nclass A { @log m(a: number) { return `x\n${a}\n` } }\nconsole.log(new A().m(1))", "call m\nx\n1\n\n")

    def test_imports_of_all_kinds(self):
        self.runs("import fs from 'fs';\nimport * as path from 'node:path';\nimport os = require('os');\nconst z = require('zlib');\nconsole.log(typeof fs.readFileSync, path.join('a', 'b'), typeof os.cpus, typeof z.gzip, await Promise.resolve(7));\nexport const q = 1; export default class {}", "function a/b function function 7\n")
        self.runs("import { half, Kind } from './util';\nimport def from './other.js';\nimport { n } from './deco';\nimport data from './pkg.json';\nimport { value } from './dep';\nconst later = await import('./util.js');\nconsole.log(half(8), Kind.A, def, n, data.a, value, later.half(2))", "dep\n4 a other 8 1 6 1\n")
        self.runs("import { fileURLToPath } from 'url';\nconst f: string = fileURLToPath(import.meta.url);\nconst u = await import('./util');\nconsole.log(f.endsWith('/main.ts'), u.half(4))", "true 2\n")

    def test_errors_are_on_the_programs_lines(self):
        self.fails("interface A {\n  x: number;\n}\nfunction f(a: A): never {\n  throw new TypeError('at 5');\n}\nf({ x: 1 });", "MAIN:5\n", "at f (MAIN:5:9)", "(MAIN:7:1)")
        self.fails("async function f(): Promise<void> {\n  await null;\n  throw new Error('at 3');\n}\nf();", "MAIN:3\n", "at f (MAIN:3:9)")
        self.fails("import { bad } from './util';\n\nbad();", "util.ts:6\n", "(MAIN:3:")
        self.fails("const u: string = import.meta.url;\n\nthrow new Error('at 3');", "main.ts:3:7")
        # Those of the compiler, which prints a program anew.
        self.fails("namespace N {\n  export const a = 1;\n  export function f(): never { throw new Error('at 3') }\n}\ntype T = {\n  a: string;\n};\nN.f();", "MAIN:3\n", "(MAIN:8:3)")
        self.fails("function d(v: any, c: any) {}\nclass A {\n  @d m() { return `x\n${1}\n` }\n}\n\nconst a: A = new A();\n// far\nif (a) {\n  throw new Error('at 11');\n}", "MAIN:11\n", "(MAIN:11:")

    def test_what_is_misspelt_is_shown(self):
        text = self.fails("const a: number = 1;\nconst b: number = ;\n", "MAIN:2\nconst b: number = ;\n                  ^\n\nSyntaxError: Expression expected. (TS1109)\n")
        self.assertNotIn("triggerUncaughtException", text)
        self.fails("function f( {\n", "SyntaxError: ")

    def test_warming_is_for_the_next_program(self):
        h = Harness([NODE, FLAG, os.path.join(self.home, "harness.js")])
        got = h.call(warm="console.log(1)", programs=True)
        self.assertEqual((got["stdout"], got["stderr"], got["error"]), ("", "", None))
        got = h.program("console.log(process.argv.length, require.main === module)")
        self.assertEqual((got["exit"], got["stdout"], got["stderr"]), (0, "2 true\n", ""))
        h.kill()
        h.close()

    def test_without_the_libraries_it_says_so(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        shutil.copy(os.path.join(TOP, "harness", "harness.js"), folder)
        status, stdout, stderr = self.program("const a: number = 1", home=folder, typescript=True)
        self.assertEqual((status, stdout), (1, ""))
        self.assertTrue(stderr.startswith("TypeScript is not available"), stderr)


if __name__ == "__main__":
    unittest.main()
