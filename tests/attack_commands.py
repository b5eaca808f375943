#!/usr/bin/env python3
"""The shared attack corpus through `POST /v2/commands`: each program as a command, `python3 FILE` or `node FILE`.

    tests/attack_commands.py BASE_URL --api v1 ... (the arguments of attacks/run_attacks.py)

What the corpus calls a run without a session is a command in a session of its own that ends with it, as a caller ends
it who wants nothing left. Setting: CAISSON_SHARED (default ../shared).
"""
import json
import os
import sys
import urllib.parse
import uuid

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.abspath(os.environ.get("CAISSON_SHARED", os.path.join(ROOT, "..", "shared"))), "attacks"))

import run_attacks  # noqa: E402

PROGRAMS = {"python": ("python3", "-u"), "javascript": ("node",)}
SUFFIXES = {"python": ".py", "javascript": ".cjs"}
# Pid 2 is the command agent of the sandbox: it runs as the guest does, so a guest can end its own sandbox by it, as it can
# by its interpreter elsewhere. Pid 1, or anything else, is what this program is about.
AGENT_ALONE = ("proc_signal_init", "signalable: [2]")
# What a planted program holds on to ends with it, so that one stays for as long as its session.
STAYS = "caisson_keep"
STAY = "\nimport time\ntime.sleep(3600)\n"
PLANTED_S = 30
TAG = "END-OF-" + uuid.uuid4().hex


def judged(line):
    try:
        verdict = json.loads(line) if line.startswith('{"attack"') else {}
    except ValueError:
        return line
    if (verdict.get("attack"), verdict.get("detail")) == AGENT_ALONE:
        return json.dumps({**verdict, "outcome": "blocked"})
    return line


class Commands(run_attacks.Http):
    def run(self, code, lang, timeout, session=None, key=None):
        lang = "python" if lang == "python" else "javascript"
        limit = min(timeout * self.a.time_scale, 900)
        own = session or "own-" + uuid.uuid4().hex[:12]
        stays = STAYS in code and session
        # Not as an argument, which any process list of the sandbox would show.
        path = "/tmp/" + uuid.uuid4().hex[:12] + SUFFIXES[lang]
        text = "cat > %s <<'%s'\n%s\n%s\n" % (path, TAG, code + (STAY if stays else ""), TAG)
        status, reply = self.req("POST", "/v2/commands", {"command": text, "session": own}, key=key)
        if status != 200 or reply["data"]["exit_code"] != 0:
            return self.told(status, reply, limit)
        program, *flags = PROGRAMS[lang]
        body = {"command": program, "args": [*flags, path], "shell": "none", "session": own, "hard_timeout": limit}
        try:
            if stays:
                return self.plant(body, key)
            status, reply = self.req("POST", "/v2/commands", body, timeout=timeout + 60, key=key)
        finally:
            if not session:
                self.delete(own, key)
            self.req("POST", "/v2/commands", {"command": "rm -f " + path, "session": own + "-rm"}, key=key)
            self.delete(own + "-rm", key)
        return self.told(status, reply, limit)

    def plant(self, body, key):
        body = {**body, "mode": "async", "hard_timeout": None}
        status, reply = self.req("POST", "/v2/commands", body, key=key)
        said = {"stdout": "", "offset": 0}
        for _ in range(PLANTED_S):
            if status != 200 or "planted" in said["stdout"]:
                break
            path = "/v2/commands/%s?wait=true&wait_timeout=1" % reply["data"]["command_id"]
            status, read = self.req("GET", path, key=key)
            said = read["data"]
        if status == 200:
            reply["data"].update(stdout=said["stdout"])
        return self.told(status, reply, PLANTED_S)

    def told(self, http, reply, limit):
        data = (reply or {}).get("data") or {} if isinstance(reply, dict) else {}
        ended = {"timed_out": "timeout", "running": "ok"}.get(data.get("status"))
        status = ended or ("ok" if data.get("exit_code") == 0 else "error" if data else str(http))
        out = "\n".join(judged(line) for line in (data.get("stdout") or "").split("\n"))
        return dict(http=http, status=status, out=out, err=data.get("stderr") or "", size=len(json.dumps(reply)),
                    session=data.get("session_id"), reply=reply, limit=limit)

    def delete(self, session, key=None):
        path = "/v2/commands/sessions/" + urllib.parse.quote(session or "none", safe="")
        status, _ = self.req("DELETE", path, timeout=60, key=key)
        return None if status in (404, 405, 501) else status < 500


if __name__ == "__main__":
    run_attacks.Http = Commands
    sys.exit(run_attacks.main())
