"""Records and failing disks, for the tests of the log.

A failing disk does less than the real one, never anything else.
"""

import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import pytest

from loradock.controller.log import storage
from loradock.controller.log.segments import read
from loradock.controller.log.writer import Log
from loradock.messages.records import FORMAT, Header, Record
from tests.support.simulation.message_examples import input_examples

HEADER = Header(FORMAT, 1, "lru", {"slots_max": 4, "host_adapters_max": 16}, 0)
TIME_NS = 1_700_000_000_000_000_000


def make_records(count: int, first: int = 1) -> list[Record]:
    """Make different records of all kinds of input, numbered from `first` on."""
    examples = input_examples()
    return [_varied(examples[i % len(examples)], i) for i in range(first, first + count)]


def _varied(example: Any, i: int) -> Record:
    fields = set(example.__struct_fields__)
    changes: dict[str, Any] = {"request_id": f"r-{i}"} if "request_id" in fields else {}
    if "op" in fields:
        changes["op"] = i
    varied = msgspec.structs.replace(example, **changes)
    return Record(TIME_NS + i * 1_000_003, varied, f"{i:x}" * (i % 3), i % 6, i % 4)


def write(directory: Path, records: Sequence[Record], **options: Any) -> None:
    """Append records to the log in `directory`, in groups of three and in epoch 1."""
    with Log(directory, HEADER, **options) as log:
        for start in range(0, len(records), 3):
            log.append(records[start : start + 3], epoch=1)


def records_in(directory: Path) -> list[Record]:
    """Return the records of the log in `directory`."""
    return [record for _, _, record in read(directory)]


def files(directory: Path) -> list[Path]:
    """Return the paths of a log's segments, oldest first."""
    return sorted(directory.glob("*.log"))


DiskT = TypeVar("DiskT", bound="Disk")


def write_with(disk: DiskT, monkeypatch: pytest.MonkeyPatch) -> DiskT:
    """Let the log's storage use this disk, which is returned."""
    monkeypatch.setattr(storage, "os", disk)
    monkeypatch.setattr(storage, "operations", lambda: None)
    return disk


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


class Crash(BaseException):
    """The process ends here."""


class Disk:
    """Replaces the module `os`, and records the names of the functions called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return partial(self.do, name, real) if callable(real) else real

    def do(self, name: str, real: Callable[..., Any], *args: Any) -> Any:
        """Call the function."""
        self.calls.append(name)
        return real(*args)


class FailingDisk(Disk):
    """Fails the functions in `errors`, `write` after `room` bytes, until `errors` is cleared."""

    def __init__(self, room: int = 0, **errors: int) -> None:
        super().__init__()
        self.room = room
        self.errors = errors

    def do(self, name: str, real: Callable[..., Any], *args: Any) -> Any:
        """Call the function, or raise its error."""
        self.calls.append(name)
        if name not in self.errors:
            return real(*args)
        if name == "write" and self.room:
            room, self.room = self.room, 0
            return real(args[0], args[1][:room])
        raise OSError(self.errors[name], os.strerror(self.errors[name]))


class CrashingDisk(Disk):
    """Ends the process at call number `at`: `before` it, `within` a write, or `after` it.

    `cut_power` then removes bytes that no sync has made durable.
    """

    def __init__(self, at: int, when: str) -> None:
        super().__init__()
        self._at = at
        self._when = when
        self._durable: dict[int, int] = {}
        self._renamed: list[tuple[Path, Path]] = []

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended; only the kernel closes files from then on."""
        return len(self.calls) >= self._at

    def do(self, name: str, real: Callable[..., Any], *args: Any) -> Any:
        """Call the function, or end the process."""
        if name == "close":
            return real(*args)
        if self.is_dead:
            raise Crash
        self.calls.append(name)
        if self.is_dead and self._when == "within" and name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        if self.is_dead and self._when != "after":
            raise Crash
        result = real(*args)
        self._remember(name, args)
        if self.is_dead:
            raise Crash
        return result

    def _remember(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "rename":
            self._renamed.append((args[0], args[1]))
        if name in ("fsync", "fdatasync"):
            about = os.fstat(args[0])
            self._durable[about.st_ino] = about.st_size
            if stat.S_ISDIR(about.st_mode):
                self._renamed.clear()

    def cut_power(self, directory: Path, rng: Random) -> None:
        """Remove a random part of the unsynced bytes of every file, and unsynced names."""
        for draft, path in reversed(self._renamed):
            path.rename(draft)
        for path in directory.glob("*.log"):
            about = path.stat()
            durable = self._durable.get(about.st_ino, 0)
            os.truncate(path, rng.randint(min(durable, about.st_size), about.st_size))
