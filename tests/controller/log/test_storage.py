"""Syncs: in the background, of files in chunks, and systems that have none."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from loradock.controller.log import storage
from loradock.controller.log.storage import CHUNK_BYTES, DISK, operations, write_file


class Operation:
    """An operation, with what each call of `get_value` raises; None if it raises nothing."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self._outcomes = list(outcomes)

    def get_value(self) -> None:
        outcome = self._outcomes.pop(0)
        if outcome is not None:
            raise outcome


class Queue:
    """A queue that counts how often it is waited for, and raises the errors it is given."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.waits = 0

    def process_events(self, *_arguments: int) -> int:
        self.waits += 1
        if self._errors:
            raise self._errors.pop(0)
        return 1


IN_PROGRESS = RuntimeError("in flight")


def begun(monkeypatch: pytest.MonkeyPatch, queue: Queue, operation: Operation | None) -> Any:
    """Begin a sync in a queue that accepts this operation, and return what waits for it."""
    monkeypatch.setattr(storage, "operations", lambda: queue)
    monkeypatch.setattr(storage, "_submit", lambda _queue, _fd: operation)
    return DISK.start_sync(-1)


@pytest.fixture
def fd(tmp_path: Path) -> Any:
    opened = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    yield opened
    os.close(opened)


def test_syncs_of_this_system_end_in_any_order(fd: int) -> None:
    os.write(fd, b"content")
    first, second = DISK.start_sync(fd), DISK.start_sync(fd)
    second()
    first()


def test_this_system_syncs_in_the_background() -> None:
    if operations() is None:
        pytest.skip("this system has no asynchronous file operations")
    assert operations() is operations()


def test_an_operation_in_progress_has_no_value(fd: int) -> None:
    queue = operations()
    if queue is None:
        pytest.skip("this system has no asynchronous file operations")
    os.write(fd, b"content")
    operation = storage._submit(queue, fd)
    assert operation is not None
    with pytest.raises(RuntimeError):
        operation.get_value()
    storage._wait(queue, operation)
    operation.get_value()


def test_a_descriptor_that_can_not_be_synced_raises_at_once() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        DISK.start_sync(2**20)


def test_a_sync_is_made_at_once_where_the_system_accepts_no_operation(
    monkeypatch: pytest.MonkeyPatch, fd: int
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    monkeypatch.setattr(storage, "_submit", lambda _queue, _fd: None)
    DISK.start_sync(fd)()
    monkeypatch.setattr(storage, "operations", lambda: None)
    DISK.start_sync(fd)()
    assert synced == [fd, fd]


def test_a_sync_is_waited_for_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(SystemError(errno.EINTR, "a signal"))
    wait = begun(monkeypatch, queue, Operation(IN_PROGRESS, IN_PROGRESS, None))
    assert queue.waits == 0
    wait()
    assert queue.waits == 2


@pytest.mark.parametrize(
    ("queue", "operation"),
    [
        (Queue(), Operation(IN_PROGRESS, SystemError("Input/output error"))),
        (Queue(SystemError(errno.EIO, "Input/output error")), Operation(IN_PROGRESS)),
    ],
    ids=["operation", "queue"],
)
def test_a_sync_that_fails_is_an_error_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, operation: Operation
) -> None:
    wait = begun(monkeypatch, queue, operation)
    with pytest.raises(OSError, match="Input/output error"):
        wait()


@pytest.mark.usefixtures("without_fsync")
def test_a_file_is_synced_in_chunks(tmp_path: Path) -> None:
    """The log's own syncs wait for those of a snapshot."""

    class SyncedBytes(storage.Storage):
        def __init__(self) -> None:
            self.synced: list[int] = []
            self.unsynced = 0

        def write(self, fd: int, data: bytes) -> int:
            self.unsynced += len(data)
            return super().write(fd, data)

        def sync_data(self, fd: int) -> None:
            self.synced.append(self.unsynced)
            self.unsynced = 0

        sync = sync_data

    disk, data = SyncedBytes(), bytes(5 * CHUNK_BYTES + 1)
    write_file(tmp_path / "file", data, disk)
    assert max(disk.synced) <= CHUNK_BYTES
    assert sum(disk.synced) == len(data)
    assert (tmp_path / "file").read_bytes() == data
