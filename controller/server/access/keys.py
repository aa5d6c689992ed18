"""The controller's own key pair and the list of allowed keys, in the directory `keys`.

The list is replaced as a whole, so a reader sees either the old or the new one. Write permission
for the directory is the right to decide about access, so it belongs to its user alone.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
import zmq
from msgspec import Struct

from loradock.controller.server.access.directories import private_directory
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


class KeyListError(ValueError):
    """A name, a right or a pattern that can't be allowed, or a list that can't be read."""


class AllowedKey(Struct, frozen=True):
    """A public key, its name, and what it may do.

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
            draft = self._list.with_suffix(".draft")
            draft.unlink(missing_ok=True)
            write_new(draft, msgspec.json.format(msgspec.json.encode(keys)) + b"\n", 0o600)
            draft.replace(self._list)
            self._sync_directory()

    def _sync_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

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
