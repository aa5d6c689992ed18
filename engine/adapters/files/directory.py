"""An adapter's directory, opened so that nobody can swap what was checked for something else.

What it is: two open files and bounded reads from them. What it is not: a judge of what they say.
One rule: below a root no link is followed and no name is looked up twice; what is read is what was
opened, and a file that changes meanwhile is an error.

The root itself may be reached through links, because its operator named it. Everything below it is
opened name by name, each in the directory opened before. Files are read, never mapped: a mapped
file that shrinks ends the process.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from engine.adapters.files.problems import shown
from engine.config import AdapterBounds
from engine.errors import (
    AdapterConfigRefused,
    AdapterNotFound,
    Conflict,
    PathNotAllowed,
)

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
STREAMED_NAME: Final = "adapter_model.tensors"
PICKLED_NAMES: Final = ("adapter_model.bin", "adapter_model.pt")

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BELOW_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class OpenFile:
    """A regular file, opened for reading, as it was when it was opened."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor = descriptor
        self._opened = os.fstat(descriptor)
        if not stat.S_ISREG(self._opened.st_mode):
            raise PathNotAllowed(f"{name} is no regular file; an adapter has plain files only")

    @property
    def size_bytes(self) -> int:
        """The file's size when it was opened."""
        return self._opened.st_size

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start` on; raises `Conflict` where they end early."""
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
        """So many bytes from `start` on; raises `Conflict` where they end early."""
        buffer = bytearray(size_bytes)
        self.read_into(memoryview(buffer), start)
        return bytes(buffer)

    @property
    def stamp(self) -> str:
        """Size and time of the last change: what two readers of one file agree on."""
        return f"{self._opened.st_size}@{self._opened.st_mtime_ns}"

    def check_unchanged(self) -> None:
        """Raise `Conflict` where the file was written to since it was opened."""
        now, then = os.fstat(self._descriptor), self._opened
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            then.st_size,
            then.st_mtime_ns,
            then.st_ctime_ns,
        ):
            raise Conflict(f"{self.name} was changed while it was read; load it again")


class AdapterFiles:
    """An adapter's two files, open."""

    def __init__(self, config: OpenFile, weights: OpenFile) -> None:
        self._config = config
        self.weights = weights

    def read_config(self, bounds: AdapterBounds) -> bytes:
        """The whole config; raises `AdapterConfigRefused` where it is too long."""
        size_bytes = self._config.size_bytes
        if size_bytes > bounds.config_bytes_max:
            raise AdapterConfigRefused(
                f"{CONFIG_NAME} has {size_bytes} bytes; at most {bounds.config_bytes_max} are read"
            )
        return self._config.read(0, size_bytes)

    @property
    def stamp(self) -> str:
        """What two readers of the same files agree on."""
        return f"{self._config.stamp} {self.weights.stamp}"

    def check_unchanged(self) -> None:
        """Raise `Conflict` where either file was written to since it was opened."""
        self._config.check_unchanged()
        self.weights.check_unchanged()


@contextmanager
def open_adapter(
    path: str, roots: Sequence[Path], *, allow_pickled: bool = False
) -> Iterator[AdapterFiles]:
    """The files of the adapter at `path`, absolute or relative to one of `roots`.

    Weights are safetensors, else a tensorizer stream; `allow_pickled` takes what `torch.save` wrote
    where there is neither.
    Raises `PathNotAllowed` for a path that is not below a root, steps upwards or crosses a link,
    and `AdapterNotFound` where directory or files are missing.
    """
    with ExitStack() as stack:
        directory = _open_directory(path, roots, stack)
        config = _open_file(CONFIG_NAME, directory, stack)
        weights = _open_file(_weights_name(directory, allow_pickled), directory, stack)
        yield AdapterFiles(config, weights)


def _weights_name(directory: int, allow_pickled: bool) -> str:
    """The first of the names that are there; the usual one where none is."""
    plain = [name for name in (WEIGHTS_NAME, STREAMED_NAME) if _is_there(name, directory)]
    pickled = [name for name in PICKLED_NAMES if not plain and _is_there(name, directory)]
    if pickled and not allow_pickled:
        raise AdapterNotFound(
            f"there is {pickled[0]} but no {WEIGHTS_NAME}; pickled weights are not read here: save "
            "the adapter as safetensors, or start the engine with --allow-pickled-weights"
        )
    return next(iter(plain + pickled), WEIGHTS_NAME)


def _open_directory(path: str, roots: Sequence[Path], stack: ExitStack) -> int:
    """A descriptor of the adapter's directory: the first root that has it."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts:
        raise PathNotAllowed(
            f"path {shown(path)}; name a directory below an adapter root, without '..'"
        )
    missing: AdapterNotFound | None = None
    for root, below in _candidates(parts, roots):
        try:
            return _walk(root, below, stack)
        except AdapterNotFound as error:
            missing = missing or error
    raise missing or PathNotAllowed(
        f"path {shown(path)} is below none of the adapter roots: {', '.join(map(str, roots))}"
    )


def _candidates(
    parts: tuple[str, ...], roots: Sequence[Path]
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Each root that the path can be below, with the names from there on.

    A root counts under the name that its operator gave it and under its real one.
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
    """Open one name in an open directory, following no link."""
    try:
        return os.open(name, _BELOW_FLAGS | flags, dir_fd=directory)
    except ValueError as error:
        raise PathNotAllowed(f"{shown(name)} is no file name") from error
    except OSError as error:
        if error.errno == errno.ELOOP or _is_link(name, directory):
            raise PathNotAllowed(
                f"{shown(name)} is a link; none is followed below an adapter root, copy the files"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENXIO):
            raise PathNotAllowed(f"{shown(name)} can't be opened: {error.strerror}") from error
        raise AdapterNotFound(f"{shown(name)} can't be opened: {error.strerror}") from error


def _is_link(name: str, directory: int) -> bool:
    """Whether a name that could not be opened is a link; only chooses the words of an error."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _is_there(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True
