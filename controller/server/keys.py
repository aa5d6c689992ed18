"""The controller's directories, its key pair and the list of allowed keys.

The directories have to belong to the controller's user and to be no links: with write permission
for one of them the log, the keys or a socket can be replaced. The directory itself can be reached
through links, because its operator named it. The list of keys is replaced as a whole, so a reader
sees either the old or the new one.
"""

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
import zmq
from msgspec import Struct

from loradock.controller.log.storage import write_file
from loradock.processes.key_files import (
    KeyPair,
    check_key,
    public_key_path,
    read_key_pair,
    write_key_pair,
    write_new,
)

Right = Literal["read", "operate", "administrate", "engine"]

KEYS_MAX: Final = 10_000

PATTERNS_MAX: Final = 64

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,16}\Z")

_PATTERN: Final = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,128}\Z")

_LIST: Final = "allowed.json"

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class DirectoryRefused(Exception):  # noqa: N818 - a refusal that names what to change
    """A directory or a file of the controller belongs to another user, or is of another kind."""


class KeyListError(ValueError):
    """A name, a right or a pattern that can't be allowed, or a list that can't be read."""


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


class AllowedKey(Struct, frozen=True):
    """A public key, its name, and its right.

    `operate` includes `read`, and `administrate` includes `operate`; `engine` is for engines alone.
    `adapters`: patterns of the adapters' names that the key is limited to; empty: all adapters.
    """

    name: str
    public: str
    right: Right
    adapters: tuple[str, ...] = ()


class KeyStore:
    """The files of the directory `keys` of one controller."""

    def __init__(self, directory: Path) -> None:
        self.directory: Final = directory / "keys"
        self._list = self.directory / _LIST

    @property
    def server_public_path(self) -> Path:
        """The file of the controller's public key, which clients need."""
        return public_key_path(self.directory / "server.key")

    def server_pair(self) -> KeyPair:
        """Return the controller's key pair, which is made on first use."""
        path = self.directory / "server.key"
        with self._locked():
            if not path.exists():
                write_key_pair(path, new_pair())
            pair = read_key_pair(path)
            with suppress(FileExistsError):
                write_new(self.server_public_path, f"{pair.public}\n".encode(), 0o644)
        return pair

    def read(self) -> tuple[AllowedKey, ...]:
        """Return all allowed keys; raises `KeyListError` if the list is damaged."""
        try:
            data = self._list.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise KeyListError(f"{self._list}: {error.strerror}") from error
        try:
            keys = msgspec.json.decode(data, type=tuple[AllowedKey, ...])
            for key in keys:
                check_allowed(key)
        except (msgspec.MsgspecError, ValueError) as error:
            raise KeyListError(f"{self._list}: {error}") from error
        return keys

    def stamp(self) -> tuple[int, int, int]:
        """Return what differs after each change of the list; zeros without one."""
        try:
            status = os.stat(self._list)
        except OSError:
            return (0, 0, 0)
        # The time of modification can be set back, and new permissions do not change it.
        return (status.st_ino, status.st_ctime_ns, status.st_size)

    def allow(self, key: AllowedKey) -> None:
        """Add a key; raises `KeyListError` if its name or the key itself is in the list."""
        check_allowed(key)

        def added(keys: tuple[AllowedKey, ...]) -> tuple[AllowedKey, ...]:
            for other in keys:
                if key.name == other.name or key.public == other.public:
                    raise KeyListError(f"already allowed as {other.name!r}; revoke that first")
            if len(keys) >= KEYS_MAX:
                raise KeyListError(f"{KEYS_MAX} keys are allowed; revoke some")
            return (*keys, key)

        self._change(added)

    def revoke(self, name: str) -> None:
        """Remove a key by its name; raises `KeyListError` for an unknown one."""

        def removed(keys: tuple[AllowedKey, ...]) -> tuple[AllowedKey, ...]:
            kept = tuple(key for key in keys if key.name != name)
            if len(kept) == len(keys):
                raise KeyListError(f"no key is allowed under the name {name!r}")
            return kept

        self._change(removed)

    def _change(self, change: Callable[[tuple[AllowedKey, ...]], tuple[AllowedKey, ...]]) -> None:
        with self._locked():
            keys = change(self.read())
            write_file(self._list, msgspec.json.format(msgspec.json.encode(keys)) + b"\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other writers, and check that the directory belongs to this user alone."""
        fd = private_directory(self.directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def new_pair() -> KeyPair:
    """Return a new random key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def check_allowed(key: AllowedKey) -> None:
    """Raise `KeyListError` unless a key's name, its public key and its patterns are valid."""
    if not NAME.match(key.name):
        raise KeyListError(f"name {key.name!r}: 1 to 16 of the characters A-Z a-z 0-9 . _ - only")
    try:
        check_key(key.public, f"key of {key.name!r}")
    except ValueError as error:
        raise KeyListError(str(error)) from error
    if key.right == "engine" and key.adapters:
        raise KeyListError("the key of an engine can't be limited to adapters")
    if len(key.adapters) > PATTERNS_MAX:
        raise KeyListError(f"{len(key.adapters)} patterns; at most {PATTERNS_MAX} are allowed")
    for pattern in key.adapters:
        if not _PATTERN.match(pattern):
            raise KeyListError(
                f"pattern {pattern!r}: adapters' names and the wildcards * ? [] are allowed"
            )
