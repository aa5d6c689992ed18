"""A storage in memory with the failures of real disks, all decided by a seeded `Random`.

The process sees its own writes at once, as from a page cache. Only a sync copies them to the disk,
which is all that is left after `lose_power`. A sync that fails drops what it should have written,
and the next one succeeds without it, as Linux does.
"""

import errno
import os
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from loradock.controller.log.storage import Space, Storage, Wait

FALLIBLE = ("create", "write", "cut", "sync_data", "sync", "rename", "remove", "commit")
"""The operations that can fail, by the names of their methods."""

SECTOR_BYTES = 512


@dataclass
class Faults:
    """Probabilities of failures, and the room on the disk; all may be changed at any time.

    `holes`: after a loss of power a sector of an unsynced write is zero. `flips`: one of its bits
    is another one. Without both, the unsynced bytes that are left are a prefix.
    """

    write_fails: float = 0.0
    sync_fails: float = 0.0
    holes: float = 0.0
    flips: float = 0.0
    bytes_max: int = 1 << 40
    is_full: bool = False
    """No file can be created, as where the last free bytes are those of the current write."""


@dataclass(frozen=True)
class _Change:
    """An unsynced change of a file: bytes at an offset, or a cut to `offset` if `data` is None."""

    offset: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.offset :]
        else:
            content.extend(bytes(max(0, self.offset - len(content))))
            content[self.offset : self.offset + len(self.data)] = self.data


@dataclass(eq=False)
class _File:
    """A file as the process sees it (`cache`), as the disk has it, and the changes between."""

    cache: bytearray = field(default_factory=bytearray)
    disk: bytearray = field(default_factory=bytearray)
    changes: list[_Change] = field(default_factory=list)

    def change(self, change: _Change) -> None:
        change.apply(self.cache)
        self.changes.append(change)

    def sync(self) -> None:
        for change in self.changes:
            change.apply(self.disk)
        self.changes.clear()


_Names = dict[Path, _File | None]
"""An atomic change of names: the file of each, None where the name is removed."""


class MemoryStorage(Storage):
    """Files in memory. `calls` are the `FALLIBLE` operations, each with the name of its file.

    `synced` counts the successful syncs by file. A descriptor that a crash has closed raises EBADF.
    """

    def __init__(self, rng: Random | None = None, faults: Faults | None = None) -> None:
        self.rng = rng or Random(0)
        self.faults = faults or Faults()
        self.calls: list[tuple[str, str]] = []
        self.synced: Counter[str] = Counter()
        self._failures: dict[int, int] = {}
        self._directories: set[Path] = set()
        self._names: dict[Path, _File] = {}
        # Changes of names that no sync of the directory has made durable.
        self._renames: list[_Names] = []
        self._durable_names: dict[Path, _File] = {}
        self._open: dict[int, _File | Path] = {}
        self._paths: dict[int, Path] = {}
        self._locked: dict[Path, int] = {}
        self._next_fd = 3

    # What a test does to it

    def fail_call(self, number: int, error: int = errno.EIO) -> None:
        """Let the call of a `FALLIBLE` operation with this number fail, counted from 0."""
        self._failures[number] = error

    def fail_nothing(self) -> None:
        """Forget the calls that were to fail, and set all probabilities to 0."""
        self._failures.clear()
        self.faults = Faults()

    def crash(self) -> None:
        """End the process: descriptors and locks are gone, and the files are as it saw them."""
        self._open.clear()
        self._locked.clear()

    def lose_power(self) -> None:
        """End the machine: what no sync has made durable is there, missing, torn or changed."""
        self.crash()
        kept = self.rng.randint(0, len(self._renames))
        for names in self._renames[:kept]:
            _apply(self._durable_names, names)
        self._renames.clear()
        self._names = dict(self._durable_names)
        for file in {id(file): file for file in self._names.values()}.values():
            self._lose_changes(file)

    def flip(self, path: Path, offset: int, bit: int = 0) -> None:
        """Flip one bit of a file, also on the disk."""
        file = self._names[path]
        for content in (file.cache, file.disk):
            if offset < len(content):
                content[offset] ^= 1 << bit

    def unsynced_bytes(self, path: Path) -> int:
        """Return the number of bytes of a file that a loss of power may change."""
        return sum(len(change.data or b"") for change in self._names[path].changes)

    # Storage

    def names(self, directory: Path) -> list[str]:
        """Return the names, in an order that depends on the seed."""
        self._require_directory(directory)
        found = [path.name for path in self._names if path.parent == directory]
        self.rng.shuffle(found)
        return found

    def is_directory(self, path: Path) -> bool:
        """Whether `path` is a directory."""
        return path in self._directories

    def make_directory(self, directory: Path) -> None:
        """Create a directory, durably."""
        self._directories |= {directory, *directory.parents}

    def read(self, path: Path, offset: int = 0, size_bytes: int = -1) -> bytes:
        """Return the bytes that the process sees."""
        content = self._file(path).cache
        end = len(content) if size_bytes < 0 else offset + size_bytes
        return bytes(content[offset:end])

    def size_bytes(self, path: Path) -> int:
        """Return the size that the process sees."""
        return len(self._file(path).cache)

    def space(self, directory: Path) -> Space:
        return Space(self.faults.bytes_max - self._used_bytes(), 1)

    def create(self, path: Path) -> int:
        """Create an empty file, or empty an existing one."""
        self._call("create", path.name)
        self._require_directory(path.parent)
        file = self._names.get(path)
        if file is None:
            if self.faults.is_full or self._used_bytes() >= self.faults.bytes_max:
                raise _error(errno.ENOSPC)
            file = _File()
            self._rename({path: file})
        else:
            file.change(_Change(0, None))
        return self._opened(file, path)

    def open_end(self, path: Path) -> int:
        """Open an existing file for appending."""
        return self._opened(self._file(path), path)

    def write(self, fd: int, data: bytes) -> int:
        """Append the bytes that fit; after a failure a part of them may be there."""
        file = self._open_file(fd)
        room = self.faults.bytes_max - self._used_bytes()
        try:
            self._call("write", self._name_of(fd), self.faults.write_fails)
        except OSError:
            torn = data[: self.rng.randint(0, min(len(data), max(0, room)))]
            file.change(_Change(len(file.cache), torn))
            raise
        if data and room <= 0:
            raise _error(errno.ENOSPC)
        written = data[: max(0, room)]
        file.change(_Change(len(file.cache), bytes(written)))
        return len(written)

    def cut(self, fd: int, size_bytes: int) -> None:
        """Cut a file to a size."""
        file = self._open_file(fd)
        self._call("cut", self._name_of(fd))
        file.change(_Change(size_bytes, None))

    def sync_data(self, fd: int) -> None:
        """Copy a file's changes to the disk, or lose them."""
        self._sync("sync_data", fd)

    def start_sync(self, fd: int) -> Wait:
        """Do nothing: the sync is made at the last moment that is allowed."""
        return lambda: self.sync_data(fd)

    def sync(self, fd: int) -> None:
        """Copy a file's changes or a directory's names to the disk, or lose the changes."""
        self._sync("sync", fd)

    def close(self, fd: int) -> None:
        """Close a descriptor, which ends its lock."""
        self._open.pop(fd, None)
        self._locked = {path: owner for path, owner in self._locked.items() if owner != fd}

    def rename(self, path: Path, new: Path) -> None:
        """Rename a file; an existing file `new` is replaced."""
        self._call("rename", path.name)
        file = self._file(path)
        self._rename({new: file, path: None})

    def remove(self, path: Path) -> None:
        """Delete a file."""
        self._call("remove", path.name)
        self._file(path)
        self._rename({path: None})

    def open_directory(self, directory: Path) -> int:
        """Open a directory, for `lock` and `sync`."""
        self._require_directory(directory)
        return self._opened(directory, directory)

    def connect(self, path: Path, *, create: bool = False) -> sqlite3.Connection:
        """Open a database, which is a file that each commit replaces durably and at once."""
        if not create:
            self._file(path)
        elif path not in self._names:
            self.close(self.create(path))
        return _Database(self, path)

    def commit(self, path: Path, data: bytes) -> None:
        """Replace a database; raises an error of sqlite if that fails."""
        file = self._file(path)
        if self._used_bytes() - len(file.cache) + len(data) > self.faults.bytes_max:
            raise sqlite3.OperationalError("database or disk is full")
        try:
            self._call("commit", path.name, self.faults.sync_fails)
        except OSError as error:
            raise sqlite3.OperationalError("disk I/O error") from error
        file.change(_Change(0, None))
        file.change(_Change(0, data))
        file.sync()

    def lock(self, fd: int) -> None:
        """Lock a directory; raises `BlockingIOError` if it is locked."""
        path = self._paths[fd]
        if path in self._locked:
            raise BlockingIOError(errno.EWOULDBLOCK, f"{path} is locked")
        self._locked[path] = fd

    # Internals

    def _call(self, name: str, file: str, chance: float = 0.0) -> None:
        """Count an operation; raises `OSError` if it is one that fails."""
        number = len(self.calls)
        self.calls.append((name, file))
        if number in self._failures:
            raise _error(self._failures.pop(number))
        if chance and self.rng.random() < chance:
            raise _error(errno.EIO)

    def _sync(self, name: str, fd: int) -> None:
        opened = self._open.get(fd)
        if opened is None:
            raise _error(errno.EBADF)
        try:
            self._call(name, self._name_of(fd), self.faults.sync_fails)
        except OSError:
            if isinstance(opened, _File):
                opened.changes.clear()
            raise
        self.synced[self._name_of(fd)] += 1
        if isinstance(opened, _File):
            opened.sync()
            return
        for names in [names for names in self._renames if _directory_of(names) == opened]:
            _apply(self._durable_names, names)
        self._renames = [names for names in self._renames if _directory_of(names) != opened]

    def _lose_changes(self, file: _File) -> None:
        """Apply some of the unsynced changes to the disk, the last of them torn."""
        kept = self.rng.randint(0, len(file.changes))
        for change in file.changes[:kept]:
            self._apply_corrupt(change, file.disk)
        for change in file.changes[kept : kept + 1]:
            if change.data is not None:
                torn = change.data[: self.rng.randint(0, len(change.data))]
                self._apply_corrupt(_Change(change.offset, torn), file.disk)
        file.changes.clear()
        file.cache = bytearray(file.disk)

    def _apply_corrupt(self, change: _Change, disk: bytearray) -> None:
        if change.data:
            data = bytearray(change.data)
            if self.rng.random() < self.faults.holes:
                start = self.rng.randrange(0, len(data), SECTOR_BYTES)
                end = min(start + SECTOR_BYTES, len(data))
                data[start:end] = bytes(end - start)
            if self.rng.random() < self.faults.flips:
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            change = _Change(change.offset, bytes(data))
        change.apply(disk)

    def _rename(self, names: _Names) -> None:
        _apply(self._names, names)
        self._renames.append(names)

    def _name_of(self, fd: int) -> str:
        """Return the name that a descriptor's file has now, or had when it was opened."""
        opened = self._open.get(fd)
        names = [path.name for path, file in self._names.items() if file is opened]
        return names[0] if names else self._paths[fd].name

    def _opened(self, file: _File | Path, path: Path) -> int:
        fd, self._next_fd = self._next_fd, self._next_fd + 1
        self._open[fd], self._paths[fd] = file, path
        return fd

    def _open_file(self, fd: int) -> _File:
        file = self._open.get(fd)
        if not isinstance(file, _File):
            raise _error(errno.EBADF)
        return file

    def _file(self, path: Path) -> _File:
        file = self._names.get(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return file

    def _require_directory(self, path: Path) -> None:
        if path not in self._directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _used_bytes(self) -> int:
        return sum(len(file.cache) for file in self._names.values())


class _Database(sqlite3.Connection):
    """A connection to a database in a `MemoryStorage`, which sees the last commit before it."""

    def __init__(self, storage: MemoryStorage, path: Path) -> None:
        super().__init__(":memory:")
        self._storage, self._path = storage, path
        if data := storage.read(path):
            self.deserialize(data)

    def commit(self) -> None:
        """Store the database, or keep the one from before."""
        super().commit()
        self._storage.commit(self._path, self.serialize())


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _apply(files: dict[Path, _File], names: _Names) -> None:
    for path, file in names.items():
        if file is None:
            files.pop(path, None)
        else:
            files[path] = file


def _directory_of(names: _Names) -> Path:
    return next(iter(names)).parent
