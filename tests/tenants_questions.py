"""What a caller of `tenants.py` asks with the ids of another, with ids that never were, and with its own."""
import json
import random
import re
import string
import threading
import types
import urllib.parse
import uuid

import sessions

holds = sessions.holds

MCP = {"Accept": "application/json, text/event-stream"}
# Ids that several callers have by the same name.
COMMON = {"user", "agent", "skill", "call", "folder"}
# Stored files by the name of their ids: `<name>_session` and `<name>_file`.
OF_ONE = ["run", "next", "entity", "placed", "hint", "upload", "batch", "stream", "ptc"]
OF_TENANT = ["agent", "skill", "mixed"]
# What differs from one answer to the next by itself.
VOLATILE = {"wall_time", "cpu_time", "age_seconds", "created_at", "last_used", "last_used_at", "modified_time", "duration_ms",
            "execution_count", "msg_id", "memory"}
OF_EVERY_ANSWER = {"date", "x-tt-logid", "content-length"}


def steady(value):
    if isinstance(value, dict):
        return {key: steady(it) for key, it in value.items() if key not in VOLATILE}
    return [steady(it) for it in value] if isinstance(value, list) else value


def like(value):
    """An id of the same form that never was."""
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value):
        return str(uuid.uuid4())
    if re.fullmatch(r"[0-9a-f]{32}", value):
        return uuid.uuid4().hex
    head = re.match(r"([a-z]+[_-])?", value).group(0)
    return head + "".join(random.choice(string.ascii_letters + string.digits) for _ in value[len(head):])


def never(ids):
    return types.SimpleNamespace(**{name: value if name in COMMON else like(value) for name, value in vars(ids).items()})


# Times and ids that a daemon makes.
MADE = (r"\d{4}-\d\d-\d\dT[\d:.]+Z|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<![\w-])[0-9a-f]{32}(?![\w-])"
        r"|(?<![\w-])(?=[\w-]*[A-Z0-9_])[\w-]{21}(?![\w-])")


class Visit:
    """One caller with one set of ids: every question, in the same order each time, and the answers to them."""

    tried = {}  # by route: pairs of owner and visitor, and names of the fields that held an id
    lock = threading.Lock()

    def __init__(self, who, ids, owner=None):
        self.who, self.ids, self.owner = who, ids, owner
        # What a colleague has of an agent or a skill is the caller's as well.
        colleague = owner and owner is not who and owner.tenant == who.tenant
        self.files = OF_ONE + ([] if colleague else OF_TENANT)
        self.answers, self.again = {}, {}
        self.known = {value: "<%s>" % name for name, value in vars(ids).items() if name not in COMMON}
        given = "|".join(re.escape(it) for it in sorted(self.known, key=len, reverse=True))
        self.ids_pattern = re.compile("(%s)|%s" % (given, MADE))

    def ask(self, method, route, ids=None, note="", query=None, body=None, headers=None, form=None):
        """`ids` fill the path; `form`: fields and files."""
        path = route.format(**{name: urllib.parse.quote(value, safe="") for name, value in (ids or {}).items()})
        path += "?" + urllib.parse.urlencode(query) if query else ""
        headers = dict(headers or {})
        fields = {*(ids or {}), *(query or {}), *(name.lower() for name in headers)}
        if form:
            body, headers["Content-Type"] = sessions.form(*form)
            fields |= {*form[0], "file"}
        elif isinstance(body, dict):
            fields |= {*body}
        reply = self.who.request(method, path, body, headers)
        label = (method, route, note)
        holds(label not in self.answers, "asked twice: %s %s %s" % label)
        self.answers[label] = self.normal(reply)
        self.again[label] = lambda: self.normal(self.who.request(method, path, body, headers))
        if self.owner and self.owner is not self.who:
            with Visit.lock:
                pairs, known = Visit.tried.setdefault((method, route), (set(), set()))
                pairs.add((self.owner.name, self.who.name))
                known |= fields
        return reply

    def normal(self, reply):
        """The answer without the ids it was asked with, and without what no two answers share."""
        if isinstance(reply.body, (dict, list)):
            text = json.dumps(steady(reply.body), sort_keys=True)
        elif reply.headers.get("content-type") == "text/event-stream":
            events = [json.loads(line[6:]) for line in reply.content.decode().splitlines() if line.startswith("data: {")]
            text = json.dumps(steady(events), sort_keys=True)
        else:
            text = reply.content.decode(errors="replace")
        head = json.dumps({name: value for name, value in reply.headers.items() if name not in OF_EVERY_ANSWER}, sort_keys=True)
        text = "%d %s\n%s" % (reply.status, text, head)
        return self.ids_pattern.sub(lambda it: self.known[it.group(1)] if it.group(1) else "<made>", text)


LIBRECHAT = ["", "/v1"]
LOOK = "import os\nprint(globals().get('x'), sorted(os.listdir()))"


def stored_files(visit):
    it, me = visit.ids, visit.who.ids
    of_file = "/download/{session_id}/{file_id}", "/sessions/{session_id}/objects/{file_id}"
    looks = [(method, prefix + route) for prefix in LIBRECHAT for route in of_file for method in ("GET", "HEAD")]
    looks += [("GET", prefix + "/files/{session_id}") for prefix in LIBRECHAT]
    deletes = [("DELETE", prefix + route) for prefix in LIBRECHAT for route in ("/files/{session_id}/{file_id}", of_file[1])]
    forged = [
        ("as its user's", {"kind": "user", "id": it.user, "entity_id": it.entity}, {"User-Id": it.user}),
        ("as an agent's", {"kind": "agent", "id": it.agent}, {}),
        ("as a skill's", {"kind": "skill", "id": it.skill, "version": "4"}, {}),
    ]

    def ask(route, note, session, file, query=None, headers=None):
        ids = {"session_id": session, "file_id": file} if "{file_id}" in route[1] else {"session_id": session}
        visit.ask(*route, ids, note, query, headers=headers)

    def numbered():
        return enumerate((name, getattr(it, name + "_session"), getattr(it, name + "_file")) for name in visit.files)

    for number, (name, *pair) in numbered():
        for route in looks:
            ask(route, name, *pair)
        # Each way to lie has its turn on each route, with one file or another.
        for turn, (how, query, headers) in enumerate(forged * 3):
            ask(looks[(number + turn) % len(looks)], "%s %s" % (name, how), *pair, query, headers)
        for detail in ("simple", "summary", "full", "normalized"):
            ask(looks[-1], "%s %s" % (name, detail), *pair, {"detail": detail})
        if visit.owner is not visit.who:
            for route in looks[number % 2:4:2] + deletes[number % 2::2]:
                ask(route, name + " in my session", me.run_session, pair[1])
                ask(route, name + " with my file", pair[0], me.run_file)
    # The first that asks for a file is the one that an owner would be heard by, so each spelling has its turn at that.
    for number, (name, *pair) in numbered():
        for turn in range(4):
            route = deletes[(number + turn) % 4]
            for how, query, headers in forged if turn == 0 else [("", None, None)]:
                ask(route, "%s %s" % (name, how), *pair, query, headers)


def references(it, name, kind="user", **more):
    """A file as the clients of both generations name it in a request."""
    session, file = getattr(it, name + "_session"), getattr(it, name + "_file")
    yield "classic", {"id": file, "session_id": session, "name": "f.txt"}
    resource = {"user": it.user, "agent": it.agent, "skill": it.skill}[kind]
    yield "current as " + kind, {"id": file, "resource_id": resource, "storage_session_id": session, "name": "f.txt", "kind": kind, **more}


def runs(visit):
    it = visit.ids
    routes = [prefix + route for prefix in LIBRECHAT for route in ("/exec", "/exec/stream", "/exec/programmatic")]

    def run(route, note, lang="bash", **more):
        headers = {"User-Id": it.user} if "user_id" in more else {}
        code = LOOK if lang == "py" else "ls -A"
        return visit.ask("POST", route, None, note, body={"lang": lang, "code": code, **more}, headers=headers)

    kinds = [("user", {}), ("agent", {}), ("skill", {"version": 4})]
    for number, name in enumerate(visit.files):
        for kind, more in kinds:
            for how, reference in references(it, name, kind, **more):
                if how != "classic" or kind == "user":
                    for route in routes if number == 0 else [routes[number % 6]]:
                        run(route, "%s %s" % (name, how), files=[reference])
    continued = ["run", "entity", "hint", "upload", "stream", "ptc", "waiting", "live", "mixed", "agent"]
    for number, name in enumerate(continued):
        # An owner's own that runs now is waited for.
        if name != "live" or visit.owner is not visit.who:
            run(routes[number % 6], name + "_session as session_id", session_id=getattr(it, name + "_session"))
    run("/exec", "runtime_session_id as session_id", session_id=it.runtime)
    for number, route in enumerate(routes):
        answered = run(route, "session and hint and user", session_id=it.next_session, runtime_session_hint=it.hint, user_id=it.user)
        holds(answered.status == 200, answered)
        if "programmatic" not in route:
            run(route, "entity and user", "py" if number == 0 else "bash", entity_id=it.entity, user_id=it.user)
    for prefix in LIBRECHAT:
        again = {"continuation_token": it.waiting_token, "tool_results": [{"call_id": it.call, "result": 1, "is_error": False}]}
        visit.ask("POST", prefix + "/exec/programmatic", None, "token", body=again, headers={"User-Id": it.user})
        visit.ask("POST", prefix + "/exec/programmatic/cancel", None, "", body={"request_id": it.request}, headers={"User-Id": it.user})
        for route in ("/upload", "/upload/batch"):
            mine, headers = {"theirs.txt": b"theirs"}, {"User-Id": it.user}
            visit.ask("POST", prefix + route, None, "entity", headers=headers, form=({"entity_id": it.entity, "kind": "user", "id": it.user}, mine))
            visit.ask("POST", prefix + route, None, "skill", headers=headers, form=({"kind": "skill", "id": it.skill, "version": "4"}, mine))


def protocol(visit):
    it, me = visit.ids, visit.who
    calls = {
        "list_files": {}, "read_file": {"path": "named.txt"}, "delete_file": {"path": "named.txt"}, "run_command": {"command": "ls"},
        "execute_code": {"code": LOOK}, "upload_file": {"path": "mine.txt", "content": "mine"}, "reset_session": {"delete_files": True},
    }

    def say(note, method, params=None, headers=()):
        message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params or {}}
        return visit.ask("POST", "/mcp", None, note, body=message, headers={**MCP, **dict(headers)})

    resource = "caisson://sessions/%s/files/named.txt" % it.named
    # From a connection of one's own: the other's name, as an argument, in the resource and in the header.
    mine = {"Mcp-Session-Id": me.desk}
    say("resource of a name", "resources/read", {"uri": resource}, mine)
    say("list by header", "resources/list", headers={**mine, "X-Caisson-Session": it.named})
    say("read by header", "resources/read", {"uri": "caisson://files/named.txt"}, {**mine, "X-Caisson-Session": it.named})
    for tool, arguments in calls.items():
        say(tool + " by header", "tools/call", {"name": tool, "arguments": arguments}, {**mine, "X-Caisson-Session": it.named})
    for tool, arguments in calls.items():
        say(tool + " by argument", "tools/call", {"name": tool, "arguments": {**arguments, "session": it.named}}, mine)
    # Without a connection, as the revision without sessions has it.
    alone = {"MCP-Protocol-Version": "2026-07-28"}
    meta = {"_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}}
    for method, params in (("resources/read", {"uri": resource}), ("tools/call", {"name": "list_files", "arguments": {"session": it.named}})):
        name = {"Mcp-Method": method, "Mcp-Name": params.get("name", params.get("uri"))}
        say("alone " + method, method, {**params, **meta}, {**alone, **name})
    # The other's connection.
    for how, headers in (("", {"Mcp-Session-Id": it.mcp}), (" behind mine", {"Mcp-Session-Id": (me.desk, it.mcp)}), (" before mine", {"Mcp-Session-Id": (it.mcp, me.desk)})):
        for method, params in (("tools/list", None), ("resources/list", None), ("resources/read", {"uri": "caisson://files/mcp.txt"}), ("ping", None)):
            say(method + how, method, params, headers)
        for tool, arguments in calls.items():
            say(tool + how, "tools/call", {"name": tool, "arguments": arguments}, headers)
        visit.ask("POST", "/mcp", None, "cancelled" + how, body={"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}, headers={**MCP, **headers})
        visit.ask("GET", "/mcp", None, "listen" + how, headers={"Accept": "text/event-stream", **headers})
        visit.ask("GET", "/mcp", None, "resume" + how, headers={"Accept": "text/event-stream", "Last-Event-ID": "0/0", **headers})
    for how, headers in ((" behind mine", (me.desk, it.mcp)), (" before mine", (it.mcp, me.desk)), ("", it.mcp)):
        if visit.owner is not visit.who or not how:
            visit.ask("DELETE", "/mcp", None, "leave" + how, headers={"Mcp-Session-Id": headers})


def code_sessions(visit):
    it = visit.ids
    for what in ("code", "minted", "node"):
        name = getattr(it, what)
        for plane, methods in (("/v2/code", ("GET", "DELETE")), ("/v1/jupyter", ("GET", "DELETE")), ("/v1/nodejs", ("GET", "PATCH", "DELETE"))):
            for method in methods:
                visit.ask(method, plane + "/sessions/{id}", {"id": name}, what)
        for verb in ("interrupt", "restart"):
            visit.ask("POST", "/v1/jupyter/sessions/{id}/" + verb, {"id": name}, what)
        # Asked to run, a name that is not there yet is begun.
        python = {"language": "python", "code": "globals().get('x')", "session_id": name}
        script = {"code": "typeof x === 'undefined' ? null : x", "session_id": name}
        visit.ask("POST", "/v2/code/execute", None, what, body=python)
        visit.ask("POST", "/v1/code/execute", None, what, body=python)
        visit.ask("POST", "/v1/jupyter/execute", None, what, body=python)
        if what == "node":
            visit.ask("POST", "/v1/nodejs/execute", None, what, body=script)
            visit.ask("POST", "/v2/code/execute", None, what + " javascript", body={**script, "language": "javascript"})
        visit.ask("DELETE", "/v2/code/sessions/{id}", {"id": name}, what + " of mine")
        for route in ("/v2/code/sessions", "/v1/jupyter/sessions/create", "/v1/nodejs/sessions"):
            visit.ask("POST", route, None, what, body={"session_id": name, "language": "python"})
        visit.ask("DELETE", "/v2/code/sessions/{id}", {"id": name}, what + " made by me")


def commands(visit):
    it = visit.ids
    for what in ("command", "done"):
        one = {"command_id": getattr(it, what)}
        visit.ask("GET", "/v2/commands/{command_id}", one, what, {"offset": 0, "stderr_offset": 0})
        visit.ask("POST", "/v2/commands/{command_id}/stdin", one, what, body={"input": "theirs\n"})
        visit.ask("POST", "/v2/commands/{command_id}/kill", one, what, body={"signal": "SIGKILL"})
    named = {"session_id": it.box, "command_id": it.command}
    for how, more in (("", {"session_id": it.box}), (" with its command", named)):
        visit.ask("POST", "/v1/bash/output", None, how, body=more)
        visit.ask("POST", "/v1/bash/write", None, how, body={**more, "input": "theirs\n"})
        visit.ask("POST", "/v1/bash/kill", None, how, body={**more, "signal": "SIGKILL"})
    for what in ("shell", "box"):
        name = getattr(it, what)
        for verb, more in (("view", {}), ("wait", {"seconds": 1}), ("write", {"input": "theirs"}), ("kill", {}), ("exec", {"command": "echo $x"})):
            visit.ask("POST", "/v1/shell/" + verb, None, what, body={"id": name, **more})
        visit.ask("POST", "/v1/shell/sessions/update", None, what, body={"id": name, "no_change_timeout": 3})
        visit.ask("DELETE", "/v1/shell/sessions/{session_id}", {"session_id": name}, what)
        visit.ask("DELETE", "/v2/commands/sessions/{session_id}", {"session_id": name}, what)
        visit.ask("POST", "/v1/bash/sessions/{session_id}/close", {"session_id": name}, what)
        # Asked to run, a name that is not there yet is begun; with the command's id it is still not that session's.
        visit.ask("POST", "/v2/commands", None, what, body={"command": "echo ${x-none}", "session": name})
        visit.ask("POST", "/v1/bash/output", None, what + " of mine", body={"session_id": name, "command_id": it.command})
        visit.ask("POST", "/v1/bash/write", None, what + " of mine", body={"session_id": name, "command_id": it.command, "input": "x"})
        visit.ask("POST", "/v1/bash/kill", None, what + " of mine", body={"session_id": name, "command_id": it.command})
        visit.ask("POST", "/v1/bash/sessions/{session_id}/close", {"session_id": name}, what + " of mine")
        visit.ask("POST", "/v1/bash/exec", None, what, body={"command": "echo ${x-none}", "session_id": name})
        visit.ask("DELETE", "/v2/commands/sessions/{session_id}", {"session_id": name}, what + " of mine")
        for route, field in (("/v2/commands/sessions", "id"), ("/v1/bash/sessions/create", "session_id"), ("/v1/shell/sessions/create", "id")):
            visit.ask("POST", route, None, what, body={field: name})
        visit.ask("DELETE", "/v2/commands/sessions/{session_id}", {"session_id": name}, what + " made by me")
        visit.ask("DELETE", "/v1/shell/sessions/{session_id}", {"session_id": name}, what + " made by me")


def paths(visit):
    name, mine = visit.ids.pathname, "/mnt/data/visit.txt"
    path = "/mnt/data/" + name

    def v2(method, verb, note="", body=None, **query):
        visit.ask(method, "/v2/fs/" + verb, None, note, query, body)

    def v1(verb, note="", **body):
        visit.ask("POST", "/v1/file/" + verb, None, note, body=body)

    v2("GET", "stat", path=path)
    v2("GET", "read", path=path)
    v2("GET", "download", path=path)
    v2("HEAD", "download", path=path)
    v2("GET", "tree", path=path)
    v2("GET", "list", path=path)
    v2("GET", "search", path=path, pattern="*")
    v2("GET", "search", "by name", path="/mnt/data", pattern=name)
    v2("POST", "grep", body={"path": path, "pattern": "mark"})
    v2("POST", "edit", body={"command": "view", "path": path})
    v2("POST", "edit", "replace", {"command": "str_replace", "path": path, "old_str": "mark", "new_str": "gone"})
    v2("POST", "copy", body={"source": path, "destination": mine, "overwrite": True})
    v1("read", file=path)
    v1("stat", path=path)
    v1("list", path=path)
    v1("find", path="/mnt/data", glob=name)
    v1("glob", path="/mnt/data", pattern=name)
    v1("grep", path=path, pattern="mark")
    v1("search", file=path, regex="mark")
    v1("replace", file=path, old_str="mark", new_str="gone")
    v1("str_replace_editor", command="view", path=path)
    v1("copy", source=path, destination=mine, overwrite=True)
    visit.ask("GET", "/v1/file/download", None, "", {"path": path})
    visit.ask("HEAD", "/v1/file/download", None, "", {"path": path})
    # An owner's own would be there for one of the two that move, and for one of the two that delete.
    v2("POST", "move", body={"source": path, "destination": path + ".moved", "overwrite": True})
    v1("move", source=path + ".moved", destination=path, overwrite=True)
    v2("POST", "delete", body={"path": path})
    v1("delete", "before", path=path)
    # Written by this name, it is one's own.
    v2("POST", "write", body={"path": path, "content": "mine"})
    v1("copy", "over mine", source=path, destination=path, overwrite=False)
    v1("delete", path=path)
    v1("write", file=path, content="mine")
    v1("delete", "again", path=path)
    for route in ("/v2/fs/upload", "/v1/file/upload"):
        visit.ask("POST", route, form=({"path": path}, {"f": b"mine"}))
        v1("delete", "after " + route, path=path)
    for route, body in (("/v2/fs/mkdir", {"path": path}), ("/v1/file/mkdir", {"path": path})):
        visit.ask("POST", route, body=body)
        v2("POST", "delete", "after " + route, {"path": path, "recursive": True})
    visit.ask("PUT", "/v2/fs/tree", None, "", {"path": path}, body=b"\0" * 10240, headers={"Content-Type": "application/x-tar"})
    v2("POST", "delete", "after the tree", {"path": path, "recursive": True})


FAMILIES = {"stored files": stored_files, "runs": runs, "the protocol": protocol, "code sessions": code_sessions, "commands": commands, "paths": paths}
