#!/usr/bin/env python3
"""Runs every file of tests/workloads as a one-off of the real daemon, and tries the console scripts of the Python
environment, as commands and in a kernel: `workloads.py [NAME…]`.

Prints `suite workloads: N passed, N failed`. A library that is not installed is a skip.
"""
import concurrent.futures
import os
import sys

import live
import suites

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workloads")
LIMIT_S = 120
NO_SUCH_PACKAGE = "caisson-no-such-package"
PIP_S = 6  # to say that there is no network; with pip's own settings it says so after eight seconds or more


def run(client, name):
    stem, kind = os.path.splitext(name)
    with open(os.path.join(HERE, name)) as source:
        code = source.read()
    answer = client.run(code, "javascript" if kind == ".js" else "python", timeout=LIMIT_S, wait_s=LIMIT_S + 30)
    if answer.error.startswith("ModuleNotFoundError"):
        return name, None, "skipped: " + answer.error
    fine = answer.http == 200 and answer.status == "ok" and answer.stdout == "ok %s\n" % stem
    return name, fine, "ok %.1f s" % answer.seconds if fine else "FAILED " + str(answer)


# --- console scripts -------------------------------------------------------------------------------------------------


class Said:
    """What a line of shell answered: as a command, or from a cell of a kernel, where both streams are one."""

    def __init__(self, answer):
        self.answer, self.seconds = answer, answer.seconds
        self.text = answer.stdout + answer.stderr
        # 0 for a cell: its own end says nothing about the line's.
        self.exit_code = answer.data.get("exit_code") or 0

    def __str__(self):
        return "exit code %d; %r; %s" % (self.exit_code, self.text[-300:], self.answer)


def as_command(client, line):
    return Said(client.request("POST", "/v2/commands", {"command": line, "timeout": LIMIT_S}, LIMIT_S + 30))


def in_kernel(client, line):
    return Said(client.run("!" + line, session="scripts", timeout=LIMIT_S, wait_s=LIMIT_S + 30))


def by_magic(client, line):
    return Said(client.run("%" + line, session="scripts", timeout=LIMIT_S, wait_s=LIMIT_S + 30))


def pip_answers(said):
    return said.exit_code == 0 and said.text.startswith("pip ") and "/opt/python" in said.text


def pip_gives_up(said):
    # Python's own words for a name that nobody resolves differ, and so does the sentence of %pip.
    reason = any(words in said.text for words in ("Failed to establish a new connection", "Temporary failure", "There is no network"))
    return reason and NO_SUCH_PACKAGE in said.text and said.seconds < PIP_S


def every_script_starts(said):
    return said.exit_code == 0 and said.text.strip() == "all start"


# Each says with --help or an error of its own that it has been started; 126 and 127 are the shell's.
EVERY_SCRIPT = """
cd "$HOME"; count=0
for script in /opt/python/bin/*; do
  case ${script##*/} in python*|[aA]ctivate*) continue ;; esac
  said=$(timeout 60 "${script##*/}" --help 2>&1 </dev/null); code=$?
  case $code in 124|126|127) echo "${script##*/}: $code $said" ;; esac
  count=$((count + 1))
done
[ "$count" -ge 10 ] && echo 'all start'
"""
INSTALL = "pip install " + NO_SUCH_PACKAGE
SCRIPTS = {
    # %pip comes last: it leaves settings of its own in the kernel's environment.
    "pip as a command": (as_command, "pip --version", pip_answers),
    "pip in a kernel": (in_kernel, "pip --version", pip_answers),
    "pip by a link": (as_command, "ln -sf /opt/python/bin/pip /tmp/linked && /tmp/linked --version", pip_answers),
    "pip without variables": (as_command, "env -i /opt/python/bin/pip --version", pip_answers),
    "every script": (as_command, EVERY_SCRIPT, every_script_starts),
    "pip install as a command": (as_command, INSTALL, pip_gives_up),
    "pip install in a kernel": (in_kernel, INSTALL, pip_gives_up),
    "pip install by the magic": (by_magic, INSTALL, pip_gives_up),
}


def run_scripts(names):
    with live.Daemon("scripts", {"AIO_CODE_BACKEND": "kernel"}) as daemon:
        client = daemon.client()
        in_kernel(client, "true")  # the kernel's start is not pip's time
        for name in names:
            ask, line, is_fine = SCRIPTS[name]
            said = ask(client, line)
            fine = is_fine(said)
            yield name, fine, "ok %.1f s" % said.seconds if fine else "FAILED " + str(said)


# --- running ---------------------------------------------------------------------------------------------------------


def run_workloads(names):
    with live.Daemon("workloads") as daemon, concurrent.futures.ThreadPoolExecutor(2) as pool:
        client = daemon.client()
        yield from pool.map(lambda name: run(client, name), names)


def main():
    files = sorted(n for n in os.listdir(HERE) if n != "run.py" and n.endswith((".py", ".js")))
    names = sys.argv[1:] or [*files, *SCRIPTS]
    unknown = [name for name in names if name not in files and name not in SCRIPTS]
    if unknown:
        sys.exit("no such workload: " + ", ".join(unknown))
    stages = ((run_workloads, [n for n in names if n not in SCRIPTS]), (run_scripts, [n for n in names if n in SCRIPTS]))
    passed = failed = 0
    try:
        for stage, chosen in stages:
            for name, fine, said in stage(chosen) if chosen else ():
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
