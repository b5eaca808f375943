#!/usr/bin/env python3
"""The endpoint backend against a real jupyter-server on loopback, whose kernels are the product's own ipykernel.

    tests/endpoint.py [--only NAME[,NAME]]      `caisson serve` with AIO_JUPYTER_ENDPOINT, through its HTTP routes
    tests/endpoint.py --module                  the ignored Rust tests of src/backend/endpoint/real.rs, in both forms of the protocol

The server is installed into target/jupyter as tests/endpoint-requirements.txt says. Exit status 0 when nothing
failed. Settings: CAISSON_BINARY, CAISSON_SUITE_LOGS as in tests/suites.py; CAISSON_CARGO_TEST (default "cargo test --release --locked").
"""
import argparse
import concurrent.futures
import hashlib
import http.server
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

import live
import suites

ENVIRONMENT = os.path.join(suites.ROOT, "target/jupyter")
REQUIREMENTS = os.path.join(suites.ROOT, "tests/endpoint-requirements.txt")
PYTHON = os.path.join(suites.ROOT, "target/runtime/python/bin/python3")
SERVER_START_S, NOTICE_S, CARGO_S = 60, 60, 900


def make_environment():
    """The venv with jupyter-server, remade when its list or the interpreter changes."""
    with open(REQUIREMENTS, "rb") as f:
        stamp = hashlib.sha256(f.read() + sys.version.encode() + suites.ROOT.encode()).hexdigest()
    stamp_path = ENVIRONMENT + ".stamp"
    if os.path.exists(stamp_path) and open(stamp_path).read() == stamp:
        return
    print("endpoint: making %s" % os.path.relpath(ENVIRONMENT, suites.ROOT), flush=True)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    pip = [os.path.join(ENVIRONMENT, "bin/python3"), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install"]
    for argv in ([sys.executable, "-m", "venv", ENVIRONMENT], [*pip, "--no-deps", "--only-binary", ":all:", "-r", REQUIREMENTS]):
        subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=suites.PIP_S, check=True)
    with open(stamp_path, "w") as f:
        f.write(stamp)


class JupyterServer:
    """jupyter-server on a loopback port, with folders of its own."""

    def __init__(self, name, args=()):
        self.name, self.args = name, args
        self.port, self.token = suites.free_port(), secrets.token_hex(16)
        self.shown = "http://127.0.0.1:%d" % self.port
        self.url = "%s/?token=%s" % (self.shown, self.token)
        self.process = self.scratch = None

    def __enter__(self):
        self.scratch = tempfile.mkdtemp(prefix="caisson-jupyter-", dir="/var/tmp")
        os.makedirs(os.path.join(self.scratch, "share/kernels/python3"))
        with open(os.path.join(self.scratch, "share/kernels/python3/kernel.json"), "w") as f:
            argv = [PYTHON, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            json.dump({"argv": argv, "display_name": "Python 3", "language": "python"}, f)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        folder = lambda name: os.path.join(self.scratch, name)
        env = {k: v for k, v in suites.clean_env().items() if not k.startswith("JUPYTER")}
        env.update(HOME=self.scratch, JUPYTER_PATH=folder("share"), JUPYTER_CONFIG_DIR=folder("config"),
                   JUPYTER_RUNTIME_DIR=folder("runtime"), JUPYTER_NO_CONFIG="1")
        argv = [os.path.join(ENVIRONMENT, "bin/jupyter-server"), "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
                "--ServerApp.port=%d" % self.port, "--ServerApp.port_retries=0", "--IdentityProvider.token=" + self.token,
                "--ServerApp.root_dir=" + self.scratch, "--ServerApp.log_level=WARN", *self.args]
        with open(os.path.join(suites.LOGS, self.name + ".jupyter.log"), "ab") as log:
            self.process = suites.start(argv, log, env, cwd=self.scratch)
        deadline = time.monotonic() + SERVER_START_S
        while True:
            try:
                self.get("/api/status")
                return
            except OSError as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise suites.Failed("jupyter-server did not come up") from error
                time.sleep(0.1)

    def kill(self):
        """At once, and its kernels with it."""
        os.killpg(self.process.pid, signal.SIGKILL)
        suites.end(self.process)

    def get(self, path):
        request = urllib.request.Request(self.shown + path, headers={"Authorization": "token " + self.token})
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def kernels(self):
        return self.get("/api/kernels")

    def cull(self, kernel):
        """Ends a kernel as the server's own culling of idle ones does."""
        request = urllib.request.Request("%s/api/kernels/%s" % (self.shown, kernel), method="DELETE", headers={"Authorization": "token " + self.token})
        urllib.request.urlopen(request, timeout=10).close()

    def __exit__(self, *_):
        if self.process:
            suites.end(self.process)
        shutil.rmtree(self.scratch, ignore_errors=True)


class NeverReady:
    """Answers as a Jupyter server does, but for the channels of its kernels."""

    def __enter__(self):
        self.started = self.deleted = 0
        self.ending = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self, status, body):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                if self.path.startswith("/api/kernelspecs"):
                    return self.answer(200, json.dumps({"default": "python3", "kernelspecs": {"python3": {"spec": {"language": "python"}}}}).encode())
                outer.ending.wait(120)

            def do_POST(self):
                outer.started += 1
                self.answer(201, b'{"id": "k-%d"}' % outer.started)

            def do_DELETE(self):
                outer.deleted += 1
                self.answer(204, b"")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = "http://127.0.0.1:%d" % self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        self.server.shutdown()
        self.server.server_close()


def within(seconds, condition):
    """Whether it comes true in that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


class Routes(unittest.TestCase):
    """One server and one daemon for all of them."""

    @classmethod
    def setUpClass(cls):
        cls.stack = []
        try:
            cls.jupyter = cls.enter(JupyterServer("endpoint"))
            cls.daemon = cls.enter(suites.Daemon("endpoint", {"AIO_JUPYTER_ENDPOINT": cls.jupyter.url}))
        except BaseException:
            cls.tearDownClass()
            raise
        cls.client = live.Client(cls.daemon.port)

    def setUp(self):
        # Another backend would pass many of these.
        self.assertEqual(self.backend(), "endpoint")

    @classmethod
    def enter(cls, context):
        cls.stack.append(context)
        return context.__enter__()

    @classmethod
    def tearDownClass(cls):
        for context in reversed(cls.stack):
            context.__exit__()

    def run_ok(self, code, **more):
        answer = self.client.run(code, **more)
        self.assertEqual((answer.http, answer.status), (200, "ok"), str(answer))
        return answer

    def end_session(self, session):
        self.client.request("DELETE", "/v1/jupyter/sessions/" + session)

    def backend(self):
        return self.client.request("GET", "/v2/code/info").data.get("backend")

    def test_info_names_the_endpoint_and_not_its_token(self):
        info = self.client.request("GET", "/v1/code/info")
        self.assertEqual(info.data["backend"], "endpoint")
        self.assertIn("jupyter", info.data["kinds"])
        capabilities = self.client.request("GET", "/v1/capabilities?refresh=true").data["code_interpreter"]
        for key, value in {"backend": "endpoint", "jupyter_backend": "endpoint", "endpoint": self.jupyter.shown}.items():
            self.assertEqual(capabilities[key], value, key)
        jupyter = self.client.request("GET", "/v1/jupyter/info")
        self.assertEqual(jupyter.data["available_kernels"], ["python3"])
        self.assertIn("external Jupyter server", jupyter.data["description"])
        self.assertEqual((info.data["python"], info.data["languages"][0]["runtime_version"]), ({"available": True, "version": None}, None))
        for said in (self.client.request("GET", "/health").body, self.client.request("GET", "/v1/capabilities").data["isolation"]):
            self.assertEqual(said["confinement"], "external")
            self.assertTrue([it for it in said["warnings"] if "external Jupyter server" in it], said["warnings"])
        self.assertEqual([it["details"]["confinement"] for it in info.data["languages"]], ["external", "sandbox"])
        self.assertEqual(jupyter.data["confinement"], "external")
        self.assertIn("external Jupyter server", self.client.request("GET", "/openapi.json").body["info"]["description"])
        for answer in (info, jupyter, self.client.request("GET", "/v1/capabilities"), self.client.request("GET", "/v2/sandbox"),
                       self.client.request("GET", "/health")):
            self.assertNotIn(self.jupyter.token, json.dumps(answer.body))
        with open(self.daemon.log_path) as f:
            self.assertNotIn(self.jupyter.token, f.read())

    def test_a_one_off_leaves_no_kernel(self):
        before = {kernel["id"] for kernel in self.jupyter.kernels()}
        answer = self.run_ok("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
        self.assertEqual((answer.stdout, answer.stderr, answer.result), ("out\n", "err\n", "42"))
        self.assertIsNone(answer.data["session_id"])
        self.assertEqual(answer.data["execution_count"], 1)
        left = lambda: {kernel["id"] for kernel in self.jupyter.kernels()} - before
        self.assertTrue(within(10, lambda: not left()), left())

    def test_a_session_keeps_its_names_and_counts_its_cells(self):
        before = {kernel["id"] for kernel in self.jupyter.kernels()}
        self.assertEqual(self.run_ok("x = 41", session="names").data["execution_count"], 1)
        self.assertTrue({kernel["id"] for kernel in self.jupyter.kernels()} - before, "it has a kernel at the server")
        answer = self.run_ok("x + 1", session="names")
        self.assertEqual((answer.result, answer.data["execution_count"], answer.data["session_id"]), ("42", 2, "names"))
        self.end_session("names")

    def test_rich_outputs_come_on_both_generations(self):
        code = "%matplotlib inline\nimport pandas as pd, matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\npd.DataFrame({'a': [1]})"
        for path in ("/v1/code/execute", "/v2/code/execute"):
            answer = self.client.request("POST", path, {"language": "python", "code": code})
            bundles = [output["data"] for output in answer.data["outputs"] if output["output_type"] in ("display_data", "execute_result")]
            self.assertEqual(len(bundles), 2, str(answer))
            self.assertTrue(bundles[0]["image/png"].startswith("iVBORw0KGgo"))
            self.assertIn("<table", bundles[1]["text/html"])

    def test_an_exception_is_an_answer(self):
        answer = self.client.run("print('before')\n{}['missing']")
        self.assertEqual((answer.http, answer.status, answer.stdout), (200, "error", "before\n"))
        self.assertEqual(answer.error, "KeyError: 'missing'")

    def test_a_cell_over_its_time_is_interrupted_and_names_stay(self):
        self.run_ok("x = 1", session="slow")
        answer = self.client.run("import time\nprint('before', flush=True)\nwhile True: time.sleep(0.1)", session="slow", timeout=1)
        text = "execution timed out after 1000ms and was interrupted"
        self.assertEqual((answer.http, answer.status, answer.stdout), (200, "timeout", "before\n"))
        self.assertIn(text, answer.stderr)
        self.assertEqual(answer.error, "TimeoutError: " + text)
        self.assertEqual(self.run_ok("x", session="slow").result, "1")
        self.end_session("slow")

    def test_a_kernel_that_ignores_the_interrupt_is_ended(self):
        code = "import time\nx = 1\nwhile True:\n  try:\n    while True: time.sleep(0.1)\n  except BaseException: pass"
        answer = self.client.run(code, session="stubborn", timeout=1)
        self.assertEqual((answer.http, answer.status), (200, "timeout"), str(answer))
        self.assertLess(answer.seconds, 10)
        answer = self.client.run("x", session="stubborn")
        self.assertTrue(answer.error.startswith("NameError"), str(answer))
        self.end_session("stubborn")

    def test_a_kernel_that_dies_is_an_answer_and_its_session_starts_anew(self):
        self.run_ok("x = 1", session="dying")
        answer = self.client.run("import os, time\nprint('last', flush=True)\ntime.sleep(0.5)  # ipykernel sends from a thread of its own\nos._exit(3)", session="dying")
        self.assertEqual((answer.http, answer.status, answer.stdout), (200, "error", "last\n"), str(answer))
        self.assertTrue(answer.error.startswith("ProcessError"), str(answer))
        self.assertTrue(self.client.run("x", session="dying").error.startswith("NameError"))
        self.end_session("dying")

    def test_a_kernel_that_was_culled_between_two_cells_is_replaced_and_its_loss_told(self):
        before = {kernel["id"] for kernel in self.jupyter.kernels()}
        for path in ("/v2/code/execute", "/v1/jupyter/execute"):
            session = "culled" + path[2]
            self.run_ok("x = 1", session=session)
            for kernel in {kernel["id"] for kernel in self.jupyter.kernels()} - before:
                self.jupyter.cull(kernel)
            time.sleep(6)  # a kernel is taken to be there for some seconds after a cell
            body = {"code": "'x' in globals()", "session_id": session, **({"language": "python"} if "code" in path else {})}
            answer = self.client.request("POST", path, body)
            self.assertEqual((answer.http, answer.status, answer.result), (200, "ok", "False"), str(answer))
            self.assertEqual(answer.body["hint"], "session was reset: the Jupyter server ended the kernel", str(answer))
            self.assertLess(answer.seconds, 15)
            self.assertEqual(self.client.request("POST", path, body).body["hint"], None, "it is told once")
            self.end_session(session)

    def test_input_fails_at_once(self):
        answer = self.client.run("input()")
        self.assertEqual((answer.http, answer.status), (200, "error"))
        self.assertLess(answer.seconds, 20)

    def test_jupyter_routes_share_their_sessions_with_the_code_routes(self):
        created = self.client.request("POST", "/v1/jupyter/sessions/create", {"session_id": "shared"})
        self.assertEqual((created.http, created.data["session_id"], created.data["kernel_name"]), (200, "shared", "python3"))
        self.run_ok("x = 5", session="shared")
        answer = self.client.request("POST", "/v1/jupyter/execute", {"code": "x + 1", "session_id": "shared"})
        self.assertEqual((answer.http, answer.status, answer.result), (200, "ok", "6"), str(answer))
        self.assertEqual(answer.data["kernel_name"], "python3")
        self.assertEqual(self.client.request("GET", "/v1/jupyter/sessions").data["sessions"]["shared"]["cwd"], "", "nobody knows it here")
        self.assertEqual(self.client.request("GET", "/v2/code/sessions/shared").data["cwd"], "")
        self.end_session("shared")
        self.assertNotIn("shared", self.client.request("GET", "/v1/jupyter/sessions").data["sessions"])

    def test_refusals_are_those_of_the_contract(self):
        answer = self.client.request("POST", "/v1/jupyter/execute", {"code": "1", "kernel_name": "ir"})
        self.assertEqual(answer.http, 422)
        self.assertIn("unknown kernel 'ir'; available: python3", json.dumps(answer.body))
        self.assertEqual(self.client.run("1", cwd="/no/such").http, 422)
        answer = self.client.request("POST", "/v1/jupyter/execute", {"code": "1", "cwd": "/no/such"})
        self.assertEqual(answer.http, 200)
        self.assertTrue(answer.error.startswith("DirectoryError"), str(answer))

    def test_a_working_directory_is_where_the_cells_run(self):
        self.assertEqual(self.run_ok("import os\nprint(os.getcwd())", cwd="/usr/lib").stdout, "/usr/lib\n")

    def test_a_busy_session_can_be_deleted(self):
        self.run_ok("x = 1", session="busy")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.client.run, "import time; time.sleep(60)", session="busy", timeout=60)
            time.sleep(1)
            self.assertEqual(self.client.end_session("busy").http, 200)
            answer = running.result(20)
        self.assertEqual((answer.http, answer.status), (200, "error"), str(answer))

    def test_javascript_stays_here(self):
        self.assertEqual(self.run_ok("console.log(1)", language="javascript").stdout, "1\n")


class Ends(unittest.TestCase):
    """Servers and daemons that come and go."""

    def test_a_daemon_that_ends_deletes_its_kernels(self):
        with JupyterServer("endpoint-ends") as jupyter:
            with suites.Daemon("endpoint-ends", {"AIO_JUPYTER_ENDPOINT": jupyter.url}) as daemon:
                self.assertEqual(live.Client(daemon.port).run("x = 1", session="s").status, "ok")
                self.assertEqual(len(jupyter.kernels()), 1)
            self.assertTrue(within(10, lambda: not jupyter.kernels()), jupyter.kernels())

    def test_kernels_of_a_daemon_that_was_killed_are_deleted_by_the_next_one(self):
        with JupyterServer("endpoint-killed") as jupyter:
            with suites.Daemon("endpoint-killed", {"AIO_JUPYTER_ENDPOINT": jupyter.url}) as daemon:
                self.assertEqual(live.Client(daemon.port).run("x = 1", session="s").status, "ok")
                left = jupyter.kernels()
                self.assertEqual(len(left), 1)
                os.killpg(daemon.process.pid, signal.SIGKILL)
                suites.end(daemon.process)
                self.assertEqual(len(jupyter.kernels()), 1, "control: nobody deleted it")
                daemon.start()
                self.assertTrue(within(15, lambda: not jupyter.kernels()), jupyter.kernels())
                self.assertEqual(live.Client(daemon.port).run("x = 2", session="t").status, "ok")
                self.assertEqual(len(jupyter.kernels()), 1, "and no other")

    def test_a_server_that_dies_is_an_answer_then_another_backend_then_itself_again(self):
        with JupyterServer("endpoint-dies") as jupyter, suites.Daemon("endpoint-dies", {"AIO_JUPYTER_ENDPOINT": jupyter.url}) as daemon:
            client = live.Client(daemon.port)
            backend = lambda: client.request("GET", "/v2/code/info").data.get("backend")
            self.assertEqual(backend(), "endpoint")
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                running = pool.submit(client.run, "import time\nprint('before', flush=True)\ntime.sleep(40)", session="s", timeout=60)
                time.sleep(5)
                jupyter.kill()
                answer = running.result(60)
            self.assertEqual((answer.http, answer.status, answer.stdout), (200, "error", "before\n"), str(answer))
            answer = client.run("print(1)")
            self.assertEqual((answer.http, answer.status, answer.stdout), (200, "ok", "1\n"), str(answer))
            self.assertTrue(within(NOTICE_S, lambda: backend() in ("kernel", "native")), backend())
            jupyter.start()
            self.assertTrue(within(NOTICE_S, lambda: backend() == "endpoint"), backend())
            self.assertEqual(client.run("print(2)").stdout, "2\n")
            self.assertEqual(client.health()["status"], "healthy")

    def test_a_server_that_was_never_there_leaves_the_other_backends(self):
        with suites.Daemon("endpoint-absent", {"AIO_JUPYTER_ENDPOINT": "http://127.0.0.1:%d" % suites.free_port()}) as daemon:
            client = live.Client(daemon.port)
            self.assertIn(client.request("GET", "/v2/code/info").data["backend"], ("kernel", "native"))
            self.assertEqual(client.health()["confinement"], "external", "it may be there for the next cell")
            self.assertEqual(client.run("print(1)").stdout, "1\n")

    def test_a_server_whose_kernels_never_get_ready_is_an_answer_in_time_then_another_backend(self):
        with NeverReady() as server, suites.Daemon("endpoint-never", {"AIO_JUPYTER_ENDPOINT": server.url}) as daemon:
            client = live.Client(daemon.port)
            backend = lambda: client.request("GET", "/v2/code/info").data.get("backend")
            self.assertEqual(backend(), "endpoint")
            for session, cwd in ((None, None), ("s", None), (None, "/srv"), ("s", None)):
                answer = client.run("print(1)", session=session, timeout=2, **({"cwd": cwd} if cwd else {}))
                self.assertEqual((answer.http, answer.status), (200, "error"), str(answer))
                self.assertEqual(answer.error, "ProcessError: a new kernel of the Jupyter server did not get ready")
                self.assertLess(answer.seconds, 6)
            self.assertEqual(backend(), "endpoint", "callers in a hurry say nothing of the server")
            self.assertTrue(within(45, lambda: backend() in ("kernel", "native")), backend())
            answer = client.run("print(1)")
            self.assertEqual((answer.http, answer.status, answer.stdout), (200, "ok", "1\n"), str(answer))
            self.assertTrue(within(10, lambda: server.deleted == server.started == 3), (server.started, server.deleted))

    def test_settings_that_cannot_be_are_refused_at_start(self):
        refused = {
            "more than one tenant": {"AIO_JUPYTER_ENDPOINT": "http://127.0.0.1:1", "CODE_INTERPRETER_API_KEYS": "a=KEYA,b=KEYB"},
            "https is not supported": {"AIO_JUPYTER_ENDPOINT": "https://127.0.0.1:1/?token=very-secret-token"},
            "differ": {"AIO_JUPYTER_ENDPOINT": "http://127.0.0.1:1/?token=very-secret-token", "AIO_JUPYTER_TOKEN": "another-secret"},
        }
        for words, env in refused.items():
            done = subprocess.run([suites.BINARY, "config"], env=suites.clean_env(**env), capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0, words)
            self.assertIn(words, done.stderr)
            self.assertNotIn("secret", done.stderr + done.stdout)
        done = subprocess.run([suites.BINARY, "config"], env=suites.clean_env(AIO_JUPYTER_ENDPOINT="http://127.0.0.1:1/?token=very-secret-token"),
                              capture_output=True, text=True, timeout=60, check=True)
        self.assertIn("http://127.0.0.1:1", done.stdout)
        self.assertNotIn("secret", done.stdout)


def module_tests():
    """The Rust tests in both forms of the protocol."""
    cargo = shlex.split(os.environ.get("CAISSON_CARGO_TEST", "cargo test --release --locked"))
    forms = {"offsets": (), "json": ("--ZMQChannelsWebsocketConnection.kernel_ws_protocol=",)}
    failed = False
    for form, args in forms.items():
        with JupyterServer("endpoint-module-" + form, args) as jupyter:
            env = {**os.environ, "CAISSON_TEST_JUPYTER_URL": jupyter.url}
            argv = [*cargo, "--lib", "--", "--ignored", "backend::endpoint::real"]
            print("endpoint: %s, %s" % (" ".join(argv), form), flush=True)
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=suites.ROOT, env=env, timeout=CARGO_S)
            print(done.stdout, flush=True)
            # A name that no test has is no failure of cargo's.
            failed |= done.returncode != 0 or " 0 passed" in done.stdout
            left = [] if within(10, lambda: not jupyter.kernels()) else jupyter.kernels()
            if left:
                print("endpoint: kernels were left: %s" % left)
                failed = True
    return failed


def api_tests(only):
    loader = unittest.TestLoader()
    tests = unittest.TestSuite()
    for case in (Routes, Ends):
        names = [name for name in loader.getTestCaseNames(case) if not only or any(word in name for word in only)]
        tests.addTests(case(name) for name in names)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(tests)
    return not result.wasSuccessful() or result.testsRun == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--only", default="", help="parts of test names, comma-separated")
    args = parser.parse_args()
    os.makedirs(suites.LOGS, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        make_environment()
        failed = module_tests() if args.module else api_tests([word for word in args.only.split(",") if word])
    except suites.Failed as error:
        print("endpoint: %s" % error, file=sys.stderr)
        return 2
    finally:
        suites.end_all()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
