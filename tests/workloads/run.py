#!/usr/bin/python3
"""Runs the workloads as cells of the bare harnesses: `run.py [NAME…]`. A missing library is a skip."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "harness"))
from driver import JS_ARGV, PY_ARGV, Dead, Harness  # noqa: E402


def run(name):
    stem, kind = os.path.splitext(name)
    with open(os.path.join(HERE, name)) as source:
        code = source.read()
    harness = Harness(JS_ARGV if kind == ".js" else PY_ARGV)
    try:
        got = harness.call(code, seconds=120)
    except (Dead, TimeoutError) as error:
        return "FAILED %r" % error
    harness.close()
    if got["error"] and got["error"]["ename"] == "ModuleNotFoundError":
        return "skipped: " + got["error"]["evalue"]
    if got["error"] or got["stdout"] != "ok %s\n" % stem:
        return "FAILED %r" % got
    return "ok"


def main():
    names = sys.argv[1:] or sorted(n for n in os.listdir(HERE) if n != "run.py" and n.endswith((".py", ".js")))
    failed = 0
    for name in names:
        outcome = run(name)
        failed += outcome.startswith("FAILED")
        print("%-32s %s" % (name, outcome), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
