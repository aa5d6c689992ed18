"""The file system as the log uses it: the only module of the log that opens, writes or syncs.

A `Storage` has no state of its own, so that a simulation can replace it by one in memory. Files are
named by paths and, while they are written, by descriptors. Errors are `OSError`.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

_SIGEV_NONE: Final = 1
_CONTROL_BLOCK_BYTES_MAX: Final = 256

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _AioRequest(ctypes.Structure):
    """POSIX `struct aiocb`, with room for the C library's own fields after the standard ones."""

    _fields_ = (
        ("fd", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("event_value", ctypes.c_void_p),
        ("event_signal", ctypes.c_int),
        ("event_notify", ctypes.c_int),
        ("private", ctypes.c_char * _CONTROL_BLOCK_BYTES_MAX),
    )


class _BackgroundSync:
    """An `fdatasync` by a thread of the C library (POSIX AIO), while Python code runs.

    A Python thread would need the interpreter's lock to begin and to end, and would wait for the
    code that it should run next to. `started` is False where the system offers no such thread.
    """

    def __init__(self, fd: int) -> None:
        self._request = _AioRequest(fd=fd, event_notify=_SIGEV_NONE)
        self._is_waited_for = False
        begin = getattr(_libc, "aio_fsync", None)
        self.started: Final = (
            begin is not None and begin(os.O_DSYNC, ctypes.byref(self._request)) == 0
        )

    def wait(self) -> None:
        """Wait until the content is durable; raises `OSError`."""
        request = ctypes.pointer(self._request)
        while (error := _libc.aio_error(request)) == errno.EINPROGRESS:
            _libc.aio_suspend(ctypes.byref(request), 1, None)
        self._is_waited_for = True
        _libc.aio_return(request)
        if error:
            raise OSError(error, os.strerror(error))

    def __del__(self) -> None:
        # The C library writes the result into this object's memory.
        if self.started and not self._is_waited_for:
            with contextlib.suppress(OSError):
                self.wait()


class Storage:
    """The files of the machine."""

    def names(self, directory: Path) -> list[str]:
        """Return the names of the files in a directory, in no particular order."""
        return os.listdir(directory)

    def is_directory(self, path: Path) -> bool:
        """Whether `path` is a directory."""
        return path.is_dir()

    def make_directory(self, directory: Path) -> None:
        """Create a directory that only its user can enter; its name is durable."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        self.sync_directory(directory.parent)

    def read(self, path: Path, offset: int = 0, size_bytes: int = -1) -> bytes:
        """Return up to `size_bytes` of a file from `offset` on; -1: all."""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size_bytes)

    def size_bytes(self, path: Path) -> int:
        """Return the size of a file."""
        return path.stat().st_size

    def create(self, path: Path) -> int:
        """Create an empty file, or empty an existing one, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)

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

    def begin_sync(self, fd: int) -> Callable[[], None]:
        """Begin `sync_data`; the returned function waits for its end, and raises `OSError`."""
        background = _BackgroundSync(fd)
        return background.wait if background.started else partial(self.sync_data, fd)

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

    def lock(self, fd: int) -> None:
        """Lock a directory until its descriptor is closed; raises `BlockingIOError` if locked."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


DISK: Final = Storage()
