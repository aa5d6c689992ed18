"""The rights that a process gives up before it parses what strangers wrote.

It keeps its memory and its open descriptors. It opens nothing more, starts nothing, reaches no
network and no other process, and its processor time, memory and files are bounded. Limits of the
kernel enforce that, and a filter of system calls (seccomp) where the kernel has one.
"""

import ctypes
import os
import platform
import resource
import struct
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2


_AUDIT_NUMBERS: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's numbers of architectures."""

_CALLS: Final = {
    # What has been opened before.
    "read": (0, 63),
    "readv": (19, 65),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "preadv2": (327, 286),
    "write": (1, 64),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "fcntl": (72, 25),
    "close": (3, 57),
    # Memory.
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    # Time, locks, signals and the process itself.
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
"""The system calls that are allowed, with their numbers on x86_64 and aarch64."""

_INSTRUCTION: Final = struct.Struct("HBBI")
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001
"""Refused calls fail with EPERM, so that a library that can do without them continues."""


def give_up_rights(memory_bytes: int, cpu_s: int) -> bool:
    """Give up all rights but computing; return whether the kernel filters system calls too.

    `memory_bytes`: more than the process has mapped. No right can be had again.
    """
    mapped = int(_first_word("/proc/self/statm")) * resource.getpagesize()
    used_s = int(sum(os.times()[:2]))
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_AS, mapped + memory_bytes),
        (resource.RLIMIT_CPU, used_s + cpu_s),
        # The last one: nothing can be opened after it, sockets included.
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    return _filter_calls()


def _first_word(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().split()[0]


def _filter_calls() -> bool:
    machine = platform.machine()
    if machine not in _AUDIT_NUMBERS or _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    program = _program(machine)
    buffer = ctypes.create_string_buffer(program)
    count = len(program) // _INSTRUCTION.size
    header = struct.pack("HP", count, ctypes.addressof(buffer))
    return not _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0)


def _program(machine: str) -> bytes:
    """Return the filter: the architecture's own calls of the list are allowed, all others fail."""
    calls = [numbers[machine == "aarch64"] for numbers in _CALLS.values()]
    lines = [
        (_LOAD, 0, 0, 4),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_NUMBERS[machine]),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, 0),
        *((_JUMP_IF_EQUAL, len(calls) - at, 0, call) for at, call in enumerate(calls)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(_INSTRUCTION.pack(*line) for line in lines)
