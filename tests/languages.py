#!/usr/bin/env python3
"""Every language of the table through `POST /exec` of the real daemon, and two that an operator adds.

    tests/languages.py [--only TEXT] [--all]

A language whose toolchain this host lacks is passed over, and must be refused with 503; with `--all` that is a failure
(`scripts/setup.sh languages` installs them), and so it is where CI=true. Ruby and Lua come from the table in
docs/languages.md, as it stands there.
Prints a line per test and `suite languages: N passed, N failed`.
"""
import argparse
import os
import re
import signal
import sys
import tempfile
import tomllib

import faults
import live
import suites

TABLE = os.path.join(suites.ROOT, "policies", "languages.toml")
PAGE = os.path.join(suites.ROOT, "docs", "languages.md")
ALWAYS = ["python", "bash", "javascript", "typescript", "go", "cpp"]
ARGS = ["one", "two words", "$HOME", "é"]
ARGS_OUT = "one|two words|$HOME|é\n"

# For each language: hello; its arguments joined by |; exit code 7; what the compiler refuses (None: nothing compiles it
# ahead); what it reads from its empty input, which must be nothing; a child process that says "child".
PROGRAMS = {
    "python": (
        "print('hi')", "import sys\nprint('|'.join(sys.argv[1:]))", "import sys\nsys.exit(7)", None,
        "import sys\nprint(len(sys.stdin.read()))", "import subprocess\nsubprocess.run(['echo', 'child'])"),
    "bash": (
        "echo hi", "(IFS='|'; echo \"$*\")", "exit 7", None, "wc -c", "sh -c 'echo child'"),
    "javascript": (
        "console.log('hi')", "console.log(process.argv.slice(2).join('|'))", "process.exit(7)", None,
        "console.log(require('fs').readFileSync(0).length)", "require('child_process').spawnSync('echo', ['child'], { stdio: 'inherit' })"),
    "typescript": (
        "const s: string = 'hi'; console.log(s)", "const a: string[] = process.argv.slice(2); console.log(a.join('|'))", "process.exit(7 as number)",
        ("const a: number = ;", "main.ts:1"), "import { readFileSync } from 'fs';\nconsole.log(readFileSync(0).length as number)",
        "import { spawnSync } from 'child_process';\nspawnSync('echo', ['child'], { stdio: 'inherit' })"),
    "go": (
        'package main\nimport "fmt"\nfunc main() { fmt.Println("hi") }',
        'package main\nimport ("fmt"; "os"; "strings")\nfunc main() { fmt.Println(strings.Join(os.Args[1:], "|")) }',
        'package main\nimport "os"\nfunc main() { os.Exit(7) }',
        ('package main\n\nfunc main() { undefined() }', "./main.go:3:15: undefined: undefined"),
        'package main\nimport ("fmt"; "io"; "os")\nfunc main() { b, _ := io.ReadAll(os.Stdin); fmt.Println(len(b)) }',
        'package main\nimport ("os"; "os/exec")\nfunc main() { c := exec.Command("echo", "child"); c.Stdout = os.Stdout; c.Run() }'),
    "cpp": (
        '#include <iostream>\nint main() { std::cout << "hi\\n"; }',
        '#include <iostream>\nint main(int n, char** a) { for (int i = 1; i < n; i++) std::cout << (i > 1 ? "|" : "") << a[i]; std::cout << "\\n"; }',
        "int main() { return 7; }", ("int main() {\n  undefined();\n}", "main.cpp:2:3: error:"),
        '#include <bits/stdc++.h>\nint main() { std::cout << std::string(std::istreambuf_iterator<char>(std::cin), {}).size() << "\\n"; }',
        '#include <cstdlib>\nint main() { return system("echo child"); }'),
    "c": (
        '#include <stdio.h>\nint main(void) { puts("hi"); }',
        '#include <stdio.h>\nint main(int n, char **a) { for (int i = 1; i < n; i++) printf("%s%s", i > 1 ? "|" : "", a[i]); puts(""); }',
        "int main(void) { return 7; }", ("int main(void) {\n  return undefined;\n}", "main.c:2:10: error:"),
        '#include <stdio.h>\nint main(void) { int n = 0; while (getchar() != EOF) n++; printf("%d\\n", n); }',
        '#include <stdlib.h>\nint main(void) { return system("echo child"); }'),
    "java": (
        'class Helper {}\npublic class Anything {\n  static class Inner {}\n  public static void main(String[] args) { System.out.println("hi"); }\n}',
        'public class Main { public static void main(String[] args) throws Exception { new java.io.PrintStream(System.out, true, "UTF-8").println(String.join("|", args)); } }',
        "class A { public static void main(String[] args) { System.exit(7); } }",
        ("class A {\n  public static void main(String[] args) { undefined(); }\n}", "Main.java:2: error:"),
        "class A { public static void main(String[] args) throws Exception { System.out.println(System.in.readAllBytes().length); } }",
        'class A { public static void main(String[] args) throws Exception { new ProcessBuilder("echo", "child").inheritIO().start().waitFor(); } }'),
    "php": (
        "<?php echo \"hi\\n\";", "<?php echo implode('|', array_slice($argv, 1)), \"\\n\";", "<?php exit(7);", None,
        "<?php echo strlen(stream_get_contents(STDIN)), \"\\n\";", "<?php passthru('echo child');"),
    "rust": (
        'fn main() { println!("hi"); }',
        'fn main() { println!("{}", std::env::args().skip(1).collect::<Vec<_>>().join("|")); }',
        "fn main() { std::process::exit(7) }", ("fn main() {\n  undefined();\n}", "main.rs:2:3"),
        'use std::io::Read;\nfn main() { let mut s = String::new(); std::io::stdin().read_to_string(&mut s).unwrap(); println!("{}", s.len()); }',
        'fn main() { std::process::Command::new("echo").arg("child").status().unwrap(); }'),
    "fortran": (
        "program p\n  print '(a)', 'hi'\nend program",
        "program p\n  integer :: i, n\n  character(len=99) :: a\n  do i = 1, command_argument_count()\n    call get_command_argument(i, a, n)\n    if (i > 1) write(*, '(a)', advance='no') '|'\n    write(*, '(a)', advance='no') a(1:n)\n  end do\n  print *\nend program",
        "program p\n  call exit(7)\nend program", ("program p\n  x = = 1\nend program", "main.f90:2:"),
        "program p\n  integer :: e\n  character(len=9) :: l\n  read(*, '(a)', iostat=e) l\n  print '(i0)', merge(0, 1, e < 0)\nend program",
        "program p\n  call execute_command_line('echo child')\nend program"),
    "r": (
        "cat('hi\\n')", "cat(paste(commandArgs(trailingOnly = TRUE), collapse = '|'), '\\n', sep = '')", "quit(status = 7)", None,
        "cat(length(readLines(file('stdin'))), '\\n', sep = '')", "invisible(system('echo child'))"),
    "d": (
        'import std.stdio; void main() { writeln("hi"); }',
        'import std.stdio, std.array; void main(string[] args) { writeln(args[1 .. $].join("|")); }',
        "int main() { return 7; }", ("void main() {\n  undefined();\n}", "main.d:2:3: error:"),
        'import std.stdio; void main() { int n; foreach (c; stdin.byChunk(9)) n += c.length; writeln(n); }',
        'import std.process; void main() { spawnProcess(["echo", "child"]).wait; }'),
    "ruby": (
        "puts 'hi'", "puts ARGV.join('|')", "exit 7", None, "puts STDIN.read.size", "system('echo', 'child')"),
    "lua": (
        "print('hi')", "print(table.concat(arg, '|'))", "os.exit(7)", ("local x = = 1", "main.lua:1:"),
        "print(#io.read('a'))", "os.execute('echo child')"),
}


def holds(condition, what):
    if not condition:
        raise AssertionError(what)


class Api:
    def __init__(self, daemon):
        self.client = daemon.client()

    def post(self, lang, code, **more):
        return self.client.request("POST", "/exec", {"lang": lang, "code": code, **more}, 180)

    def run(self, lang, code, stdout, status=0, **more):
        answer = self.post(lang, code, **more)
        holds(answer.http == 200, answer)
        got = answer.body
        holds((got["stdout"], got["run"]["code"]) == (stdout, status), "%r, %r, code %r; stderr %r" % (lang, got["stdout"], got["run"]["code"], got["stderr"]))
        return got


def table():
    with open(TABLE, "rb") as file:
        return tomllib.load(file)["language"]


def example():
    """The operator's table of docs/languages.md."""
    with open(PAGE) as file:
        return re.search(r"```toml\n(builtin = true\n.*?)```", file.read(), re.S).group(1)


def one_language(report, api, language, only, needs_all):
    name, lang = language["id"], language["names"][-1]
    answer = api.post(lang, PROGRAMS[name][0])
    if answer.http == 503 and name not in ALWAYS and not needs_all:
        print("skip   %s: %s" % (name, answer.body.get("detail")))
        report.run("%s is refused while it is not installed" % name, lambda: holds(answer.body.get("error") == "unsupported_capability" and answer.body.get("detail") == "Runtime '%s' is unavailable" % name, answer.body))
        return
    hello, args, exit_7, mistake, stdin, child = PROGRAMS[name]

    def says_hello():
        for each in [*language["names"], language["names"][0].upper()]:
            got = api.run(each, hello, "hi\n")
            holds(got["stderr"] == "" and got["files"] == [] and got["language"] == each, got)
        holds(re.match(r"\d+(\.\d+)*$", got["version"]), got["version"])

    def is_compiled():
        code, text = mistake
        got = api.post(lang, code).body
        holds(got["run"]["code"] not in (0, None) and got["stdout"] == "", got)
        holds(text in got["stderr"] and "\x1b" not in got["stderr"] and got["files"] == [], got["stderr"])

    tests = [
        ("says hello", says_hello),
        ("gets its arguments", lambda: api.run(lang, args, ARGS_OUT, args=ARGS) and None),
        ("ends with its exit code", lambda: api.run(lang, exit_7, "", 7) and None),
        ("reads nothing", lambda: api.run(lang, stdin, "0\n") and None),
        ("has children", lambda: api.run(lang, child, "child\n") and None),
    ]
    if mistake:
        tests.insert(3, ("does not compile a mistake", is_compiled))
    for what, run in tests:
        title = "%s %s" % (name, what)
        if only in title:
            report.run(title, run)


# --- what only one language has ------------------------------------------------------------------------------------------


def of_go(api):
    api.run("go", 'package main\nimport ("fmt"; "slices"; "maps")\nfunc main() { for i := range 2 { fmt.Println(i, min(1, 2), slices.Sorted(maps.Keys(map[int]int{3: 1}))) } }', "0 1 [3]\n1 1 [3]\n")
    api.run("go", 'package main\n// int two() { return 2; }\nimport "C"\nimport "fmt"\nfunc main() { fmt.Println(C.two()) }', "2\n")
    got = api.post("go", 'package main\nimport "example.com/x"\nfunc main() { x.F() }').body
    holds(got["run"]["code"] and "example.com/x" in got["stderr"], got)
    got = api.post("go", 'package main\nfunc main() { panic("no") }').body
    holds(got["run"]["code"] == 2 and "panic: no" in got["stderr"] and "main.go:2" in got["stderr"], got)
    # The cache is there to be read.
    got = api.post("bash", "ls -d /opt/caisson/toolchains/go-cache && touch /opt/caisson/toolchains/go-cache/x").body
    holds(got["run"]["code"] and "Read-only file system" in got["stderr"], got)


def of_cpp(api):
    for header in ("iostream", "bits/stdc++.h", "vector", "string", "algorithm", "cstdio"):
        api.run("cpp", "#include <%s>\n#include <iostream>\nint main() { std::cout << __cplusplus / 100 << std::endl; }" % header, "2020\n")
    got = api.post("bash", "cd /tmp; echo '#include <iostream>' >x.cpp; g++ -std=gnu++20 -O2 -pthread -fdiagnostics-color=never -I /opt/caisson/toolchains/cpp -H -c x.cpp 2>&1 | head -n 1").body
    holds(got["stdout"] == "! /opt/caisson/toolchains/cpp/iostream.gch\n", got)


def of_node(api):
    api.run("js", "import { join } from 'path';\nimport x from './x.mjs';\nconsole.log(join('a', 'b'), x, import.meta.url)", "", 1)
    api.run("js", "require('fs').writeFileSync('y.cjs', 'exports.y = 4'); console.log(require('./y.cjs').y, __filename, process.cwd())", "4 /mnt/data/main.js /mnt/data\n")
    api.run("js", "const { Worker, isMainThread, parentPort } = require('worker_threads');\nif (isMainThread) new Worker(__filename).on('message', (m) => console.log(m)); else parentPort.postMessage('thread')", "thread\n")
    got = api.post("js", "Promise.reject(new Error('lost'))").body
    holds(got["run"]["code"] == 1 and "Error: lost\n    at " in got["stderr"] and "/opt/caisson" not in got["stderr"], got["stderr"])
    got = api.post("ts", "interface A {\n  x: number\n}\n\nthrow new Error('five')").body
    holds("/mnt/data/main.ts:5\n" in got["stderr"], got["stderr"])
    api.run("ts", "namespace N { export const a = 1 }\nfunction d(v: any, c: any) {}\nclass A { @d m() { return N.a } }\nconsole.log(new A().m())", "1\n")


def of_bash(api):
    api.run("bash", "for p in python3 jq node go g++; do command -v $p >/dev/null || echo missing $p; done; python3 -c 'import pandas; print(1)'; echo '{\"a\":[1,2]}' | jq -c .a", "1\n[1,2]\n")


def an_operators(report, only, needs_all):
    with tempfile.TemporaryDirectory(prefix="policies-") as folder:
        os.chmod(folder, 0o755)
        with open(os.path.join(folder, "languages.toml"), "w") as out:
            out.write(example())
        entries = tomllib.loads(example())["language"]
        with live.Daemon("languages-operator", {"CAISSON_POLICIES_DIR": folder}) as daemon:
            api = Api(daemon)
            for language in entries:
                one_language(report, api, language, only, needs_all)
            report.run("the built-in languages are there beside them", lambda: api.run("bash", "echo hi", "hi\n") and None)
        with open(os.path.join(folder, "languages.toml"), "a") as out:
            out.write("\n[[language]]\nid = \"x\"\n")

        def names_the_line():
            try:
                with live.Daemon("languages-mistake", {"CAISSON_POLICIES_DIR": folder}):
                    raise AssertionError("it serves all the same")
            except suites.Failed as failed:
                holds("languages.toml, line %d: missing field" % (example().count("\n") + 2) in str(failed), failed)

        report.run("a mistake in the operator's table ends the start with its line", names_the_line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tests whose name holds this text")
    parser.add_argument("--all", action="store_true", default=suites.IS_CI, help="every language of the table must be installed")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = faults.Report()
    try:
        with live.Daemon("languages", {}) as daemon:
            api = Api(daemon)
            for language in table():
                one_language(report, api, language, args.only, args.all)
            for title, run in [("go has the standard library and C", of_go), ("c++ has compiled headers", of_cpp), ("node has modules, threads and lines", of_node), ("bash has its tools", of_bash)]:
                if args.only in title:
                    report.run(title, run, api)
        if args.only in "operator ruby lua":
            an_operators(report, "" if args.only == "operator" else args.only, args.all)
    except suites.Failed as error:
        report.note("daemon", str(error))
    finally:
        suites.end_all()
    print("suite languages: %d passed, %d failed" % (report.passed, report.failed))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
