import ctypes, os, sys, gc
sys.path.insert(0, "/opt/caisson")
import harness, random
if sys.argv[1] == "python-data":
    _a=os.access; os.access=lambda p,m,**k: True if str(p).startswith("/opt/caisson") else _a(p,m,**k)
    import numpy, pandas, matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot
    matplotlib.font_manager._get_font.cache_clear()
L = ctypes.PyDLL("/opt/caisson/libcaisson.so")
libc = ctypes.CDLL(None)
off = ctypes.c_long.in_dll(libc, "__rseq_offset").value; size = ctypes.c_uint.in_dll(libc, "__rseq_size").value
L.caisson_zygote_prepare.argtypes=[ctypes.c_long, ctypes.c_uint]
L.caisson_zygote_serve.restype = ctypes.c_long
r = L.caisson_zygote_prepare(off, size)
if r: sys.exit("prepare %d" % r)
gc.collect(); gc.freeze()
L.caisson_zygote_ready(3, b"")
B, AC = ctypes.pythonapi.PyOS_BeforeFork, ctypes.pythonapi.PyOS_AfterFork_Child
B()
if L.caisson_zygote_serve(3) < 0: os._exit(0)
AC()
random.seed()
harness.serve()
