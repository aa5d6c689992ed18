"""The disk of the simulated machine: a process may end at any operation, and corruption is undone.

The rest is `tests.support.simulation.memory_storage.MemoryStorage`: torn, lost and changed bytes
after a loss of power, failed writes and syncs, a full disk.
"""

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.simulation.memory_storage import Faults, MemoryStorage

_TAIL_BYTES: Final = 1024
"""Bytes at the end of a file in which no bit is flipped: there, a record may be the torn tail."""


class SimulatedCrash(BaseException):
    """The process ended in the middle of a disk operation; nothing may catch this."""


class Flip(NamedTuple):
    """A flipped bit of a file, and the file's content before."""

    path: Path
    offset: int
    bit: int
    before: bytes


class SimulatedDisk(MemoryStorage):
    """One machine's disk, with the directory of a log; every operation is observed.

    `crash_after` operations succeed before the process ends; negative: it does not. The next
    `fails` operations fail, if they are of the kinds in `failing`.
    """

    def __init__(self, observe: Callable[[str, bytes], None], rng: random.Random) -> None:
        super().__init__(rng)
        self.crash_after = -1
        self.fails = 0
        self.failing: tuple[str, ...] = ()
        self._observe = observe
        self._is_down = False

    def heal(self) -> None:
        """End all faults."""
        self.faults = Faults(holes=self.faults.holes, flips=self.faults.flips)
        self.crash_after, self.fails = -1, 0

    def fail_next(self, count: int, *operations: str) -> None:
        """Let the next operations of these kinds fail."""
        self.fails, self.failing = count, operations

    @property
    def is_full(self) -> bool:
        """Whether a write may find no space: the largest is that of the events' database."""
        return self._used_bytes() >= self.faults.bytes_max - (1 << 16)

    def fill(self) -> None:
        """Leave no space, or space for a part of a record."""
        self.faults.bytes_max = self._used_bytes() + self.rng.choice(
            (0, 0, self.rng.randrange(200))
        )

    def empty(self) -> None:
        """Make space again."""
        self.faults.bytes_max = Faults().bytes_max

    def crash(self) -> None:
        """Close all descriptors: the process that opened them has ended."""
        super().crash()
        self._is_down = False
        self.crash_after = -1

    @contextmanager
    def other_process(self, crash_after: int = -1) -> Iterator[None]:
        """Run another process on this disk, which ends with the context or at an operation."""
        before, opened = self.crash_after, set(self._open)
        self.crash_after = crash_after
        try:
            yield
        except SimulatedCrash:
            self._observe("other process ended", b"")
        finally:
            self.crash_after, self._is_down = before, False
            for fd in set(self._open) - opened:
                self.close(fd)

    def sync_all(self) -> None:
        """Make everything durable, as an operator's copy does."""
        for file in self._names.values():
            file.sync()
        self._durable_names = dict(self._names)
        self._renames.clear()

    def flip_bit(self) -> Flip | None:
        """Flip a bit of a segment or a snapshot; None for no file that is long enough."""
        sizes = {path: len(file.cache) for path, file in self._names.items()}
        long = [path for path in sorted(sizes) if self._is_flipped(path, sizes[path])]
        if not long:
            return None
        path = self.rng.choice(long)
        offset, bit = self.rng.randrange(sizes[path] - _TAIL_BYTES), self.rng.randrange(8)
        before = bytes(self._names[path].cache)
        self.flip(path, offset, bit)
        return Flip(path, offset, bit, before)

    @staticmethod
    def _is_flipped(path: Path, size_bytes: int) -> bool:
        if path.suffix == ".snap":
            return size_bytes > _TAIL_BYTES
        return path.suffix == ".log" and size_bytes > 2 * _TAIL_BYTES

    def _call(self, name: str, file: str, chance: float = 0.0) -> None:
        if self._is_down:
            raise SimulatedCrash(name)
        self.calls.clear()
        self._observe(name, file.encode())
        if self.crash_after >= 0:
            self.crash_after -= 1
            if self.crash_after < 0:
                self._is_down = True
                raise SimulatedCrash(name)
        if self.fails and name in self.failing:
            self.fails -= 1
            self._failures[0] = errno.EIO
        super()._call(name, file, chance)
