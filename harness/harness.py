"""Runs cells inside a sandbox and speaks the line protocol of `src/harness/mod.rs`.

Descriptors: 0 /dev/null, 1 and 2 capture pipes, 3 requests, 4 events. Two ways in: run as a script by a fresh
exec, or loaded by `zygote.py`, which calls `prepare()` once and `serve()` in every forked child.

Nothing here defends against the guest: it shares this process and may forge whatever it likes, and the daemon
takes every frame for guest text. What the code does defend against is mistakes: cells that close descriptors,
replace modules, patch `os` or `json`, set traces and limits. So everything it calls later is held from import.
"""

import _thread
import builtins
import errno
import fcntl
import io
import json
import linecache
import os
import select
import sys
import time
import traceback
import types
from _ast import Expr, Expression
from collections import deque

# A copy for the functions below: a cell may replace `str` or `len` in the module.
__builtins__ = dict(builtins.__dict__)

REQUESTS, EVENTS = 3, 4
READ_FIRST = 4096  # bytes: nearly every request is shorter, and a large buffer costs more than its reading
# Where a second descriptor of each stream is kept: below 64, up to where the kernel's table of a process is not grown.
SPARE = 62
GONE = (errno.EBADF, errno.EPIPE, errno.EINVAL)
ORDER_ENTRIES_MAX = 10_000
# Control characters grow sixfold in JSON: these keep a frame below 16 MiB and still let the daemon see that a
# text passed its cap of 2,000,000 characters.
RESULT_CHARS_MAX = 2_100_000
EVALUE_CHARS_MAX = 400_000
TRACEBACK_CHARS_MAX = 1_000_000
# Code of earlier cells that tracebacks show, and whatever else is kept of them for its text: in characters, and in cells.
KEPT_CHARS_MAX, KEPT_CELLS_MAX = 8_000_000, 1_000
CUT = "\n[cut by the harness: %d characters left out]"

ONLY_AST, TOP_LEVEL_AWAIT = 0x400, 0x2000  # ast.PyCF_*: the module `ast` itself is not needed
FUTURES = 0x1FE0000  # CO_FUTURE_* of every supported version
COROUTINE = 0x80  # CO_COROUTINE
HERE = (lambda: 0).__code__.co_filename
OWN_FILES = {HERE}  # and `program.py`, once it is loaded
OWN_ENTRIES = ("evaluate", "drive", "play")  # what the guest's code is called from

_read, _write, _exit, _getpid, _chdir = os.read, os.write, os._exit, os.getpid, os.chdir
_getppid, _kill, SIGKILL = os.getppid, os.kill, 9
_access, _set_inheritable = os.access, os.set_inheritable
_fstat, _dup2, _close, _fcntl, F_DUPFD_CLOEXEC = os.fstat, os.dup2, os.close, fcntl.fcntl, fcntl.F_DUPFD_CLOEXEC
_now = time.monotonic_ns
_ioctl, FIONREAD, _int_from = fcntl.ioctl, 0x541B, int.from_bytes
_poll, _scan, _quote = select.poll, json.JSONDecoder().scan_once, json.encoder.encode_basestring
_print, _compile, _eval, _repr, _str = builtins.print, compile, eval, repr, str
_settrace, _gettrace, _setprofile, _getprofile = sys.settrace, sys.gettrace, sys.setprofile, sys.getprofile
_getlimit, _setlimit = sys.getrecursionlimit, sys.setrecursionlimit
_TracebackException, _linecache = traceback.TracebackException, linecache


# --- output -------------------------------------------------------------------------------------------------------


class Recorder:
    """Which stream this interpreter wrote how many bytes to, in order."""

    def __init__(self):
        self.entries, self.written = [], {"o": 0, "e": 0, "r": 0}
        self.muted = False  # while warming: the calls are made, with no bytes

    def note(self, key, size):
        self.written[key] += size
        entries = self.entries
        if entries and entries[-1][0] == key:
            entries[-1][1] += size
        elif len(entries) <= ORDER_ENTRIES_MAX:
            entries.append([key, size])

    def take(self):
        """The list as JSON, or None when it grew too long to be sent. Starts over."""
        entries, self.entries, self.written = self.entries, [], {"o": 0, "e": 0, "r": 0}
        if len(entries) > ORDER_ENTRIES_MAX:
            return None
        return "[" + ",".join(['["%s",%d]' % (key, size) for key, size in entries]) + "]"


def write_all(fd, data):
    """Writes everything, waiting where a cell has made the pipe non-blocking."""
    write_on(fd, data, [])


def write_on(fd, data, sent):
    """The same from where it was broken off. `sent` has what each write took, noted in one step with the write: whatever a
    signal's handler raises between two steps of ours, it can be gone on with."""
    done, size = sum(sent), len(data)
    while done < size:
        try:
            sent.extend(map(_write, (fd,), (memoryview(data)[done:] if done else data,)))
        except BlockingIOError:
            wait_for(fd, select_out)
        done = sum(sent)


def wait_for(fd, event):
    poll = _poll()
    poll.register(fd, event)
    poll.poll()


select_in, select_out = select.POLLIN, select.POLLOUT


class Pipe(io.BufferedIOBase):
    """The binary layer of a stream: unbuffered, so that child processes and C code fall in place."""

    def __init__(self, fd, key, mode_name, recorder):
        self._fd, self._key, self.name, self._recorder = fd, key, mode_name, recorder

    mode = "wb"

    def write(self, data):
        if self.closed:
            raise ValueError("write to closed file")
        if type(data) is not bytes:
            data = memoryview(data).tobytes()
        recorder = self._recorder
        if recorder.muted:
            _write(self._fd, b"")
            return len(data)
        try:
            sent = _write(self._fd, data)
        except BlockingIOError:
            sent = 0
        recorder.note(self._key, sent)
        if sent != len(data):
            rest = memoryview(data)[sent:]
            write_all(self._fd, rest)
            recorder.note(self._key, len(rest))
        return len(data)

    def fileno(self):
        return self._fd

    def isatty(self):
        return False

    def writable(self):
        return True

    @property
    def raw(self):
        return self


class Spare:
    """A second descriptor of a stream's pipe, from which a cell's successor gets back what the cell closed or replaced.

    A guest may close this one as well. Then what it does to its streams stays as it is.
    """

    def __init__(self, fd):
        self.fd, self.pipe, self.spare = fd, identity(fd), -1
        try:
            self.spare = _fcntl(fd, F_DUPFD_CLOEXEC, SPARE)
        except OSError:
            pass

    def restore(self):
        if identity(self.fd) != self.pipe and identity(self.spare) == self.pipe:
            try:
                _dup2(self.spare, self.fd)
            except OSError:
                pass

    def close(self):
        if identity(self.spare) == self.pipe:
            _close(self.spare)


def unread(fd):
    return _int_from(_ioctl(fd, FIONREAD, b"\0\0\0\0"), sys.byteorder)


def identity(fd):
    """What tells two open files apart; None for a descriptor that is closed."""
    try:
        status = _fstat(fd)
        return status.st_ino, status.st_dev
    except OSError:
        return None


class Text(io.TextIOWrapper):
    """`sys.stdout` and `sys.stderr` of a cell. A type of its own so that `print` below can know it."""

    mode = "w"


def new_stream(fd, key, name, recorder):
    pipe = Pipe(fd, key, name, recorder)
    return Text(pipe, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)


def one_write_print(*args, sep=" ", end="\n", file=None, flush=False):
    # The built-in makes a write call for the text and one for the newline. Streams here are unbuffered, so that
    # would be two system calls and two wake-ups of the daemon a line; everything unusual goes to the built-in.
    if file is None and (sep is None or type(sep) is str) and (end is None or type(end) is str):
        out = sys.stdout
        if type(out) is Text:
            if len(args) == 1:
                line = _str(args[0])
            else:
                line = (" " if sep is None else sep).join([_str(arg) for arg in args])
            out.write(line + ("\n" if end is None else end))
            if flush:
                out.flush()
            return
    _print(*args, sep=sep, end=end, file=file, flush=flush)


def unbuffer_c_stdio():
    """Makes C's stdout unbuffered: behind a pipe, printf of an extension would show up at exit or never."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        io_nbf = 2
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, io_nbf, ctypes.c_size_t(0))
    except (ImportError, OSError, ValueError, AttributeError):
        pass  # another libc: such output is late then, and not lost to the rest of the cell


# --- text for frames ----------------------------------------------------------------------------------------------


def clean(text, limit):
    """Fit for a frame: really a str, not too long, no lone surrogates."""
    if type(text) is not str:
        text = str.__str__(text)
    if len(text) > limit:
        text = text[:limit] + CUT % (len(text) - limit)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def safe_str(value):
    try:
        return clean(_str(value), EVALUE_CHARS_MAX)
    except BaseException:
        return "<unprintable %s object>" % type.__dict__["__name__"].__get__(type(value))


def bare_error(exc):
    """The `error` object of a frame with nothing that could fail in it."""
    return '{"ename":%s,"evalue":"","traceback":[]}' % _quote(clean(type.__dict__["__name__"].__get__(type(exc)), 1000))


def exit_code_text(exc):
    code = exc.code
    return "0" if code is None else safe_str(code)


def strip_own_frames(report):
    """Takes the harness out of a TracebackException, its causes, contexts and groups included."""
    seen, todo = set(), [report]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if each.stack is not None:
            first = 0
            for index, frame in enumerate(each.stack):
                if frame.filename in OWN_FILES and frame.name in OWN_ENTRIES:
                    first = index + 1  # what lies before is ours, or the event loop's
            kept = [frame for frame in each.stack[first:] if frame.filename not in OWN_FILES]
            each.stack[:] = kept
            if not kept and sys.version_info >= (3, 10):
                each.stack = None  # no header without a frame below it
        todo += [each.__cause__, each.__context__]
        todo += getattr(each, "exceptions", None) or []


def traceback_chunks(exc, name, evalue):
    try:
        report = _TracebackException(type(exc), exc, exc.__traceback__)
        strip_own_frames(report)
        chunks = [chunk.rstrip("\n") for chunk in report.format()]
    except BaseException:
        chunks = []  # a __str__ or a source line that fights back, or no memory left
    return cut_middle(chunks) or ["%s: %s" % (name, evalue) if evalue else name]


def cut_middle(chunks):
    if sum(map(len, chunks)) <= TRACEBACK_CHARS_MAX:
        return [clean(chunk, EVALUE_CHARS_MAX) for chunk in chunks]
    keep = 40
    cut = chunks[:keep] + ["[…]"] + chunks[-keep:] if len(chunks) > 2 * keep else chunks
    return [clean(chunk, TRACEBACK_CHARS_MAX // (2 * keep + 1)) for chunk in cut]


def cut_error(name, evalue, lines):
    """The fields of an error, fit for a frame."""
    return {"ename": clean(name, 1000), "evalue": clean(evalue, EVALUE_CHARS_MAX), "traceback": cut_middle(lines)}


def describe(exc):
    """The `error` object of a frame, as JSON."""
    name = clean(type.__dict__["__name__"].__get__(type(exc)), 1000)
    if isinstance(exc, SystemExit):
        evalue = exit_code_text(exc)
        chunks = ["%s: %s" % (name, evalue)]
    else:
        evalue = safe_str(exc)
        chunks = traceback_chunks(exc, name, evalue)
    lines = ",".join([_quote(chunk) for chunk in chunks])
    return '{"ename":%s,"evalue":%s,"traceback":[%s]}' % (_quote(name), _quote(evalue), lines)


class Latest:
    """How much text is kept of which cells; says which are to go when it is more than may be."""

    def __init__(self):
        self.chars, self.total = {}, 0

    def clear(self):
        self.__init__()

    def fresh(self, entries):
        """The keys of a dictionary that have come to it since it was asked for last."""
        keys = []
        for key in reversed(entries):
            if key in self.chars:
                break
            keys.append(key)
        return keys[::-1]

    def add(self, key, chars):
        """Returns the earliest ones, for which there is no room any more."""
        kept, gone = self.chars, []
        self.total += chars - kept.get(key, 0)
        kept[key] = chars
        while len(kept) > 1 and (self.total > KEPT_CHARS_MAX or len(kept) > KEPT_CELLS_MAX):
            key = next(iter(kept))
            self.total -= kept.pop(key)
            gone.append(key)
        return gone


# --- cells --------------------------------------------------------------------------------------------------------


class Session:
    """One interpreter's line of cells."""

    def __init__(self, out=1, err=2):
        self.out, self.err = out, err
        self.recorder = Recorder()
        self.stdout = new_stream(out, "o", "<stdout>", self.recorder)
        self.stderr = new_stream(err, "e", "<stderr>", self.recorder)
        self.main = types.ModuleType("__main__")
        self.main.__builtins__ = builtins
        self.cells, self.codes = 0, Latest()
        self.flags = 0  # `from __future__` of earlier cells
        self.shown = self  # the value this harness last bound to `_`; itself: none yet
        self.loop = None
        self.calmed = None, None, _getlimit()
        self.pid = _getpid()
        self.spares = None  # made when the first cell comes: programs have no next one
        self.kernel = None  # the shell that runs the cells of this session, if they are a kernel's

    def install(self):
        """Makes this process look like an interactive session that has not begun."""
        sys.modules["__main__"] = self.main
        sys.stdout = sys.__stdout__ = self.stdout
        sys.stderr = sys.__stderr__ = self.stderr
        sys.argv = [""]
        one_write_print.__name__ = one_write_print.__qualname__ = "print"
        one_write_print.__module__ = "builtins"
        one_write_print.__doc__ = _print.__doc__
        builtins.print = one_write_print
        if "" not in sys.path:
            sys.path.insert(0, "")

    def repair(self):
        """Streams that a cell closed or detached come back, and so do their descriptors; objects that it put in the place
        of `sys.stdout` on purpose stay."""
        if self.spares is None:
            self.spares = Spare(self.out), Spare(self.err)
        for spare in self.spares:
            spare.restore()
        recorder = self.recorder
        if is_closed(self.stdout):
            self.stdout = sys.__stdout__ = new_stream(self.out, "o", "<stdout>", recorder)
        if is_closed(self.stderr):
            self.stderr = sys.__stderr__ = new_stream(self.err, "e", "<stderr>", recorder)
        if sys.stdout is not self.stdout and is_closed(sys.stdout):
            sys.stdout = self.stdout
        if sys.stderr is not self.stderr and is_closed(sys.stderr):
            sys.stderr = self.stderr
        if is_closed(sys.stdin):  # exit() closes it
            try:
                sys.stdin = open(0, encoding="utf-8", closefd=False)
            except OSError:
                sys.stdin = io.StringIO()

    def flush(self):
        flush(self.stdout)
        flush(self.stderr)
        if sys.stdout is not self.stdout:
            flush(sys.stdout)
        if sys.stderr is not self.stderr:
            flush(sys.stderr)

    def cell(self, code):
        """Runs one cell. Returns its result and its error, both as JSON."""
        self.repair()
        self.cells += 1
        name = "<cell %d>" % self.cells
        # A modification time of None keeps linecache.checkcache away.
        _linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
        for old in self.codes.add(name, len(code)):
            _linecache.cache.pop(old, None)
        return self.run(code, name, self.main.__dict__)

    def place(self):
        """Where among the text something stands that is published now: what this interpreter has written of each stream,
        what lies in its pipe, whoever wrote that, and when this was so. Empty when it cannot be told."""
        written, (out, err), begun = self.recorder.written, self.spares, _now()
        try:
            in_pipes = unread(out.spare), unread(err.spare)
            return ',"at":[%d,%d,%d,%d,%d,%d]' % (written["o"], in_pipes[0], written["e"], in_pipes[1], begun, _now())
        except OSError:
            return ""

    def take_kernel(self):
        """From now on this session's cells are a kernel's. Returns why they cannot be, as JSON, or None."""
        try:
            kernel = build_kernel()
        except ImportError as exc:
            return describe(ImportError("this interpreter has no kernel: %s" % exc))
        kernel.take_over(self)
        self.kernel = kernel
        return None

    def kernel_cell(self, code, nonce, count):
        """The same as `cell` for a kernel, which publishes its outputs itself."""
        self.repair()
        try:
            rouse(*self.calmed)
            error = self.kernel.cell(code, nonce, self, send, count)
            self.calmed = calm()
        except BaseException as exc:
            self.calmed = calm()
            if _getpid() != self.pid:
                self.leave_fork(exc)
            error = describe(exc)
        if _getpid() != self.pid:
            self.leave_fork(None)
        return error

    def run(self, code, name, names):
        result, error = "null", "null"
        try:
            rouse(*self.calmed)
            value = self.evaluate(code, name, names)
            if value is not None:
                result = _quote(clean(_repr(value), RESULT_CHARS_MAX))
                self.bind_underscore(names, value)
            self.calmed = calm()
        except BaseException as exc:
            self.calmed = calm()
            if _getpid() != self.pid:
                self.leave_fork(exc)
            result, error = "null", describe(exc)
        if _getpid() != self.pid:
            self.leave_fork(None)
        return result, error

    def evaluate(self, code, name, names):
        """Runs the statements, then evaluates a last expression; None if there is none."""
        flags = self.flags | TOP_LEVEL_AWAIT
        parts, shows = one_expression(code, name, flags), True
        if parts is None:
            parts, shows = self.statements(code, name, flags)
        value = None
        if any([part.co_flags & COROUTINE for part in parts]):
            value = self.evaluate_awaiting(parts, names)
        else:
            for part in parts:
                value = _eval(part, names)
        return value if shows else None

    def statements(self, code, name, flags):
        """The code objects of a cell, and whether the last one is an expression."""
        tree = _compile(code, name, "exec", flags | ONLY_AST, True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], Expr) else None
        parts = []
        if tree.body:
            parts.append(_compile(tree, name, "exec", flags, True))
            self.flags |= parts[0].co_flags & FUTURES
        if last is not None:
            parts.append(_compile(Expression(last.value), name, "eval", self.flags | TOP_LEVEL_AWAIT, True))
        return parts, last is not None

    def evaluate_awaiting(self, parts, names):
        """The same inside an event loop, which stays for the session's next awaiting cell."""
        import asyncio

        async def drive():
            value = None
            for part in parts:
                value = _eval(part, names)
                if part.co_flags & COROUTINE:
                    value = await value
            return value

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(drive())

    def bind_underscore(self, names, value):
        # A name the user gave to something of his own (gettext's `_`, a loop's) is left alone.
        if "_" not in names or names["_"] is self.shown:
            names["_"] = self.shown = value

    def warm(self, code, programs=False):
        """Evaluates like a cell, and like a program where one is to come, in namespaces that are thrown away and with no
        bytes written."""
        flags, shown, self.recorder.muted = self.flags, self.shown, True
        try:
            self.run(code, "<warm>", {"__name__": "__main__", "__builtins__": builtins})
            if programs:
                load_program().WarmUp(self, {"program": {"code": code}}).run()
            if self.kernel is not None:
                self.kernel.warm()
            self.flush()
        finally:
            self.flags, self.shown, self.recorder.muted = flags, shown, False
            self.recorder.take()

    def leave_fork(self, exc):
        """A child that user code forked came back from its cell: it ends as a script would, without a frame."""
        status = 0
        try:
            if isinstance(exc, SystemExit):
                status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
            elif exc is not None:
                status = 1
                name = type(exc).__name__
                self.stderr.write("\n".join(traceback_chunks(exc, name, safe_str(exc))) + "\n")
            self.flush()
        finally:
            _exit(status & 0xFF)


def one_expression(code, name, flags):
    """A line that is an expression, compiled without the detour over a tree; None for anything else.

    Not with white space in front, which is an error in a cell and none here; nor with a backslash, since what the
    parser warns of it would be said twice where the line turns out to be no expression.
    """
    if "\n" in code or "\\" in code or code[:1] in " \t\f" or "=" in code.split("(", 1)[0]:
        return None
    try:
        return [_compile(code, name, "eval", flags, True)]
    except SyntaxError:
        return None


def is_closed(stream):
    try:
        return stream is None or stream.closed
    except ValueError:  # detached
        return True
    except AttributeError:  # a user's own object with nothing but write()
        return False


def flush(stream):
    try:
        stream.flush()
    except BaseException:
        pass  # closed, detached, or its descriptor is gone: what could be written has been


def calm():
    """Takes a cell's trace, profile and small recursion limit away while the harness works."""
    trace, profile, limit = _gettrace(), _getprofile(), _getlimit()
    if trace is not None:
        _settrace(None)
    if profile is not None:
        _setprofile(None)
    if limit < 500:
        _setlimit(1000)
    return trace, profile, limit


def rouse(trace, profile, limit):
    if limit < 500:
        try:
            _setlimit(limit)
        except RecursionError:
            pass
    if profile is not None:
        _setprofile(profile)
    if trace is not None:
        _settrace(trace)


# --- protocol -----------------------------------------------------------------------------------------------------


class Requests:
    """Request lines from descriptor 3, and how far the one at hand has come: kept here, so that an exception in the
    middle neither loses a request nor runs one twice."""

    def __init__(self):
        self.parts = [b""]  # read so far
        self.line, self.begun, self.frame = None, False, None
        self.poll = _poll()
        self.poll.register(REQUESTS, select_in)

    def next(self):
        """The request at hand, or None at the end of the session."""
        while self.line is not None or self.read_line():
            try:
                request = _scan(self.line.decode("utf-8", "surrogatepass"), 0)[0]
            except (ValueError, StopIteration):
                request = None  # a cell read from the pipe and left a half
            if type(request) is dict:
                return request
            self.finish()
        return None

    def finish(self):
        self.line, self.begun, self.frame = None, False, None

    def read_line(self):
        """False at the end of the session."""
        parts = self.parts
        while parts[-1].find(10) < 0:
            # Waited for apart from the reading: what a read returns is lost when a signal's handler raises as it wakes.
            self.poll.poll()
            try:
                data = _read(REQUESTS, READ_FIRST if len(parts) == 1 else 1 << 16)
            except BlockingIOError:
                continue
            except OSError as exc:
                if exc.errno in GONE:
                    return False
                raise  # a guest's signal handler may well raise TimeoutError, which is an OSError
            if not data:
                return False
            parts.append(data)
        line, _, rest = b"".join(parts).partition(b"\n")
        self.parts, self.line = [rest], line
        return True


def answer(session, request):
    """Carries out one request. Returns its `done` frame."""
    result, error, refused = "null", "null", ""
    setup, warm, code, argv = request.get("setup"), request.get("warm"), request.get("code"), request.get("argv")
    session.recorder.take()
    if type(setup) is dict and type(setup.get("cwd")) is str:
        refused = enter(setup["cwd"])
    if not refused:
        missing = None
        if request.get("kernel") is True and session.kernel is None:
            missing = session.take_kernel()
        if type(warm) is str:
            session.warm(warm, request.get("programs") is True)
        if type(request.get("program")) is dict:
            load_program().begin(session, request).run()
        before = sys.argv
        if type(argv) is list:
            sys.argv = argv = [""] + [_str(arg) for arg in argv]
        if missing is not None:
            error = missing
        elif type(code) is str and session.kernel is not None:
            error = session.kernel_cell(code, quoted_nonce(request), request.get("count"))
        elif type(code) is str:
            result, error = session.cell(code)
        if sys.argv is argv:
            sys.argv = before  # one that the cell has set itself stays
        if type(argv) is list:
            end_children()
    session.flush()
    order = session.recorder.take()
    return done(request, result, error, ("" if order is None else ',"order":' + order) + refused)


def end_children():
    """Ends whatever else runs in this sandbox: what a run leaves behind ends with its call.

    Only where the numbers of a sandbox of our own are all there are: its init is 1, we are 2, and nobody's child.
    """
    if _getpid() == 2 and _getppid() == 0:
        try:
            _kill(-1, SIGKILL)
        except OSError:
            pass  # nobody else is there


def quoted_nonce(request):
    return _quote(clean(_str(request.get("nonce")), 200))


def done(request, result, error, more):
    nonce = quoted_nonce(request)
    # The newline before it ends what a cell may have written there, so that ours is not read as its tail.
    frame = '\n{"nonce":%s,"event":"done","result":%s,"error":%s%s}\n' % (nonce, result, error, more)
    return frame.encode("utf-8", "replace")


class Frames:
    """What goes to the daemon: each frame whole and in its turn, whichever thread or signal handler sends it.

    A frame that is broken off is gone on with by whoever sends next, a cell's or a program's last one at the latest. A
    forked child has no daemon to speak to; whoever held the lock does not exist there.
    """

    def __init__(self):
        self.lock, self.pid = _thread.RLock(), _getpid()
        self.waiting = deque()  # of frames, each with what has been written of it

    def send(self, frame):
        if _getpid() != self.pid:
            return
        if not any([each is frame for each, _ in self.waiting]):  # its sender was interrupted, and tries again
            self.waiting.append((frame, []))
        if self.lock._is_owned():
            return  # a handler in the middle of another frame, which goes on once it returns
        with self.lock:
            try:
                while self.waiting:
                    first, sent = self.waiting[0]
                    write_on(EVENTS, first, sent)
                    self.waiting.popleft()
            except OSError as exc:
                if exc.errno in GONE:
                    self.waiting.clear()
                raise


_frames = Frames()


def send(frame):
    try:
        _frames.send(frame)
    except OSError as exc:
        if exc.errno in GONE:
            _exit(0)  # the daemon left, or a cell closed descriptor 4: nobody can be answered any more
        raise


def enter(cwd):
    try:
        _chdir(cwd)
        return ""
    except (OSError, ValueError) as exc:
        return ',"refused":{"what":"cwd","errno":%d}' % (getattr(exc, "errno", None) or 22)


def own_descriptors():
    for fd in (REQUESTS, EVENTS):
        try:
            _set_inheritable(fd, False)
        except OSError:
            _exit(70)


def add_user_site():
    """`pip install --user` of earlier sessions. Interpreters start with -s, so that a zygote never reads a HOME."""
    import site

    try:
        site.addsitedir(_user_site)
    except BaseException:
        flush(sys.stderr)  # a broken .pth file of the guest's own


def user_site():
    import site

    try:
        return site.getusersitepackages()
    except BaseException:
        return "/nonexistent"


_session = _user_site = _kernel = _program = None


def load_neighbour(file):
    """A module that lies beside this one and is not among the guest's."""
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.abspath(HERE)), file)
    spec = importlib.util.spec_from_file_location("caisson_" + file[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_kernel():
    """The kernel's shell; a zygote has built it beforehand."""
    global _kernel
    if _kernel is None:
        _kernel = load_neighbour("kernel.py").Kernel(cut_error, Latest)
    return _kernel


class Own:
    """This module, which may have no name to be imported by."""

    def __init__(self):
        self.__dict__ = globals()


def load_program():
    """The module that runs programs; a zygote has loaded it beforehand."""
    global _program
    if _program is None:
        _program = load_neighbour("program.py")
        _program.harness = Own()
        OWN_FILES.add(_program.HERE)
    return _program


def prepare():
    """Everything that does not depend on a request. A zygote does this once, before it forks."""
    global _session, _user_site
    if _session is None:
        _user_site = user_site()
        _session = Session()
        _session.install()
        unbuffer_c_stdio()
    return _session


def serve():
    """Answers requests until the daemon closes descriptor 3. Never returns."""
    session = prepare()
    session.pid = _frames.pid = _getpid()
    own_descriptors()
    if _access(_user_site, 0):
        add_user_site()
    requests = Requests()
    while True:
        try:
            while turn(session, requests):
                pass
            _exit(0)
        except BaseException:
            pass  # of a signal handler, between two steps: the turn goes on where it was


BROKEN_OFF = '{"ename":"RuntimeError","evalue":"a signal handler raised while the cell was ending","traceback":[]}'


def turn(session, requests):
    """Takes one request and answers it; false at the end of the session."""
    request = insist(session, requests.next)
    if request is None:
        return False
    if requests.frame is None:
        if requests.begun:
            requests.frame = done(request, "null", BROKEN_OFF, "")
        else:
            requests.begun = True
            requests.frame = insist(session, answer, session, request)
    insist(session, send, requests.frame)
    requests.finish()
    return True


def rehearse(codes, kernel=False, program=False):
    """Serves throw-away cells, or programs, over pipes of its own, down the very road that a guest's cells take, and forgets them.

    For a zygote: whatever an interpreter does for the first time (attribute caches, code counted until it is
    specialised, buffers, imports) writes pages, and every fork would pay for its own copies of them.
    """
    global REQUESTS, EVENTS
    programs, numbers = load_program(), (REQUESTS, EVENTS)
    _frames.pid = _getpid()
    (REQUESTS, asked), (answers, EVENTS), (heard, out) = os.pipe(), os.pipe(), os.pipe()
    try:
        for fd in (answers, heard):
            os.set_blocking(fd, False)
        own_descriptors()
        session = Session(out, out)
        session.install()
        requests = Requests()
        programs.begin = programs.Rehearsal
        for code in codes:
            what = '"program":{"code":%s}' if program else '"kernel":true,"code":%s' if kernel else '"code":%s'
            ask = '{"nonce":"","timeout_ms":1000,%s}\n' % (what % _quote(code))
            write_all(asked, ask.encode())
            turn(session, requests)
            for fd in (answers, heard):
                empty(fd)
    finally:
        for spare in session.spares or ():
            spare.close()
        for fd in (REQUESTS, asked, answers, EVENTS, heard, out):
            os.close(fd)
        REQUESTS, EVENTS = numbers
        programs.begin = programs.Program
        for name in [name for name in _linecache.cache if name.startswith("<cell ")]:
            del _linecache.cache[name]


def empty(fd):
    try:
        while _read(fd, 1 << 16):
            pass
    except BlockingIOError:
        pass


def insist(session, step, *args):
    """Takes a step of the loop whatever a signal handler that a cell left behind raises in it."""
    while True:
        try:
            try:
                return step(*args)
            except BaseException as exc:
                complain(session, exc)
                if step is answer:  # the cell ran, or part of it: it must not run twice
                    step, args = done, (args[1], "null", describe(exc), "")
        except BaseException as exc:  # the handler again, while the first one was being told
            if step is answer:
                step, args = done, (args[1], "null", bare_error(exc), "")


def complain(session, exc):
    if isinstance(exc, KeyboardInterrupt):
        return  # an interrupt that came when its cell was over
    try:
        session.stderr.write("\n".join(traceback_chunks(exc, type(exc).__name__, safe_str(exc))) + "\n")
    except BaseException:
        pass


if __name__ == "__main__":
    serve()
