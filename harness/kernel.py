"""The kernel backend inside a sandbox: ipykernel's own shell with the harness's pipes in place of its sockets.

Loaded by `harness.py` when the first cell asks for a kernel, and built beforehand by a `python-data` zygote. It is
ipykernel's class and not a likeness of it, because libraries decide by its name and its traits what to show.
Everything it publishes becomes an event of the cell that runs; without one it goes nowhere.

Building a shell changes much of the process (builtins, filters of warnings, the environment, matplotlib's backend).
A zygote undoes that with `put_aside()`, so that native cells see no trace of it; `take_over()` does it again.
"""

import asyncio
import atexit
import builtins
import contextlib
import getpass
import json
import linecache
import os
import re
import signal
import sys
import types
import warnings

INLINE = "module://matplotlib_inline.backend_inline"
NO_NETWORK = (
    "There is no network in this sandbox, so pip finds no index. Packages that are installed already need no pip;"
    " a wheel among your files is installed with: %pip install --no-index ./NAME.whl"
)
# pip would try for a minute to reach what is not there; with one try more it says why it cannot.
PIP_ENVIRONMENT = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "1", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
UNFIT = (
    "Message serialization failed with:\n%s\n"
    "Supporting this message is deprecated in jupyter-client 7, please make sure your message is JSON-compliant"
)
# What pandas takes for its `display.max_columns` in a terminal and in a notebook.
TERMINAL_COLUMNS, NOTEBOOK_COLUMNS = 0, 20
# How much one cell may publish: the daemon's own number (`PUBLISHED_MAX` in src/harness/mod.rs), which hears of one more.
PUBLISHED_MAX = 60_000
# What one cell may publish, in bytes of its frames: below the daemon's bound for a cell, and enough for the daemon to
# see that a cell passed its cap of characters.
PUBLISHED_BYTES_MAX = 15_000_000


def pack_odd(value):
    """What jupyter_client does with a value that JSON has no word for: times and bytes become strings."""
    from jupyter_client.jsonutil import json_default

    return json_default(value)


_encode, _getpid = json.JSONEncoder(allow_nan=False, default=pack_odd).encode, os.getpid


def pack(value):
    """JSON as jupyter_client packs it, so that a bundle which a notebook takes is taken here."""
    try:
        return _encode(value)
    except (TypeError, ValueError) as error:
        from jupyter_client.jsonutil import json_clean

        packed = _encode(json_clean(value))
        warnings.warn(UNFIT % error, stacklevel=2)
        return packed


class Publisher:
    """Turns what the shell publishes into event frames."""

    def __init__(self, cut_error):
        self.events = dict(EVENTS, error=error_event(cut_error))
        self.nonce = self.send = self.session = None
        self.pid = -1
        self.count = self.published = 0
        self.dropped = False
        self.failed = None  # the last error that was shown, as JSON

    def open(self, nonce, session, send):
        self.nonce, self.session, self.send = nonce, session, send
        self.pid, self.count, self.published, self.dropped, self.failed = _getpid(), 0, 0, False, None

    def close(self):
        self.nonce = None

    def publish(self, kind, content):
        # A forked child has no cell of its own, and a thread may outlive its cell.
        if self.nonce is None or _getpid() != self.pid:
            return
        event = self.events.get(kind)
        if event is None:
            return
        body = event(content)
        if kind == "error":
            self.failed = body
        frame = '\n{"nonce":%s,"event":%s%s}\n' % (self.nonce, body, self.session.place())
        if self.count < PUBLISHED_MAX and self.published + len(frame) <= PUBLISHED_BYTES_MAX:
            self.count += 1
            self.published += len(frame)
            self.session.recorder.note("r", 1)
        elif self.dropped:
            return
        else:
            self.dropped = True
            frame = '\n{"nonce":%s,"event":"dropped"}\n' % self.nonce
        self.send(frame.encode("ascii"))


def bundle_event(name):
    def event(content):
        display_id = (content.get("transient") or {}).get("display_id")
        more = "" if display_id is None else ',"id":%s' % pack(str(display_id))
        data, metadata = pack(content.get("data") or {}), pack(content.get("metadata") or {})
        return '"%s","data":%s,"metadata":%s%s' % (name, data, metadata, more)

    return event


def clear_event(content):
    return '"clear","wait":%s' % ("true" if content.get("wait") else "false")


def error_event(cut_error):
    def event(content):
        lines = [str(line) for line in content["traceback"]]
        return '"error","error":%s' % pack(cut_error(str(content["ename"]), str(content["evalue"]), lines))

    return event


EVENTS = {
    "display_data": bundle_event("display"),
    "update_display_data": bundle_event("update"),
    "execute_result": bundle_event("result"),
    "clear_output": clear_event,
}


def shell_classes(publisher):
    """Made late: the imports are what this costs."""
    from ipykernel.zmqshell import ZMQInteractiveShell
    from jupyter_client.session import Session

    class Pipe(Session):
        """A session that has neither sockets nor keys."""

        def msg(self, msg_type, content=None, parent=None, header=None, metadata=None):
            header = {"msg_id": "", "msg_type": msg_type} if header is None else header
            return {
                "header": header,
                "msg_id": header["msg_id"],
                "msg_type": msg_type,
                "parent_header": {},
                "content": {} if content is None else content,
                "metadata": {} if metadata is None else metadata,
            }

        def send(self, stream, msg_or_type, content=None, *args, **kwargs):
            if isinstance(msg_or_type, dict):
                publisher.publish(msg_or_type["msg_type"], msg_or_type["content"])
            else:
                publisher.publish(msg_or_type, content or {})

    class Shell(ZMQInteractiveShell):
        @property
        def db(self):
            """In the guest's own home: the profile that the shell was built with is read-only."""
            if self._db is None:
                from IPython.external.pickleshare import PickleShareDB
                from IPython.paths import get_ipython_dir

                self._db = PickleShareDB(os.path.join(get_ipython_dir(), "profile_default", "db"))
            return self._db

        def _tee(self, channel):
            """IPython keeps all that is printed, for `%notebook`: a flood would fill the memory before it is cut."""
            return contextlib.nullcontext()

        def enable_gui(self, gui=None):
            """There is no event loop of a window system to join."""

        def ask_exit(self):
            # The daemon ends sessions, cells do not: like sys.exit(), it is an error of this cell.
            raise SystemExit(0)

    Shell.__name__ = Shell.__qualname__ = ZMQInteractiveShell.__name__
    Shell.__module__ = ZMQInteractiveShell.__module__
    return Shell, Pipe


class Forgetful(dict):
    """In the place of IPython's record of outputs and errors: whatever is put into it is gone."""

    def __missing__(self, key):
        return []

    def __setitem__(self, key, value):
        pass


class Surroundings:
    """What building a shell changes in the process, as it is at one moment."""

    def __init__(self):
        self.builtins = {name: getattr(builtins, name) for name in WATCHED_BUILTINS if hasattr(builtins, name)}
        self.sys = {name: getattr(sys, name) for name in WATCHED_SYS if hasattr(sys, name)}
        self.path, self.main = list(sys.path), sys.modules.get("__main__")
        self.filters = list(warnings.filters)
        self.environment = dict(os.environ)

    def restore(self):
        restore_names(builtins, WATCHED_BUILTINS, self.builtins)
        restore_names(sys, WATCHED_SYS, self.sys)
        sys.path[:], sys.modules["__main__"] = self.path, self.main
        if list(warnings.filters) != self.filters:
            warnings.filters[:] = self.filters
            warnings._filters_mutated()
        for name in set(os.environ) - set(self.environment):
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


WATCHED_BUILTINS = ("display", "get_ipython", "__IPYTHON__", "_", "exit", "quit", "input", "print")
WATCHED_SYS = ("displayhook", "excepthook", "ps1", "ps2", "ps3", "argv", "stdout", "stderr", "stdin") + (
    "last_type",
    "last_value",
    "last_traceback",
    "last_exc",
)


def restore_names(module, names, values):
    for name in names:
        if name in values:
            if getattr(module, name, None) is not values[name]:
                setattr(module, name, values[name])
        elif hasattr(module, name):
            delattr(module, name)


def pip_magic(shell):
    from IPython.core.magics.packaging import PackagingMagics

    def pip(line):
        for name, value in PIP_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        PackagingMagics(shell).pip(line)
        words = line.split()
        wants_index = any(word in ("install", "download", "wheel", "index", "search") for word in words)
        if wants_index and "--no-index" not in words and shell.user_ns.get("_exit_code"):
            print(NO_NETWORK, file=sys.stderr)

    pip.__doc__ = PackagingMagics.pip.__doc__
    return pip


def forbidden_input():
    """`input` and `getpass` of a kernel whose client takes no questions."""
    from ipykernel.kernelbase import Kernel as Asker

    class Nobody:
        _allow_stdin = False

    return types.MethodType(Asker.raw_input, Nobody()), types.MethodType(Asker.getpass, Nobody())


def path_of_kernel(path):
    """The working directory behind the standard library: a cell's `random.py` does not hide Python's."""
    path = [folder for folder in path if folder]
    packages = [at for at, folder in enumerate(path) if os.path.basename(folder) in ("site-packages", "dist-packages")]
    path.insert(packages[0] if packages else len(path), "")
    return path


def end_interrupts():
    """One that comes now came too late: the cell is over."""
    while True:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return
        except KeyboardInterrupt:
            pass


def set_columns(before, now):
    """pandas looks once, when it is imported, whether it is in a notebook, and a zygote imported it before."""
    options = sys.modules.get("pandas._config.config")
    registered = getattr(options, "_registered_options", {})
    option = registered.get("display.max_columns")
    if option is not None and option.defval == before:
        registered["display.max_columns"] = option._replace(defval=now)
        # As set_option does, which would look for the name by a pattern in every session.
        options._global_config["display"]["max_columns"] = now


class Replaced:
    """Functions of modules that a kernel replaces, so that it can put them back."""

    def __init__(self):
        self.before = []

    def replace(self, module, name, value):
        self.before.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def restore(self):
        while self.before:
            setattr(*self.before.pop())


# Whatever the input transformers of a fresh shell may look for, and what a parser may warn of. Anything else that can
# be parsed they give back as it is.
SPECIAL = re.compile(r"[%!?\\\f\r\v]|^[ \t]*[,;/]|^[ \t]*(>>>|\.\.\.)|In ?\[|\A\s|\A\Z|^[ \t]+$", re.MULTILINE)
ONLY_AST, TOP_LEVEL_AWAIT = 0x400, 0x2000  # ast.PyCF_*


def spare_plain_cells(manager):
    """Lets cells pass in which there is nothing to transform: looking for that by tokens takes a fifth of a short cell."""

    def transformers():
        return [*manager.cleanup_transforms, *manager.line_transforms, *manager.token_transformers]

    at_first, transform = transformers(), manager.transform_cell

    def transform_cell(cell):
        if SPECIAL.search(cell) or transformers() != at_first:
            return transform(cell)
        try:
            compile(cell, "", "exec", ONLY_AST | TOP_LEVEL_AWAIT, True)
        except Exception:
            return transform(cell)
        return cell if cell.endswith("\n") else cell + "\n"

    manager.transform_cell = transform_cell


class Kernel:
    """One shell. Built once, taken over by at most one session. `cut_error` keeps an error within a frame, `latest`
    makes bounds for what is kept of earlier cells."""

    def __init__(self, cut_error, latest):
        self.codes, self.reprs = latest(), latest()
        self.publisher = Publisher(cut_error)
        self.native = Surroundings()
        # Before anything is imported that looks for it.
        os.environ["MPLBACKEND"] = INLINE
        self.shell = self.build()
        # Names that emptying the module takes away as well and does not bring back.
        names = self.shell.user_ns.items()
        self.module_names = {name: value for name, value in names if name.startswith("__") or name == "_"}
        self.cells, self.has_loop, self.replaced = 0, False, Replaced()
        self.input, self.getpass = forbidden_input()
        builtins.input = self.input
        self.own = Surroundings()

    def build(self):
        shell_class, session_class = shell_classes(self.publisher)
        from ipykernel.compiler import XCachingCompiler
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False  # its thread and its database
        shell_class.compiler_class = XCachingCompiler
        shell = shell_class.instance(config=config)
        session = session_class(parent=shell)
        for part in (shell.displayhook, shell.display_pub):
            part.session, part.pub_socket = session, None
        shell.displayhook.topic = b""
        shell.display_pub.topic = b""
        shell.register_magic_function(pip_magic(shell), magic_name="pip")
        shell.extension_manager.load_extension("storemagic")
        shell.history_manager.outputs = shell.history_manager.exceptions = Forgetful()
        spare_plain_cells(shell.input_transformer_manager)
        # A kernel is ended and never ends by itself; a program that a zygote's fork runs does, and it is none of its.
        atexit.unregister(shell.atexit_operations)
        return shell

    # --- in a zygote --------------------------------------------------------------------------------------------------

    def put_aside(self):
        """Leaves the process as if no shell had been built."""
        self.shell.reset(new_session=False)
        self.shell.user_ns.update(self.module_names)
        self.shell.user_ns_hidden.update(self.module_names)
        self.cells, self.has_loop = 0, False
        self.shell.history_manager.reset()
        for name in self.shell.compile._filename_map:
            linecache.cache.pop(name, None)
        self.shell.compile._filename_map.clear()
        self.codes.clear()
        self.reprs.clear()
        self.own = Surroundings()
        self.leave_inline()
        # An event loop holds descriptors: each fork makes its own.
        self.loop().close()
        asyncio.set_event_loop_policy(None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        set_columns(NOTEBOOK_COLUMNS, TERMINAL_COLUMNS)
        self.replaced.restore()
        for cls in type(self.shell)._walk_mro():
            cls._instance = None
        self.native.restore()

    def leave_inline(self):
        matplotlib = sys.modules.get("matplotlib")
        if matplotlib is not None and "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].switch_backend("agg")
            matplotlib.interactive(False)

    def take_over(self, session):
        """The session's cells are this shell's from now on."""
        shell = self.shell
        for cls in type(shell)._walk_mro():
            cls._instance = shell
        own, here = self.own, Surroundings()
        own.sys = dict(own.sys, stdout=here.sys["stdout"], stderr=here.sys["stderr"], stdin=here.sys["stdin"])
        own.builtins["print"] = here.builtins["print"]
        own.path = path_of_kernel(here.path)
        changed = {name: value for name, value in own.environment.items() if self.native.environment.get(name) != value}
        own.environment = dict(here.environment, **changed)
        own.restore()
        if "matplotlib.pyplot" in sys.modules:
            self.enter_inline()
        set_columns(TERMINAL_COLUMNS, NOTEBOOK_COLUMNS)
        self.replaced.replace(getpass, "getpass", self.getpass)
        self.replace_debugger()
        shell.starting_dir = os.getcwd()
        shell.history_manager.dir_hist[:] = [shell.starting_dir]
        session.main = shell.user_module
        # However the daemon was started: an interrupt reaches a cell, and only a cell.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def enter_inline(self):
        from IPython.core.pylabtools import activate_matplotlib

        activate_matplotlib(INLINE)
        from matplotlib_inline.backend_inline import configure_inline_support

        configure_inline_support(self.shell, INLINE)
        # Of the rehearsals' figures: `%run` would draw one that nobody made.
        sys.modules["matplotlib.pyplot"].draw_if_interactive.called = False

    def replace_debugger(self):
        """With the one of IPython, whose prompt is `input` and so an error at once."""
        import pdb

        from IPython.core import debugger

        for module in (debugger, pdb):
            self.replaced.replace(module, "Pdb", debugger.InterruptiblePdb)
        self.replaced.replace(pdb, "set_trace", debugger.set_trace)

    # --- cells --------------------------------------------------------------------------------------------------------

    def cell(self, code, nonce, session, send, count=None):
        """Runs one cell. Returns its error as JSON; everything else has been published by then."""
        publisher, shell = self.publisher, self.shell
        self.begin_cell(code, count)
        publisher.open(nonce, session, send)
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            result = shell.run_cell(code, store_history=True)
            self.show_pages()
        finally:
            end_interrupts()
            publisher.close()
            self.tidy()
        if result.success and not shell._last_traceback_during_displayhook:
            return "null"
        return (publisher.failed or publisher.events["error"](self.unshown(result))).partition('"error":')[2]

    def begin_cell(self, code, count):
        """Numbers the cell as the daemon does, so that `Out[n]` is what was shown as n, and sets what ipykernel sets
        for each cell anew."""
        # After the death of an earlier interpreter the session goes on counting.
        self.cells = count if type(count) is int and count > 0 else self.cells + 1
        self.shell.execution_count = self.cells
        history = self.shell.history_manager
        for inputs in (history.input_hist_parsed, history.input_hist_raw):
            inputs[self.cells :] = []
            inputs.extend([""] * (self.cells - len(inputs)))
        builtins.input, getpass.getpass = self.input, self.getpass
        # Made when it is wanted: it costs a session 0.9 MiB and its first cell a millisecond.
        self.has_loop = self.has_loop or "asyncio" in code or "loop" in code
        if self.has_loop:
            asyncio.set_event_loop(self.loop())

    def tidy(self):
        """Lets go of what only we would keep of earlier cells. `In`, `Out` and their like are the guest's."""
        history, numbers = self.shell.history_manager, self.shell.compile._filename_map
        history.db_input_cache, history.db_output_cache = [], []  # of a database that is off
        for name in self.codes.fresh(numbers):
            for old in self.codes.add(name, linecache.cache.get(name, (0,))[0]):
                numbers.pop(old, None)
                linecache.cache.pop(old, None)
        reprs = history.output_hist_reprs
        for number in self.reprs.fresh(reprs):
            for old in self.reprs.add(number, len(reprs[number])):
                reprs.pop(old, None)

    def loop(self):
        from IPython.core.async_helpers import get_asyncio_loop

        return get_asyncio_loop()

    def unshown(self, result):
        error = result.error_before_exec or result.error_in_exec
        return {"ename": type(error).__name__, "evalue": str(error), "traceback": []}

    def show_pages(self):
        """`name?` and its like open a pager in a notebook's page; here they are an output."""
        manager = self.shell.payload_manager
        for payload in manager.read_payload():
            if payload.get("source") == "page":
                self.publisher.publish("display_data", {"data": payload["data"], "metadata": {}})
        manager.clear_payload()

    def warm(self):
        self.shell.run_cell("pass", store_history=False)
