"""An adapter's directory and its files, opened so that they can't be replaced while in use.

A file that changes while it is read, a link that leads elsewhere after it, and a file with a second
name (a hard link) are errors. Files are read and never mapped: a mapped file that shrinks would end
the process.

A file that is being written in place may look unchanged between two blocks, and its time counts in
ticks of some milliseconds. So files are read only once the last change is `QUIET_S` ago: a writer
that pauses for less than that is waited for or noticed, and any later change has another time.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from loradock.engine.adapters.file_names import (
    CONFIG_NAME,
    INDEX_NAME,
    config_is_missing,
    names_in_index,
    weights_names,
)
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds
from loradock.engine.errors import (
    AdapterConfigRefused,
    AdapterNotFound,
    AdapterUnsound,
    Conflict,
    PathNotAllowed,
)
from loradock.processes.safe_open import NotAllowed, NotFound, SafeDirectory, is_link

QUIET_S: Final = 1.0
"""The time since the last change of files after which they are read, in seconds."""

_WRITE_ELSEWHERE: Final = "write files elsewhere, rename their directory, and load it again"


class OpenFile:
    """A regular file, opened for reading, with its status at that time."""

    def __init__(self, name: str, descriptor: int, directory: int) -> None:
        """`directory`: a descriptor of the directory that has the name."""
        self.name = name
        self._descriptor = descriptor
        self._directory = directory
        self._is_linked = is_link(name, directory)
        self._opened = os.fstat(descriptor)

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
                raise Conflict(f"{self.name} became shorter while it was read; {_WRITE_ELSEWHERE}")
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

    @property
    def changed_s(self) -> float:
        """The wall-clock time of the last change of content or name, when it was opened."""
        return max(self._opened.st_mtime, self._opened.st_ctime)

    @property
    def identity(self) -> tuple[int, ...]:
        """The file, its size, and the times of its last changes, when it was opened."""
        found = self._opened
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def check_unchanged(self) -> None:
        """Raise `Conflict` if the file was written to since it was opened."""
        now, then = os.fstat(self._descriptor), self._opened
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            then.st_size,
            then.st_mtime_ns,
            then.st_ctime_ns,
        ):
            raise Conflict(f"{self.name} was changed while it was read; {_WRITE_ELSEWHERE}")
        if self._is_linked and not self._is_target():
            raise Conflict(f"{self.name} links to another file now; load it again")

    def _is_target(self) -> bool:
        """Return whether the link still leads to this file; else two versions could be mixed.

        The links of a Kubernetes mount all change at one moment.
        """
        try:
            return os.path.samestat(os.stat(self.name, dir_fd=self._directory), self._opened)
        except OSError:
            return False


class AdapterFiles:
    """The open files of an adapter: its config, and its weights, in several files if sharded.

    `index`: the file that names the shards.
    """

    def __init__(
        self,
        config: OpenFile,
        weights: Sequence[OpenFile],
        index: OpenFile | None,
        directory: "_Directory",
    ) -> None:
        self._config = config
        self._directory = directory
        self.weights = tuple(weights)
        self._files = (config, *(() if index is None else (index,)), *self.weights)

    def other(self, name: str) -> OpenFile | None:
        """Open a file that is not needed for serving; None if there is none of this name.

        It is part of neither stamp nor identity.
        """
        return self._directory.file(name) if self._directory.has(name) else None

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
        return " ".join(file.stamp for file in self._files)

    @property
    def identity(self) -> tuple[tuple[int, ...], ...]:
        """The identities of all files."""
        return tuple(file.identity for file in self._files)

    @property
    def weights_bytes(self) -> int:
        """The size of all weights files."""
        return sum(file.size_bytes for file in self.weights)

    def check_unchanged(self) -> None:
        """Raise `Conflict` if one of the files was written to since it was opened."""
        for file in self._files:
            file.check_unchanged()

    def wait_until_quiet(self) -> None:
        """Wait until no file was written to for `QUIET_S`; raises `Conflict` if one is written.

        The wait is bounded, because the file system may have another clock.
        """
        age_s = time.time() - max(file.changed_s for file in self._files)
        if age_s < QUIET_S:
            time.sleep(min(QUIET_S, QUIET_S - age_s))
            self.check_unchanged()


@contextmanager
def open_adapter(
    path: str,
    roots: Sequence[Path],
    *,
    allow_pickled: bool = False,
    bounds: AdapterBounds = DEFAULT_BOUNDS,
) -> Iterator[AdapterFiles]:
    """Open the files of the adapter at `path`, absolute or relative to one of `roots`.

    The weights are safetensors, possibly sharded, else a tensorizer stream, else, with
    `allow_pickled`, a file of `torch.save`; see `weights_names`. Raises `PathNotAllowed` for a path
    that is not below a root, contains `..` or links out of the roots, `AdapterNotFound` if the
    directory or a file is missing, and `Conflict` for files that are being written.
    """
    with ExitStack() as stack:
        opened = _Directory(path, roots, stack)
        if not opened.has(CONFIG_NAME):
            raise AdapterNotFound(config_is_missing(path, opened.descriptor))
        config = opened.file(CONFIG_NAME)
        index, weights = _open_weights_files(path, opened, allow_pickled, bounds)
        files = AdapterFiles(config, weights, index, opened)
        files.wait_until_quiet()
        yield files


class _Directory:
    """An open directory of an adapter; `stack` closes it and its files."""

    def __init__(self, path: str, roots: Sequence[Path], stack: ExitStack) -> None:
        self._stack = stack
        with _as_engine_errors():
            self._opened = stack.enter_context(SafeDirectory(path, roots))
        self.descriptor = self._opened.descriptor

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name."""
        return self._opened.has(name)

    def file(self, name: str) -> OpenFile:
        """Open a file of the directory."""
        with _as_engine_errors():
            descriptor = self._opened.open(name)
        self._stack.callback(os.close, descriptor)
        return OpenFile(name, descriptor, self.descriptor)


@contextmanager
def _as_engine_errors() -> Iterator[None]:
    try:
        yield
    except NotAllowed as error:
        raise PathNotAllowed(str(error)) from error
    except NotFound as error:
        raise AdapterNotFound(str(error)) from error


def _open_weights_files(
    path: str, directory: _Directory, allow_pickled: bool, bounds: AdapterBounds
) -> tuple[OpenFile | None, list[OpenFile]]:
    """Open the weights files, and the index of several shards; raises `AdapterNotFound`."""
    names = weights_names(path, directory.descriptor, allow_pickled)
    index = None
    if names == [INDEX_NAME]:
        index = directory.file(INDEX_NAME)
        names = names_in_index(_read_index(index, bounds), bounds)
    return index, [directory.file(name) for name in names]


def _read_index(index: OpenFile, bounds: AdapterBounds) -> bytes:
    if index.size_bytes > bounds.header_bytes_max:
        raise AdapterUnsound(
            f"{INDEX_NAME} has {index.size_bytes} bytes; at most {bounds.header_bytes_max} are read"
        )
    return index.read(0, index.size_bytes)
