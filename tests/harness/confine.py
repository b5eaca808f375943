#!/usr/bin/python3
"""Installs seccomp programs in order and executes a command: `confine.py A.bpf B.bpf -- argv…`."""

import ctypes
import os
import platform
import sys

PR_SET_NO_NEW_PRIVS = 38
SECCOMP = {"x86_64": 317, "aarch64": 277, "riscv64": 277}[platform.machine()]
SET_MODE_FILTER = 1


class Fprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def main():
    at = sys.argv.index("--")
    libc = ctypes.CDLL(None, use_errno=True)
    programs = [open(path, "rb").read() for path in sys.argv[1:at]]
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for program in programs:
        text = ctypes.create_string_buffer(program, len(program))
        prog = Fprog(len(program) // 8, ctypes.addressof(text))
        if libc.syscall(SECCOMP, SET_MODE_FILTER, 0, ctypes.byref(prog)) != 0:
            sys.exit("seccomp: " + os.strerror(ctypes.get_errno()))
    os.execv(sys.argv[at + 1], sys.argv[at + 1 :])


if __name__ == "__main__":
    main()
