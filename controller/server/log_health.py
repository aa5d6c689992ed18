"""Whether the log can be written, and the space that its disk has.

Both an attempt to write and the file system itself can show that it can't be written: an idle
server learns of a full disk before the first request does. Times are nanoseconds of a monotonic
clock.
"""

from pathlib import Path
from typing import Final

from loradock.controller.log.storage import Storage

GRACE_NS: Final = 1_000_000_000
"""A failure that lasts longer is reported to the clients whose answers wait for the log."""


class LogHealth:
    """The health of one log; `disk_free_bytes` is as of the last `measure`."""

    def __init__(self, directory: Path, storage: Storage) -> None:
        self._directory = directory
        self._storage = storage
        self._refusal = ""
        self._refused_ns = 0
        self._disk_error = ""
        self.disk_free_bytes = 0
        self.measure()

    @property
    def error(self) -> str:
        """Why the log can't be written; empty if it can."""
        return self._refusal or self._disk_error

    def on_written(self) -> None:
        """Record that a group was written."""
        self._refusal = ""

    def on_refused(self, why: str, now_ns: int) -> None:
        """Record that a group could not be written."""
        if not self._refusal:
            self._refused_ns = now_ns
        self._refusal = why

    def is_lasting(self, now_ns: int) -> bool:
        """Return whether groups have been refused for longer than `GRACE_NS`."""
        return bool(self._refusal) and now_ns - self._refused_ns > GRACE_NS

    def measure(self) -> None:
        """Read the space of the disk."""
        try:
            space = self._storage.space(self._directory)
        except OSError as error:
            self._disk_error = f"{self._directory}: {error.strerror or error}"
            return
        self.disk_free_bytes = space.free_bytes
        self._disk_error = ""
        if space.is_read_only:
            self._disk_error = f"{self._directory}: the file system is read-only"
        elif space.free_bytes < space.block_bytes:
            self._disk_error = f"{self._directory}: no space is left on the disk"
