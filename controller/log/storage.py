"""The file system as the log uses it: the only module of the log that opens, writes or syncs.

A `Storage` has no state, so that a simulation can replace it by one in memory. Files are
named by paths and, while they are written, by descriptors. Errors are `OSError`.
"""

import errno
import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from caio.abstract import AbstractOperation
    from caio.linux_aio import Context

Wait = Callable[[], None]
"""Returns when a sync is done; raises its `OSError`."""

CHUNK_BYTES: Final = 1 << 17
"""The most bytes that one sync waits for, so that the log's own syncs are not delayed for long.

The log's sync waits for one that is in progress on the same disk: for some milliseconds if that
writes a MiB, for a fraction of one with this size.
"""

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""The errors of a disk that takes no more bytes for now, and keeps what it has."""

_BAD_MEDIUM: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})

_LOCKED_S: Final = 5.0
"""Longest wait of a connection for another process's commit."""

_OPERATIONS_MAX: Final = 4
_WAIT_S: Final = 3600

# What the library raises if the system does not accept an operation, or has none.
_REFUSALS: Final = (ImportError, OSError, OverflowError, RuntimeError, SystemError, ValueError)


class UnreadableError(OSError):
    """The content of a file is lost: the disk can't read it, or it is not a regular file."""


class Space(NamedTuple):
    """The space of a file system that this process can use; writing allocates whole blocks."""

    free_bytes: int
    block_bytes: int
    is_read_only: bool = False


class Storage:
    """The files of the machine."""

    def names(self, directory: Path) -> list[str]:
        """Return the names of the files in a directory, in no particular order."""
        return os.listdir(directory)

    def is_directory(self, path: Path) -> bool:
        """Return whether `path` is a directory."""
        return path.is_dir()

    def make_directory(self, directory: Path) -> None:
        """Create a directory that only its user can enter; its name is durable."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        self.sync_directory(directory.parent)

    def read(self, path: Path, offset: int = 0, size_bytes: int = -1) -> bytes:
        """Return up to `size_bytes` of a file from `offset` on; -1: all.

        Raises `UnreadableError` if the file is there and its content is not.
        """
        # Opening a FIFO would wait for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnreadableError("it is not a regular file")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(size_bytes)
        except OSError as error:
            if error.errno in _BAD_MEDIUM:
                raise UnreadableError(f"it can't be read: {error.strerror}") from error
            raise

    def is_regular(self, path: Path) -> bool:
        """Return whether `path` is a file, and no directory or FIFO; True if it is gone."""
        try:
            return stat.S_ISREG(os.stat(path).st_mode)
        except FileNotFoundError:
            return not os.path.lexists(path)

    def size_bytes(self, path: Path) -> int:
        """Return the size of a file."""
        return path.stat().st_size

    def space(self, directory: Path) -> Space:
        """Return the space of the file system that has a directory."""
        stats = os.statvfs(directory)
        # Some blocks are reserved for root.
        blocks = stats.f_bfree if os.geteuid() == 0 else stats.f_bavail
        is_read_only = bool(stats.f_flag & os.ST_RDONLY)
        return Space(blocks * stats.f_frsize, stats.f_frsize, is_read_only)

    def create(self, path: Path) -> int:
        """Create an empty file, or empty an existing one, and return its descriptor."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NONBLOCK
        return os.open(path, flags, 0o600)

    def open_end(self, path: Path) -> int:
        """Open an existing file for appending."""
        return os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, fd: int, data: bytes) -> int:
        """Append `data`; return the number of bytes that were written."""
        return os.write(fd, data)

    def cut(self, fd: int, size_bytes: int) -> None:
        """Cut a file to a size."""
        os.ftruncate(fd, size_bytes)

    def sync_data(self, fd: int) -> None:
        """Make the content of an existing file durable."""
        os.fdatasync(fd)

    def start_sync(self, fd: int) -> Wait:
        """Begin what `sync_data` does; it is done when the returned function returns.

        Either raises the error of the sync.
        """
        return _start_sync(fd)

    def sync(self, fd: int) -> None:
        """Make a file's content and size durable, or the names in a directory."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def rename(self, path: Path, new: Path) -> None:
        """Rename a file; an existing file `new` is replaced."""
        os.rename(path, new)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        os.remove(path)

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        fd = self.open_directory(directory)
        try:
            self.sync(fd)
        finally:
            self.close(fd)

    def open_directory(self, directory: Path) -> int:
        """Open a directory, for `lock` and `sync`."""
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)

    def connect(self, path: Path, *, create: bool = False) -> sqlite3.Connection:
        """Open a sqlite database; raises `FileNotFoundError` if there is none, unless `create`.

        Raises `UnreadableError` for a directory or a FIFO.
        A commit is atomic: after an error or a crash the database is as after the last one.
        """
        if not self.is_regular(path):
            raise UnreadableError("it is not a regular file")
        if create:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        else:
            os.stat(path)
        return sqlite3.connect(path, timeout=_LOCKED_S)

    def lock(self, fd: int) -> None:
        """Lock a directory until its descriptor is closed; raises `BlockingIOError` if locked."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _start_sync(fd: int) -> Wait:
    """Let the system sync a file's content in the background; at once if it can't.

    A thread of Python would begin when the interpreter is free for it, which takes up to 5 ms.
    """
    context = operations()
    operation = _submit(context, fd) if context is not None else None
    if context is None or operation is None:
        os.fdatasync(fd)
        return _return_at_once
    return lambda: _wait(context, operation)


def _return_at_once() -> None:
    """Wait for nothing."""


@cache
def operations() -> "Context | None":
    """Return this process's queue of file operations; None if it can have none."""
    try:
        from caio.linux_aio import Context  # noqa: PLC0415 - only writers of a log need it

        return Context(_OPERATIONS_MAX)
    except _REFUSALS:
        return None


def _submit(context: "Context", fd: int) -> "AbstractOperation | None":
    """Begin a sync; None if the system does not accept it."""
    from caio.linux_aio import Operation  # noqa: PLC0415 - as the context's class

    operation = Operation.fdsync(fd)
    try:
        return operation if context.submit(operation) == 1 else None
    except _REFUSALS:
        return None


def _wait(context: "Context", operation: "AbstractOperation") -> None:
    while True:
        try:
            operation.get_value()
        except RuntimeError:
            _process_events(context)
        except SystemError as error:
            raise OSError(errno.EIO, str(error)) from error
        else:
            return


def _process_events(context: "Context") -> None:
    """Wait until an operation has ended, or a signal has arrived."""
    try:
        context.process_events(1, 1, _WAIT_S)
    except SystemError as error:
        if error.args[0] != errno.EINTR:
            raise OSError(*error.args) from error


DISK: Final = Storage()


def observed(on_read: Callable[[int], None]) -> Storage:
    """Return the files of the machine; `on_read` is called with the bytes of each read."""

    class Observed(Storage):
        def read(self, path: Path, offset: int = 0, size_bytes: int = -1) -> bytes:
            data = super().read(path, offset, size_bytes)
            on_read(len(data))
            return data

    return Observed()


def replace_file(path: Path, data: bytes, storage: Storage = DISK) -> None:
    """Write a file durably; its name is durable once its directory is synced.

    After an error or a crash it has all of `data`, or is as before. The draft is `path` with `.new`
    added. Raises `OSError`.
    """
    draft = path.with_name(f"{path.name}.new")
    fd = storage.create(draft)
    try:
        for offset in range(0, len(data), CHUNK_BYTES):
            chunk = data[offset : offset + CHUNK_BYTES]
            count = storage.write(fd, chunk)
            if count != len(chunk):
                raise OSError(errno.ENOSPC, f"{count} of {len(chunk)} bytes were written")
            storage.sync_data(fd)
    finally:
        storage.close(fd)
    storage.rename(draft, path)


def write_file(path: Path, data: bytes, storage: Storage = DISK) -> None:
    """Write a file and its name durably; raises as `replace_file` does."""
    replace_file(path, data, storage)
    storage.sync_directory(path.parent)


def free_name(path: Path, suffix: str, storage: Storage = DISK) -> Path:
    """Return `path` with a number and a suffix added, a name that no file has."""
    names, number = set(storage.names(path.parent)), 0
    while (name := f"{path.name}.{number}.{suffix}") in names:
        number += 1
    return path.with_name(name)
