#!/usr/bin/python3
"""Stands in for the environment's interpreter. As a zygote it does what `mode` beside it says; else it is Python."""

import array
import os
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


channel.send(b"R")
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
    elif mode == "garbles":
        os.write(status, os.urandom(3 + count % 8))
        for fd in fds:
            os.close(fd)
