"""Directories and files below configured roots, opened so that they can't be replaced while in use.

Every name is opened in the directory that was opened before it. A link is followed, and the place
of what was opened is read from its descriptor: it must be below a root, as in the cache of Hugging
Face and in mounts of Kubernetes. So no link and no directory that is swapped meanwhile changes what
was checked. Until then a file is opened with O_PATH, which has no effect on a pipe or a device.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, Self

_PLACE: Final = os.O_PATH | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MISSING: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_LEVELS_MAX: Final = 16
_SHOWN_MAX: Final = 160


class NotAllowed(Exception):  # noqa: N818 - what the path is
    """A path that is not below a root, or a file that must not be read; the text says why."""


class NotFound(Exception):  # noqa: N818 - what happened to the file
    """A directory or file that can't be opened; the text says why."""


class NoSuchName(NotFound):
    """A directory has no such name, or has something other than a directory under it."""


class _Bounds(NamedTuple):
    """The directories below which links can lead, and their name in errors."""

    places: tuple[str, ...]
    name: str = "the adapter roots"


class SafeDirectory:
    """A directory below one of `roots`, open within a `with` block.

    `path`: absolute, or relative to one of `roots`, of which the first that has it counts. If it
    contains `/./`, what follows can't lead out of the directory before that by links. Raises
    `NotAllowed` for a path that is not below a root, contains `..` or links out of the roots, and
    `NotFound`.
    """

    def __init__(self, path: str, roots: Sequence[str | Path]) -> None:
        # An operator's own links to a root are trusted.
        bounds = _Bounds(tuple(os.path.realpath(root) for root in roots))
        self.descriptor, self._bounds = _open_directory(path, roots, bounds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def open(self, name: str) -> int:
        """Return a descriptor for reading a regular file, which the caller closes.

        Raises `NotAllowed`, also for a file with a second name, and `NoSuchName`.
        """
        place = _open_place(name, self.descriptor, self._bounds, is_directory=False)
        try:
            status = os.fstat(place)
            if not stat.S_ISREG(status.st_mode):
                raise NotAllowed(f"{name} is not a regular file; only regular files are read")
            if status.st_nlink > 1:
                # The other name can be outside all roots, in a directory that its owner keeps
                # closed.
                raise NotAllowed(
                    f"{name} has {status.st_nlink} names (hard links), and some can be outside "
                    "the adapter roots; replace it by a copy"
                )
            return _open_for_reading(place, name)
        finally:
            os.close(place)

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name, of any type."""
        return is_present(name, self.descriptor)


def is_present(name: str, directory: int) -> bool:
    """Return whether an open directory has an entry of this name, of any type."""
    return _mode_of(name, directory) != 0


def is_link(name: str, directory: int) -> bool:
    """Return whether an open directory has a link of this name."""
    return stat.S_ISLNK(_mode_of(name, directory))


def _mode_of(name: str, directory: int) -> int:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except OSError:
        return 0


def _open_directory(path: str, roots: Sequence[str | Path], bounds: _Bounds) -> tuple[int, _Bounds]:
    """Return a descriptor for reading a directory, in the first root that has it.

    Also returns the bounds of the links in it.
    """
    parts = PurePosixPath(path).parts
    head, mark, _ = f"{path}/".partition("/./")
    confined = len(parts) - len(PurePosixPath(head).parts)
    if not parts or ".." in parts:
        raise NotAllowed(
            f"path {_shown(path)} is not allowed; name a directory below an adapter root, without "
            "'..'"
        )
    if not roots:
        raise NotAllowed(
            "the server was started without an adapter root and loads no adapters; start it with "
            "--adapter-root DIRECTORY"
        )
    candidates = list(_candidates(parts, roots))
    unreadable: NotFound | None = None
    for root, below in candidates:
        try:
            return _walk(root, below, bounds, max(0, len(below) - confined) if mark else -1)
        except NoSuchName:
            pass
        except NotFound as error:
            unreadable = unreadable or error
    if unreadable is not None:
        raise unreadable
    names = ", ".join(map(str, roots))
    if not candidates:
        raise NotAllowed(f"path {_shown(path)} is below none of the adapter roots: {names}")
    raise NotFound(
        f"no directory {_shown(path)} below the adapter root{'s' * (len(roots) > 1)} {names}"
        + _suggestion(parts, roots, bounds)
    )


def _suggestion(parts: tuple[str, ...], roots: Sequence[str | Path], bounds: _Bounds) -> str:
    """Return a hint at the longest end of a relative path that is a directory below a root."""
    for start in range(1, 0 if parts[0].startswith("/") else min(len(parts), _LEVELS_MAX)):
        for root in roots:
            with suppress(NotAllowed, NotFound):
                os.close(_walk(root, parts[start:], bounds, -1)[0])
                return f"; paths are relative to a root: use {_shown('/'.join(parts[start:]))}"
    return ""


def _candidates(
    parts: tuple[str, ...], roots: Sequence[str | Path]
) -> Iterator[tuple[str | Path, tuple[str, ...]]]:
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


def _walk(
    root: str | Path, below: tuple[str, ...], bounds: _Bounds, confined: int
) -> tuple[int, _Bounds]:
    """Open `below` in `root`, name by name; raises `NoSuchName` if a name is missing.

    After `confined` names, unless that is negative, links lead no more out of the directory.
    """
    try:
        descriptor = os.open(root, _PLACE | os.O_DIRECTORY)
    except OSError as error:
        raise NotFound(f"adapter root {root} can't be opened: {error.strerror}") from error
    for count, name in enumerate(below):
        try:
            bounds = _confine(bounds, descriptor, below[:count], confined)
            child = _open_place(name, descriptor, bounds, is_directory=True)
        finally:
            os.close(descriptor)
        descriptor = child
    try:
        bounds = _confine(bounds, descriptor, below, confined)
        return _open_for_reading(descriptor, below[-1] if below else str(root)), bounds
    finally:
        os.close(descriptor)


def _confine(bounds: _Bounds, directory: int, names: tuple[str, ...], confined: int) -> _Bounds:
    """Return the bounds of the links in an open directory, which has these names below a root."""
    if len(names) != confined:
        return bounds
    return _Bounds((_place_of(directory),), _shown("/".join(names)))


def _open_place(name: str, directory: int, bounds: _Bounds, *, is_directory: bool) -> int:
    """Return a descriptor of the place of a name in an open directory, within the bounds.

    Nothing can be read from it.
    """
    flags = _PLACE | (os.O_DIRECTORY if is_directory else 0)
    try:
        place = os.open(name, flags, dir_fd=directory)
    except ValueError as error:
        raise NotAllowed(f"{_shown(name)} is not a file name") from error
    except OSError as error:
        raise _refusal(name, directory, error) from error
    try:
        if not _is_below(place, bounds.places):
            raise NotAllowed(
                f"{_shown(name)} is a link out of {bounds.name}; replace it by a copy "
                "(cp -rL), or add the directory that it leads to with --adapter-root"
            )
    except BaseException:
        os.close(place)
        raise
    return place


def _open_for_reading(place: int, name: str) -> int:
    """Return a descriptor for reading the same file or directory."""
    try:
        return os.open(f"/proc/self/fd/{place}", _READ)
    except OSError as error:
        raise NotAllowed(f"{_shown(name)} can't be opened: {error.strerror}") from error


def _is_below(place: int, roots: Sequence[str]) -> bool:
    path = _place_of(place)
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def _place_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _refusal(name: str, directory: int, error: OSError) -> NotFound | NotAllowed:
    text = f"{_shown(name)} can't be opened: {error.strerror}"
    if error.errno in _MISSING:
        if is_link(name, directory) and error.errno == errno.ENOENT:
            return NoSuchName(f"{_shown(name)} is a link to a file that does not exist")
        return NoSuchName(text)
    if error.errno == errno.ELOOP:
        return NotAllowed(f"{_shown(name)} is a link that leads back to itself")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENXIO):
        return NotAllowed(text)
    return NotFound(text)


def _shown(name: str) -> str:
    """Return a name for an error: ASCII, quoted, shortened."""
    text = ascii(name[: _SHOWN_MAX + 1])
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}... ({len(name)} characters)"
