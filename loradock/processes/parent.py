"""Processes that end with the process that started them."""

import errno
import os
import signal
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
"""The option of `prctl`, in Linux' `linux/prctl.h`."""


def end_with(parent_pid: int) -> None:
    """Have the system kill this process when the thread that started it ends; raises `OSError`.

    It holds for a program that replaces this one, too, unless that gets other rights.
    """
    import ctypes  # noqa: PLC0415 - a controller imports this module too

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "the system can't end this process with its parent")
    # No signal is sent for a parent that ended before.
    if os.getppid() != parent_pid:
        raise ProcessLookupError(errno.ESRCH, f"process {parent_pid} has ended, which started this")


def run_with(parent_pid: int, command: list[str]) -> NoReturn:
    """Replace this process by a program that ends with the parent; raises `OSError`."""
    end_with(parent_pid)
    os.execv(command[0], command)  # noqa: S606 - of our own command lines, no shell
