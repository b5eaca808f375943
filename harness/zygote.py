"""A warmed interpreter that has never run guest code. Its forks move into shells and become interpreters.

    python3 -s -P -B /opt/caisson/zygote.py python|python-data [--without NAME]…

Started by the launcher inside the read-only template: unprivileged, cwd /, no writable file system, an environment
built from nothing, descriptor 3 the launcher's SEQPACKET socket. What is loaded here is shared by every guest, so
it refuses to serve (exit 70) with a second thread, a descriptor too many or memory that would stay shared; and no
line between two forks writes memory that depends on a request.

`--without` leaves a package out: the launcher starts again with the name of one that killed the process.
"""

import contextlib
import ctypes
import gc
import importlib.util
import io
import json
import os
import random
import re
import sys

SOCKET = 3
HERE = os.path.dirname(os.path.abspath(__file__))
HOME = "/home/sandbox"
EXIT_REFUSED, EXIT_PREPARE = 70, 71

# What a guest's environment is, entirely. USER and LOGNAME follow its uid.
ENVIRONMENT = {
    "HOME": HOME,
    "PATH": "/opt/python/bin:/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
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
    """matplotlib takes a cache directory only if it can write there, else makes one: here it can do neither.

    The font list was built beforehand; nothing is written.
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
    # No shell instance: it would start the history's thread and its database.
    from IPython.core.interactiveshell import InteractiveShell  # noqa: F401
    from traitlets.config import Config

    Config().HistoryManager.enabled = False


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
    spec = importlib.util.spec_from_file_location("harness", os.path.join(HERE, "harness.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def warm(harness):
    """One print and one traceback, in a namespace that is thrown away."""
    session = harness.prepare()
    session.warm("print(1)")
    session.warm("def f(): return {}['x']\nf()")


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


# --- in the child -------------------------------------------------------------------------------------------------


def reseed_random():
    random.seed()


def reseed_numpy():
    sys.modules["numpy.random"].seed()


def reseed_ssl():
    # OpenSSL reseeds by itself only when the pid changed, and every guest is pid 2.
    sys.modules["ssl"].RAND_add(os.urandom(32), 32.0)


def reseed_multiprocessing():
    process = sys.modules["multiprocessing.process"]
    process.current_process().authkey = os.urandom(32)


def reseed_tempfile():
    sys.modules["tempfile"]._name_sequence = None  # made anew, with a generator of its own


def reseed_uuid():
    module = sys.modules["uuid"]
    module._node = module._last_timestamp = None


# A package enters PRELOAD only with its line here, or with the reason why it keeps no generator. The names are the
# modules whose presence calls for the line.
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


def become_guest():
    """After the fork, confined: nothing that the zygote drew, opened or was told may be left to the guest."""
    for name, reseed in RESEED:
        if name in sys.modules:
            reseed()  # a failure ends the guest: better none than one that draws what its sibling draws
    for name, forget in FORGET:
        if name in sys.modules:
            try:
                forget()
            except Exception:
                pass  # another version of the package; the guest sees an odd path at worst
    set_environment()
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")


def set_environment():
    """Through os.environ, whose setter and deleter call putenv and unsetenv: C code reads the same."""
    wanted = dict(ENVIRONMENT)
    wanted["USER"] = wanted["LOGNAME"] = account_name()
    for name in list(os.environ):
        if name not in wanted:
            del os.environ[name]
    for name, value in wanted.items():
        os.environ[name] = value


def account_name():
    import pwd

    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return "sandbox"
    return entry.pw_name


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
    harness = load_harness()
    loaded, warnings = preload(profile, without)
    if "_hashlib" in sys.modules:
        import ssl  # noqa: F401  # the same OpenSSL, whose generator every guest has to stir
    warm(harness)
    library = load_library()
    before, after = ctypes.pythonapi.PyOS_BeforeFork, ctypes.pythonapi.PyOS_AfterFork_Child
    before.restype = after.restype = None
    import pwd  # noqa: F401  # here, so that a guest's first import is none of a file

    account_name()
    report = {"profile": profile, "loaded": loaded, "warnings": warnings}
    report["version"] = "%d.%d.%d" % sys.version_info[:3]
    report = json.dumps(report).encode()
    gc.collect()
    gc.freeze()
    reasons = reasons_to_refuse()
    if reasons:
        stop(EXIT_REFUSED, "refuses to serve: " + "; ".join(reasons))
    failed = library.caisson_zygote_prepare(*rseq_area())
    if failed < 0:
        stop(EXIT_PREPARE, "failed to prepare: %s" % os.strerror(-failed))
    if library.caisson_zygote_ready(SOCKET, report) < 0:
        stop(EXIT_PREPARE, "failed to tell the launcher")
    # The locks that this takes are let go by AfterFork_Child alone: the zygote runs no Python from here on.
    before()
    if library.caisson_zygote_serve(SOCKET) < 0:
        os._exit(0)
    after()
    become_guest()
    harness.serve()


if __name__ == "__main__":
    main()
