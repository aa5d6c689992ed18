"""Opening of a name in an open directory, only if what it leads to is below an allowed root.

A link is followed, and the place of what was opened is read from its descriptor. So no link and no
directory that is swapped meanwhile changes what was checked. Until then the file is opened with
O_PATH, which has no effect on a pipe or a device.
"""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loradock.engine.adapters.files.problems import shown
from loradock.engine.errors import AdapterNotFound, PathNotAllowed

_PLACE: Final = os.O_PATH | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MISSING: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class NoSuchName(AdapterNotFound):
    """A directory has no such name, or has something other than a directory under it."""


def real_roots(roots: Sequence[Path]) -> tuple[str, ...]:
    """Return the roots' places, without links; an operator's own links to a root are trusted."""
    return tuple(os.path.realpath(root) for root in roots)


def open_root(root: Path) -> int:
    """Return a descriptor of a root's place; raises `AdapterNotFound`."""
    try:
        return os.open(root, _PLACE | os.O_DIRECTORY)
    except OSError as error:
        raise AdapterNotFound(f"adapter root {root} can't be opened: {error.strerror}") from error


def open_place(name: str, directory: int, roots: Sequence[str], *, is_directory: bool) -> int:
    """Return a descriptor of the place of a name in an open directory, below one of `roots`.

    Nothing can be read from it. Raises `PathNotAllowed` and `NoSuchName`.
    """
    flags = _PLACE | (os.O_DIRECTORY if is_directory else 0)
    try:
        place = os.open(name, flags, dir_fd=directory)
    except ValueError as error:
        raise PathNotAllowed(f"{shown(name)} is not a file name") from error
    except OSError as error:
        raise _refusal(name, directory, error) from error
    try:
        if not _is_below(place, roots):
            raise PathNotAllowed(
                f"{shown(name)} is a link out of the adapter roots; replace it by a copy (cp -rL), "
                "or add the directory that it leads to with --adapter-root"
            )
    except BaseException:
        os.close(place)
        raise
    return place


def readable(place: int, name: str) -> int:
    """Return a descriptor for reading the same file or directory."""
    try:
        return os.open(f"/proc/self/fd/{place}", _READ)
    except OSError as error:
        raise PathNotAllowed(f"{shown(name)} can't be opened: {error.strerror}") from error


def is_link(name: str, directory: int) -> bool:
    """Whether an open directory has a link of this name."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _is_below(place: int, roots: Sequence[str]) -> bool:
    path = os.readlink(f"/proc/self/fd/{place}")
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def _refusal(name: str, directory: int, error: OSError) -> AdapterNotFound | PathNotAllowed:
    if error.errno in _MISSING:
        if is_link(name, directory) and error.errno == errno.ENOENT:
            return NoSuchName(f"{shown(name)} is a link to a file that does not exist")
        return NoSuchName(f"{shown(name)} can't be opened: {error.strerror}")
    if error.errno == errno.ELOOP:
        return PathNotAllowed(f"{shown(name)} is a link that leads back to itself")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENXIO):
        return PathNotAllowed(f"{shown(name)} can't be opened: {error.strerror}")
    return AdapterNotFound(f"{shown(name)} can't be opened: {error.strerror}")
