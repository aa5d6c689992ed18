"""Commands on a log that no server writes: verify, compact, repair, skip a record.

A repair cuts off the first corruption and what follows it. If a valid snapshot begins after the
corrupt segment, no restart needs it and the segments before it: they are renamed, and nothing is
cut. No byte is lost: a changed file replaces the original, whose copy stays next to it with suffix
`.corrupt`. A record after the corruption is never moved back into the chain. An interrupted repair
leaves a log that can be repaired again.
"""

import errno
from pathlib import Path
from typing import Final, NamedTuple

from loradock.controller.log.events import EventReader, events_path
from loradock.controller.log.format import LogCorrupt, LogError, LogFull, whole_frames
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import (
    NumberedRecord,
    Verdict,
    lock_directory,
    read,
    segment_paths,
    walk,
)
from loradock.controller.log.segments import verify as verify_segments
from loradock.controller.log.snapshots import (
    SnapshotInvalidError,
    SnapshotVerdict,
    drop_snapshots,
    read_snapshot,
    restore_controller,
    restore_newest,
    snapshot_paths,
    verify_snapshots,
)
from loradock.controller.log.snapshotter import SnapshotMade, SnapshotOrder, make_snapshot
from loradock.controller.log.storage import DISK, Storage
from loradock.controller.log.writer import Log
from loradock.messages.ids import Seq
from loradock.messages.records import Header, InputSkipped, Record

_EVENTS_PER_READ: Final = 8192


class LogVerdict(NamedTuple):
    """The content of a log; `problems` are what is wrong outside of the segments.

    `snapshot_seq` is the last record of the newest valid snapshot, 0 without one. The events are
    those in the database; later ones are made from the records after the snapshot.
    """

    segments: Verdict
    snapshots: int
    snapshot_seq: Seq
    snapshot_bytes: int
    records_since_snapshot: int
    oldest_event: Seq
    newest_event: Seq
    problems: tuple[str, ...]


def verify(directory: Path, storage: Storage = DISK) -> LogVerdict:
    """Read all files of a log; corruption is returned and not raised, and nothing is changed."""
    found = verify_segments(directory, storage)
    snapshots = list(verify_snapshots(directory, storage))
    valid = [one for one in snapshots if not one.problem]
    newest = valid[-1] if valid else None
    events = EventReader(directory, storage)
    problems = [one.problem for one in snapshots if one.problem]
    problems += _missing_records(directory, found, newest)
    if problem := events.problem(_EVENTS_PER_READ):
        problems.append(problem)
        oldest_event = newest_event = 0
    else:
        oldest_event, newest_event = events.oldest_seq, events.newest_seq
    return LogVerdict(
        segments=found,
        snapshots=len(snapshots),
        snapshot_seq=newest.seq if newest else 0,
        snapshot_bytes=newest.size_bytes if newest else 0,
        records_since_snapshot=max(0, found.last_seq - (newest.seq if newest else 0)),
        oldest_event=oldest_event,
        newest_event=newest_event,
        problems=tuple(problems),
    )


def _missing_records(directory: Path, found: Verdict, newest: SnapshotVerdict | None) -> list[str]:
    """Return which records a restart would miss."""
    contained = newest.seq if newest else 0
    if found.corruption is not None or not found.segments:
        return []
    if found.records and found.first_seq > contained + 1:
        return [
            f"{directory}: records {contained + 1} to {found.first_seq - 1} are missing, and no "
            "valid snapshot contains them"
        ]
    if found.records and found.last_seq < contained:
        return [
            f"{directory}: records {found.last_seq + 1} to {contained} are missing, which the "
            "newest snapshot contains"
        ]
    return []


class RecordNotFoundError(LogError):
    """A record that is not in the log's segments, or that can't be skipped."""


def compact(directory: Path, retention: Retention, storage: Storage = DISK) -> SnapshotMade | None:
    """Make a snapshot after the last record and apply retention; None for an empty log.

    A corrupt database of events is made again, if the log's first record is there. Raises
    `LogBusy` while a process writes the log.
    """
    with _opened(directory, storage) as log:
        if log.next_seq == 1:
            return None
        if EventReader(directory, storage).problem(_EVENTS_PER_READ):
            storage.remove(events_path(directory))
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


class RepairPlan(NamedTuple):
    """A repair of the first corruption: `file` is cut at `offset`.

    `lost_bytes` are cut off, with `lost_records` records that verify alone. `later_files` are then
    renamed: segments, and snapshots that contain lost records. If `snapshot` is not None, nothing
    is lost: `unneeded_files` are renamed instead, because it has what they led to.
    """

    file: Path
    offset: int
    seq: Seq
    reason: str
    lost_bytes: int = 0
    lost_records: int = 0
    later_files: tuple[Path, ...] = ()
    snapshot: Path | None = None
    unneeded_files: tuple[Path, ...] = ()


def repair_plan(directory: Path, storage: Storage = DISK) -> RepairPlan | None:
    """Return what `repair` would do; None if nothing is corrupt."""
    corruption = verify_segments(directory, storage).corruption
    if corruption is None:
        return None
    plan = RepairPlan(corruption.file, corruption.offset, corruption.seq, corruption.reason)
    snapshot = _snapshot_after(directory, corruption.file, storage)
    if snapshot is None:
        return _cut_plan(directory, corruption, plan, storage)
    unneeded = [p for p in segment_paths(directory, storage) if p.name <= corruption.file.name]
    return plan._replace(snapshot=snapshot, unneeded_files=tuple(unneeded))


def repair(directory: Path, storage: Storage = DISK) -> RepairPlan | None:
    """Repair the first corruption and return the plan; other corruption may follow it.

    Raises `LogBusy` while a process writes the log, and `LogFull` without space for the copies.
    """
    fd = lock_directory(directory, storage)
    try:
        plan = repair_plan(directory, storage)
        if plan is not None:
            _carry_out(plan, fd, storage)
            storage.sync(fd)
        return plan
    except OSError as error:
        raise LogFull(f"{directory}: not repaired: {error}; make space and repeat") from error
    finally:
        storage.close(fd)


def _snapshot_after(directory: Path, segment: Path, storage: Storage) -> Path | None:
    """Return a valid snapshot after which no record of this segment or one before it is read."""
    for path in reversed(snapshot_paths(directory, storage)):
        try:
            snapshot = read_snapshot(path, storage)
            restore_controller(snapshot, path)
        except SnapshotInvalidError:
            continue
        if snapshot.position.segment > int(segment.stem):
            return path
    return None


def _cut_plan(
    directory: Path, corruption: LogCorrupt, plan: RepairPlan, storage: Storage
) -> RepairPlan:
    later = [path for path in segment_paths(directory, storage) if path.name > corruption.file.name]
    lost_bytes = lost_records = 0
    for path in (corruption.file, *later):
        data = storage.read(path)
        start = corruption.offset if path == corruption.file else 0
        lost_bytes += len(data) - start
        # A segment's first frame is its header, not a record.
        lost_records += sum(1 for offset, _ in whole_frames(data, start) if offset > 0)
    later += [p for p in snapshot_paths(directory, storage) if int(p.stem) >= corruption.seq]
    return plan._replace(lost_bytes=lost_bytes, lost_records=lost_records, later_files=tuple(later))


def _carry_out(plan: RepairPlan, directory_fd: int, storage: Storage) -> None:
    # The corruption itself is removed last: until then `verify` still finds it.
    for path in (*plan.later_files, *plan.unneeded_files):
        storage.rename(path, _free_name(path, storage))
    if plan.snapshot is not None:
        return
    if plan.offset == 0:
        storage.rename(plan.file, _free_name(plan.file, storage))
        return
    data = storage.read(plan.file)
    _write(_free_name(plan.file, storage), data, storage)
    draft = plan.file.with_name("repair.new")
    _write(draft, data[: plan.offset], storage)
    storage.sync(directory_fd)
    storage.rename(draft, plan.file)


def _write(path: Path, data: bytes, storage: Storage) -> None:
    """Write a file durably; its name is not durable yet."""
    fd = storage.create(path)
    try:
        if (count := storage.write(fd, data)) != len(data):
            raise OSError(errno.ENOSPC, f"{count} of {len(data)} bytes of {path} were written")
        storage.sync(fd)
    finally:
        storage.close(fd)


def _free_name(path: Path, storage: Storage) -> Path:
    names, number = set(storage.names(path.parent)), 0
    while (name := f"{path.name}.{number}.corrupt") in names:
        number += 1
    return path.with_name(name)
