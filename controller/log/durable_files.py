"""Whole files that appear under their name only when their content is durable."""

import errno
from pathlib import Path
from typing import Final

from loradock.controller.log.storage import DISK, Storage

CHUNK_BYTES: Final = 1 << 17
"""The most bytes that one sync waits for, so that the log's own syncs are not delayed for long.

The log's sync waits for one that is in progress on the same disk: for some milliseconds where that
writes a MiB, for a fraction of one with this size.
"""


def write_file(path: Path, data: bytes, storage: Storage = DISK) -> None:
    """Write a file and its name durably; after an error or a crash it has all of `data` or none.

    The draft is `path` with `.new` added. Raises `OSError`.
    """
    draft = path.with_name(f"{path.name}.new")
    fd = storage.create(draft)
    try:
        for offset in range(0, len(data), CHUNK_BYTES):
            chunk = data[offset : offset + CHUNK_BYTES]
            count = storage.write(fd, chunk)
            if count != len(chunk):
                raise OSError(errno.ENOSPC, f"{count} of {len(chunk)} bytes were written")
            storage.sync_data(fd)
        storage.sync(fd)
    finally:
        storage.close(fd)
    storage.rename(draft, path)
    storage.sync_directory(path.parent)
