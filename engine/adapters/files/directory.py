"""An adapter's directory and its files, opened so that they can't be replaced while in use.

Below a root no link is followed and no name is resolved twice: every name is opened in the
directory that was opened before it. A file that changes while it is read, or that has a second name
(a hard link), is an error. The root itself may be reached through links, because its operator named
it. Files are read and never mapped: a mapped file that shrinks would end the process.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from engine.adapters.files.missing_files import CONFIG_NAME, config_is_missing, is_present
from engine.adapters.files.problems import shown
from engine.adapters.files.weights_names import INDEX_NAME, names_in_index, weights_names
from engine.config import DEFAULT_BOUNDS, AdapterBounds
from engine.errors import (
    AdapterConfigRefused,
    AdapterNotFound,
    AdapterUnsound,
    Conflict,
    EngineError,
    PathNotAllowed,
)

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LEVELS_MAX: Final = 16
_BELOW_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class _NoSuchName(AdapterNotFound):
    """A directory has no such name, or has something other than a directory under it."""


class OpenFile:
    """A regular file, opened for reading, with its status at that time."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor = descriptor
        self._opened = os.fstat(descriptor)
        if not stat.S_ISREG(self._opened.st_mode):
            raise PathNotAllowed(
                f"{name} is not a regular file; an adapter consists of regular files only"
            )
        if self._opened.st_nlink > 1:
            # The other name may be outside all roots, in a directory that its owner keeps closed.
            raise PathNotAllowed(
                f"{name} has {self._opened.st_nlink} names (hard links), and some may be outside "
                "the adapter roots; replace it by a copy"
            )

    @property
    def size_bytes(self) -> int:
        """The file's size when it was opened."""
        return self._opened.st_size

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start`; raises `Conflict` if the file ends early."""
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[filled:]], start + filled)
            except OSError as error:
                raise AdapterNotFound(f"{self.name} can't be read: {error.strerror}") from error
            if not count:
                raise Conflict(f"{self.name} became shorter while it was read; load it again")
            filled += count

    def read(self, start: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `start`; raises `Conflict` if the file ends early."""
        buffer = bytearray(size_bytes)
        self.read_into(memoryview(buffer), start)
        return bytes(buffer)

    @property
    def stamp(self) -> str:
        """Size and time of the last change; equal for all readers of the same file."""
        return f"{self._opened.st_size}@{self._opened.st_mtime_ns}"

    def check_unchanged(self) -> None:
        """Raise `Conflict` if the file was written to since it was opened."""
        now, then = os.fstat(self._descriptor), self._opened
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            then.st_size,
            then.st_mtime_ns,
            then.st_ctime_ns,
        ):
            raise Conflict(f"{self.name} was changed while it was read; load it again")


class AdapterFiles:
    """The open files of an adapter: its config, and its weights, in several files if sharded."""

    def __init__(self, config: OpenFile, weights: Sequence[OpenFile]) -> None:
        self._config = config
        self.weights = tuple(weights)

    def read_config(self, bounds: AdapterBounds) -> bytes:
        """Return the whole config; raises `AdapterConfigRefused` if it is too long."""
        size_bytes = self._config.size_bytes
        if size_bytes > bounds.config_bytes_max:
            raise AdapterConfigRefused(
                f"{CONFIG_NAME} has {size_bytes} bytes; at most {bounds.config_bytes_max} are read"
            )
        return self._config.read(0, size_bytes)

    @property
    def stamp(self) -> str:
        """The stamps of all files; equal for all readers of the same files."""
        return " ".join(file.stamp for file in (self._config, *self.weights))

    def check_unchanged(self) -> None:
        """Raise `Conflict` if one of the files was written to since it was opened."""
        for file in (self._config, *self.weights):
            file.check_unchanged()


@contextmanager
def open_adapter(
    path: str, roots: Sequence[Path], *, allow_pickled: bool = False
) -> Iterator[AdapterFiles]:
    """Open the files of the adapter at `path`, absolute or relative to one of `roots`.

    The weights are safetensors, possibly sharded, else a tensorizer stream, else, with
    `allow_pickled`, a file of `torch.save`; see `weights_names`. Raises `PathNotAllowed` for a path
    that is not below a root, contains `..` or crosses a link, and `AdapterNotFound` if the
    directory or a file is missing.
    """
    with ExitStack() as stack:
        directory = _open_directory(path, roots, stack)
        if not is_present(CONFIG_NAME, directory):
            raise AdapterNotFound(config_is_missing(path, directory))
        config = _open_file(CONFIG_NAME, directory, stack)
        yield AdapterFiles(config, _open_weights_files(path, directory, allow_pickled, stack))


def _open_weights_files(
    path: str, directory: int, allow_pickled: bool, stack: ExitStack
) -> list[OpenFile]:
    """Open the weights files, several for shards; raises `AdapterNotFound`."""
    names = weights_names(path, directory, allow_pickled)
    if names == [INDEX_NAME]:
        names = names_in_index(_read_index(directory, stack), DEFAULT_BOUNDS)
    return [_open_file(name, directory, stack) for name in names]


def _read_index(directory: int, stack: ExitStack) -> bytes:
    index = _open_file(INDEX_NAME, directory, stack)
    if index.size_bytes > DEFAULT_BOUNDS.header_bytes_max:
        raise AdapterUnsound(
            f"{INDEX_NAME} has {index.size_bytes} bytes; at most "
            f"{DEFAULT_BOUNDS.header_bytes_max} are read"
        )
    return index.read(0, index.size_bytes)


def _open_directory(path: str, roots: Sequence[Path], stack: ExitStack) -> int:
    """Return a descriptor of the adapter's directory, in the first root that has it."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts:
        raise PathNotAllowed(
            f"path {shown(path)} is not allowed; name a directory below an adapter root, without "
            "'..'"
        )
    candidates = list(_candidates(parts, roots))
    unreadable: AdapterNotFound | None = None
    for root, below in candidates:
        try:
            return _walk(root, below, stack)
        except _NoSuchName:
            pass
        except AdapterNotFound as error:
            unreadable = unreadable or error
    if unreadable is not None:
        raise unreadable
    names = ", ".join(map(str, roots))
    if not candidates:
        raise PathNotAllowed(f"path {shown(path)} is below none of the adapter roots: {names}")
    raise AdapterNotFound(
        f"no directory {shown(path)} below the adapter root{'s' * (len(roots) > 1)} {names}"
        + _suggestion(parts, roots)
    )


def _suggestion(parts: tuple[str, ...], roots: Sequence[Path]) -> str:
    """Return a hint at the longest end of a relative path that is a directory below a root."""
    for start in range(1, 0 if parts[0].startswith("/") else min(len(parts), _LEVELS_MAX)):
        for root in roots:
            with ExitStack() as stack, suppress(EngineError):
                _walk(root, parts[start:], stack)
                return f"; paths are relative to a root: use {shown('/'.join(parts[start:]))}"
    return ""


def _candidates(
    parts: tuple[str, ...], roots: Sequence[Path]
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield each root that the path can be below, with the names after the root.

    A root counts under the name that its operator used and under its real one.
    """
    if not parts[0].startswith("/"):
        yield from ((root, parts) for root in roots)
        return
    for root in roots:
        for spelling in {Path(os.path.abspath(root)), Path(os.path.realpath(root))}:
            names = spelling.parts[1:]
            if parts[1 : len(names) + 1] == names:
                yield root, parts[len(names) + 1 :]
                break


def _walk(root: Path, below: tuple[str, ...], stack: ExitStack) -> int:
    """Open `below` in `root`, name by name; raises `_NoSuchName` where a name is missing."""
    try:
        descriptor = os.open(root, _DIRECTORY_FLAGS)
    except OSError as error:
        raise AdapterNotFound(f"adapter root {root} can't be opened: {error.strerror}") from error
    for name in below:
        try:
            child = _open_below(name, descriptor, os.O_DIRECTORY)
        finally:
            os.close(descriptor)
        descriptor = child
    stack.callback(os.close, descriptor)
    return descriptor


def _open_file(name: str, directory: int, stack: ExitStack) -> OpenFile:
    descriptor = _open_below(name, directory, 0)
    stack.callback(os.close, descriptor)
    return OpenFile(name, descriptor)


def _open_below(name: str, directory: int, flags: int) -> int:
    """Open one name in an open directory; links are refused."""
    try:
        return os.open(name, _BELOW_FLAGS | flags, dir_fd=directory)
    except ValueError as error:
        raise PathNotAllowed(f"{shown(name)} is not a file name") from error
    except OSError as error:
        if error.errno == errno.ELOOP or _is_link(name, directory):
            raise PathNotAllowed(
                f"{shown(name)} is a link, and links below an adapter root are not followed; "
                "replace it by a copy (cp -rL)"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENXIO):
            raise PathNotAllowed(f"{shown(name)} can't be opened: {error.strerror}") from error
        is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
        kind = _NoSuchName if is_missing else AdapterNotFound
        raise kind(f"{shown(name)} can't be opened: {error.strerror}") from error


def _is_link(name: str, directory: int) -> bool:
    """Whether a name that could not be opened is a link; used for the error text only."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False
