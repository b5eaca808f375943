#!/usr/bin/env python3
"""Runs every file of tests/workloads as a one-off of the real daemon: `workloads.py [NAME…]`.

Prints `suite workloads: N passed, N failed`. A library that is not installed is a skip.
"""
import concurrent.futures
import os
import sys

import live
import suites

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workloads")
LIMIT_S = 120


def run(client, name):
    stem, kind = os.path.splitext(name)
    with open(os.path.join(HERE, name)) as source:
        code = source.read()
    answer = client.run(code, "javascript" if kind == ".js" else "python", timeout=LIMIT_S, wait_s=LIMIT_S + 30)
    if answer.error.startswith("ModuleNotFoundError"):
        return name, None, "skipped: " + answer.error
    fine = answer.http == 200 and answer.status == "ok" and answer.stdout == "ok %s\n" % stem
    return name, fine, "ok %.1f s" % answer.seconds if fine else "FAILED " + str(answer)


def main():
    names = sys.argv[1:] or sorted(n for n in os.listdir(HERE) if n != "run.py" and n.endswith((".py", ".js")))
    passed = failed = 0
    try:
        with live.Daemon("workloads") as daemon, concurrent.futures.ThreadPoolExecutor(2) as pool:
            client = daemon.client()
            for name, fine, said in pool.map(lambda name: run(client, name), names):
                passed, failed = passed + (fine is True), failed + (fine is False)
                print("%-32s %s" % (name, said), flush=True)
    except suites.Failed as error:
        print("workloads: %s" % error, file=sys.stderr)
        failed += 1
    finally:
        suites.end_all()
    print("suite workloads: %d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
