#!/usr/bin/env python3
"""The MCP server, driven by the published clients: the PyPI `mcp` and the inspector's command line, over HTTP and stdio.

    tests/mcp.py [unittest arguments, such as -k cancelled]

The clients are installed into target/mcp and target/mcp-inspector. Prints what unittest prints. Settings: CAISSON_BINARY,
CAISSON_SUITE_LOGS as in tests/suites.py.
"""
import asyncio
import base64
import contextlib
import glob
import hashlib
import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest

sys.path[:] = [it for it in sys.path if os.path.abspath(it or ".") != os.path.dirname(os.path.abspath(__file__))]  # this file is called mcp as well

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENVIRONMENT = os.path.join(ROOT, "target/mcp")
REQUIREMENTS = os.path.join(ROOT, "tests/mcp-requirements.txt")
INSPECTOR = os.path.join(ROOT, "target/mcp-inspector")
INSPECTOR_VERSION = "2.12.0"
INSTALL_S, INSTALL_TRIES = 600, 4


def make_environment():
    """The venv with the client, remade when its list or the interpreter changes; then this program again, in it."""
    with open(REQUIREMENTS, "rb") as f:
        stamp = hashlib.sha256(f.read() + sys.version.encode() + ROOT.encode()).hexdigest()
    python, stamp_path = os.path.join(ENVIRONMENT, "bin/python3"), ENVIRONMENT + ".stamp"
    if not (os.path.exists(stamp_path) and open(stamp_path).read() == stamp):
        print("mcp: making %s" % os.path.relpath(ENVIRONMENT, ROOT), flush=True)
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install"]
        for argv in ([sys.executable, "-m", "venv", ENVIRONMENT], [*pip, "--no-deps", "--only-binary", ":all:", "-r", REQUIREMENTS]):
            subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=INSTALL_S, check=True)
        with open(stamp_path, "w") as f:
            f.write(stamp)
    os.execv(python, [python, "-u", os.path.abspath(__file__), *sys.argv[1:]])


if sys.prefix != ENVIRONMENT and __name__ == "__main__":
    make_environment()

import anyio  # noqa: E402
import httpx2  # noqa: E402
from mcp import Client, MCPError, StdioServerParameters  # noqa: E402
from mcp.client.streamable_http import streamable_http_client  # noqa: E402

sys.path.append(os.path.join(ROOT, "tests"))
import live  # noqa: E402
import suites  # noqa: E402

KEYS = {"a": "key-of-a-0123456789", "b": "key-of-b-0123456789"}
ENV = {
    "CODE_INTERPRETER_API_KEYS": ",".join("%s=%s" % pair for pair in KEYS.items()),
    "CODE_INTERPRETER_URL_KEYS": "true",
    "AIO_CODE_BACKEND": "auto",
}
TOOLS = ["execute_code", "run_command", "upload_file", "list_files", "read_file", "delete_file", "reset_session"]
LEGACY, MODERN = "legacy", "2026-07-28"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000" "1f15c4890000000d49444154789c6360000002000001e221bc330000000049454e44ae426082"
)
MIB = 1024 * 1024
BIG = 20_000_000

daemon = None  # one for all tests over HTTP


def setUpModule():
    global daemon
    daemon = live.Daemon("mcp", ENV)
    daemon.__enter__()


def tearDownModule():
    daemon.__exit__()


# --- ways to the server ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def over_http(mode, key=KEYS["a"], headers=None, path="/mcp", **more):
    headers = {**({"X-API-Key": key} if key else {}), **(headers or {})}
    async with httpx2.AsyncClient(headers=headers, timeout=120) as carrier:
        # One event of a stream may be large: the client's own limit is 1 MiB.
        transport = streamable_http_client("http://127.0.0.1:%d%s" % (daemon.port, path), http_client=carrier, max_sse_event_size=None)
        async with Client(transport, mode=mode, **more) as client:
            yield client


@contextlib.asynccontextmanager
async def over_stdio(mode, **more):
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        env = {**os.environ, "TMPDIR": scratch, "AIO_RUST_LOG_LEVEL": "error"}
        server = StdioServerParameters(command=suites.BINARY, args=["mcp"], env=env)
        async with Client(server, mode=mode, **more) as client:
            yield client
        left = live.wait_until(lambda: not os.listdir(scratch), 10)
        assert left, "left behind: %s" % os.listdir(scratch)


class Session:
    """Calls of one session; over a transport without them it is named with every call."""

    def __init__(self, client, name=None):
        self.client, self.more = client, {"session": name} if name else {}

    async def call(self, tool, is_error=False, **arguments):
        result = await self.client.call_tool(tool, {**arguments, **self.more})
        text = "\n".join(it.text for it in result.content if it.type == "text")
        assert result.is_error == is_error, "%s: %s" % (tool, text[:2000])
        return types.SimpleNamespace(content=result.content, structured_content=result.structured_content, text=text)

    async def python(self, code, **more):
        return await self.call("execute_code", code=code, **more)

    def uri(self, path):
        name = self.more.get("session")
        return "caisson://sessions/%s/files/%s" % (name, path) if name else "caisson://files/%s" % path



def blocks(result, kind):
    return [it for it in result.content if it.type == kind]


def request(method, body=None, headers=None, path="/mcp"):
    """One request as no client would send it: status, headers, JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    try:
        head = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **(headers or {})}
        connection.request(method, path, None if body is None else json.dumps(body), head)
        response = connection.getresponse()
        if response.getheader("content-type") == "text/event-stream":
            return response.status, response.headers, None
        text = response.read()
        return response.status, response.headers, json.loads(text) if text else None
    finally:
        connection.close()


HELLO = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
    "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}}


def runs(marker):
    """Whether a sandbox of this host has a `sleep` of that length."""
    return any(it.words == ["sleep", marker] for it in live.processes())


# --- tests -------------------------------------------------------------------------------------------------------------


class Case(unittest.TestCase):
    def run_async(self, coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, 240))


class EveryTool(Case):
    """Each of them, each way."""

    async def tools(self, client, session):
        listed = (await client.list_tools()).tools
        self.assertEqual([it.name for it in listed], TOOLS)
        for tool in listed:
            self.assertTrue(tool.description and tool.input_schema["properties"] and tool.annotations.title, tool.name)
        hints = {it.name: it.annotations for it in listed}
        self.assertTrue(hints["read_file"].read_only_hint and hints["list_files"].read_only_hint)
        self.assertTrue(hints["delete_file"].destructive_hint and not hints["delete_file"].read_only_hint)
        self.assertIn("Languages: python, bash, javascript, typescript, go, cpp", listed[0].description)

        # Names are kept, the last value is shown, a program that fails is an error.
        got = await session.python("import sys\nn = 41\nprint('out')\nprint('err', file=sys.stderr)\nn + 1")
        self.assertEqual((got.structured_content["stdout"], got.structured_content["stderr"], got.structured_content["result"]), ("out\n", "err\n", "42"))
        self.assertEqual(got.text, "out\n42\n[stderr]\nerr\n")
        self.assertEqual((await session.python("print(n)")).structured_content["stdout"], "41\n")
        got = await session.python("1/0", is_error=True)
        self.assertEqual(got.structured_content["exit_code"], 1)
        self.assertIn("ZeroDivisionError", got.text)
        self.assertTrue(got.text.endswith("[exit code 1]"), got.text)
        got = await session.python("while True: pass", timeout_seconds=1, is_error=True)
        self.assertEqual(got.structured_content["ended"], "Time limit exceeded")

        # One workspace for all of them.
        await session.call("upload_file", path="in/data.csv", content="a,b\n1,2\n")
        got = await session.call("upload_file", path="/mnt/data/ü b.bin", content=base64.b64encode(b"\0\xff\x80").decode(), encoding="base64")
        self.assertEqual(got.structured_content["file"]["size"], 3)
        self.assertEqual((await session.python("print(open('in/data.csv').read(), open('ü b.bin', 'rb').read())")).structured_content["stdout"], "a,b\n1,2\n b'\\x00\\xff\\x80'\n")
        got = await session.call("execute_code", code="console.log(require('fs').readFileSync('in/data.csv', 'utf8').length, process.argv.slice(2).length)", language="javascript")
        self.assertEqual(got.structured_content["stdout"].split()[0], "8")
        self.assertEqual((await session.call("execute_code", code="const x: number = 7; console.log(x)", language="ts")).structured_content["stdout"], "7\n")
        got = await session.call("run_command", command="false; cat in/data.csv; echo to > note.txt; exit 3", is_error=True)
        self.assertEqual((got.structured_content["stdout"], got.structured_content["exit_code"]), ("a,b\n1,2\n", 3))
        self.assertEqual([it["path"] for it in got.structured_content["files"]], ["note.txt"])
        got = await session.call("execute_code", code="set -u; echo $1", language="bash", args=["a b"])
        self.assertEqual(got.structured_content["stdout"], "a b\n")

        # Pictures are shown, by what they are; other files are linked.
        code = "import base64\nopen('plot.png', 'wb').write(base64.b64decode(%r))\nopen('lie.png', 'w').write('no picture')\nopen('d.svg', 'w').write('<svg/>');" % base64.b64encode(PNG).decode()
        got = await session.python(code)
        self.assertEqual([(it.mime_type, base64.b64decode(it.data)) for it in blocks(got, "image")], [("image/png", PNG)])
        self.assertEqual([(it.resource.mime_type, it.resource.text) for it in blocks(got, "resource")], [("image/svg+xml", "<svg/>")])
        self.assertEqual(sorted(it.uri for it in blocks(got, "resource_link")), [session.uri(it) for it in ("d.svg", "lie.png", "plot.png")])
        got = await session.python("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
        self.assertEqual([it.mime_type for it in blocks(got, "image")], ["image/png"])

        # Files by tools and as resources.
        got = await session.call("list_files")
        names = ["d.svg", "in/data.csv", "lie.png", "note.txt", "plot.png", "plot_1.png", "ü b.bin"]
        self.assertEqual([it["path"] for it in got.structured_content["files"]], names)
        self.assertEqual([it["path"] for it in (await session.call("list_files", folder="in")).structured_content["files"]], ["in/data.csv"])
        self.assertEqual((await session.call("read_file", path="in/data.csv")).text, "a,b\n1,2\n")
        self.assertEqual((await session.call("read_file", path="in/data.csv", offset=2, length=1)).text, "b")
        self.assertEqual(blocks(await session.call("read_file", path="plot.png"), "image")[0].mime_type, "image/png")
        got = blocks(await session.call("read_file", path="ü b.bin"), "resource")[0].resource
        self.assertEqual((base64.b64decode(got.blob), got.uri), (b"\0\xff\x80", session.uri("%C3%BC%20b.bin")))
        got = (await client.read_resource(session.uri("in/data.csv"))).contents[0]
        self.assertEqual((got.text, got.mime_type), ("a,b\n1,2\n", "text/csv"))
        if not session.more:
            self.assertEqual([it.name for it in (await client.list_resources()).resources], names)
        self.assertEqual(len((await client.list_resource_templates()).resource_templates), 2)
        for wrong in (session.uri("none"), "caisson://files/", "file:///etc/passwd", session.uri("../../etc/passwd")):
            with self.assertRaises(MCPError):
                await client.read_resource(wrong)

        await session.call("delete_file", path="note.txt")
        await session.call("delete_file", path="note.txt", is_error=True)
        await session.python("import os\nassert not os.path.exists('note.txt')\nassert os.path.exists('plot.png')")
        await session.call("reset_session")
        self.assertIn("NameError", (await session.python("n", is_error=True)).text)
        self.assertEqual((await session.call("read_file", path="in/data.csv")).text, "a,b\n1,2\n")
        await session.call("reset_session", delete_files=True)
        self.assertEqual((await session.call("list_files")).structured_content["count"], 0)
        self.assertEqual((await session.call("run_command", command="ls")).structured_content["stdout"], "")

        # What does not fit is said in words.
        for tool, arguments, words in (
            ("execute_code", {}, "missing field `code`"),
            ("execute_code", {"code": "x", "language": "cobol"}, "unknown language \"cobol\"; known here: python, bash"),
            ("execute_code", {"code": "x", "timeout_seconds": 0}, "`timeout_seconds` must be"),
            ("upload_file", {"path": "../x", "content": ""}, "`path` must be"),
            ("upload_file", {"path": "x", "content": "%", "encoding": "base64"}, "not base64"),
            ("read_file", {"path": "none"}, "no file"),
        ):
            got = await session.call(tool, is_error=True, **arguments)
            self.assertIn(words, got.text)
        got = await client.call_tool("list_files", {"session": "a/b"})
        self.assertTrue(got.is_error and "`session` must be" in got.content[0].text)
        with self.assertRaises(MCPError):
            await client.call_tool("no_such_tool", {})

    def test_over_http_with_sessions(self):
        async def go():
            async with over_http(LEGACY) as client:
                await self.tools(client, Session(client))

        self.run_async(go())

    def test_over_http_without_sessions(self):
        async def go():
            async with over_http(MODERN) as client:
                first = await Session(client).python("kept = 1")
                name = first.structured_content["session"]
                self.assertIn("[session %s:" % name, first.text)
                await Session(client, name).python("kept")
                await self.tools(client, Session(client, "conversation:1"))
                got = await client.call_tool("list_files", {})
                self.assertTrue(got.is_error and "belongs to no session" in got.content[0].text)
                self.assertEqual((await client.list_resources()).resources, [])

        self.run_async(go())

    def test_over_stdio_with_sessions(self):
        async def go():
            async with over_stdio(LEGACY) as client:
                await self.tools(client, Session(client))

        self.run_async(go())

    def test_over_stdio_without_sessions(self):
        async def go():
            async with over_stdio(MODERN) as client:
                await self.tools(client, Session(client))

        self.run_async(go())


class Languages(Case):
    """Every one that the tool says there is."""

    HELLO = {
        "python": "print(6 * 7)",
        "bash": "echo $((6 * 7))",
        "javascript": "console.log(6 * 7)",
        "typescript": "const n: number = 6 * 7; console.log(n)",
        "go": 'package main\nimport "fmt"\nfunc main() { fmt.Println(6 * 7) }',
        "cpp": "#include <iostream>\nint main() { std::cout << 6 * 7 << std::endl; }",
        "c": '#include <stdio.h>\nint main(void) { printf("%d\\n", 6 * 7); }',
        "java": "public class Main { public static void main(String[] a) { System.out.println(6 * 7); } }",
        "php": "<?php echo 6 * 7, PHP_EOL;",
        "rust": 'fn main() { println!("{}", 6 * 7); }',
        "fortran": "program p\n  print '(i0)', 6 * 7\nend program",
        "r": "cat(6 * 7, '\\n', sep = '')",
        "d": "import std.stdio; void main() { writeln(6 * 7); }",
    }

    # What is no program elsewhere is text there.
    MISTAKE = {"php": "<?php %!("}

    def test_all_that_are_there(self):
        async def go():
            async with over_http(LEGACY) as client:
                schema = (await client.list_tools()).tools[0].input_schema
                there = schema["properties"]["language"]["examples"]
                self.assertGreaterEqual(len(there), 6)
                for language in there:
                    got = await Session(client).call("execute_code", code=self.HELLO[language], language=language, timeout_seconds=120)
                    self.assertEqual(got.structured_content["stdout"], "42\n", language)
                    # A fault of the program is its own, in any of them.
                    got = await Session(client).call("execute_code", code=self.MISTAKE.get(language, "%!( no program"), language=language, is_error=True)
                    self.assertNotEqual(got.structured_content["exit_code"], 0, language)
            print(" ".join(there), end=" ", flush=True)

        self.run_async(go())


class LargeResults(Case):
    async def large(self, session):
        await session.python("open('big.bin', 'wb').write(bytes(range(256)) * %d)\nopen('big.txt', 'w').write('x' * %d)" % (BIG // 256, BIG))
        got = blocks(await session.call("read_file", path="big.bin"), "resource")[0].resource
        self.assertEqual(base64.b64decode(got.blob), bytes(range(256)) * (BIG // 256))
        self.assertEqual((await session.call("read_file", path="big.txt")).text, "x" * BIG)
        got = await session.client.read_resource(session.uri("big.txt"))
        self.assertEqual(len(got.contents[0].text), BIG)

    def test_over_http_with_sessions(self):
        async def go():
            async with over_http(LEGACY) as client:
                session = Session(client)
                await self.large(session)
                await session.python("open('huge', 'wb').truncate(33 * 1024 * 1024)")
                got = await session.call("read_file", path="huge", is_error=True)
                self.assertIn("34603008 bytes are more than one call reads (33554432)", got.text)
                with self.assertRaisesRegex(MCPError, "read_file reads parts"):
                    await client.read_resource("caisson://files/huge")
                got = await session.python("print('x' * (2 * 1024 * 1024))", is_error=True)
                self.assertEqual(got.structured_content["ended"], "stdout length exceeded")

        self.run_async(go())

    def test_over_http_without_sessions(self):
        async def go():
            async with over_http(MODERN) as client:
                await self.large(Session(client, "large"))

        self.run_async(go())

    def test_an_upload_of_20_mb(self):
        async def go():
            async with over_http(LEGACY) as client:
                session = Session(client)
                content = base64.b64encode(b"\1" * BIG).decode()
                await session.call("upload_file", path="up.bin", content=content, encoding="base64")
                self.assertEqual((await session.python("import os\nprint(os.path.getsize('up.bin'))")).structured_content["stdout"], "%d\n" % BIG)

        self.run_async(go())
        status, _, body = request("POST", {"x": "y" * (51 * MIB)}, {"X-API-Key": KEYS["a"]})
        self.assertEqual(status, 413, body)

    def test_over_stdio(self):
        async def go():
            async with over_stdio(LEGACY) as client:
                session = Session(client)
                await session.python("open('big.bin', 'wb').write(b'\\xff' * %d)" % BIG)
                got = blocks(await session.call("read_file", path="big.bin"), "resource")[0].resource
                self.assertEqual(len(base64.b64decode(got.blob)), BIG)

        self.run_async(go())


class WhoAsks(Case):
    def test_a_bad_key_is_refused_in_json(self):
        for headers in ({}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer wrong"}):
            status, _, body = request("POST", HELLO, headers)
            self.assertEqual((status, body["error"]), (401, "Unauthorized"))
        for mode in (LEGACY, MODERN):
            async def go():
                async with over_http(mode, key="wrong") as client:
                    await client.list_tools()

            with self.assertRaises(BaseException) as caught:
                self.run_async(go())
            self.assertNotIsInstance(caught.exception, AssertionError)

    def test_every_credential_is_good(self):
        key = KEYS["a"]
        ways = (
            ({"X-API-Key": key}, "/mcp"),
            ({"Authorization": "Bearer " + key}, "/mcp"),
            ({}, "/mcp?api_key=" + key),
            ({}, "/k/%s/mcp" % key),
        )
        for headers, path in ways:
            async def go():
                async with over_http(LEGACY, key=None, headers=headers, path=path) as client:
                    await Session(client).python("1")

            with self.subTest(path=path, headers=headers):
                self.run_async(go())
        self.assertEqual(request("POST", HELLO, {"X-API-Key": key}, "/v1/mcp")[0], 404)

    def test_two_keys_and_two_sessions_do_not_reach_each_other(self):
        async def go():
            async with over_http(LEGACY) as one, over_http(LEGACY) as two, over_http(LEGACY, KEYS["b"]) as other:
                sessions = [Session(it) for it in (one, two, other)]
                for number, session in enumerate(sessions):
                    await session.python("open('own.txt', 'w').write('%d'); name = %d" % (number, number))
                for number, session in enumerate(sessions):
                    self.assertEqual((await session.call("read_file", path="own.txt")).text, str(number))
                    self.assertEqual((await session.python("print(name)")).structured_content["stdout"], "%d\n" % number)
                await sessions[0].python("open('only.txt', 'w').write('0')")
                for client in (two, other):
                    with self.assertRaises(MCPError):
                        await client.read_resource("caisson://files/only.txt")
            # Sessions that clients name are the caller's own, whatever their names.
            async with over_http(MODERN) as of_a, over_http(MODERN, KEYS["b"]) as of_b, over_http(LEGACY) as again:
                a, b, named = Session(of_a, "shared"), Session(of_b, "shared"), Session(again, "shared")
                await a.python("open('a.txt', 'w').write('a'); secret = 1")
                self.assertIn("NameError", (await b.python("secret", is_error=True)).text)
                self.assertEqual((await b.call("list_files")).structured_content["count"], 0)
                with self.assertRaises(MCPError):
                    await of_b.read_resource(a.uri("a.txt"))
                self.assertEqual((await named.call("read_file", path="a.txt")).text, "a", "it is one session, whatever leads to it")
                # What the server has made up is nobody else's either.
                name = (await Session(of_a).python("open('x', 'w').write('x')")).structured_content["session"]
                self.assertEqual((await Session(of_b, name).call("list_files")).structured_content["count"], 0)
                self.assertEqual((await Session(of_a, name).call("list_files")).structured_content["count"], 1)
            # Neither does the other API lead to them, nor this one to its entities.
            exec_a = {"code": "import os\nif os.path.exists('/mnt/data/a.txt'): print('found')", "lang": "py"}
            for way in ("entity_id", "runtime_session_hint", "session_id"):
                got = daemon_client("a").request("POST", "/exec", {**exec_a, way: "shared"})
                self.assertEqual((got.http, got.body["stdout"]), (200, ""), way)

        self.run_async(go())

    def test_a_foreign_session_id_is_as_unknown_as_none(self):
        status, headers, _ = request("POST", HELLO, {"X-API-Key": KEYS["a"]})
        self.assertEqual(status, 200)
        session = {"Mcp-Session-Id": headers["mcp-session-id"]}
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "list_files", "arguments": {}}}
        for method, body in (("POST", call), ("GET", None), ("DELETE", None)):
            for key, of in (("b", session), ("a", {"Mcp-Session-Id": "00000000-0000-4000-8000-000000000000"})):
                status, _, answer = request(method, body, {"X-API-Key": KEYS[key], **of})
                self.assertEqual((status, answer["error"]["message"]), (404, "Session not found"), method)
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}
        self.assertEqual(request("POST", cancel, {"X-API-Key": KEYS["b"], **session})[0], 404)
        self.assertEqual(request("POST", call, {"X-API-Key": KEYS["a"], **session})[0], 200)
        self.assertEqual(request("DELETE", None, {"X-API-Key": KEYS["a"], **session})[0], 204)

    def test_a_header_names_the_session_of_every_call(self):
        async def go():
            for mode in (LEGACY, MODERN):
                async with over_http(mode, headers={"X-Caisson-Session": "chat-9"}) as client:
                    await Session(client).call("run_command", command="echo %s >> seen" % mode)
                    got = await Session(client).call("read_file", path="seen")
                    names = [it.name for it in (await client.list_resources()).resources]
                    self.assertEqual(names, ["seen"])
            self.assertEqual(got.text, "%s\n%s\n" % (LEGACY, MODERN))
            async with over_http(MODERN, headers={"X-Caisson-Session": "no/good"}) as client:
                await Session(client).call("list_files", is_error=True)

        self.run_async(go())


class Ends(Case):
    def gone(self, marker):
        self.assertTrue(live.wait_until(lambda: not runs(marker), 15), "what it ran goes on")

    async def begun(self, marker):
        for _ in range(200):
            if runs(marker):
                return
            await anyio.sleep(0.1)
        self.fail("it has not begun")

    async def cancelled(self, client, session, marker):
        await session.python("kept = 1")
        for call in (
            lambda: session.call("run_command", command="sleep " + marker),
            lambda: session.python("import subprocess; subprocess.run(['sleep', %r])" % marker),
        ):
            async with anyio.create_task_group() as group:
                group.start_soon(call)
                await self.begun(marker)
                group.cancel_scope.cancel()
            await anyio.to_thread.run_sync(self.gone, marker)
            # The session is free again.
            with anyio.fail_after(20):
                self.assertEqual((await session.call("run_command", command="echo on")).structured_content["stdout"], "on\n")

    def test_a_cancelled_call_ends_what_it_runs(self):
        async def go(way, mode, marker):
            async with way(mode) as client:
                await self.cancelled(client, Session(client, "cancel" if mode == MODERN and way is over_http else None), marker)

        for way, mode, marker in ((over_http, LEGACY, "31001"), (over_http, MODERN, "31002"), (over_stdio, LEGACY, "31003"), (over_stdio, MODERN, "31004")):
            with self.subTest(way=way.__name__, mode=mode):
                self.run_async(go(way, mode, marker))

    def test_the_end_of_a_session_ends_what_it_runs_and_takes_its_files(self):
        spaces = lambda: {it for it in glob.glob(os.path.join(daemon.scratch, "data/launcher/spaces/*"))}
        before, stored = spaces(), lambda: len(os.listdir(os.path.join(daemon.scratch, "data/daemon/objects")))
        stored_before = stored()
        key = {"X-API-Key": KEYS["a"]}
        _, headers, _ = request("POST", HELLO, key)
        session = {**key, "Mcp-Session-Id": headers["mcp-session-id"]}
        ids = itertools.count(7)  # one that a hung up request had stays taken
        call = lambda name, **arguments: {"jsonrpc": "2.0", "id": next(ids), "method": "tools/call", "params": {"name": name, "arguments": arguments}}
        request("POST", call("upload_file", path="x", content="y"), session)
        self.assertTrue(live.wait_until(lambda: stored() == stored_before + 1, 10))
        request("POST", call("run_command", command="sleep 31005"), session)  # hangs up, which does not cancel
        self.assertTrue(live.wait_until(lambda: runs("31005"), 10))
        self.assertTrue(spaces() - before)
        self.assertEqual(request("DELETE", None, session)[0], 204)
        self.gone("31005")
        self.assertTrue(live.wait_until(lambda: not spaces() - before, 30), "its space is still there: %s" % (spaces() - before))
        self.assertTrue(live.wait_until(lambda: stored() == stored_before, 10), "its files are still there")

    def test_a_run_that_ends_in_time_is_answered_by_a_daemon_that_stops(self):
        with live.Daemon("mcp-last", {}) as own:
            head = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
            connection = http.client.HTTPConnection("127.0.0.1", own.port, timeout=60)
            connection.request("POST", "/mcp", json.dumps(HELLO), head)
            response = connection.getresponse()
            session = {**head, "Mcp-Session-Id": response.getheader("mcp-session-id")}
            response.read()
            call = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "run_command", "arguments": {"command": "sleep 3.1006; echo whole"}}}
            connection.request("POST", "/mcp", json.dumps(call), session)
            answer = connection.getresponse()
            self.assertTrue(live.wait_until(lambda: runs("3.1006"), 20))
            live.kill(own.process.pid, signal.SIGTERM)
            self.assertIn(b"whole", answer.read())
            self.assertEqual(own.process.wait(60), 0)

    def test_a_daemon_ends_with_sessions_open(self):
        with live.Daemon("mcp-stop", {}) as own:
            connection = http.client.HTTPConnection("127.0.0.1", own.port, timeout=60)
            head = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
            connection.request("POST", "/mcp", json.dumps(HELLO), head)
            response = connection.getresponse()
            session = {**head, "Mcp-Session-Id": response.getheader("mcp-session-id")}
            response.read()
            connection.request("GET", "/mcp", None, session)
            listening = connection.getresponse()
            self.addCleanup(listening.close)
            self.assertEqual(listening.status, 200)
            started = time.monotonic()
            live.kill(own.process.pid, signal.SIGTERM)
            self.assertEqual(own.process.wait(60), 0)
            self.assertLess(time.monotonic() - started, 15)


class Told(Case):
    async def told(self, client, session, lines):
        progress = []

        async def on_progress(done, total, message):
            progress.append((done, total, message))

        more = session.more
        code = "import sys, time\nfor i in range(8):\n    print('line', i, flush=True)\n    print('bad', i, file=sys.stderr, flush=True)\n    time.sleep(1)"
        got = await client.call_tool("execute_code", {"code": code, "timeout_seconds": 30, **more}, progress_callback=on_progress)
        self.assertFalse(got.is_error)
        self.assertGreaterEqual(len(progress), 2)
        self.assertTrue(all(one[0] < other[0] for one, other in zip(progress, progress[1:])), progress)
        self.assertEqual(progress[0][1], 30)
        self.assertRegex(progress[0][2], r"^running for \d+ s, \d+ characters of output$")
        heard = lambda logger: "".join(it.data for it in lines if it.logger == logger)
        self.assertEqual(heard("stdout"), "".join("line %d\n" % i for i in range(8)))
        self.assertEqual(heard("stderr"), "".join("bad %d\n" % i for i in range(8)))
        self.assertGreater(len(lines), 4, "it comes in pieces")

    def test_progress_and_output_while_it_runs(self):
        async def go(way, mode):
            lines = []

            async def on_log(params):
                lines.append(params)

            more = {"log_level": "info"} if mode == MODERN else {}
            async with way(mode, logging_callback=on_log, **more) as client:
                if mode == LEGACY:
                    await client.set_logging_level("info")
                await self.told(client, Session(client, "told" if mode == MODERN and way is over_http else None), lines)

        for way, mode in ((over_http, LEGACY), (over_http, MODERN), (over_stdio, LEGACY), (over_stdio, MODERN)):
            with self.subTest(way=way.__name__, mode=mode):
                self.run_async(go(way, mode))

    def test_who_asks_for_nothing_is_told_nothing(self):
        async def go():
            lines = []

            async def on_log(params):
                lines.append(params)

            async with over_http(LEGACY, logging_callback=on_log) as client:
                await Session(client).python("import time\nprint('x', flush=True)\ntime.sleep(4)")
                self.assertEqual(lines, [])
                await client.set_logging_level("warning")
                await Session(client).python("import sys\nprint('out')\nprint('err', file=sys.stderr)")
                await anyio.sleep(0.5)
                # In pieces or at once, and nothing of the other stream.
                self.assertEqual(("".join(it.data for it in lines), {it.logger for it in lines}), ("err\n", {"stderr"}))

        self.run_async(go())


class Stdio(Case):
    """What no client shows: the bytes, and what stays behind."""

    def start(self, scratch, **more):
        env = {**os.environ, "TMPDIR": scratch, "AIO_RUST_LOG_LEVEL": "info"}
        return subprocess.Popen([suites.BINARY, "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, **more)

    def say(self, process, message):
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()

    def gone(self, scratch, marker):
        self.assertTrue(live.wait_until(lambda: not os.listdir(scratch), 10), os.listdir(scratch))
        self.assertFalse(runs(marker))
        self.assertEqual(live.loops(scratch), [])

    def one_life(self, end, marker, account=None):
        with tempfile.TemporaryDirectory() as scratch:
            os.chmod(scratch, 0o777)
            more = {"user": account, "group": account, "extra_groups": []} if account else {}
            process = self.start(scratch, **more)
            try:
                self.say(process, HELLO)
                first = json.loads(process.stdout.readline())
                self.assertEqual(first["result"]["serverInfo"]["name"], "caisson")
                self.say(process, {"jsonrpc": "2.0", "method": "notifications/initialized"})
                self.say(process, {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "run_command", "arguments": {"command": "echo got $(id -u); sleep %s" % marker}}})
                self.assertTrue(live.wait_until(lambda: runs(marker), 30))
                started = time.monotonic()
                end(process)
                out, err = process.communicate(timeout=40)
                self.assertLess(time.monotonic() - started, 15)
                self.assertEqual([json.loads(line)["jsonrpc"] for line in out.splitlines()], ["2.0"] * len(out.splitlines()))
                self.assertIn(b" INFO ", err)
                self.gone(scratch, marker)
                return process.returncode
            finally:
                process.kill()

    def test_closing_stdin_ends_it_and_leaves_nothing(self):
        self.assertEqual(self.one_life(lambda it: it.stdin.close() or setattr(it, "stdin", None), "31011"), 0)

    def test_a_signal_ends_it_and_leaves_nothing(self):
        self.assertEqual(self.one_life(lambda it: it.send_signal(signal.SIGTERM), "31012"), 0)

    @unittest.skipUnless(suites.IS_ROOT, "only root becomes somebody else")
    def test_an_ordinary_account_has_it_too(self):
        self.assertEqual(self.one_life(lambda it: it.stdin.close() or setattr(it, "stdin", None), "31013", account=suites.ORDINARY), 0)


class Inspector(Case):
    """The npm inspector's command line, one process a call."""

    @staticmethod
    def absent(what):
        # Somebody's own machine may lack it; where CI says that all is there, nobody reads of what was passed over.
        raise AssertionError(what) if suites.IS_CI else unittest.SkipTest(what)

    @staticmethod
    def tried(argv):
        """Why it failed each time. A connection to a registry that stands still is given up and made anew."""
        for _ in range(INSTALL_TRIES):
            try:
                # Not by --prefix: with it npm leaves out what the machine's administrator has set.
                done = subprocess.run(argv, cwd=INSPECTOR, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_S / INSTALL_TRIES, check=False)
            except subprocess.TimeoutExpired as expired:
                trouble = str(expired)
                continue
            if done.returncode == 0:
                return ""
            trouble = "status %d: %s" % (done.returncode, done.stderr.decode()[-500:])
        return trouble

    @classmethod
    def setUpClass(cls):
        if not shutil.which("npm"):
            cls.absent("npm is not there")
        cls.program = os.path.join(INSPECTOR, "node_modules/.bin/mcp-inspector")
        stamp = os.path.join(INSPECTOR, "stamp")
        if not (os.path.exists(stamp) and open(stamp).read() == INSPECTOR_VERSION):
            print("mcp: making %s" % os.path.relpath(INSPECTOR, ROOT), flush=True)
            os.makedirs(INSPECTOR, exist_ok=True)
            with open(os.path.join(INSPECTOR, "package.json"), "w") as f:
                f.write("{}")  # without one npm looks in the folders above
            argv = ["npm", "install", "--loglevel=error", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-timeout=30000"]
            trouble = cls.tried(argv + ["@modelcontextprotocol/inspector@" + INSPECTOR_VERSION])
            if trouble:
                cls.absent("the inspector cannot be installed: " + trouble)
            with open(stamp, "w") as f:
                f.write(INSPECTOR_VERSION)

    def inspect(self, *arguments, key=KEYS["a"], stdio=False, status=0):
        if stdio:
            target = [suites.BINARY, "mcp"]
        else:
            target = ["http://127.0.0.1:%d/mcp" % daemon.port, "--transport", "http", "--header", "X-API-Key: " + key]
        done = subprocess.run([self.program, "--cli", *target, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=90, check=False)
        if status is not None:
            self.assertEqual(done.returncode, status, done.stderr.decode()[-2000:] + done.stdout.decode()[-2000:])
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr.decode() + done.stdout.decode()

    def call(self, tool, stdio=False, status=0, **arguments):
        words = [word for name, value in arguments.items() for word in ("--tool-arg", "%s=%s" % (name, value))]
        return self.inspect("--method", "tools/call", "--tool-name", tool, *words, stdio=stdio, status=status)

    def test_every_tool_over_http(self):
        self.assertEqual([it["name"] for it in self.inspect("--method", "tools/list")["tools"]], TOOLS)
        more = {"session": "inspector"}
        self.assertEqual(self.call("execute_code", code="n = 6 * 7; print(n)", **more)["structuredContent"]["stdout"], "42\n")
        self.assertEqual(self.call("execute_code", code="print(n)", **more)["structuredContent"]["stdout"], "42\n")
        self.assertEqual(self.call("upload_file", path="x.txt", content="y", **more)["structuredContent"]["file"]["size"], 1)
        self.assertEqual(self.call("run_command", command="cat x.txt", **more)["structuredContent"]["stdout"], "y")
        self.assertEqual(self.call("list_files", **more)["structuredContent"]["count"], 1)
        self.assertEqual(self.call("read_file", path="x.txt", **more)["content"][0]["text"], "y")
        got = self.inspect("--method", "resources/read", "--uri", "caisson://sessions/inspector/files/x.txt")
        self.assertEqual(got["contents"][0]["text"], "y")
        self.assertIn("is deleted", self.call("delete_file", path="x.txt", **more)["content"][0]["text"])
        self.assertIn("starts anew", self.call("reset_session", **more)["content"][0]["text"])
        self.assertEqual(len(self.inspect("--method", "resources/templates/list")["resourceTemplates"]), 2)
        self.assertEqual(self.inspect("--method", "resources/list")["resources"], [])
        self.assertIn("auth_required", self.inspect("--method", "tools/list", key="wrong", status=None))

    def test_over_stdio(self):
        self.assertEqual([it["name"] for it in self.inspect("--method", "tools/list", stdio=True)["tools"]], TOOLS)
        self.assertEqual(self.call("execute_code", stdio=True, code="print(6 * 7)")["structuredContent"]["stdout"], "42\n")


def daemon_client(tenant):
    return live.Client(daemon.port, KEYS[tenant])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        unittest.main(verbosity=2, warnings="ignore")
    finally:
        suites.end_all()
