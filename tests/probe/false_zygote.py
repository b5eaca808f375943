#!/usr/bin/python3
"""Stands in for the environment's interpreter. As a zygote it does what `mode` beside it says; else it is Python."""

import array
import ctypes
import errno
import json
import os
import signal
import socket
import sys
import time

REAL = "/usr/bin/python3"
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("Python %d.%d.%d" % sys.version_info[:3])
    sys.exit()
if "/opt/caisson/zygote.py" not in arguments:
    os.execv(REAL, [REAL, *arguments])

with open("/opt/python/mode") as file:
    mode = file.read().strip()
channel = socket.socket(fileno=3)


def job():
    """The descriptors of the next job."""
    fds = array.array("i")
    data, ancillary, _, _ = channel.recvmsg(4096, socket.CMSG_SPACE(32 * fds.itemsize))
    if not data:
        sys.exit()
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return list(fds)


libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206


def trace(pid):
    if libc.ptrace(PTRACE_SEIZE, pid, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)


def read(pid):
    """Asks the kernel what a trace would."""
    with open("/proc/%d/environ" % pid, "rb") as file:
        file.read(1)


TRIES = {"signal 0": lambda pid: os.kill(pid, 0), "SIGSTOP": stop, "ptrace": trace, "environ": read}


def reach():
    """Tries what a taken zygote would, again and again: who is out of reach now may have our uid in a moment."""
    path = "/opt/python/targets"
    while not os.path.exists(path):
        time.sleep(0.02)
    with open(path) as file:
        targets = {name: int(pid) for name, pid in (line.split("=") for line in file)}
    own = os.fork()
    if own == 0:
        time.sleep(10_000)
    answers = {name: {} for name in [*targets, "itself"]}
    end = time.monotonic() + 4
    while time.monotonic() < end:
        for name, pid in [*targets.items(), ("itself", own)]:
            for what, attempt in TRIES.items():
                if answers[name].get(what) == "done":
                    continue
                try:
                    attempt(pid)
                    answers[name][what] = "done"
                except OSError as error:
                    answers[name][what] = errno.errorcode[error.errno]
    os.kill(own, signal.SIGKILL)
    os.write(2, b"REACHED %s\n" % json.dumps(answers).encode())
    os._exit(0)


channel.send(b"R")
if mode == "reaches" and "python" in arguments and os.fork() == 0:
    reach()
if mode == "talks":
    time.sleep(1)
    channel.send(b"another word")
    channel.send(b"R")
elif mode == "deaf":
    time.sleep(10_000)
count = 0
while True:
    fds = job()
    count += 1
    status = fds[5]
    if mode == "dies":
        os._exit(1)
    elif mode == "lies":
        os.write(status, b"\0" * 8)  # "confined and waiting", and there is nobody
    elif mode == "reaches":
        os.write(status, b"no")
        for fd in fds:
            os.close(fd)
    elif mode == "garbles":
        os.write(status, os.urandom(3 + count % 8))
        for fd in fds:
            os.close(fd)
