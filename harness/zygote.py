"""A warmed interpreter that has never run guest code. Its forks move into shells and become interpreters.

    python3 -s -P -B /opt/caisson/zygote.py python|python-data [--without NAME]…

Started by the launcher inside the read-only template: unprivileged, cwd /, no writable file system, an environment
built from nothing, descriptor 3 the launcher's SEQPACKET socket. What is loaded here is shared by every guest, so
it refuses to serve (exit 70) with a second thread, a descriptor too many or memory that would stay shared; and no
line between two forks writes memory that depends on a request.

`--without` leaves a package out: the launcher starts again with the name of one that killed the process.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import io
import json
import marshal
import os
import random
import re
import struct
import sys

SOCKET = 3
HERE = os.path.dirname(os.path.abspath(__file__))
HOME = "/home/sandbox"
ACCOUNT = "sandbox"
EXIT_REFUSED, EXIT_PREPARE = 70, 71

# What a guest's environment is, entirely, but for USER and LOGNAME.
ENVIRONMENT = {
    "HOME": HOME,
    # The launcher knows where the interpreters are.
    "PATH": os.environ.get("PATH", os.defpath),
    "LANG": "C.UTF-8",
    "SHELL": "/bin/bash",
    "TMPDIR": "/tmp",
    "MPLBACKEND": "Agg",
    "OPENBLAS_NUM_THREADS": "1",
}


# --- preloading ---------------------------------------------------------------------------------------------------


def use_numpy():
    import numpy
    import numpy.random

    numpy.arange(4.0).reshape(2, 2) @ numpy.eye(2)


def use_pandas():
    import pandas

    frame = pandas.DataFrame({"a": [1, 2], "b": [3.0, 4.0]})
    frame.describe().to_string()
    frame._repr_html_()


def use_matplotlib():
    with pretended_writable(os.environ.get("MPLCONFIGDIR")):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import font_manager, pyplot
    figure, axes = pyplot.subplots(figsize=(2, 2))
    axes.plot([1, 2, 3])
    axes.set_title("x")
    figure.savefig(io.BytesIO(), format="png")
    pyplot.close(figure)
    # Cached fonts hold descriptors, and an at-fork hook would close whatever has their numbers in a guest.
    font_manager._get_font.cache_clear()


@contextlib.contextmanager
def pretended_writable(folder):
    """matplotlib and IPython take a directory only if they can write there, else make one: here they can do neither.

    What they want to find there was built beforehand; nothing is written.
    """
    real = os.access

    def access(path, mode, **more):
        return (folder is not None and os.fspath(path) == folder) or real(path, mode, **more)

    os.access = access
    try:
        yield
    finally:
        os.access = real


def use_ipython():
    # The shell itself is built later, beside the harness.
    import ipykernel.zmqshell  # noqa: F401
    import matplotlib_inline.config  # noqa: F401


PRELOAD = {
    "python": [],
    "python-data": [
        ("numpy", use_numpy),
        ("pandas", use_pandas),
        ("matplotlib", use_matplotlib),
        ("IPython", use_ipython),
    ],
}


def preload(profile, without):
    """Loads and uses each package once. Returns the names that are in, and a warning for each that is not."""
    loaded, warnings = [], []
    for name, use in PRELOAD[profile]:
        if name in without:
            warnings.append("%s is left out: it ended the zygote" % name)
            continue
        os.write(2, b"zygote: loading %s\n" % name.encode())  # the last such line names what killed the process
        try:
            use()
            loaded.append(name)
        except ImportError as error:
            warnings.append("%s is not preloaded: %s" % (name, error))
        except Exception as error:
            warnings.append("%s failed when it was used: %s: %s" % (name, type(error).__name__, error))
    return loaded, warnings


def load_harness():
    """Compiled first and loaded when memory has no holes left: what every guest's cells write to lies together."""
    path = os.path.join(HERE, "harness.py")
    with open(path, "rb") as source:
        code = marshal.dumps(compile(source.read(), path, "exec", dont_inherit=True))
    spec = importlib.util.spec_from_file_location("harness", path)
    module = importlib.util.module_from_spec(spec)
    plug_holes()
    exec(marshal.loads(code), module.__dict__)
    return module


def renewed(function):
    """The same function with code that lies where memory was taken last."""
    code = marshal.loads(marshal.dumps(function.__code__))
    return type(function)(code, function.__globals__, function.__name__)


REHEARSAL = [
    "def f():\n    return {}['x']\nf()",
    "f(",
    "raise SystemExit",
    "import sys\nfor i in range(3):\n    print(i, 'a', file=sys.stderr)",
    "[x * 1.5 for x in range(3)], f'{1:>3}', {'a': 1}",
    "class A:\n    def __init__(self):\n        self.x = 1\nA().x",
]
REHEARSAL_DATA = [
    "import pandas as pd, numpy as np\ndf = pd.DataFrame({'a': range(10), 'b': range(10)})\nprint(df.describe().to_string())",
    "import pandas, matplotlib.pyplot\nprint(1)",
]
REHEARSAL_KERNEL = [
    "1/0",
    "f(",
    "raise SystemExit",
    "1 + 1",
    "await __import__('asyncio').sleep(0)",
    "%matplotlib inline\nimport matplotlib.pyplot as plt, pandas as pd\nplt.plot([1])\npd.DataFrame({'a': [1]})",
    "display(pd.DataFrame({'a': range(3), 'b': 1.5}).describe())",
    "%%time\n1",
]
REHEARSAL_PROGRAM = [
    "1/0",
    "f(",
    "import sys\nsys.exit('text')",
]
# Code is specialised at its eighth call.
REHEARSALS_OF_PRINT = 12


def build_kernel(harness, ipython_dir):
    """Builds the kernel's shell, uses it, and takes away every trace that a native session could see. Returns a
    warning when there can be none."""
    import tempfile

    tempfile.tempdir = "/tmp"  # nothing is written, and nowhere could be
    if ipython_dir is not None:
        os.environ["IPYTHONDIR"] = ipython_dir
    try:
        with pretended_writable(ipython_dir):
            kernel = harness.build_kernel()
        harness.rehearse(REHEARSAL_KERNEL + ["print(1)"] * REHEARSALS_OF_PRINT, kernel=True)
        kernel.put_aside()
        return []
    except Exception as error:
        return ["there is no kernel: %s: %s" % (type(error).__name__, error)]
    finally:
        tempfile.tempdir = None
        os.environ.pop("IPYTHONDIR", None)


def rehearse(harness, profile):
    data = REHEARSAL_DATA if profile == "python-data" else []
    harness.rehearse(REHEARSAL_PROGRAM + ["print(1)"] * REHEARSALS_OF_PRINT, program=True)
    harness.rehearse(REHEARSAL + data + ["print(1)"] * REHEARSALS_OF_PRINT)


# --- memory -------------------------------------------------------------------------------------------------------


class MallocInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


LIBC = ctypes.CDLL(None)
PAGE = os.sysconf("SC_PAGESIZE")
MADV_DONTNEED, MADV_NOHUGEPAGE = 4, 15
PLUG_MAX, PLUGS_MAX = 65536, 1_000_000
TOP_WANTED, TOP_ROUNDS = 1 << 20, 4


def plug_holes():
    """Takes whatever is free between other things, for good, so that from now on memory comes in one piece.

    A fork that fills holes copies a page for each: that was half of what a guest had for itself. Free lists of
    the interpreter are emptied first, by the collector. Another libc, or another allocator: nothing happens.
    """
    gc.collect()
    try:
        mallinfo, sbrk, malloc, free = LIBC.mallinfo2, LIBC.sbrk, LIBC.malloc, LIBC.free
    except AttributeError:
        return
    mallinfo.restype = MallocInfo
    sbrk.restype = malloc.restype = ctypes.c_size_t
    malloc.argtypes = free.argtypes = [ctypes.c_size_t]
    top = sbrk(0) - mallinfo().keepcost
    size, left = PLUG_MAX - 8, PLUGS_MAX
    while size >= 24 and left:
        at = malloc(size)
        left -= 1
        if at >= top:  # no hole of this size is left
            free(at)
            size -= 16 if size < 1040 else size // 16 & ~15


def clear_top():
    """Makes sure that the heap ends in enough unused memory, gives its pages back, and keeps huge ones off it: a
    guest's first small allocation there would cost it two MiB."""
    try:
        mallinfo, sbrk, malloc, madvise = LIBC.mallinfo2, LIBC.sbrk, LIBC.malloc, LIBC.madvise
    except AttributeError:
        return
    madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for _ in range(TOP_ROUNDS):
        end, room = sbrk(0), mallinfo().keepcost
        start = (end - room + 2 * PAGE) & -PAGE
        if start < end:
            madvise(start, end - start, MADV_NOHUGEPAGE)
            madvise(start, end - start, MADV_DONTNEED)
        if room >= TOP_WANTED:
            break
        if room > 4 * PAGE:
            malloc(room - 4 * PAGE)
        malloc(8 * PAGE)  # does not fit any more, so the heap grows


# --- what must not be shared --------------------------------------------------------------------------------------


def reasons_to_refuse():
    """Whatever two guests of this zygote would have in common besides read-only pages."""
    reasons = []
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        reasons.append("%d threads: only the forking one would live on" % len(threads))
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        if number > SOCKET and is_open(number):
            reasons.append("descriptor %d is open: %s" % (number, os.readlink("/proc/self/fd/%d" % number)))
    with open("/proc/self/maps") as maps:
        for line in maps:
            if re.match(r"\S+ .w.s ", line):
                kind = "a SysV segment" if "/SYSV" in line else "a writable shared mapping"
                reasons.append("%s: %s" % (kind, line.strip()))
            elif "/SYSV" in line:
                reasons.append("a SysV segment: %s" % line.strip())
    return reasons


def is_open(number):
    try:
        os.fstat(number)
        return True
    except OSError:
        return False  # the listing's own


# --- what a guest may not have from its siblings -------------------------------------------------------------------

# Each returns what a fork calls: prepared here, so that a fork touches little. A package enters PRELOAD only with
# its line in RESEED, or with the reason why it keeps no generator. The names are the modules whose presence calls
# for the line.


def reseed_random():
    generator = random._inst
    state = random.getstate()
    key = struct.pack("%dI" % len(state[1][:-1]), *state[1][:-1])
    at = ctypes.string_at(id(generator), type(generator).__basicsize__).find(key) if state[2] is None else -1
    return state_filler(id(generator) + at, key) if at > 0 else random.seed


def reseed_numpy():
    module = sys.modules["numpy.random"]
    module.seed()
    state = module.get_state(legacy=False)
    key = state["state"]["key"].tobytes()
    address = module.mtrand._rand._bit_generator.ctypes.state_address
    known = state["bit_generator"] == "MT19937" and not state["has_gauss"]
    as_expected = known and ctypes.string_at(address, len(key)) == key
    return state_filler(address, key) if as_expected else module.seed


def state_filler(address, key):
    """Fills a generator's state with random bytes, as seeding does, and touches nothing else."""
    memory = memoryview((ctypes.c_ubyte * len(key)).from_address(address)).cast("B")
    urandom, length = os.urandom, len(key)

    def fill():
        memory[:] = urandom(length)

    return fill


def reseed_ssl():
    # OpenSSL reseeds by itself only when the pid changed, and every guest is pid 2: no zygote's number.
    ssl, urandom = sys.modules["ssl"], os.urandom
    ssl.RAND_add(urandom(32), 32.0)  # loads what it takes
    ssl.RAND_bytes(1)
    add = ssl.RAND_add
    return lambda: add(urandom(32), 32.0)


def reseed_multiprocessing():
    process, urandom = sys.modules["multiprocessing.process"].current_process(), os.urandom

    def reseed():
        process.authkey = urandom(32)

    return reseed


def reseed_tempfile():
    sys.modules["tempfile"]._name_sequence = None  # made anew by each guest, with a generator of its own


def reseed_uuid():
    module = sys.modules["uuid"]
    module._node = module._last_timestamp = None


RESEED = [
    ("random", reseed_random),
    ("numpy.random", reseed_numpy),
    ("ssl", reseed_ssl),
    ("multiprocessing.process", reseed_multiprocessing),
    ("tempfile", reseed_tempfile),
    ("uuid", reseed_uuid),
    # pandas draws from numpy.random; matplotlib and IPython keep none.
]


def forget_matplotlib():
    """The template's configuration directory is the zygote's; a guest's is below its own HOME."""
    matplotlib = sys.modules["matplotlib"]
    for function in (matplotlib.get_configdir, matplotlib.get_cachedir):
        # matplotlib remembers the answer in its decorator's variables, not by functools.
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        if "called" in cells:
            cells["called"].cell_contents = False


# What a package remembers of the zygote's surroundings.
FORGET = [("matplotlib", forget_matplotlib)]


def forget_surroundings():
    for name, forget in FORGET:
        if name in sys.modules:
            try:
                forget()
            except Exception:
                pass  # another version of the package; the guest sees an odd path at worst


def forget_exit_functions():
    """What the libraries here have registered for the end would tidy up what is the zygote's. A guest's program runs
    what it registers itself; these two do that only once, for all that a program may do with them later."""
    atexit._clear()
    if "logging" in sys.modules:
        logging = sys.modules["logging"]
        atexit.register(shut_down, logging._handlerList, logging.shutdown)
    if "weakref" in sys.modules:
        finalize = sys.modules["weakref"].finalize
        finalize._registry.clear()
        finalize._registered_with_atexit = False


def shut_down(handlers, end):
    if len(handlers) > 1:  # the first is logging's own
        end()


def set_environment():
    """Through os.environ, whose setter and deleter call putenv and unsetenv: C code reads the same."""
    wanted = dict(ENVIRONMENT, USER=ACCOUNT, LOGNAME=ACCOUNT)
    for name in list(os.environ):
        if name not in wanted:
            del os.environ[name]
    for name, value in wanted.items():
        os.environ[name] = value


def fork_hooks():
    """What was registered to run before and after a fork, in pairs of the interpreter's list and a copy of it.

    A zygote has one thread and holds no lock when it forks, and what of it must change in a guest is listed above:
    its own forks skip the hooks (they would touch 90 pages). A guest's forks find them in place.
    """

    def mark():
        pass

    os.register_at_fork(before=mark, after_in_child=mark)
    found = [each for each in gc.get_referrers(mark) if type(each) is list and mark in each]
    for each in found:
        each.remove(mark)
    # Only both or neither: one takes the locks that the other makes anew.
    return [(each, list(each)) for each in found] if len(found) == 2 else []


def account_names():
    """By uid, without the usual account: its name is in the environment already."""
    import pwd

    names = {entry.pw_uid: entry.pw_name for entry in pwd.getpwall()}
    return {uid: name for uid, name in names.items() if name != ACCOUNT}


# --- in the child -------------------------------------------------------------------------------------------------


def become_guest(reseeds, names, getuid, hooks):
    """After the fork, confined: nothing that the zygote drew, opened or was told may be left to the guest."""
    for registered, put_aside in hooks:
        registered[:] = put_aside
    for reseed in reseeds:
        reseed()  # a failure ends the guest: better none than one that draws what its sibling draws
    name = names.get(getuid())
    if name is not None:
        os.environ["USER"] = os.environ["LOGNAME"] = name


# --- serving ------------------------------------------------------------------------------------------------------


def rseq_area():
    """Where glibc registered its rseq area, from the thread pointer; (0, 0) on a libc without."""
    libc = ctypes.CDLL(None)
    try:
        offset = ctypes.c_ssize_t.in_dll(libc, "__rseq_offset").value
        return offset, ctypes.c_uint.in_dll(libc, "__rseq_size").value
    except ValueError:
        return 0, 0


def load_library():
    library = ctypes.PyDLL(os.path.join(HERE, "libcaisson.so"))
    library.caisson_zygote_prepare.argtypes = [ctypes.c_long, ctypes.c_uint]
    library.caisson_zygote_prepare.restype = ctypes.c_int
    library.caisson_zygote_ready.argtypes = [ctypes.c_int, ctypes.c_char_p]
    library.caisson_zygote_ready.restype = ctypes.c_int
    library.caisson_zygote_serve.argtypes = [ctypes.c_int]
    library.caisson_zygote_serve.restype = ctypes.c_long
    library.caisson_zygote_await_release.argtypes = []
    library.caisson_zygote_await_release.restype = None
    return library


def stop(status, reason):
    os.write(2, ("zygote: %s\n" % reason).encode())
    os._exit(status)


def arguments(argv):
    profile, without = argv[1], set()
    rest = argv[2:]
    while rest:
        if rest[0] != "--without" or len(rest) < 2:
            stop(EXIT_REFUSED, "unknown argument %s" % rest[0])
        without.add(rest[1])
        rest = rest[2:]
    if profile not in PRELOAD:
        stop(EXIT_REFUSED, "unknown profile %s" % profile)
    return profile, without


def main():
    profile, without = arguments(sys.argv)
    loaded, warnings = preload(profile, without)
    if "_hashlib" in sys.modules:
        import ssl  # noqa: F401  # the same OpenSSL, whose generator every guest has to stir
    library = load_library()
    before, after = ctypes.pythonapi.PyOS_BeforeFork, ctypes.pythonapi.PyOS_AfterFork_Child
    before.restype = after.restype = None
    forget_surroundings()
    ipython_dir = os.environ.get("IPYTHONDIR")
    set_environment()
    names = account_names()
    harness = load_harness()
    if "IPython" in loaded:
        warnings += build_kernel(harness, ipython_dir)
    report = {"profile": profile, "loaded": loaded, "warnings": warnings}
    report["version"] = "%d.%d.%d" % sys.version_info[:3]
    report = json.dumps(report).encode()
    forget_exit_functions()
    become, getuid = renewed(become_guest), os.getuid
    rehearse(harness, profile)
    harness.prepare()
    # Numbers only: the guest's descriptor 0 is another /dev/null.
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    reseeds = [reseed for reseed in [make() for name, make in RESEED if name in sys.modules] if reseed]
    hooks = fork_hooks()
    os.access(HOME, os.F_OK)
    for _ in range(2):
        # As if forked, first with the hooks and then without: with one thread there is nothing to take away.
        before()
        after()
        become(reseeds, names, getuid, hooks)
        for registered, _ in hooks:
            registered.clear()
    plug_holes()
    clear_top()
    gc.freeze()
    reasons = reasons_to_refuse()
    if reasons:
        stop(EXIT_REFUSED, "refuses to serve: " + "; ".join(reasons))
    failed = library.caisson_zygote_prepare(*rseq_area())
    if failed < 0:
        stop(EXIT_PREPARE, "failed to prepare: %s" % os.strerror(-failed))
    if library.caisson_zygote_ready(SOCKET, report) < 0:
        stop(EXIT_PREPARE, "failed to tell the launcher")
    await_release = library.caisson_zygote_await_release
    # The locks that this takes are let go by AfterFork_Child alone: the zygote runs no Python from here on.
    before()
    if library.caisson_zygote_serve(SOCKET) < 0:
        os._exit(0)
    # The launcher looks at this process from outside meanwhile. Until it has, nothing of a guest's is read: no
    # request, and no file of its space (`serve` looks for packages there).
    after()
    become(reseeds, names, getuid, hooks)
    await_release()
    harness.serve()


if __name__ == "__main__":
    main()
