#!/usr/bin/env python3
"""Five callers try every id of each other, on every route of the real daemon that takes one.

    tests/tenants.py [--only TEXT]

Two keys, two proven users of one tenant and one of another. Each makes what has an id or a name, and asks with the ids of
each other what it asks with ids of the same form that never were: the answers must be the same, must hold nothing of the
owner's, and the owner must find all as it was. What is asked is held against the daemon's own document: a route, or a field
of one, that no caller has tried with the id of another fails, unless it stands in LEFT_OUT or PLAIN. At the end each asks
the same with its own ids: a route that answers that as it answers ids that never were would prove nothing.

Prints a line per test and `suite tenants: N passed, N failed`.
"""
import argparse
import base64
import concurrent.futures
import hashlib
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import types
import urllib.parse
import uuid

import faults
import files
import live
import sessions
import suites
from tenants_questions import COMMON, FAMILIES, LIBRECHAT, MCP, OF_ONE, OF_TENANT, Visit, never, references, steady

holds = sessions.holds

KEYS = os.path.join(suites.ROOT, "tests/keys")
SIGN = "process.stdout.write(crypto.sign('sha256', process.argv[1], fs.readFileSync(process.argv[2])))"
ENV = {
    "CODE_INTERPRETER_API_KEYS": "a=key-of-a,b=key-of-b",
    "CODE_INTERPRETER_URL_KEYS": "true",
    "AIO_CODE_BACKEND": "auto",  # Python's code sessions are the Jupyter plane's as well
    "AIO_KERNEL_MAX_SESSIONS": "40",
    "AIO_CODE_MAX_SESSIONS": "40",
    "AIO_BASH_MAX_SESSIONS": "40",
}
ONE_USER, ONE_AGENT, ONE_SKILL = "user-1", "agent-1", "skill-1"

# Routes that no caller's id reaches, each with the reason.
LEFT_OUT = {
    ("GET", "/"): "names and versions",
    ("GET", "/health"): "open to all; names no tenant",
    ("GET", "/v1/health"): "the same",
    ("GET", "/v1/ping"): "the same",
    ("GET", "/openapi.json"): "the document",
    ("GET", "/v1/openapi.json"): "the document",
    ("GET", "/v2/openapi.json"): "the document",
    ("GET", "/internal/auth"): "looks at a key only",
    ("GET", "/libraries"): "what is installed, the same for all",
    ("GET", "/v1/libraries"): "the same",
    ("GET", "/v1/capabilities"): "what this build can do",
    ("GET", "/v1/code/info"): "versions and limits",
    ("GET", "/v2/code/info"): "the same",
    ("GET", "/v1/jupyter/info"): "the same",
    ("GET", "/v1/nodejs/info"): "the same",
    ("GET", "/v1/sandbox"): "versions and folders",
    ("GET", "/v2/sandbox"): "the same",
    ("GET", "/v1/sandbox/packages/nodejs"): "what is installed",
    ("GET", "/v1/sandbox/packages/python"): "the same",
    ("GET", "/v2/sandbox/packages"): "the same",
}
# Routes whose answer to an owner is the one to anybody, each with the reason.
SAYS_NOTHING = {
    ("POST", "/mcp", "upload_file by header"): "tells of what was written",
    ("POST", "/mcp", "upload_file by argument"): "the same",
    ("POST", "/mcp", "reset_session by header"): "the same for what was never there",
    ("POST", "/mcp", "reset_session by argument"): "the same",
    ("POST", "/v2/fs/write"): "does not tell what it wrote over",
    ("POST", "/v1/file/write"): "the same",
    ("POST", "/v2/fs/upload"): "the same",
    ("POST", "/v1/file/upload"): "the same",
    ("PATCH", "/v1/nodejs/sessions/{id}"): "answers 404 whatever it is asked",
    ("POST", "/v1/jupyter/sessions/{id}/interrupt"): "501 for every id",
    ("POST", "/v1/jupyter/sessions/{id}/restart"): "501 for every id",
}
# Fields that lead to nothing of anybody's: programs, numbers, switches, names of accounts and signals.
PLAIN = set("""
    args async_mode append case_insensitive change_policy code command_text content context_after context_before cwd detail
    encoding end_line env exclude exec_dir file_text file_types files_only fixed_strings follow_symlinks hard_timeout
    ignore_case include include_hidden include_metadata include_permissions include_size input insert_line kernel_name lang
    language leading_newline max_depth max_file_size max_idle_time max_output_length max_results max_wait_seconds mode
    multiline new_str no_change_timeout offset old_str overwrite parents preserve_symlinks press_enter read_only recursive
    refresh regex replace_mode seconds shell show_hidden signal snapshot_path sort_by sort_desc start_line stateful
    stderr_offset strict sudo timeout tools trailing_newline truncate type user view_range wait wait_timeout glob pattern
    mcp-protocol-version
""".split())


# --- callers -----------------------------------------------------------------------------------------------------------


def token(tenant, user):
    """As LibreChat mints it, signed RS256. It is good for as long as one may be, five minutes."""
    now = int(time.time())
    claims = {"iss": "librechat", "aud": "codeapi", "sub": user, "tenant_id": tenant, "jti": uuid.uuid4().hex, "iat": now, "nbf": now,
              "exp": now + 300, "role": "USER", "principal_source": "librechat_jwt", "auth_context_hash": "5f2c"}
    told = lambda data: base64.urlsafe_b64encode(data).rstrip(b"=").decode()
    head = {"alg": "RS256", "typ": "JWT", "kid": "lc-codeapi-2026-05"}
    text = ".".join(told(json.dumps(part).encode()) for part in (head, claims))
    argv = ["node", "-e", SIGN, text, os.path.join(KEYS, "rsa.private.pem")]
    signature = subprocess.run(argv, env=suites.clean_env(), capture_output=True, check=True, timeout=60).stdout
    return "%s.%s" % (text, told(signature))


def public_key():
    with open(os.path.join(KEYS, "rsa.public.pem")) as f:
        return f.read()


class Crossed(AssertionError):
    """Something of one caller's was in the answer to another."""


def in_base64(text):
    """What `text` looks like in base64, wherever it begins; without its ends, which depend on what is around it."""
    return [base64.b64encode(b"\0" * shift + text)[4 if shift else 0:-4] for shift in range(3)]


class Caller:
    def __init__(self, daemon, name, tenant, user, headers=(), before="", proven=False):
        self.port, self.name, self.tenant, self.user, self.proven = daemon.port, name, tenant, user, proven
        self.headers, self.before = dict(headers), before  # what shows who it is
        self.mark = "mark%s" % secrets.token_hex(12)
        self.of_tenant = "mark%s" % hashlib.sha256(tenant.encode()).hexdigest()[:24]  # in what its whole tenant may see
        self.ids, self.others = types.SimpleNamespace(), []
        self.foreign = None  # of the others: what must not be shown, by whose it is and what
        self.looks = 0
        self.state = None

    def learn(self):
        """What is the others', once they have made it."""
        self.foreign = {}
        for other in self.others:
            for mark in [other.mark] + ([other.of_tenant] if other.tenant != self.tenant else []):
                self.foreign.update({form: (other, "mark") for form in [mark.encode(), *in_base64(mark.encode())]})
            names = [name for name in vars(other.ids) if name not in COMMON]
            if other.tenant == self.tenant:
                names = [name for name in names if not name.startswith(tuple(OF_TENANT))]
            self.foreign.update({getattr(other.ids, name).encode(): (other, name) for name in names})
        self.foreign_pattern = re.compile(b"|".join(re.escape(it) for it in sorted(self.foreign, key=len, reverse=True)))

    def request(self, method, path, body=None, headers=(), wait_s=60):
        """A reply, once it is sure that there is nothing of another's in it but the ids that were asked with."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=wait_s)
        sent = http.client.HTTPMessage()  # a header may be there twice
        if isinstance(body, (dict, list)):
            body, sent["Content-Type"] = json.dumps(body).encode(), "application/json"
        for name, value in [*self.headers.items(), *dict(headers).items()]:
            for each in value if isinstance(value, tuple) else [value]:
                sent[name] = each
        try:
            connection.putrequest(method, self.before + path)
            for name, value in sent.items():
                connection.putheader(name, value)
            if body is not None or method in ("POST", "PUT"):
                connection.putheader("Content-Length", str(len(body or b"")))
            connection.endheaders(body or None)
            response = connection.getresponse()
            head = {name.lower(): value for name, value in response.getheaders()}
            endless = method == "GET" and head.get("content-type") == "text/event-stream"
            reply = files.Reply(response.status, head, b"(a stream)" if endless else response.read(), False)
        finally:
            connection.close()
        shown = reply.content + str(head).encode()
        for found in self.foreign_pattern.findall(shown) if self.foreign else ():
            (owner, what), asked = self.foreign[found], urllib.parse.unquote_to_bytes(path) + (body or b"") + str(sent).encode()
            if what == "mark" or found not in asked:
                raise Crossed("%s %s shows to %s the %s of %s: %s" % (method, path, self.name, what, owner.name, reply))
        return reply

    def call(self, method, path, body=None, headers=(), status=200):
        reply = self.request(method, path, body, headers)
        holds(reply.status == status, "%s: %s %s: %s" % (self.name, method, path, reply))
        return reply.body

    def run(self, lang, code, route="/exec", **more):
        return self.call("POST", route, {"lang": lang, "code": code, **more})

    def upload(self, route, fields, contents):
        body, kind = sessions.form(fields, contents)
        return self.call("POST", route, body, {"Content-Type": kind})

    def mcp(self, method, params=None, session=None, headers=(), number=7):
        """One message of the protocol: a reply whose body is the message that came back."""
        message = {"jsonrpc": "2.0", "method": method, "params": params or {}, **({"id": number} if number else {})}
        return self.request("POST", "/mcp", message, {**MCP, **({"Mcp-Session-Id": session} if session else {}), **dict(headers)})

    def connect(self):
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "tenants", "version": "1"}}
        reply = self.mcp("initialize", hello)
        holds(reply.status == 200, reply)
        session = reply.headers["mcp-session-id"]
        self.mcp("notifications/initialized", session=session, number=None)
        return session

    def tool(self, name, connection, **arguments):
        reply = self.mcp("tools/call", {"name": name, "arguments": arguments}, connection)
        return event(reply)["result"]


def event(reply):
    """The last message of a stream, or the body."""
    lines = [line[6:] for line in reply.content.decode().splitlines() if line.startswith("data: {")]
    return json.loads(lines[-1]) if lines else reply.body


def callers(daemon):
    def bearer(*whose):
        return {"Authorization": "Bearer " + token(*whose)}

    everyone = [
        Caller(daemon, "key a", "a", "asserted", {"X-API-Key": "key-of-a"}),
        Caller(daemon, "key b", "b", "asserted", before="/k/key-of-b"),
        Caller(daemon, "user 1", "one", ONE_USER, bearer("one", ONE_USER), proven=True),
        Caller(daemon, "user 2", "one", "user-2", bearer("one", "user-2"), proven=True),
        # The same name in another tenant is somebody else.
        Caller(daemon, "user 1 of elsewhere", "other", ONE_USER, bearer("other", ONE_USER), proven=True),
    ]
    for caller in everyone:
        caller.others = [it for it in everyone if it is not caller]
    return everyone


# --- what each of them makes ---------------------------------------------------------------------------------------------

KEEP = "import os\nx = %r\nopen(%r, 'w').write(x)"
SPACES = ["/mnt/data", "/tmp", "/home/sandbox"]


def name_of(caller, what):
    """A name that nobody else would use."""
    return "%s-%s" % (what, secrets.token_hex(8))


def make(me):
    ids, mark = me.ids, me.mark
    ids.user, ids.agent, ids.skill, ids.call = me.user, ONE_AGENT, ONE_SKILL, "call_001"
    for what in ("entity", "hint", "named", "request", "code", "node", "box", "shell", "pathname"):
        setattr(ids, what, name_of(me, what))
    asserted = {} if me.proven else {"user_id": me.user}
    as_user = {} if me.proven else {"User-Id": me.user}

    def stored(what, answer):
        it = answer["files"][-1]
        session = answer.get("session_id") or it["session_id"]
        setattr(ids, what + "_session", session)
        setattr(ids, what + "_file", it.get("fileId") or it["id"])

    stored("run", me.run("py", KEEP % (mark, "run-%s.txt" % mark)))
    stored("next", me.run("bash", "echo %s > next.txt" % mark, session_id=ids.run_session))
    stored("entity", me.run("py", KEEP % (mark, "entity.txt"), entity_id=ids.entity, **asserted))
    form, kind = sessions.form({"entity_id": ids.entity}, {"placed.txt": mark.encode()})
    stored("placed", me.call("POST", "/upload", form, {"Content-Type": kind, **as_user}))
    holds(ids.placed_session == ids.entity_session, "an upload of an entity goes elsewhere")
    answer = me.run("bash", "echo %s > hint.txt" % mark, runtime_session_hint=ids.hint, **asserted)
    stored("hint", answer)
    ids.runtime = answer["runtime_session_id"]
    stored("upload", me.upload("/upload", {"kind": "user", "id": me.user, "read_only": "true"}, {"up-%s.csv" % mark: mark.encode()}))
    stored("batch", me.upload("/upload/batch", {}, {"one.txt": mark.encode(), "two/%s.txt" % mark: mark.encode()}))
    stored("agent", me.upload("/upload", {"kind": "agent", "id": ONE_AGENT}, {"agent.txt": me.of_tenant.encode()}))
    stored("skill", me.upload("/upload/batch", {"kind": "skill", "id": ONE_SKILL, "version": "4", "read_only": "true"}, {"s/SKILL.md": me.of_tenant.encode()}))
    # A file that its tenant may see, in a workspace that it may not.
    mixed = name_of(me, "mixed")
    me.run("py", KEEP % (mark, "private-%s.txt" % mark), entity_id=mixed)
    stored("mixed", me.upload("/upload", {"kind": "agent", "id": ONE_AGENT, "entity_id": mixed}, {"public.txt": me.of_tenant.encode()}))

    reply = me.request("POST", "/exec/stream", {"lang": "py", "code": KEEP % (mark, "streamed.txt")})
    stored("stream", event(reply))
    done = me.call("POST", "/exec/programmatic", {"code": KEEP % (mark, "ptc.txt"), "tools": []})
    stored("ptc", done)
    for request, what in ((ids.request, "waiting"), ("one-request", "named_waiting")):
        code = "x = %r\nprint(x)\nprint(await t(word=x), x)" % mark
        headers = {"X-LibreChat-Code-Request-ID": request}
        answer = me.call("POST", "/exec/programmatic", {"code": code, "tools": [{"name": "t"}]}, headers)
        holds(answer["status"] == "tool_call_required", answer)
        setattr(ids, what + "_token", answer["continuation_token"])
        setattr(ids, what + "_session", answer["session_id"])
    me.live = Live(me)
    ids.live_session = me.live.session

    ids.mcp = me.connect()
    me.tool("execute_code", ids.mcp, code=KEEP % (mark, "mcp.txt"))
    me.tool("execute_code", ids.mcp, code=KEEP % (mark, "named.txt"), session=ids.named)
    me.desk = me.connect()  # from which others' names are tried

    make_code(me)
    make_commands(me)
    ids.folder = "/mnt/data/folder"
    me.call("POST", "/v2/fs/mkdir", {"path": ids.folder, "parents": True})
    for path in ("/mnt/data/" + ids.pathname, ids.folder + "/same.txt", "/tmp/same.txt"):
        me.call("POST", "/v2/fs/write", {"path": path, "content": mark + "\n"})


def make_code(me):
    ids, mark = me.ids, me.mark
    python = {"language": "python", "code": "x = %r" % mark}
    me.call("POST", "/v2/code/execute", {**python, "session_id": ids.code, "cwd": "/mnt/data"})
    ids.minted = me.call("POST", "/v2/code/execute", {**python, "stateful": True})["data"]["session_id"]
    me.call("POST", "/v1/nodejs/execute", {"code": "globalThis.x = %r" % mark, "session_id": ids.node})


def make_commands(me):
    ids, mark = me.ids, me.mark
    me.request("DELETE", "/v2/commands/sessions/" + ids.box)
    me.call("POST", "/v1/shell/sessions/create", {"id": ids.shell, "exec_dir": "/mnt/data"})
    me.call("POST", "/v2/commands/sessions", {"id": ids.box, "env": {"x": mark}})
    me.call("POST", "/v1/shell/exec", {"id": ids.shell, "command": "x=%s; echo $x" % mark})
    ids.done = me.call("POST", "/v2/commands", {"command": "echo %s" % mark, "session": ids.box})["data"]["command_id"]
    ids.command = me.call("POST", "/v2/commands", {"command": "echo %s; read line; echo $line %s" % (mark, mark), "session": ids.box, "mode": "async"})["data"]["command_id"]


class Live:
    """A stream of a run that goes on."""

    def __init__(self, me):
        code = "import time\nprint(%r, flush=True)\nwhile True:\n  print(time.time(), flush=True); time.sleep(0.5)" % me.mark
        body = json.dumps({"lang": "py", "code": code}).encode()
        self.connection = http.client.HTTPConnection("127.0.0.1", me.port, timeout=30)
        self.connection.request("POST", me.before + "/exec/stream", body, {"Content-Type": "application/json", **me.headers})
        self.response = self.connection.getresponse()
        self.session = self.next()["session_id"]

    def next(self):
        while True:
            line = self.response.readline()
            holds(line, "the stream has ended")
            if line.startswith(b"data: "):
                return json.loads(line[6:])

    def goes_on(self, mark):
        """From its first word up to what it says now. It ends with its connection."""
        told, now = "", time.time()
        while not any(float(line) > now for line in told.split("\n")[1:-1]):
            told += self.next().get("text", "")
        holds(told.startswith(mark + "\n"), told[:200])
        self.response.close()
        self.connection.close()


# --- what an owner finds -------------------------------------------------------------------------------------------------


def look(me):
    """All that is the caller's, as it is now. What it runs for that changes nothing."""
    found, ids = {}, me.ids

    def note(what, value):
        found[what] = steady(value)

    for name in OF_ONE + OF_TENANT:
        where = "%s/%s" % (getattr(ids, name + "_session"), getattr(ids, name + "_file"))
        reply = me.request("GET", "/download/" + where)
        holds(reply.status == 200 and (me.of_tenant if name in OF_TENANT else me.mark).encode() in reply.content, "%s of %s: %s" % (name, me.name, reply))
        note(name + " bytes", [reply.content.decode(), reply.headers["etag"], reply.headers["content-disposition"]])
        note(name + " object", me.call("GET", "/sessions/%s/objects/%s" % tuple(where.split("/"))))
        note(name + " listing", me.call("GET", "/files/%s?detail=full" % where.split("/")[0]))
    asserted = {} if me.proven else {"user_id": me.user}
    where = "import os\nprint(globals().get('x'), sorted(os.listdir()))"
    for what, more in (("run", {"session_id": ids.run_session}), ("entity", {"entity_id": ids.entity, **asserted}), ("hint", {"runtime_session_hint": ids.hint, **asserted})):
        answer = me.run("py", where, **more)
        note(what + " workspace", [answer["session_id"], answer["stdout"], answer.get("runtime_status")])
    for what, more in (("connection", {}), ("named session", {"session": ids.named})):
        note("mcp " + what, [me.tool("execute_code", ids.mcp, code=where, **more)["structuredContent"]["stdout"], me.tool("list_files", ids.mcp, **more)])
    note("mcp resources", event(me.mcp("resources/list", session=ids.mcp)))
    me.looks += 1
    for session in (ids.code, ids.minted):
        answer = me.call("POST", "/v2/code/execute", {"language": "python", "code": "x", "session_id": session})
        note("code " + session, answer)
        note("cells of " + session, answer["data"]["execution_count"] - me.looks)
    note("node", me.call("POST", "/v1/nodejs/execute", {"code": "x", "session_id": ids.node}))
    note("shell", me.call("POST", "/v1/shell/view", {"id": ids.shell}))
    note("command", [me.call("GET", "/v2/commands/" + it) for it in (ids.command, ids.done)])
    for route in LISTS:
        note(route, me.call("GET", route))
    for folder in SPACES:
        listed = me.call("GET", "/v2/fs/list?recursive=true&path=" + folder)
        note(folder, listed)
        for it in listed["data"]["files"]:
            if not it["is_directory"] and it["path"].startswith(("/mnt/data", "/tmp")):
                note(it["path"], me.call("GET", "/v2/fs/read?path=" + urllib.parse.quote(it["path"])))
    return found


LISTS = ["/v2/code/sessions", "/v1/jupyter/sessions", "/v1/nodejs/sessions", "/v2/commands/sessions", "/v1/bash/sessions",
         "/v1/shell/sessions", "/v1/shell/sessions/stats"]


def unchanged(me):
    now = look(me)
    for what in sorted({*now, *me.state}):
        holds(now.get(what) == me.state.get(what), "%s was %s and is %s" % (what, me.state.get(what), now.get(what)))


# Where the contract has another's id told from one that never was: the answers that it has.
TOLD = {("POST", prefix + "/exec/programmatic", "token"): (403, 404) for prefix in LIBRECHAT}


def visits(report, me, only):
    """A caller tries the ids of each other."""
    for family, questions in FAMILIES.items():
        title = "%s tries %s" % (me.name, family)
        if only not in title:
            continue
        first = {}
        for owner in me.others:

            def test():
                if not first:
                    strangers = Visit(me, never(owner.ids))
                    questions(strangers)
                    first.update(strangers.answers)
                visit = Visit(me, owner.ids, owner)
                questions(visit)
                crossed = []
                for label, got in visit.answers.items():
                    wanted = first[label]
                    if got != wanted and (int(got[:3]), int(wanted[:3])) != TOLD.get(label):
                        at = len(os.path.commonprefix([got, wanted]))
                        told = [it if at < len(it.splitlines()[0]) else it[at:] for it in (got, wanted)]
                        crossed.append("%s %s (%s)" % label + " answered %s, and an id that never was %s" % tuple(it[:200] for it in told))
                holds(not crossed, "%d of %d: %s" % (len(crossed), len(visit.answers), "; ".join(crossed[:3])))

            report.run("%s of %s" % (title, owner.name), test)


# --- what is the same for all ----------------------------------------------------------------------------------------------


def equal_names(me):
    """A name that all have is each one's own. Everybody is here before anybody looks."""
    keep = "x = %r\nopen('same.txt', 'w').write(x)" % me.mark
    show = "print(x, open('same.txt').read())"
    me.run("py", keep, entity_id="same")
    me.run("bash", "echo %s > same.txt" % me.mark, runtime_session_hint="same")
    me.tool("execute_code", me.ids.mcp, code=keep, session="same")
    me.call("POST", "/v2/code/execute", {"language": "python", "code": "x = %r" % me.mark, "session_id": "same"})
    me.call("POST", "/v1/nodejs/execute", {"code": "globalThis.x = %r" % me.mark, "session_id": "same"})
    me.call("POST", "/v1/shell/sessions/create", {"id": "same"})
    me.call("POST", "/v1/shell/exec", {"id": "same", "command": "x=%s" % me.mark})
    me.call("POST", "/v2/commands", {"command": "echo %s" % me.mark, "session": "same-commands"})
    yield
    twice = "%s %s\n" % (me.mark, me.mark)
    got = [
        me.run("py", show, entity_id="same")["stdout"],
        me.run("bash", "cat same.txt same.txt | xargs", runtime_session_hint="same")["stdout"],
        me.tool("execute_code", me.ids.mcp, code=show, session="same")["structuredContent"]["stdout"],
    ]
    holds(got == [twice] * 3, got)
    got = [
        me.call("POST", "/v2/code/execute", {"language": "python", "code": "print(x)", "session_id": "same"})["data"]["stdout"].strip(),
        me.call("POST", "/v1/jupyter/execute", {"code": "print(x)", "session_id": "same"})["data"]["outputs"][0]["text"].strip(),
        me.call("POST", "/v1/nodejs/execute", {"code": "console.log(x)", "session_id": "same"})["data"]["stdout"].strip(),
        me.call("POST", "/v1/shell/exec", {"id": "same", "command": "echo $x"})["data"]["output"].strip(),
        me.call("POST", "/v1/bash/output", {"session_id": "same-commands"})["data"]["stdout"].strip(),
        event(me.mcp("resources/read", {"uri": "caisson://sessions/same/files/same.txt"}, me.ids.mcp))["result"]["contents"][0]["text"],
        me.call("GET", "/v2/fs/read?path=/mnt/data/folder/same.txt")["data"]["content"].strip(),
        me.call("GET", "/v2/fs/read?path=/tmp/same.txt")["data"]["content"].strip(),
    ]
    holds(got == [me.mark] * len(got), got)


def users_of_one_key(me):
    """What a client says of its users parts their names, whichever way it says it."""
    for how, said in (("user_id", lambda user: ({"user_id": user}, {})), ("User-Id", lambda user: ({}, {"User-Id": user}))):
        def run(code, user, **more):
            fields, headers = said(user)
            return me.call("POST", "/exec", {"lang": "py", "code": code, **fields, **more}, headers)

        for number, affinity in enumerate(({"entity_id": "team-" + how}, {"runtime_session_hint": "team-" + how})):
            made = {user: run("open('%s.txt', 'w').write('')" % user, user, **affinity)["session_id"] for user in ("ann", "bob")}
            holds(made["ann"] != made["bob"], "one session for both: %s" % made)
            for user in ("ann", "bob"):
                got = run("import os; print(os.listdir())", user, **affinity)
                holds((got["session_id"], got["stdout"]) == (made[user], "['%s.txt']\n" % user), got)
    # Whatever bytes their names have.
    for affinity in ({"entity_id": "team-names"}, {"runtime_session_hint": "team-names"}):
        names = [it.encode() for it in ("ann", "j\u00f6rg", "ren\u00e9", "a" * 500)] + [b"\xfe", b"\xff"]
        code = "x = globals().get('x', 0) + 1; open(str(x), 'a').write('1'); import os; print(sorted(os.listdir()))"
        made = {}
        for user in names:
            got = me.call("POST", "/exec", {"lang": "py", "code": code, **affinity}, {"User-Id": user})
            holds(got["stdout"] == "['1']\n", "%s: %s" % (user, got))
            made[got["session_id"]] = user
        holds(len(made) == len(names), made)
        holds(me.request("POST", "/exec", {"lang": "py", "code": code, **affinity}, {"User-Id": "a" * 513}).status == 400, "it is nobody")
    form, kind = sessions.form({"entity_id": "team-user_id"}, {"to-ann.txt": b"x"})
    me.call("POST", "/upload", form, {"Content-Type": kind, "User-Id": "ann"})
    for user, wanted in (("ann", "['ann.txt', 'to-ann.txt']\n"), ("bob", "['bob.txt']\n")):
        got = me.run("py", "import os; print(sorted(os.listdir()))", entity_id="team-user_id", user_id=user)["stdout"]
        holds(got == wanted, "%s has %s" % (user, got))


def a_user_that_is_proven(me):
    """What a request says of its user counts for nothing beside a token."""
    own = me.run("py", "x = 1", entity_id="proven")["session_id"]
    for user in [it.user for it in me.others] + ["nobody"]:
        for fields, headers in (({"user_id": user}, {}), ({}, {"User-Id": user}), ({"user_id": user}, {"User-Id": user})):
            got = me.call("POST", "/exec", {"lang": "py", "code": "print(x)", "entity_id": "proven", **fields}, headers)
            holds((got["session_id"], got["stdout"]) == (own, "1\n"), got)
        form, kind = sessions.form({"entity_id": "proven", "kind": "user", "id": user}, {"forged.txt": b"x"})
        sent = me.call("POST", "/upload", form, {"Content-Type": kind, "User-Id": user})
        holds(sent["session_id"] == own, sent)


def shared_in_a_tenant(me):
    """An agent's and a skill's files are their tenant's; the workspace around one is not."""
    for owner in me.others:
        for name, kind, more in (("agent", "agent", {}), ("skill", "skill", {"version": 4}), ("mixed", "agent", {})):
            session, file = getattr(owner.ids, name + "_session"), getattr(owner.ids, name + "_file")
            resource = ONE_SKILL if kind == "skill" else ONE_AGENT
            where = "/download/%s/%s" % (session, file)
            there = me.tenant == owner.tenant
            for query in ("", "?kind=%s&id=%s%s" % (kind, resource, "".join("&%s=%s" % it for it in more.items()))):
                reply = me.request("GET", where + query)
                holds((reply.status, reply.content == me.of_tenant.encode()) == ((200, True) if there else (404, False)), "%s of %s: %s" % (name, owner.name, reply))
            for how, reference in references(owner.ids, name, kind, **more):
                reply = me.request("POST", "/exec", {"lang": "py", "code": "import os; print(os.listdir(), open('f.txt').read())", "files": [reference]})
                holds(reply.status == (200 if there else 403), "%s %s of %s: %s" % (name, how, owner.name, reply))
                if there:
                    holds(reply.body["stdout"] == "['f.txt'] %s\n" % me.of_tenant and reply.body["session_id"] != session, reply.body)
            if there:
                reply = me.request("GET", where + "?kind=user&id=" + me.user)
                holds(reply.status == 403, reply)
                listed = me.call("GET", "/files/" + session)
                holds([it["id"] for it in listed] == [file], listed)


def equal_requests(me):
    """Each cancels its own request of a name that all have used."""
    me.call("POST", "/exec/programmatic/cancel", {"request_id": "one-request"})
    done = {"continuation_token": me.ids.named_waiting_token, "tool_results": [{"call_id": "call_001", "result": 1, "is_error": False}]}
    gone = live.wait_until(lambda: me.request("POST", "/exec/programmatic", done).status == 404, 10)
    holds(gone, "its program goes on")
    me.cancelled = True
    for other in me.others:
        if not getattr(other, "cancelled", False):
            reply = other.request("POST", "/exec/programmatic", {**done, "continuation_token": other.ids.named_waiting_token, "tool_results": [{"call_id": "call_999", "result": 1}]})
            holds(reply.status == 400 and b"call_999" in reply.content, "that of %s does not wait any more: %s" % (other.name, reply))


def clear_all(me):
    """What ends all sessions ends one's own."""
    before = {other.name: [other.call("GET", route) for route in LISTS] for other in me.others}
    for route in ("/v2/code/sessions", "/v1/jupyter/sessions", "/v1/nodejs/sessions", "/v1/shell/sessions"):
        me.call("DELETE", route)
        holds(not me.call("GET", route)["data"]["sessions"], "%s left some" % route)
    for other in me.others:
        after = [other.call("GET", route) for route in LISTS]
        holds(steady(after) == steady(before[other.name]), "%s has %s, and had %s" % (other.name, after, before[other.name]))
        for route in ("/v2/code/sessions", "/v1/jupyter/sessions", "/v1/nodejs/sessions", "/v1/shell/sessions"):
            Visit.tried.setdefault(("DELETE", route), (set(), set()))[0].add((other.name, me.name))
        for route in LISTS:
            Visit.tried.setdefault(("GET", route), (set(), set()))[0].add((other.name, me.name))
    make_code(me)
    make_commands(me)


def goes_on(me):
    """What waited all the while is taken up by its owner."""
    ids = me.ids
    answer = me.call("POST", "/exec/programmatic", {"continuation_token": ids.waiting_token, "tool_results": [{"call_id": "call_001", "result": "back", "is_error": False}]})
    holds((answer["status"], answer["stdout"], answer["session_id"]) == ("completed", "%s\nback %s\n" % (me.mark, me.mark), ids.waiting_session), answer)
    me.live.goes_on(me.mark)
    me.call("POST", "/v2/commands/%s/stdin" % ids.command, {"input": "on\n"})
    ended = me.call("GET", "/v2/commands/%s?wait=true&offset=%d" % (ids.command, len(me.mark) + 1))["data"]
    holds(ended["stdout"] == "on %s\n" % me.mark, ended)


def own_ids(me, sharp):
    """The same questions with one's own ids: which of them are answered as nobody else is? Nothing of the caller's is left."""
    for family, questions in FAMILIES.items():
        RESTORE[family](me)
        strangers, visit = Visit(me, never(me.ids)), Visit(me, me.ids, me)
        questions(strangers)
        questions(visit)
        for label, got in visit.answers.items():
            told = sharp.setdefault(question(*label), [])
            told += [label] if got != strangers.answers[label] else []
        # What was deleted by a question before it is there again for this one.
        for label, again in visit.again.items():
            if not sharp[question(*label)] and question(*label) not in SAYS_NOTHING:
                RESTORE[family](me)
                sharp[question(*label)] += [label] if again() != strangers.answers[label] else []


def question(method, route, note):
    """What must tell an owner from anybody: a route, and at one for all messages each of them."""
    return (method, route) if route != "/mcp" else (method, route, note)


def make_waiting(me):
    me.request("POST", "/exec/programmatic/cancel", {"request_id": me.ids.request})
    me.call("POST", "/exec/programmatic", {"code": "await t()", "tools": [{"name": "t"}]}, {"X-LibreChat-Code-Request-ID": me.ids.request})


# What a question could have taken away, made again under the names that it had.
RESTORE = {
    "stored files": lambda me: None,
    "runs": make_waiting,
    "the protocol": lambda me: me.tool("execute_code", me.desk, code=KEEP % (me.mark, "named.txt"), session=me.ids.named),
    "code sessions": make_code,
    "commands": make_commands,
    "paths": lambda me: me.call("POST", "/v2/fs/write", {"path": "/mnt/data/" + me.ids.pathname, "content": me.mark}),
}


def fields_of(document, operation):
    """What a request may hold, by name."""
    names = {it["name"].lower() if it["in"] == "header" else it["name"] for it in operation.get("parameters", [])}
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content.get("schema", {})
        for each in [schema, *schema.get("oneOf", [])]:
            if "$ref" in each:
                names |= {*document["components"]["schemas"][each["$ref"].rpartition("/")[2]].get("properties", {})}
    return names


def everything_is_tried(everyone, sharp):
    document = everyone[0].call("GET", "/openapi.json")
    for other in ("/v1/openapi.json", "/v2/openapi.json"):
        missing = {*everyone[0].call("GET", other)["paths"]} - {*document["paths"]}
        holds(not missing, "%s has %s beyond /openapi.json" % (other, missing))
    pairs = {(owner.name, who.name) for who in everyone for owner in who.others}
    routes, wrong = set(), []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            route = (method.upper(), path)
            routes.add(route)
            if route in LEFT_OUT:
                continue
            tried, fields = Visit.tried.get(route, (set(), set()))
            if pairs - tried:
                wrong.append("%s %s is not tried with another's ids by %d of %d pairs" % (*route, len(pairs - tried), len(pairs)))
            elif fields_of(document, operation) - fields - PLAIN:
                wrong.append("%s %s is tried without %s" % (*route, sorted(fields_of(document, operation) - fields - PLAIN)))
    wrong += ["%s %s is left out, and is no route" % route for route in LEFT_OUT if route not in routes]
    wrong += ["%s %s is left out, and is tried" % route for route in LEFT_OUT if route in Visit.tried]
    wrong += ["%s answers an owner as it answers anybody" % " ".join(route) for route, told in sharp.items() if not told and route not in SAYS_NOTHING]
    wrong += ["%s says nothing, and did" % " ".join(route) for route in SAYS_NOTHING if sharp.get(route)]
    listed = event(everyone[0].mcp("tools/list", session=everyone[0].connect()))["result"]["tools"]
    for how in ("", " behind mine", " before mine", " by argument", " by header"):
        wrong += ["the tool %s is not tried%s" % (it["name"], how) for it in listed if ("POST", "/mcp", it["name"] + how) not in sharp]
    holds(not wrong, "\n    ".join(wrong))


# --- all of it -------------------------------------------------------------------------------------------------------------


def for_each(everyone, what):
    """At once: what takes time is mostly the daemon."""
    with concurrent.futures.ThreadPoolExecutor(len(everyone)) as pool:
        return list(pool.map(what, everyone))


def all_tests(report, daemon, only):
    everyone = callers(daemon)

    def each(title, test, among=everyone):
        for_each(among, lambda me: report.run("%s: %s" % (me.name, title), test, me))

    for_each(everyone, make)
    for me in everyone:
        me.learn()
    names = {me.name: equal_names(me) for me in everyone}
    for_each(everyone, lambda me: next(names[me.name]))
    each("a name that all have is its own", lambda me: next(names[me.name], None))
    each("users that it tells of are parted", users_of_one_key, [it for it in everyone if not it.proven])
    each("a proven user is no other by its word", a_user_that_is_proven, [it for it in everyone if it.proven])
    each("agents' and skills' files are its tenant's", shared_in_a_tenant)
    for_each(everyone, lambda me: setattr(me, "state", look(me)))
    for_each(everyone, lambda me: visits(report, me, only))
    each("all is as it was", unchanged)
    for me in everyone:
        report.run("%s: a request is cancelled for its own caller" % me.name, equal_requests, me)
    each("what waited goes on", goes_on)
    for me in everyone:
        report.run("%s: ending all sessions ends its own" % me.name, clear_all, me)
    sharp = {}
    if not only:
        me = everyone[2]
        report.run("%s: its own ids are answered" % me.name, own_ids, me, sharp)
        report.run("every route and field is tried, and would have told", everything_is_tried, everyone, sharp)
    return sharp


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="of the visits, those whose title holds this text")
    only = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = faults.Report()
    try:
        with live.Daemon("tenants", {**ENV, "CODEAPI_JWT_PUBLIC_KEY": public_key()}) as daemon:
            all_tests(report, daemon, only)
    except suites.Failed as error:
        report.note("daemon", str(error))
    except AssertionError as error:
        report.note("what all make, and find before they are visited", str(error))
    finally:
        suites.end_all()
    print("suite tenants: %d passed, %d failed" % (report.passed, report.failed))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
