"""The controller's directories, which have to belong to its user and to be no links.

With write permission for one of them the log, the keys or a socket can be replaced. The directory
itself may be reached through links, because its operator named it.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class DirectoryRefused(Exception):  # noqa: N818 - a refusal that names what to change
    """A directory or a file of the controller belongs to another user, or is of another kind."""


def check_controller_directory(directory: Path) -> None:
    """Create the controller's directory and its private parts; raises `DirectoryRefused`.

    Existing files of the log and existing sockets have to be this user's too.
    """
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=True)
    fd = _open(directory, _FLAGS)
    try:
        status = os.fstat(fd)
        _check_owner(directory, status)
        if status.st_mode & 0o022:
            raise DirectoryRefused(
                f"{directory} can be written by other users; end that with `chmod go-w`"
            )
    finally:
        os.close(fd)
    for name in ("run", "log", "keys"):
        fd = private_directory(directory / name)
        try:
            for entry in os.listdir(fd):
                status = os.stat(entry, dir_fd=fd, follow_symlinks=False)
                _check_entry(directory / name / entry, status, is_socket=name == "run")
        finally:
            os.close(fd)


def _check_entry(path: Path, status: os.stat_result, *, is_socket: bool) -> None:
    _check_owner(path, status)
    if stat.S_ISLNK(status.st_mode):
        raise DirectoryRefused(f"{path} is a link; remove it")
    if is_socket != stat.S_ISSOCK(status.st_mode):
        kind = "not a socket" if is_socket else "a socket"
        raise DirectoryRefused(f"{path} is {kind}; remove it")


def private_directory(path: Path) -> int:
    """Create or open a directory of this user alone; return its descriptor.

    Permissions of other users are removed. Raises `DirectoryRefused` for a link, or for a directory
    of another user.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    fd = _open(path, _FLAGS | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        _check_owner(path, status)
        if status.st_mode & 0o077:
            os.fchmod(fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags)
    except OSError as error:
        if path.is_symlink():
            raise DirectoryRefused(
                f"{path} is a link; a directory of the controller has to be one itself"
            ) from error
        raise DirectoryRefused(f"{path}: {error.strerror}") from error


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise DirectoryRefused(
            f"{path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
        )
