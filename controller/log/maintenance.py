"""Changes of a log by its operator while no server writes it: compaction, and skipping a record."""

from pathlib import Path

from loradock.controller.log.format import LogError
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import NumberedRecord, read, segment_paths, walk
from loradock.controller.log.snapshots import drop_snapshots, restore_newest
from loradock.controller.log.snapshotter import SnapshotMade, SnapshotOrder, make_snapshot
from loradock.controller.log.storage import DISK, Storage
from loradock.controller.log.writer import Log
from loradock.messages.ids import Seq
from loradock.messages.records import Header, InputSkipped, Record


class RecordNotFoundError(LogError):
    """A record that is not in the log's segments, or that can't be skipped."""


def compact(directory: Path, retention: Retention, storage: Storage = DISK) -> SnapshotMade | None:
    """Make a snapshot after the last record and apply retention; None for an empty log.

    Raises `LogBusy` while a process writes the log.
    """
    with _opened(directory, storage) as log:
        if log.next_seq == 1:
            return None
        return make_snapshot(directory, SnapshotOrder(log.next_seq - 1, retention), storage)


def record_at(directory: Path, seq: Seq, storage: Storage = DISK) -> Record:
    """Return a record; raises `RecordNotFoundError` and `LogError`."""
    return _find(directory, seq, storage)[2]


def _find(directory: Path, seq: Seq, storage: Storage) -> NumberedRecord:
    for found in read(directory, seq, storage=storage):
        if found[0] == seq:
            return found
        break
    raise RecordNotFoundError(f"{directory}: record {seq} is not in the log")


def skip(directory: Path, seq: Seq, storage: Storage = DISK) -> Seq:
    """Log that record `seq` is skipped, and return the number of that record.

    Snapshots that contain the skipped record are dropped first. Raises `LogBusy` while a process
    writes the log, and `RecordNotFoundError` for a record that can't be skipped.
    """
    with _opened(directory, storage) as log:
        record = _find(directory, seq, storage)[2]
        if isinstance(record.input, InputSkipped):
            raise RecordNotFoundError(f"{directory}: record {seq} is itself the skip of another")
        _check_base(directory, seq, storage)
        drop_snapshots(directory, seq, storage)
        last_ns = _last_time_ns(directory, log.next_seq - 1, storage)
        skipped = InputSkipped(seq, getattr(record.input, "request_id", ""))
        return log.append([Record(last_ns, skipped)], log.recovered.epoch)


def _check_base(directory: Path, seq: Seq, storage: Storage) -> None:
    """Check that the state before the record can be computed."""
    base = restore_newest(directory, seq - 1, storage=storage).snapshot
    first = int(segment_paths(directory, storage)[0].stem)
    if base is None and first != 1:
        raise RecordNotFoundError(
            f"{directory}: record {seq} can't be skipped: every snapshot contains it, and the log "
            f"before record {first} was dropped"
        )


def _last_time_ns(directory: Path, seq: Seq, storage: Storage) -> int:
    return _find(directory, seq, storage)[2].time_ns


def _opened(directory: Path, storage: Storage) -> Log:
    """Open a log for appending under the header that it has."""
    return Log.open(directory, _last_header(directory, storage), storage=storage)


def _last_header(directory: Path, storage: Storage) -> Header:
    paths = segment_paths(directory, storage)
    first_seq = int(paths[-1].stem) if paths else 0
    headers = [s.header for s in walk(directory, first_seq, storage) if s.header is not None]
    if not headers:
        raise LogError(f"{directory}: the log has no segment with a header")
    return headers[-1]
