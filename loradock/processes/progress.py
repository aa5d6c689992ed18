"""The step that a process's main loop is in, on a page of memory shared with other processes.

The main loop writes one record per step, without a system call. A supervisor reads it at any time,
also while the main loop is busy, hangs or is stopped. No thread of the writer takes part, which
could report life while the main loop hangs, or be starved while the main loop works.
"""

import mmap
import os
import struct
import time
import zlib
from typing import Final, NamedTuple

_RECORD: Final = struct.Struct("<QQQQ16s")
"""Number, process id, start and bound of a step, and its name; a CRC-32 follows."""

_CHECKSUM: Final = struct.Struct("<I")
START_BOUND_S: Final = 3_600
"""The bound of the time before a process's first step, and of each step of reading a model."""

_LOADING: Final = "load "

_STEP_BYTES: Final = _RECORD.size + _CHECKSUM.size

REASON_BYTES_MAX: Final = 1000
"""Bound on the text that states why a process ends."""

_BYTES: Final = _STEP_BYTES + REASON_BYTES_MAX


class Step(NamedTuple):
    """A step of the main loop of process `pid`, in nanoseconds of the monotonic clock.

    `number` differs between any two steps of a process. A step that takes longer than `bound_ns`
    hangs.
    """

    number: int
    pid: int
    since_ns: int
    bound_ns: int
    name: str


def loading_step(loaded: int, tensors: int) -> str:
    """Return the name of the step of an engine that has read some tensors of its model."""
    return f"{_LOADING}{loaded}/{tensors}"


def loading_text(step: Step | None) -> str:
    """Return how much of its model an engine has read; empty unless it is at such a step."""
    if step is None or not step.name.startswith(_LOADING):
        return ""
    loaded, _, tensors = step.name.removeprefix(_LOADING).partition("/")
    return f"{loaded} of {tensors} tensors of its model are read"


class Progress:
    """A page with the current step of one process.

    Without a `path` it is memory of this process. `share` makes a page that other processes open by
    its `path`, which needs no file system and is valid as long as the sharing process runs.
    """

    def __init__(self, path: str = "") -> None:
        self.path = path
        self._number = 0
        self._pid = os.getpid()
        if not path:
            self._page = mmap.mmap(-1, _BYTES)
            return
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(fd, _BYTES)
        finally:
            os.close(fd)

    @classmethod
    def share(cls) -> "Progress":
        """Return a new page that processes of this user can open; it stays open."""
        fd = os.memfd_create("progress", os.MFD_CLOEXEC)
        os.write(fd, bytes(_BYTES))
        return cls(f"/proc/{os.getpid()}/fd/{fd}")

    def enter(self, name: str, bound_s: float) -> None:
        """Record that the main loop begins a step, which takes at most `bound_s`."""
        self._number += 1
        record = _RECORD.pack(
            self._number, self._pid, time.monotonic_ns(), round(bound_s * 1e9), name.encode()
        )
        self._page[:_STEP_BYTES] = record + _CHECKSUM.pack(zlib.crc32(record))

    def end(self, reason: str) -> None:
        """Record why the process ends, for the supervisor's last message."""
        data = reason.encode(errors="backslashreplace")[:REASON_BYTES_MAX]
        self._page[_STEP_BYTES:] = data.ljust(REASON_BYTES_MAX, b"\0")

    def reason(self) -> str:
        """Return why the process ended; empty if it did not record that."""
        return self._page[_STEP_BYTES:].rstrip(b"\0").decode(errors="replace")

    def clear(self) -> None:
        """Forget the step: another process will write here."""
        self._page[:] = bytes(_BYTES)

    def read(self) -> Step | None:
        """Return the current step; None before the first, and while a step is being written."""
        data = self._page[:_STEP_BYTES]
        record = data[: _RECORD.size]
        number, pid, since_ns, bound_ns, name = _RECORD.unpack(record)
        if not number or _CHECKSUM.pack(zlib.crc32(record)) != data[_RECORD.size :]:
            return None
        return Step(number, pid, since_ns, bound_ns, name.rstrip(b"\0").decode(errors="replace"))
