"""Files with CURVE keys, which each process reads before it opens an encrypted connection.

A key is 40 characters of Z85. A key pair's file is JSON that only its user can read; a public key's
file is the key alone.
"""

import os
import re
import stat
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

_KEY: Final = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")
_FILE_BYTES_MAX: Final = 4096


class KeyFileError(ValueError):
    """A file is missing, is not a key's, or can be read by other users."""


class KeyPair(Struct, frozen=True):
    """A public key and its secret key, which is in no text that is shown or logged."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def check_key(key: str, what: str) -> str:
    """Return `key`; raises `KeyFileError` if it is not 40 characters of Z85."""
    if not _KEY.match(key):
        raise KeyFileError(f"{what}: not a key; a key is 40 characters of Z85")
    return key


def read_key_pair(path: str | os.PathLike[str]) -> KeyPair:
    """Return a key pair from its file; raises `KeyFileError` if other users can access the file."""
    try:
        pair = msgspec.json.decode(_read(path, is_private=True), type=KeyPair)
    except msgspec.MsgspecError as error:
        raise KeyFileError(f"{os.fspath(path)}: not a file with a key pair") from error
    for key in (pair.public, pair.secret):
        check_key(key, os.fspath(path))
    return pair


def read_public_key(path: str | os.PathLike[str]) -> str:
    """Return the key in the file of a public key; raises `KeyFileError`."""
    text = _read(path, is_private=False).decode(errors="replace").strip()
    return check_key(text, os.fspath(path))


def write_new(path: str | os.PathLike[str], data: bytes, mode: int) -> None:
    """Write a file that does not exist yet; raises `FileExistsError` if it does."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_key_pair(path: str | os.PathLike[str], pair: KeyPair) -> None:
    """Write a key pair to a new file for its user alone; raises `FileExistsError`."""
    write_new(path, msgspec.json.encode(pair) + b"\n", 0o600)


def public_key_path(path: str | os.PathLike[str]) -> Path:
    """Return where the public key of a key pair's file is stored."""
    return Path(os.fspath(path) + ".pub")


def share_key_pair(pair: KeyPair) -> str:
    """Return the path of a key pair in memory, which processes of this user can read.

    It is valid as long as this process runs.
    """
    fd = os.memfd_create("key", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.write(fd, msgspec.json.encode(pair))
    return f"/proc/{os.getpid()}/fd/{fd}"


def _read(path: str | os.PathLike[str], *, is_private: bool) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = f"the key file {os.fspath(path)} can't be read: {error.strerror}"
        raise KeyFileError(reason) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise KeyFileError(f"{os.fspath(path)}: not a regular file")
        if is_private and (status.st_mode & 0o077 or status.st_uid != os.geteuid()):
            raise KeyFileError(
                f"{os.fspath(path)}: a secret key that other users can access is not used; make it "
                "yours alone with `chmod 600`"
            )
        return os.pread(fd, _FILE_BYTES_MAX, 0)
    finally:
        os.close(fd)
