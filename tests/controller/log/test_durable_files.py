"""No sync of a snapshot or of event files waits for many bytes: the log's own syncs wait for it."""

from collections import Counter
from pathlib import Path

import pytest

from loradock.controller.log.durable_files import CHUNK_BYTES, write_file
from loradock.controller.log.event_files import EVENTS_PER_FRAME, EventWriter
from loradock.controller.log.storage import Storage
from loradock.messages.events import AdapterCached, Published

pytestmark = pytest.mark.usefixtures("without_fsync")


class SyncedBytes(Storage):
    """Notes how many bytes each sync of a file waits for."""

    def __init__(self) -> None:
        self.synced: list[int] = []
        self._unsynced: Counter[int] = Counter()

    def write(self, fd: int, data: bytes) -> int:
        """Write and count."""
        self._unsynced[fd] += len(data)
        return super().write(fd, data)

    def sync_data(self, fd: int) -> None:
        """Note what was written since the last sync."""
        self.synced.append(self._unsynced.pop(fd, 0))

    def sync(self, fd: int) -> None:
        """Note it likewise."""
        self.sync_data(fd)


def test_a_file_is_synced_in_chunks(tmp_path: Path) -> None:
    storage, data = SyncedBytes(), bytes(5 * CHUNK_BYTES + 1)
    write_file(tmp_path / "file", data, storage)
    assert max(storage.synced) <= CHUNK_BYTES
    assert sum(storage.synced) == len(data)


def test_events_are_synced_in_chunks(tmp_path: Path) -> None:
    storage = SyncedBytes()
    writer = EventWriter(tmp_path, storage)
    count = 100 * EVENTS_PER_FRAME
    name = "a" * 100
    writer.add(tuple(Published(seq, seq, AdapterCached(name)) for seq in range(1, count + 1)))
    writer.close()
    frame_bytes = sum(storage.synced) // (count // EVENTS_PER_FRAME)
    assert sum(storage.synced) > 5 * CHUNK_BYTES
    assert max(storage.synced) <= CHUNK_BYTES + 2 * frame_bytes
