#!/usr/bin/env python3
"""What `POST /exec` promises of sessions that go on, and of their bounds, asked of the real daemon.

    tests/sessions.py [--only TEXT]

Prints a line per test and `suite sessions: N passed, N failed`.
"""
import argparse
import base64
import contextlib
import glob
import http.client
import json
import os
import random
import re
import signal
import sqlite3
import sys
import threading
import time
import uuid

import faults
import live
import suites

KEYS = {"CODE_INTERPRETER_API_KEYS": "a=key-of-a,b=key-of-b"}
SPACE_MIB = 24
PYTHON_ENV = os.path.join(suites.ROOT, "target/runtime/python")


def holds(condition, what):
    if not condition:
        raise AssertionError(what)


def form(fields, files):
    """A form of an upload, and its type."""
    edge = uuid.uuid4().hex
    head = "--%s\r\nContent-Disposition: form-data; name=" % edge
    parts = [('%s"%s"\r\n\r\n%s\r\n' % (head, name, value)).encode() for name, value in fields.items()]
    parts += [('%s"file"; filename="%s"\r\n\r\n' % (head, name)).encode() + content + b"\r\n" for name, content in files.items()]
    return b"".join(parts) + ("--%s--\r\n" % edge).encode(), "multipart/form-data; boundary=" + edge


class Api:
    def __init__(self, daemon, key="key-of-a"):
        self.daemon, self.port, self.key, self.client = daemon, daemon.port, key, daemon.client(key)

    def post(self, lang, code, **more):
        return self.client.request("POST", "/exec", {"lang": lang, "code": code, **more}, 120)

    def run(self, lang, code, stdout=None, **more):
        answer = self.post(lang, code, **more)
        holds(answer.http == 200, answer)
        if stdout is not None:
            holds(answer.body["stdout"] == stdout, "%r; stderr %r" % (answer.body["stdout"], answer.body["stderr"]))
        return answer.body

    def upload(self, name, content, entity):
        body, kind = form({"entity_id": entity}, {name: content})
        return self.raw("POST", "/upload", body, {"Content-Type": kind})[0]

    def raw(self, method, path, body=None, headers=()):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"X-API-Key": self.key, **dict(headers)})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def programmatic(self, **body):
        return self.client.request("POST", "/exec/programmatic", body, 60)


def another_language_leaves_its_names(api):
    entity = {"entity_id": "names"}
    api.run("py", "x = 41", "", **entity)
    api.run("bash", "echo 1 > /mnt/data/one.txt", "", **entity)
    api.run("js", "console.log(require('fs').readFileSync('/mnt/data/one.txt', 'utf8'))", "1\n\n", **entity)
    api.run("py", "print(x + int(open('one.txt').read()))", "42\n", **entity)


# In pieces: a single file may not have all of it.
FILL = "import os\nos.mkdir('.fill')\ntry:\n  for n in range(99):\n    with open('.fill/%d' % n, 'wb', 0) as f: f.write(os.urandom(1 << 20))\nexcept OSError as e: print(e.errno)"


def an_upload_that_does_not_fit(api):
    entity = {"entity_id": "full"}
    api.run("py", FILL, "28\n", **entity)
    holds(api.upload("late.csv", b"x" * (3 << 20), "full") == 200, "the upload")
    got = api.run("py", "print('still here')", "still here\n", **entity)
    holds("late.csv was not put into the workspace: it does not fit there" in got["stderr"], got["stderr"])
    api.run("py", "import shutil; shutil.rmtree('.fill'); print('room')", "room\n", **entity)
    got = api.run("bash", "wc -c <late.csv", "%d\n" % (3 << 20), **entity)
    holds("late.csv" not in got["stderr"], got["stderr"])


def a_file_with_holes_goes_on(api):
    code = "f = open('sparse.bin', 'wb'); f.truncate(%d << 20); f.seek(1 << 20); f.write(b'here')"
    for each in range(2):
        first = api.run("py", code % (SPACE_MIB - 4))
        session = first["session_id"]
        second = api.run("py", "f = open('sparse.bin', 'rb'); f.seek(1 << 20); print(f.read(4)); open('more.bin', 'wb').write(b'm' * (2 << 20))", "b'here'\n", session_id=session)
        api.run("py", "import os; print(sorted(os.listdir()))", "['more.bin', 'sparse.bin']\n", session_id=second["session_id"])


def an_output_that_is_taken_away(api):
    first = api.run("py", "open('gone.txt', 'w').write('kept'); open('stays.txt', 'w').write('x')")
    session = first["session_id"]
    gone = [it for it in first["files"] if it["name"] == "gone.txt"][0]
    api.run("py", "import os; os.remove('gone.txt')", session_id=session)
    api.run("py", "import os; print(os.listdir())", "['stays.txt']\n", session_id=session)
    status, content = api.raw("GET", "/download/%s/%s" % (session, gone["id"]))
    holds((status, content) == (200, b"kept"), (status, content))


def a_name_with_a_backslash(api):
    first = api.run("py", "open('a\\\\b.txt', 'w').write('kept')")
    output = first["files"][0]
    holds(output["name"] == "a_b.txt", output)
    again = {"id": output["id"], "session_id": first["session_id"], "name": output["name"]}
    api.run("py", "print(open('a_b.txt').read())", "kept\n", files=[again])


def a_program_with_tools_leaves_the_turn(api):
    entity = "turns"
    session = api.run("py", "x = 1", "", entity_id=entity)["session_id"]
    waiting = api.programmatic(code="await t()\nprint('end')", tools=[{"name": "t"}], session_id=session)
    holds(waiting.body.get("status") == "tool_call_required", waiting)
    api.run("py", "print(x)", "1\n", session_id=session)
    call = waiting.body["tool_calls"][0]["id"]
    done = api.programmatic(continuation_token=waiting.body["continuation_token"], tool_results=[{"call_id": call, "result": None, "is_error": False}])
    holds(done.body.get("stdout") == "end\n", done)
    api.run("py", "print(x)", "1\n", session_id=session)


def time_between_calls_is_its_own(api):
    """Each of three stretches takes more than half of what one may take."""
    code = "sleep 1.2; t '{}' >/dev/null; sleep 1.2; t '{}' >/dev/null; sleep 1.2; echo end"
    answer = api.programmatic(code=code, lang="bash", tools=[{"name": "t"}], timeout=2000)
    for _ in range(2):
        holds(answer.body.get("status") == "tool_call_required", answer)
        call = answer.body["tool_calls"][0]["id"]
        answer = api.programmatic(continuation_token=answer.body["continuation_token"], tool_results=[{"call_id": call, "result": 1, "is_error": False}])
    holds(answer.body.get("stdout") == "end\n", answer)


def calls_of_one_id_stop_no_clock(api):
    """A script that writes calls itself, all of one id: one of them is a call, and its answer starts the clock again."""
    code = "for _ in 1 2 3; do echo '7 {\"name\":\"t\",\"input\":{}}' >\"$__tools_folder/calls\"; done; sleep 60"
    answer = api.programmatic(code=code, lang="bash", tools=[{"name": "t"}], timeout=1500)
    holds([it["id"] for it in answer.body.get("tool_calls", [])] == ["7"], answer)
    started = time.monotonic()
    answer = api.programmatic(continuation_token=answer.body["continuation_token"], tool_results=[{"call_id": "7", "result": 1, "is_error": False}])
    holds("Time limit exceeded" in answer.body.get("stderr", "") and time.monotonic() - started < 30, answer)


def calls_have_a_bound(api):
    code = "import asyncio\nawait asyncio.gather(*(t() for _ in range(10001)))"
    answer = api.programmatic(code=code, tools=[{"name": "t"}], timeout=60000)
    for _ in range(20):
        if answer.body.get("status") != "tool_call_required":
            break
        results = [{"call_id": it["id"], "result": 1, "is_error": False} for it in answer.body["tool_calls"]]
        answer = api.programmatic(continuation_token=answer.body["continuation_token"], tool_results=results)
    holds("Tool call limit exceeded: a program may make 10000 tool calls" in answer.body.get("stderr", ""), str(answer)[:1000])


def rounds_that_queue_up(api):
    """Calls that are made one by one while their caller is busy wait for it, however many, and come together."""
    code = "import asyncio\nasync def one(i):\n    await asyncio.sleep(0.004 * i)\n    return await t(i=i)\nprint(len(await asyncio.gather(*[one(i) for i in range(400)])))"
    answer, rounds = api.programmatic(code=code, tools=[{"name": "t"}], timeout=60000), 0
    time.sleep(2.5)
    while answer.body.get("status") == "tool_call_required" and rounds < 40:
        results = [{"call_id": it["id"], "result": 1, "is_error": False} for it in answer.body["tool_calls"]]
        answer, rounds = api.programmatic(continuation_token=answer.body["continuation_token"], tool_results=results), rounds + 1
    holds(answer.body.get("stdout") == "400\n" and rounds < 40, (rounds, str(answer)[:1000]))


def given_up(daemon):
    path = next(os.path.join(folder, name) for folder, _, names in os.walk(daemon.scratch) for name in names if name == "caisson.db")
    with contextlib.closing(sqlite3.connect("file:%s?mode=ro" % path, uri=True)) as store:
        return store.execute("SELECT language, status FROM audit WHERE ended = 'given up by its caller'").fetchall()


def a_run_that_is_given_up_is_on_record(api):
    holds(not given_up(api.daemon), given_up(api.daemon))
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)
    body = json.dumps({"lang": "bash", "code": "echo begun; sleep 60"})
    connection.request("POST", "/exec/stream", body, {"X-API-Key": api.key, "Content-Type": "application/json"})
    response = connection.getresponse()
    heard = b""
    while b"begun" not in heard:
        piece = response.read1(1000)
        holds(piece, heard)
        heard += piece
    connection.close()
    response.close()
    rows = live.wait_until(lambda: given_up(api.daemon), 20)
    holds(rows == [("program", "error")], rows)


def hang_up(api, path, body, after_s):
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"X-API-Key": api.key, "Content-Type": "application/json"})
    time.sleep(after_s)
    connection.close()


def callers_that_hang_up(api):
    """Whatever they break off, they and their neighbours get sandboxes again."""
    def some(number):
        for turn in range(40):
            lang, code = [("py", "print(1)"), ("bash", "echo 1"), ("js", "1")][(number + turn) % 3]
            hang_up(api, "/exec/stream", {"lang": lang, "code": code}, (2, 4, 8, 15, 30)[turn % 5] / 1000)

    threads = [threading.Thread(target=some, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in (Api(api.daemon, "key-of-b"), api):
        for lang in ("js", "bash", "py"):
            each.run(lang, "1" if lang == "js" else "true" if lang == "bash" else "print(1)")


def files_that_nobody_waits_for(api):
    """A request that goes away while its files are laid: its session's next run finds a workspace that nobody else writes."""
    made = api.run("py", "open('in.bin', 'wb').write(bytes([7]) * 20_000)")
    files = [{"id": made["files"][0]["id"], "session_id": made["session_id"], "name": "in%d.bin" % n} for n in range(900)]
    code = "import os, time\nfound = os.listdir()\nfor f in found: os.remove(f)\ntime.sleep(0.7)\nprint(len(found), len(os.listdir()))"
    met = set()
    for turn in range(60):
        if len(met) == 2 and turn >= 8:
            break
        session = {"runtime_session_hint": "laid-%d" % turn}
        api.run("bash", "true", "", **session)
        hang_up(api, "/exec", {"lang": "bash", "code": "true", "files": files, **session}, 0.02 + 0.012 * turn)
        found, left = api.run("py", code, **session)["stdout"].split()
        holds(left == "0", "%s files came behind the run's back" % left)
        holds(found in ("0", "900"), "%s files of 900 were laid" % found)
        met.add(found)
    holds(len(met) == 2, "requests went away before their files were laid, or after it: %s" % met)


def a_refused_run_leaves_the_names(api):
    """The bytes of a file are gone from the store: what wants it is refused before it runs, and takes no names along."""
    entity = {"entity_id": "refused"}
    api.run("py", "x = 41", "", **entity)
    made = api.run("py", "open('input.txt', 'w').write('y' * 70001)")
    output = made["files"][0]
    blobs = [it for it in glob.glob(os.path.join(api.daemon.scratch, "data", "**", "*"), recursive=True) if os.path.isfile(it) and os.path.getsize(it) == 70001]
    holds(len(blobs) == 1, blobs)
    os.unlink(blobs[0])
    answer = api.post("py", "x = 0", files=[{"id": output["id"], "session_id": made["session_id"], "name": "input.txt"}], **entity)
    holds(answer.http != 200, answer)
    api.run("py", "print(x + 1)", "42\n", **entity)


def views(daemon):
    """Workspaces that the daemon holds."""
    return {it for it in live.descriptors(daemon.tree().daemon) if re.search("/views/0[0-9a-f]{15}$", it)}


def a_dead_kernel_lets_its_workspace_go(api):
    """Without waiting for a call, so that the next one finds the workspace free; whoever has ended it."""
    entity, others = {"entity_id": "dies"}, views(api.daemon)
    api.run("py", "open('kept.txt', 'w').write('kept'); None", "", **entity)
    [mine] = views(api.daemon) - others
    end = "import os, threading, time\ndef end():\n    time.sleep(0.5)\n    os.kill(os.getpid(), 9)\nthreading.Thread(target=end).start()"
    api.run("py", end, "", **entity)
    holds(live.wait_until(lambda: mine not in views(api.daemon), 10), "it is still held")
    api.run("py", "print(open('kept.txt').read())", "kept\n", **entity)
    for lang, code in ("bash", "cat kept.txt; echo"), ("py", "print(open('kept.txt').read())"):
        api.run("py", "kernel = 1", "", **entity)
        launcher = api.daemon.tree().launcher
        live.kill(launcher)
        holds(live.wait_until(lambda: api.daemon.tree().launcher not in (None, launcher), 30), "no launcher came")
        api.daemon.wait_until_healthy()
        api.run(lang, code, "kept\n", **entity)


def state_files(daemon, name):
    return glob.glob(os.path.join(daemon.scratch, "data", "**", name), recursive=True)


def spaces_that_nobody_owns_go_at_the_start(api):
    """And no other: not a session's, not one of a number that the store has not given out yet."""
    daemon = api.daemon
    api.run("py", "open('mine.txt', 'w').write('mine')", entity_id="owner")
    images = state_files(daemon, "*.img")
    holds(images, "control: a space is an image here")
    folder, numbers = os.path.dirname(images[0]), [int(os.path.basename(it)[:16], 16) for it in images]
    [path] = state_files(daemon, "caisson.db")
    with contextlib.closing(sqlite3.connect(path)) as store:
        # One was given out and is gone from the records.
        past = store.execute("INSERT INTO spaces (session) VALUES ('past')").lastrowid
        store.execute("DELETE FROM spaces WHERE space = ?", (past,))
        store.commit()
    holds(past not in numbers, (past, numbers))
    left = {name: os.path.join(folder, name) for name in ("%016x.img" % past, "%016x.img" % (past + 50), "%016x" % past, "odd")}
    for target in left.values():
        os.mkdir(target) if target.endswith("%016x" % past) else open(target, "w").close()
    launcher = daemon.tree().launcher
    live.kill(launcher)
    holds(live.wait_until(lambda: not os.path.exists(left["%016x.img" % past]), 60), "it is still there")
    daemon.wait_until_healthy()
    api.run("py", "print(open('mine.txt').read())", "mine\n", entity_id="owner")
    holds([name for name, target in left.items() if not os.path.exists(target)] == ["%016x.img" % past], os.listdir(folder))
    holds(all(os.path.exists(image) for image in images), (images, os.listdir(folder)))
    for target in list(left.values())[1:]:
        os.rmdir(target) if os.path.isdir(target) else os.unlink(target)


def a_lost_store_gives_nobody_what_is_there(api):
    """Not one space of an older store is deleted, and none is anybody's again, however many there are."""
    daemon = api.daemon
    api.run("py", "open('old.txt', 'w').write('old')", entity_id="of-the-old-store")
    folder = os.path.dirname(state_files(daemon, "*.img")[0])
    highest = max(int(it[:16], 16) for it in os.listdir(folder) if it.endswith(".img"))
    for number in range(highest + 1, highest + 200):
        open(os.path.join(folder, "%016x.img" % number), "w").close()
    there = set(os.listdir(folder))
    for path in state_files(daemon, "caisson.db*"):
        os.unlink(path)
    before = daemon.tree().daemon
    live.kill(before)
    holds(live.wait_until(lambda: daemon.tree().daemon not in (None, before), 30), "no daemon came")
    daemon.wait_until_healthy()
    for user in Api(daemon), Api(daemon, "key-of-b"):
        user.run("py", "import os; print(os.listdir())", "[]\n", entity_id="of-the-new-store")
    made = set(os.listdir(folder)) - there
    holds(there <= set(os.listdir(folder)), "%d spaces of the old store were deleted" % len(there - set(os.listdir(folder))))
    holds(len(made) == 2 and min(made) > max(there), made)
    # What is ended here goes at the next start as ever, and nothing else.
    [path] = state_files(daemon, "caisson.db")
    with contextlib.closing(sqlite3.connect(path)) as store:
        past = store.execute("SELECT min(space) FROM spaces WHERE session IS NOT NULL").fetchone()[0]
        store.execute("DELETE FROM spaces WHERE space = ?", (past,))
        store.commit()
    live.kill(daemon.tree().launcher)
    gone = "%016x.img" % past
    holds(live.wait_until(lambda: not os.path.exists(os.path.join(folder, gone)), 60), "it is still there")
    holds(there - set(os.listdir(folder)) == set(), there - set(os.listdir(folder)))


def what_a_program_leaves_running_ends_before_its_files_are_looked_at(api):
    """No clock bounds it any more, and looking at files takes as long as a guest makes it."""
    body = """
import os, time
for n in range(3):
    with open("hole%d" % n, "w") as f: f.truncate(140 << 20)
if os.fork() == 0:
    os.close(1), os.close(2)
    while True:
        with open("zz", "a") as f: f.write("%f\\n" % time.time())
        time.sleep(0.002)
time.sleep(0.05)
open("end", "w").write("%f" % time.time())
"""
    for lang, code in ("py", body), ("bash", "python3 - <<'E'\n" + body + "E\n"):
        begun = time.monotonic()
        made = api.run(lang, code)
        took = time.monotonic() - begun
        texts = {}
        for it in made["files"]:
            if it["name"] in ("end", "zz"):
                texts[it["name"]] = api.raw("GET", "/download/%s/%s" % (made["session_id"], it["id"]))[1]
        holds(set(texts) == {"end", "zz"}, made["files"])
        beats = float(texts["zz"].split()[-1]) - float(texts["end"])
        holds(beats < max(0.25, took / 3), "it went on for %.2f s of %.2f s" % (beats, took))


def what_a_kill_left_of_files_on_their_way_goes(api):
    """It is no output, and takes no room from a request's files."""
    entity = {"entity_id": "left"}
    made = api.run("py", "open('in.bin', 'wb').write(b'i' * (3 << 20)); None")
    file = {"id": made["files"][0]["id"], "session_id": made["session_id"], "name": "in.bin"}
    api.run("py", FILL, "28\n", **entity)
    left = "for f in .fill/*; do mv $f .caisson-$(printf %021d ${f#.fill/}); done"
    holds(api.run("bash", left, "", **entity)["files"] == [], "what is on its way is no output")
    api.run("bash", "ls -A; stat -c %s in.bin", ".fill\nin.bin\n%d\n" % (3 << 20), files=[file], **entity)
    api.run("bash", "echo x > .caisson-$(printf %021d 1)", "", **entity)
    api.run("bash", "ls -A", ".fill\nin.bin\n", **entity)


def files_of_a_request_are_laid_together(api):
    """All of them or none, before what is left of uploads, and what lies there stays where they do not fit."""
    entity = {"entity_id": "together"}

    def stored(**sizes):
        code = "\n".join("open('%s', 'wb').write(b'%s' * (%d << 18))" % (name, name[0], size) for name, size in sizes.items())
        made = api.run("py", code)
        return {it["name"]: {"id": it["id"], "session_id": made["session_id"], "name": it["name"]} for it in made["files"]}

    first = stored(a=12, b=12, small=1)
    api.run("bash", "stat -c %s a b", "%d\n%d\n" % (12 << 18, 12 << 18), files=[first["a"], first["b"]], **entity)
    # Named again, they need no room: not even when there is none.
    api.run("py", FILL, "28\n", **entity)
    api.run("bash", "stat -c %s a b", "%d\n%d\n" % (12 << 18, 12 << 18), files=[first["a"], first["b"]], **entity)
    # Changed ones that do not fit: nothing is changed, not even what would fit.
    second = stored(a=13, b=13)
    sums = api.run("bash", "md5sum a b; ls -AR", **entity)["stdout"]
    for files in [second["a"], second["b"]], [first["small"], second["a"]], [first["small"], {**second["b"], "name": "deep/er/b"}]:
        answer = api.post("bash", "true", files=files, **entity)
        holds(answer.http == 413, answer)
        api.run("bash", "md5sum a b; ls -AR", sums, **entity)
    # Before uploads that wait: of the two only one fits.
    api.run("bash", "rm b .fill/0", **entity)
    holds(api.upload("late", b"l" * (5 << 20), "together") == 200, "the upload")
    got = api.run("bash", "stat -c %s a; ls", "%d\na\n" % (13 << 18), files=[second["a"]], **entity)
    holds("late was not put into the workspace" in got["stderr"], got["stderr"])
    # And none takes the place of what is named.
    holds(api.upload("a/b", b"x", "together") == 200, "the upload")
    got = api.run("bash", "stat -c %s a", "%d\n" % (13 << 18), files=[second["a"]], **entity)
    holds("a/b was not put into the workspace" in got["stderr"], got["stderr"])
    answer = api.post("bash", "ls", files=[first["small"], {**first["small"], "name": "small/under"}])
    holds(answer.http == 409, answer)


def a_flood_ends_a_kept_python(api):
    """At the limit and not at the end of its time, whoever writes and however."""
    flooding = {
        "print": "while True: print('x' * 1000)",
        "write": "import os\nwhile True: os.write(1, b'x' * 1000)",
        "child": "import subprocess; subprocess.run(['yes'])",
        "stderr": "import sys\nwhile True: sys.stderr.write('x' * 100)",
        "once": "print('x' * 3_000_000)",
        "thread": "import threading, time\nthreading.Thread(target=lambda: [print('x' * 1000) for _ in range(10**9)]).start()\ntime.sleep(100)",
    }
    for name, code in flooding.items():
        entity = {"entity_id": "flood-" + name}
        stream, status = ("stderr", "EL") if name == "stderr" else ("stdout", "OL")
        api.run("py", "kept = 1", "", **entity)
        started = time.monotonic()
        got = api.run("py", code, **entity)
        said = "%s length exceeded" % stream
        holds((got["status"], got["message"]) == (status, said) and time.monotonic() - started < 20, (name, str(got)[-300:]))
        holds(got["stderr"].endswith(said + "\n") and "truncated" not in got["stderr"], (name, got["stderr"][-300:]))
        holds(len(got[stream]) >= 1 << 20 and len(got["stdout"]) <= 1 << 20, (name, len(got[stream])))
        api.run("py", "print('kept' in globals())", "False\n", **entity)
    # Up to the limit is no flood.
    api.run("py", "kept = 1\nprint('x' * ((1 << 20) - 1))", **entity)
    api.run("py", "print(kept)", "1\n", **entity)
    for lines in streamed(api, flooding["write"]), streamed(api, flooding["child"]):
        holds([it["message"] for it in lines if it["type"] == "error"] == ["stdout length exceeded"], lines[-3:])
        holds(sum(len(it["text"]) for it in lines if it["type"] == "stream") == 1 << 20, lines[-3:])


def streamed(api, code, **more):
    """The events of `/exec/stream`."""
    body = json.dumps({"lang": "py", "code": code, **more})
    status, answer = api.raw("POST", "/exec/stream", body, {"Content-Type": "application/json"})
    holds(status == 200, answer)
    return [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: ")]


def a_closed_descriptor_is_back(api):
    entity = {"entity_id": "closed"}
    for code in "import os, sys, subprocess; os.close(1); os.close(2)", "f = open('/dev/null', 'w'); os.dup2(f.fileno(), 1); os.dup2(1, 2); None":
        api.run("py", code, "", **entity)
        got = api.run("py", "print('out', flush=True)\nsubprocess.call(['echo', 'child']);\nprint('err', file=sys.stderr)", "out\nchild\n", **entity)
        holds(got["stderr"] == "err\n", got)


def shown(events):
    """What a client has that follows the events of a cell."""
    outputs, clears = [], False
    for it in events:
        if it["event"] == "clear" and it["wait"]:
            clears = True
        elif it["event"] == "clear":
            outputs = []
        elif it["event"] == "update":
            for output, name in outputs:
                if name == it["display_id"]:
                    output.update(data=it["data"], metadata=it["metadata"])
        elif it["event"] == "output":
            if clears:
                outputs, clears = [], False
            output = it["output"]
            if outputs and output["output_type"] == "stream" and outputs[-1][0].get("name") == output["name"]:
                outputs[-1][0]["text"] += output["text"]
            else:
                outputs.append((output, it.get("display_id")))
    return [output for output, _ in outputs]


def cells_are_told_in_the_order_of_their_outputs(api):
    """Random cells in a real kernel: what the events show is what the answer has."""
    rng = random.Random(20_26)
    steps = ["print('a')", "print('b')", "display('x')", "display('y')", "clear_output()", "clear_output(wait=True)", "sleep(0.003)",
             "sleep(0.02)", "h = display('old', display_id=True); h.update('new')", "sys.stdout.write('c')", "subprocess.run(['echo', 'child']); None"]
    codes = ["print(1)\ndisplay('x')\nprint(2)", "print(1)\nsleep(0.2)\nclear_output()\nprint(2)"]
    codes += ["\n".join(rng.choice(steps) for _ in range(rng.randrange(2, 25))) for _ in range(80)]
    head = "import sys, subprocess\nfrom time import sleep\nfrom IPython.display import clear_output, display\n"
    for code in codes:
        body = json.dumps({"language": "python", "code": head + code, "session_id": "told"})
        headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
        status, answer = api.raw("POST", "/v2/code/execute", body, headers)
        holds(status == 200, answer)
        events = [json.loads(line) for line in answer.decode().splitlines() if line.strip()]
        holds(events[-1]["event"] == "done" and events[-1]["success"], events[-1])
        told, wanted = shown(events[:-1]), events[-1]["data"]["outputs"]
        holds(told == wanted, "%s\n%s\n%s" % (code, told, wanted))


def processor_time_is_bounded(api):
    for lang, code in [("py", "while True: pass"), ("bash", "while :; do :; done"), ("js", "for (;;);"), ("py", "import os\nfor _ in range(3): os.fork()\nwhile True: pass")]:
        started = time.monotonic()
        got = api.run(lang, code, timeout=60000)
        holds("Time limit exceeded" in got["stderr"] and time.monotonic() - started < 30, got)
    # Waiting is not counted.
    api.run("py", "import time; time.sleep(3); print('up')", "up\n")


def kernels_are_no_more_than_there_may_be(api):
    """Three sessions at once where two may have an interpreter: each call is answered, or told to come again."""
    got = []

    def one(number):
        got.append(api.post("py", "import time; time.sleep(2); print(1)", entity_id="kernel-%d" % number))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holds(sorted(answer.http for answer in got) == [200, 200, 429], [str(it) for it in got])
    # Idle ones make room.
    api.run("py", "print(1)", "1\n", entity_id="kernel-3")


def workspaces_have_a_share(one, other):
    kept = 0
    while kept < 20:
        answer = one.post("bash", "true", runtime_session_hint="hint-%d" % kept)
        if answer.http != 200:
            break
        kept += 1
    holds((answer.http, kept) == (429, 3), (kept, answer))
    other.run("bash", "echo up", "up\n", runtime_session_hint="hint")
    one.run("bash", "echo up", "up\n", runtime_session_hint="hint-0")
    one.run("bash", "echo up", "up\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tests whose name holds this text")
    only = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = faults.Report()

    def series(daemon, tests):
        api = Api(daemon)
        for title, test in tests:
            if only in title:
                report.run(title, test, api)

    small = {**KEYS, "CAISSON_SPACE_BYTES": str(SPACE_MIB << 20)}
    try:
        with live.Daemon("sessions", small) as daemon:
            series(daemon, [
                ("another language leaves the names of a kept Python", another_language_leaves_its_names),
                ("an upload that does not fit is told of and stops nothing", an_upload_that_does_not_fit),
                ("a file with holes fits again", a_file_with_holes_goes_on),
                ("an output that a later run takes away can still be had", an_output_that_is_taken_away),
                ("a name with a backslash can be given back", a_name_with_a_backslash),
                ("a program that waits for tools does not hold its session", a_program_with_tools_leaves_the_turn),
                ("the time limit counts between tool calls", time_between_calls_is_its_own),
                ("calls of one id stop no clock", calls_of_one_id_stop_no_clock),
                ("the calls of a program have a bound", calls_have_a_bound),
                ("rounds of calls queue up", rounds_that_queue_up),
                ("a run that is given up is on record", a_run_that_is_given_up_is_on_record),
                ("a refused run leaves a session's names", a_refused_run_leaves_the_names),
                ("callers that hang up", callers_that_hang_up),
                ("files that nobody waits for", files_that_nobody_waits_for),
                ("files of a request are laid together or not at all", files_of_a_request_are_laid_together),
                ("what a kill left of files on their way goes", what_a_kill_left_of_files_on_their_way_goes),
                ("a dead kernel lets its workspace go", a_dead_kernel_lets_its_workspace_go),
                ("spaces that nobody owns go at the start", spaces_that_nobody_owns_go_at_the_start),
                ("a lost store gives nobody what is there", a_lost_store_gives_nobody_what_is_there),
            ])
        kernel = {**KEYS, "AIO_CODE_BACKEND": "auto", "CAISSON_PYTHON_ENV": PYTHON_ENV}
        with live.Daemon("sessions-kernel", kernel) as daemon:
            series(daemon, [
                ("a flood ends a kept Python at the limit", a_flood_ends_a_kept_python),
                ("what a program leaves running ends before its files are looked at", what_a_program_leaves_running_ends_before_its_files_are_looked_at),
                ("a closed descriptor is back for the next cell", a_closed_descriptor_is_back),
                ("a cell is told in the order of its outputs", cells_are_told_in_the_order_of_their_outputs),
            ])
        bounded = {**KEYS, "SUBPROCESS_MAX_CPU_SECONDS": "1", "MAX_SESSIONS": "2"}
        with live.Daemon("sessions-bounds", bounded) as daemon:
            series(daemon, [
                ("processor time is bounded", processor_time_is_bounded),
                ("kernels are no more than there may be", kernels_are_no_more_than_there_may_be),
            ])
        with live.Daemon("sessions-share", {**KEYS, "CAISSON_SPACES_MAX": "12"}) as daemon:
            if only in "workspaces have a share":
                report.run("workspaces of a key are a share of all", workspaces_have_a_share, Api(daemon), Api(daemon, "key-of-b"))
    except suites.Failed as error:
        report.note("daemon", str(error))
    finally:
        suites.end_all()
    print("suite sessions: %d passed, %d failed" % (report.passed, report.failed))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
