"""Program mode: one text, run the way `python3 main.py args` would run it, and then the interpreter is over.

Loaded by `harness.py` when a program is asked for, and beforehand by a zygote. What differs from a cell: `__main__` is
a script's, nothing is displayed, an uncaught error is printed, threads are waited for, what was registered with
`atexit` runs, names are let go and files flushed, and the exit status is the program's own.

As everywhere in the harness nothing here defends against the guest. It defends against programs that close
descriptors, replace streams, leave signal handlers behind or end in a fork.
"""

import _thread
import atexit
import builtins
import gc
import io
import os
import stat
import sys

# A copy for the functions below: a program may replace `str` or `len` in the module.
__builtins__ = dict(builtins.__dict__)

NAME = "main.py"
DATA = "/mnt/data"  # where plots go, if it is there
REQUESTS = 3
TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # CO_COROUTINE
HERE = (lambda: 0).__code__.co_filename
# What a call may carry to a tool, in bytes of JSON: below the daemon's bound for a frame.
INPUT_BYTES_MAX = 4 * 1024 * 1024
# Turns of an event loop that a call waits for others to go with it.
TURNS_MAX = 1000
LAST = ("last_type", "last_value", "last_traceback", "last_exc")
HOLD_OUTPUT = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
DESCRIPTORS = 5  # of an interpreter in which nothing was opened
INTERRUPTED = 130  # what a shell calls the end by SIGINT
C_LONG = 1 << 63
TRIES_MAX = 100  # of telling the end, while a signal's handler raises in each

# What a program may replace, as it was before.
_read, _exit, _getpid, _fstat = os.read, os._exit, os.getpid, os.fstat
_modules, _frames_of_threads, _int_and = sys.modules, sys._current_frames, int.__and__
_compile, _eval, _str = compile, eval, str
_stat, _count_threads = os.stat, _thread._count
_run_exit_functions = atexit._run_exitfuncs
_collect, _get_objects, _listdir, _is_regular = gc.collect, gc.get_objects, os.listdir, stat.S_ISREG

harness = None  # what the module that loaded this one holds


def c_flush():
    """The C library's fflush; None where `harness.py` could not do without ctypes either."""
    try:
        return sys.modules["ctypes"].CDLL(None).fflush
    except (KeyError, OSError, AttributeError):
        return None


_flush_c = c_flush()

# Compiled apart, because a warning that this causes names the file and the line it comes from: Python says `sys:1`.
LET_GO = compile("for name in names: main[name] = None", "sys", "exec", 0, True)


class Program:
    """The program of one request."""

    def __init__(self, session, request):
        program = request["program"]
        self.code = as_file(program["code"]) if type(program.get("code")) is str else ""
        self.args = texts(program.get("args"))
        self.nonce = harness.quoted_nonce(request)
        self.pid, self.folder = _getpid(), working_directory()
        self.names = session.main.__dict__
        self.awaits = False
        self.plots, self.modules = Plots(self), len(_modules)
        self.port = port_of(request.get("nonce"), program.get("tools"))
        self.events = harness.identity(harness.EVENTS)
        self.last = None  # the frame that tells the end

    def run(self):
        """Runs it to its end. Never returns."""
        status = self.attempt(self.become_script, 1) or self.attempt(self.play, 1)
        self.attempt(harness.calm, None)
        for step in self.steps():
            self.attempt(step, None)
        self.leave(status or 0)

    def steps(self):
        """Python's own way to end, in its order."""
        ending = (wait_for_threads, self.plots.finish, _run_exit_functions)
        return ending + (self.flush, flush_files, self.let_go, flush_files)

    def attempt(self, step, failed):
        """What Python's own ending does with an error in it: it is told, and the ending goes on."""
        try:
            return step()
        except BaseException as exc:
            self.attempt_to(self.tell, exc)
            return failed

    def attempt_to(self, step, *args):
        try:
            return step(*args)
        except BaseException:
            return None  # its stream is gone, or a signal handler struck again

    # --- the script ---------------------------------------------------------------------------------------------------

    def become_script(self):
        names, path = self.names, "%s/%s" % ("" if self.folder == "/" else self.folder, NAME)
        names.update(__file__=path, __cached__=None, __annotations__={})
        sys.argv = [NAME] + self.args
        sys.path[:] = [self.folder] + [entry for entry in sys.path if entry]
        # A modification time of None keeps linecache.checkcache away.
        lines = [line + "\n" for line in self.code.split("\n")]
        harness._linecache.cache[NAME] = (len(self.code), None, lines, NAME)
        self.watch(Watch())
        if self.port is not None:
            names.update(self.port.functions())

    def watch(self, watch):
        watch.when_loaded("matplotlib.pyplot", self.plots.hook)
        watch.when_loaded("multiprocessing.spawn", self.lend_source)
        watch.when_loaded("threading", self.tell_of_threads)

    def play(self):
        """The exit status of what was run."""
        try:
            code = _compile(self.code, NAME, "exec", TOP_LEVEL_AWAIT, True)
            if code.co_flags & COROUTINE:
                self.awaits = True
                play_awaiting(code, self.names)
            else:
                play(code, self.names)
            return 0
        except SystemExit as exc:
            return self.exit_status(exc)
        except BaseException as exc:
            return self.uncaught(exc)

    def exit_status(self, exc):
        code = exc.code
        if code is None:
            return 0
        if isinstance(code, int):
            # What is no C long is an error to Python, and so -1.
            return _int_and(code, 0xFF) if -C_LONG <= _int_and(code, -1) < C_LONG else 0xFF
        self.attempt_to(self.write, _str(code) + "\n")
        return 1

    def uncaught(self, exc):
        trace = own_frames_off(exc.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(exc), exc, trace
        if sys.version_info >= (3, 12):
            sys.last_exc = exc
        hook = getattr(sys, "excepthook", None)
        if hook is None or hook is sys.__excepthook__:
            self.attempt_to(self.tell, exc)
        else:
            try:
                hook(type(exc), exc, trace)
            except SystemExit as ending:
                return self.exit_status(ending)
            except BaseException as second:
                self.attempt_to(self.write, "Error in sys.excepthook:\n")
                self.attempt_to(self.tell, second)
                self.attempt_to(self.write, "\nOriginal exception was:\n")
                self.attempt_to(self.tell, exc)
        return INTERRUPTED if isinstance(exc, KeyboardInterrupt) else 1

    def tell(self, exc):
        try:
            report = harness._TracebackException(type(exc), exc, exc.__traceback__)
            harness.strip_own_frames(report)
            text = "".join(report.format())
        except BaseException:
            text = ""  # a __str__ or a source line that fights back, or no memory left
        name = type.__dict__["__name__"].__get__(type(exc))
        self.write(text or "%s: %s\n" % (name, harness.safe_str(exc)))

    def write(self, text):
        stream = getattr(sys, "stderr", None)
        if stream is None:
            return
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("utf-8", "backslashreplace").decode())
        except (ValueError, AttributeError):  # closed, or a user's own object that is no stream
            harness.write_all(2, text.encode("utf-8", "backslashreplace"))

    # --- the end ------------------------------------------------------------------------------------------------------

    def flush(self):
        harness.flush(getattr(sys, "stdout", None))
        harness.flush(getattr(sys, "stderr", None))

    def let_go(self):
        """Takes the program's names away, as Python's ending does: files are written, `__del__` is called."""
        if len(_frames_of_threads()) > 1:
            return  # a daemon thread would go on without its names; Python's own ending stops it first
        for last in [name for name in LAST if hasattr(sys, name)]:
            setattr(sys, last, None)
        names = [name for name in self.names if type(name) is str and name != "__builtins__"]
        names.sort(key=lambda name: not (name[:1] == "_" and name[:2] != "__"))
        _eval(LET_GO, {"names": names, "main": self.names})
        # Without classes and packages there is nothing in a ring that does something when it is collected.
        if "class" in self.code or len(_modules) != self.modules:
            _collect()

    def leave(self, status):
        tries, told = 0, False
        while True:
            try:
                tries += 1
                if not told and tries <= TRIES_MAX:
                    self.flush()
                    told = self.tell_end(status)
                if told and len(_frames_of_threads()) == 1:
                    # Until the daemon ends it, behind its answer: our own end would take the processor from that.
                    _read(REQUESTS, 1)
                _exit(status)
            except OSError:
                tries, told = TRIES_MAX, False  # nobody hears it: the launcher sees the status
            except BaseException:
                pass  # of a signal handler: once more

    def tell_end(self, status):
        """Whether it was told."""
        # Not a fork's, nor where the program has a file of its own under this number.
        if _getpid() != self.pid or harness.identity(harness.EVENTS) != self.events:
            return False
        if self.last is None:
            self.last = ('\n{"nonce":%s,"event":"done","exit":%d}\n' % (self.nonce, status)).encode()
        harness._frames.send(self.last)
        return True

    # --- threads and workers ------------------------------------------------------------------------------------------

    def tell_of_threads(self, threading):
        """Python's own hook is C, which looks for the source line in a file."""

        def excepthook(args, /):
            if args.exc_type is not SystemExit and args.exc_value is not None:
                name = args.thread.name if args.thread is not None else threading.get_ident()
                self.write("Exception in thread %s:\n" % name)
                self.tell(args.exc_value)

        threading.excepthook = excepthook

    def lend_source(self, spawn):
        """Lets `multiprocessing` import the program in workers that it starts afresh: it looks for a file."""
        real = spawn.get_preparation_data

        def get_preparation_data(name):
            data = real(name)
            if data.get("init_main_from_path") == self.names.get("__file__"):
                if self.awaits or self.port is not None:
                    del data["init_main_from_path"]  # as a file it would be no program
                else:
                    data["init_main_from_path"] = self.source_file()
            return data

        spawn.get_preparation_data = get_preparation_data

    def source_file(self):
        if getattr(self, "source", None) is None:
            import tempfile

            self.source = os.path.join(tempfile.mkdtemp(prefix="program-"), NAME)
            with open(self.source, "w", encoding="utf-8", newline="\n") as out:
                out.write(self.code)
        return self.source


class Rehearsal(Program):
    """Leaves the process as it was: for a zygote, whose forks then find everything done once before."""

    def run(self):
        path, argv = list(sys.path), sys.argv
        try:
            super().run()
        finally:
            sys.path[:], sys.argv = path, argv
            for last in [name for name in LAST if hasattr(sys, name)]:
                delattr(sys, last)
            harness._linecache.cache.pop(NAME, None)

    def watch(self, watch):
        watch.find_spec("caisson")

    def steps(self):
        return (self.plots.finish, self.flush, flush_files, self.let_go, flush_files)

    def leave(self, status):
        self.flush()
        self.tell_end(status)


class WarmUp(Rehearsal):
    """For an interpreter that waits: a fork pays once for each page that it writes, and then its program need not."""

    def __init__(self, session, request):
        super().__init__(session, request)
        self.names = dict(self.names)

    def tell_end(self, status):
        pass


begin = Program


def play(code, names):
    _eval(code, names)


def play_awaiting(code, names):
    import asyncio

    async def drive():
        await _eval(code, names)

    real = asyncio.run
    asyncio.run = asyncio.runners.run = beside(real)
    real(drive())


OWN_ENTRIES = ("play", "drive")  # what the program's code is called from


def beside(real):
    """An `asyncio.run` that a program which awaits at its top can call as well: in a thread of its own."""

    def run(main, **more):
        import asyncio
        import threading

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return real(main, **more)
        got = []

        def target():
            try:
                got.append((real(main, **more), None))
            except BaseException as exc:
                got.append((None, exc))

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        (result, error), = got
        if error is not None:
            raise error
        return result

    run.__name__, run.__qualname__, run.__doc__, run.__module__ = "run", "run", real.__doc__, real.__module__
    return run


def as_file(code):
    """What reading it from a file would give."""
    return code[code[:1] == "\ufeff" :].replace("\r\n", "\n").replace("\r", "\n")


def texts(values):
    return [value for value in values if type(value) is str] if type(values) is list else []


def working_directory():
    try:
        return os.getcwd()
    except OSError:
        return "/"


def own_frames_off(trace):
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    return trace


def wait_for_threads():
    threading = _modules.get("threading")
    if threading is None or _count_threads() == 0:
        return
    try:
        threading._shutdown()
    except (AttributeError, AssertionError):
        # Another version, or a module that the program has changed.
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


def flush_files():
    """Writes what is still held for files that nobody has closed, and for C's. Before their owners are let go as well:
    of a ring that holds a file the collector may close the lowest layer first."""
    if files_to_write():
        for each in _get_objects():
            if isinstance(each, HOLD_OUTPUT):
                try:
                    each.flush()
                except (OSError, ValueError):
                    pass
    if _flush_c is not None:
        _flush_c(None)


def files_to_write():
    try:
        # What Linux says since 6.2, at a tenth of the price.
        if _stat("/proc/self/fd").st_size == DESCRIPTORS:
            return False
        numbers = _listdir("/proc/self/fd")
    except OSError:
        return True
    return any([int(number) > 2 and is_file(int(number)) for number in numbers])


def is_file(fd):
    try:
        return _is_regular(_fstat(fd).st_mode)
    except OSError:
        return False


# --- things done when a module is loaded ----------------------------------------------------------------------------


class Watch:
    """A finder that finds nothing of its own: it does something once a module has been loaded by another."""

    def __init__(self):
        self.actions = {}

    def when_loaded(self, name, action):
        module = sys.modules.get(name)
        if module is not None:
            action(module)
        else:
            self.actions[name] = action
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        action = self.actions.pop(name, None)
        if action is None:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    follow(spec.loader, action)
                    return spec
        return None


def follow(loader, action):
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):
        return  # one for all modules

    def exec_module(module):
        execute(module)
        try:
            action(module)
        except Exception:
            pass  # another version of the package: it is as it was

    try:
        loader.exec_module = exec_module
    except AttributeError:
        pass


# --- plots ----------------------------------------------------------------------------------------------------------


class Plots:
    """What `plt.show()` shows where nobody looks: each figure that is in no file yet becomes `plot_N.png`.

    A figure that was shown is closed, as its window would be, so that the next plot begins anew.
    """

    def __init__(self, program):
        self.program = program
        self.number = 0
        self.files = None  # figure → the file that show() made for it, "" where the program made one
        self.last = self.pyplot = None

    def hook(self, pyplot):
        self.pyplot = pyplot
        self.save_current = pyplot.savefig
        pyplot.show = like(pyplot.show, self.show_all)
        # A zygote may have loaded it for nothing.
        if "show" in self.program.code:
            self.follow_figures()

    def follow_figures(self):
        import weakref

        from matplotlib.figure import Figure

        self.files = weakref.WeakKeyDictionary()
        self.savefig = Figure.savefig
        Figure.savefig = like(Figure.savefig, self.note_savefig)
        Figure.show = like(Figure.show, lambda figure, *args, **more: self.show([figure]))
        self.pyplot.savefig = like(self.save_current, self.save_last)

    def note_savefig(self, figure, fname, *args, **more):
        result = self.savefig(figure, fname, *args, **more)
        if isinstance(fname, (str, bytes, os.PathLike)) or isinstance(getattr(fname, "name", None), str):
            self.files[figure] = ""
        return result

    def save_last(self, *args, **more):
        """`plt.savefig` behind `plt.show`: what is meant is the figure that was shown."""
        if self.last is not None and not self.pyplot.get_fignums():
            return self.last.savefig(*args, **more)
        return self.save_current(*args, **more)

    def show_all(self, *args, block=None, **more):
        block = args[0] if args else block
        pyplot = self.pyplot
        if self.files is None:
            self.follow_figures()
        figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
        self.show(figures)
        if figures and block is not False and not (block is None and pyplot.isinteractive()):
            self.last = figures[-1]
            for figure in figures:
                pyplot.close(figure)

    def show(self, figures):
        for figure in figures:
            if figure not in self.files and len(figure.get_children()) > 1:
                self.files[figure] = self.keep(figure, self.new_file())

    def keep(self, figure, path):
        try:
            self.savefig(figure, path, format="png")
        except Exception as exc:
            remove(path)
            self.program.write("plt.show() could not draw a figure: %s: %s\n" % (type(exc).__name__, exc))
        return path

    def new_file(self):
        folder = DATA if os.access(DATA, os.W_OK) else self.program.folder
        while True:
            self.number += 1
            path = os.path.join(folder, "plot_%d.png" % self.number)
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                return path
            except FileExistsError:
                pass

    def finish(self):
        """What was drawn on a figure after it was shown, and is still open."""
        if self.files is None or _getpid() != self.program.pid:
            return
        for number in self.pyplot.get_fignums():
            figure = self.pyplot.figure(number)
            path = self.files.get(figure)
            if path and figure.stale:
                self.keep(figure, path)


def like(real, function):
    """A plain function, so that it may be a method, with the name and the text of the one it stands for."""

    def stand_in(*args, **more):
        return function(*args, **more)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(stand_in, name, getattr(real, name, None))
    stand_in.__wrapped__ = real
    return stand_in


def remove(path):
    try:
        os.remove(path)
    except OSError:
        pass


# --- tools ----------------------------------------------------------------------------------------------------------


class ToolError(RuntimeError):
    """A tool answered with an error."""


ToolError.__module__ = "builtins"


def port_of(nonce, tools):
    if type(tools) is not list:
        return None
    names = {}
    for each in tools:
        if type(each) is dict and type(each.get("name")) is str and type(each.get("function")) is str:
            names[each["function"]] = each["name"]
    os.set_blocking(REQUESTS, False)
    return Port(nonce, names)


class Port:
    """Carries calls of tools to the daemon, and their answers back to whichever event loop waits for them."""

    def __init__(self, nonce, names):
        import json

        self.nonce, self.names, self.pid = nonce, names, _getpid()
        self.loads, self.dumps = json.JSONDecoder().decode, json.JSONEncoder(allow_nan=False, default=plain).encode
        self.lock = _thread.allocate_lock()
        self.count = 0
        self.waiting = {}  # id → its event loop and its future
        self.unsent = {}  # id → the call as JSON
        self.gathering = set()  # event loops that will send what is unsent
        self.rest = b""

    def functions(self):
        return {function: self.function(function, name) for function, name in self.names.items()}

    def function(self, function, name):
        async def call(*args, **given):
            return await self.call(name, arguments(function, args, given))

        call.__name__ = call.__qualname__ = function
        call.__module__ = "__main__"
        call.__doc__ = "The tool %s." % name
        return call

    async def call(self, name, given):
        import asyncio

        if _getpid() != self.pid:
            raise ToolError("tools can only be called in the program's own process")
        text = self.dumps(given)
        if len(text) > INPUT_BYTES_MAX:
            raise ToolError("the input of %s is too large: %d of at most %d bytes" % (name, len(text), INPUT_BYTES_MAX))
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self.lock:
            self.count += 1
            number = "call_%03d" % self.count
            self.waiting[number] = loop, future
            self.unsent[number] = '{"id":"%s","name":%s,"input":%s}' % (number, self.dumps(name), text)
        try:
            loop.add_reader(REQUESTS, self.hear)
            if loop not in self.gathering:
                self.gathering.add(loop)
                loop.call_soon(self.gather, loop, 0)
            return await future
        finally:
            self.forget(loop, number)

    def forget(self, loop, number):
        with self.lock:
            self.waiting.pop(number, None)
            self.unsent.pop(number, None)
            others = any([each is loop for each, _ in self.waiting.values()])
        if not others and not loop.is_closed():
            loop.remove_reader(REQUESTS)

    def gather(self, loop, turns):
        """Sends all calls in one frame once the event loop has nothing else to do."""
        if getattr(loop, "_ready", None) and turns < TURNS_MAX:
            loop.call_soon(self.gather, loop, turns + 1)
            return
        self.gathering.discard(loop)
        with self.lock:
            calls = list(self.unsent.values())
            self.unsent.clear()
            if calls:
                nonce = self.dumps(self.nonce)
                frame = '\n{"nonce":%s,"event":"call","calls":[%s]}\n' % (nonce, ",".join(calls))
                self.send(frame.encode())

    def send(self, frame):
        try:
            harness._frames.send(frame)
        except OSError as exc:
            self.fail("tools cannot be called any more: %s" % exc)

    def hear(self):
        with self.lock:
            lines = self.read_lines()
        for line in lines:
            try:
                frame = self.loads(line.decode())
            except ValueError:
                continue
            if type(frame) is dict and frame.get("nonce") == self.nonce:
                for answer in frame.get("answers", ()):
                    self.deliver(answer)

    def read_lines(self):
        parts = [self.rest]
        while True:
            try:
                data = _read(REQUESTS, 1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.fail("tools cannot be called any more: their answers' descriptor is closed")
                break
            parts.append(data)
        *lines, self.rest = b"".join(parts).split(b"\n")
        return lines

    def deliver(self, answer):
        with self.lock:
            entry = self.waiting.pop(answer.get("id"), None)
        if entry is None:
            return  # whoever called has stopped waiting
        loop, future = entry
        if "error" in answer:
            step, value = settle_error, ToolError(answer["error"])
        else:
            step, value = settle, answer.get("result")
        try:
            loop.call_soon_threadsafe(step, future, value)
        except RuntimeError:
            pass  # its event loop is closed

    def fail(self, text):
        """With the lock held."""
        for loop, future in self.waiting.values():
            try:
                loop.call_soon_threadsafe(settle_error, future, ToolError(text))
            except RuntimeError:
                pass
        self.waiting.clear()


def settle(future, value):
    if not future.done():
        future.set_result(value)


def settle_error(future, error):
    if not future.done():
        future.set_exception(error)


def arguments(function, args, given):
    if not args:
        return given
    if len(args) == 1 and type(args[0]) is dict and not given:
        return args[0]
    raise TypeError("%s() takes keyword arguments only" % function)


def plain(value):
    """JSON for what libraries hand out in place of numbers, lists and times."""
    for name in ("tolist", "isoformat"):
        method = getattr(value, name, None)
        if callable(method):
            return method()
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError("a value of type %s is no JSON" % type(value).__name__)
