#!/usr/bin/env python3
"""Thousands of one-offs and sessions with random kills; then everything must be as it was at the start.

    tests/soak.py [--one-offs N] [--sessions N] [--lanes N] [--seed N] [--no-launcher]

Samples every ten seconds; prints the figures before, at their highest and after, with what each may differ by, and
`suite soak: N passed, N failed`. `make soak` runs it in full: 10,000 one-offs and 200 sessions.
"""
import argparse
import random
import signal
import sys
import threading
import time

import live
import suites

# What may differ between start and end, and why; everything else must be the same or less.
MARGINS = {
    # Blocking work runs on threads that come and go with the runtime.
    "daemon threads": 4,
    # Allocators keep what they have once needed: arenas for each thread of the daemon, tables for a hundred shells.
    "daemon rss KiB": 40 * 1024,
    "launcher rss KiB": 8 * 1024,
    "supervisor rss KiB": 2 * 1024,
    # The tenant's space: image, and the journals of the store.
    "files": 6,
}
SETTLE_S = 400  # idle slots go after five minutes
LAUNCHER_KILLS_APART_S = 25  # the supervisor gives up after eight restarts in a minute
KEY = "soak-key"

ONE_OFFS = [
    ("python", "print(%d + 1)", "{}\n"),
    ("javascript", "console.log(%d + 1)", "{}\n"),
    ("python", "import json, os\nopen('/tmp/soak-%d', 'w').write('x')\nos.remove('/tmp/soak-%d')\nprint(json.dumps(%d + 1))", "{}\n"),
    ("python", "import numpy as np\nprint(int(np.array([%d]).sum()) + 1)", "{}\n"),
    ("python", "import subprocess\nprint(subprocess.run(['echo', str(%d + 1)], capture_output=True, text=True).stdout, end='')", "{}\n"),
    ("javascript", "(async () => { await null; console.log(%d + 1) })()", "{}\n"),
]
# Ends that are the guest's own.
DEADLY = [
    ("python", "import os; os.abort()", "signal 6"),
    ("python", "import os; os._exit(9)", "code 9"),
    ("python", "import os\nif os.fork() == 0:\n  os.setsid()\n  import time; time.sleep(600)\nprint('left')", ""),
    ("python", "b = []\nwhile True: b.append(bytearray(b'x') * (32 << 20))", "out of memory"),
    ("javascript", "process.abort()", "signal 6"),
    ("javascript", "process.exit(9)", "code 9"),
]


class Soak:
    def __init__(self, daemon, args):
        self.daemon, self.args = daemon, args
        self.rng, self.lock = random.Random(args.seed), threading.Lock()
        self.one_offs, self.sessions = args.one_offs, args.sessions
        self.counts, self.wrong, self.samples = {}, [], []
        self.over = threading.Event()
        self.disturbed_until = 0.0

    def count(self, what, by=1):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + by

    def complain(self, what):
        with self.lock:
            self.wrong.append(what)

    def next_job(self):
        with self.lock:
            left = self.one_offs + self.sessions * 4
            if left <= 0:
                return None
            if self.sessions > 0 and self.rng.random() < self.sessions * 4 / left / 4:
                self.sessions -= 1
                return "session", self.sessions
            if self.one_offs > 0:
                self.one_offs -= 1
                return "one-off", self.one_offs
            self.sessions -= 1
            return "session", self.sessions

    def lane(self):
        client = self.daemon.client(KEY)
        while not suites.ending.is_set():
            job = self.next_job()
            if job is None:
                return
            (self.session if job[0] == "session" else self.one_off)(client, job[1])

    def fair(self, answer, good):
        """A right answer, or one that a kill of ours explains."""
        if good:
            return True
        # A guest or its launcher was killed under it, or no launcher was there for the moment.
        ours = time.monotonic() < self.disturbed_until and (answer.http == 503 or answer.error.startswith("ProcessError"))
        self.count("disturbed" if ours else "wrong")
        if not ours:
            self.complain(str(answer))
        return ours

    def one_off(self, client, n):
        if self.rng.random() < 0.03:
            language, code, said = self.rng.choice(DEADLY)
            answer = client.run(code, language, timeout=30)
            self.fair(answer, answer.http == 200 and said in answer.error)
        else:
            language, code, said = self.rng.choice(ONE_OFFS)
            answer = client.run(code.replace("%d", str(n)), language, timeout=30)
            self.fair(answer, answer.status == "ok" and answer.stdout == said.format(n + 1))
        self.count("one-offs")

    def session(self, client, n):
        name, language = "soak-%d" % n, self.rng.choice(["python", "javascript"])
        step = {"python": "total = globals().get('total', 0) + 1\nprint(total)", "javascript": "globalThis.total = (globalThis.total ?? 0) + 1; console.log(total)"}[language]
        expected = 0
        for _ in range(self.rng.randint(3, 8)):
            answer = client.run(step, language, name, timeout=30)
            expected += 1
            if not self.fair(answer, answer.stdout == "%d\n" % expected or (answer.stdout == "1\n" and "session was reset" in answer.hint)):
                break
            expected = int(answer.stdout) if answer.stdout.strip().isdigit() else 0
        client.end_session(name)
        self.count("sessions")

    def kills(self):
        launcher_at = time.monotonic() + LAUNCHER_KILLS_APART_S
        while not self.over.wait(self.rng.uniform(0.5, 2.5)):
            tree = self.daemon.tree()
            if time.monotonic() > launcher_at and not self.args.no_launcher:
                launcher_at = time.monotonic() + LAUNCHER_KILLS_APART_S
                what, pid = "launcher", tree.launcher
            elif self.rng.random() < 0.3:
                what, pid = "zygote", tree.zygote(self.rng.choice(["python", "python-data"]))
            else:
                what, pid = "guest", self.rng.choice(tree.guests).pid if tree.guests else None
            if pid:
                self.disturbed_until = time.monotonic() + 15
                live.kill(pid)
                self.count("kills of a " + what)

    def sampling(self):
        while not self.over.wait(10):
            figures = self.daemon.figures()
            with self.lock:
                self.samples.append(figures)
                done = dict(self.counts)
            print("%s; live %s, guests %d, daemon %d fds %d MiB, launcher %d fds %d MiB" % (
                done, figures["sandboxes live"], figures["guest processes"], figures["daemon fds"], figures["daemon rss KiB"] >> 10,
                figures["launcher fds"], figures["launcher rss KiB"] >> 10), flush=True)

    def run(self):
        lanes = [threading.Thread(target=self.lane, daemon=True) for _ in range(self.args.lanes)]
        others = [threading.Thread(target=self.kills, daemon=True), threading.Thread(target=self.sampling, daemon=True)]
        for thread in lanes + others:
            thread.start()
        for thread in lanes:
            thread.join()
        self.over.set()
        for thread in others:
            thread.join(20)


def settle(daemon, before):
    """Waits until nothing differs by more than its margin; returns the last figures and what still differs."""
    last = {}

    def settled():
        last["figures"] = now = daemon.figures()
        last["differ"] = [name for name, was in before.items() if now[name] is None or now[name] > was + MARGINS.get(name, 0)]
        return not last["differ"]

    live.wait_until(settled, SETTLE_S, every=5)
    if daemon.process.poll() is not None:  # nothing is counted of what is gone, and nothing would look settled
        raise suites.Failed("the daemon ended with status %d: %s" % (daemon.process.returncode, suites.tail(daemon.log_path, 3)))
    return last["figures"], last["differ"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-offs", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--no-launcher", action="store_true", help="kill zygotes and guests only")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    passed = failed = 0
    started = time.monotonic()
    print("soak: seed %d" % args.seed, flush=True)
    try:
        with live.Daemon("soak", {"CODE_INTERPRETER_API_KEYS": "soak=" + KEY, "CAISSON_GRACE_SECS": "1"}) as daemon:
            client = daemon.client(KEY)
            before = daemon.figures()
            soak = Soak(daemon, args)
            soak.run()
            busy_s = time.monotonic() - started
            after, differ = settle(daemon, before)
            answer = client.run("print(1)")
            print("%-20s %12s %12s %12s %10s" % ("figure", "start", "highest", "end", "margin"))
            for name, was in before.items():
                highest = max([it[name] or 0 for it in soak.samples] + [was or 0])
                print("%-20s %12s %12s %12s %10s%s" % (name, was, highest, after[name], MARGINS.get(name, 0), "   <-- differs" if name in differ else ""))
            print("%s in %.0f s, settled after %.0f s" % (soak.counts, busy_s, time.monotonic() - started - busy_s))
            for text in soak.wrong[:10]:
                print("wrong: " + text)
            passed += len(before) - len(differ) + (not soak.wrong) + (answer.stdout == "1\n")
            failed += len(differ) + bool(soak.wrong) + (answer.stdout != "1\n")
            live.kill(daemon.process.pid, signal.SIGTERM)
            status = daemon.process.wait(40)
            live.wait_until(lambda: not daemon.leftovers(), 5)
            left = daemon.leftovers()
            passed, failed = passed + (not left and status == 0), failed + bool(left or status)
            if left or status:
                print("stopped with status %d; left: %s" % (status, "; ".join(left)[:1000]))
    except suites.Failed as error:
        print("soak: %s" % error, file=sys.stderr)
        failed += 1
    finally:
        suites.end_all()
    print("suite soak: %d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
