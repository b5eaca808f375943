"""Runs a program on a host that lacks something, as far as it can tell: system calls are refused by a filter.

    without.py [--user-namespaces] [--namespaces] [--landlock] -- PROGRAM [ARGUMENT…]

A filter is inherited by everything below, also by what is root there. Refused are, with EPERM, clone and unshare with the
flags, and setns and mount with `--namespaces`; with ENOSYS clone3, whose flags no filter can read, and Landlock's calls.
"""
import argparse
import ctypes
import errno
import os
import platform
import struct
import sys

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# clone, unshare, setns, mount, by architecture; clone3 and landlock_create_ruleset are 435 and 444 on both.
NUMBERS = {"x86_64": (56, 272, 308, 165), "aarch64": (220, 97, 268, 40)}
CLONE3, LANDLOCK = 435, 444
NEWUSER, NEW_ANY = 0x10000000, 0x7E020000
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2


def program(user_namespaces, namespaces, landlock):
    clone, unshare, setns, mount = NUMBERS[platform.machine()]
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH[platform.machine()]), (RETURN, 0, 0, ALLOW)]

    def refuse(number, answer, flags=None):
        body = [(RETURN, 0, 0, ERRNO | answer)]
        if flags is not None:
            # The low half of the first argument.
            body = [(LOAD, 0, 0, 16), (AND, 0, 0, flags), (EQUAL, 1, 0, 0)] + body
        code.extend([(LOAD, 0, 0, 0), (EQUAL, 0, len(body), number)] + body)

    flags = NEW_ANY if namespaces else NEWUSER if user_namespaces else None
    if flags:
        refuse(clone, errno.EPERM, flags)
        refuse(unshare, errno.EPERM, flags)
        refuse(CLONE3, errno.ENOSYS)
    if namespaces:
        refuse(setns, errno.EPERM)
        refuse(mount, errno.EPERM)
    if landlock:
        for number in range(LANDLOCK, LANDLOCK + 3):
            refuse(number, errno.ENOSYS)
    return code + [(RETURN, 0, 0, ALLOW)]


def install(code):
    libc = ctypes.CDLL(None, use_errno=True)
    words = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    fprog = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(words)))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, FILTER, ctypes.c_void_p(ctypes.addressof(fprog)), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


def main():
    parser = argparse.ArgumentParser()
    for name in ("--user-namespaces", "--namespaces", "--landlock"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("program", nargs="+")
    asked = parser.parse_args()
    install(program(asked.user_namespaces, asked.namespaces, asked.landlock))
    os.execvp(asked.program[0], asked.program)


if __name__ == "__main__":
    sys.exit(main())
