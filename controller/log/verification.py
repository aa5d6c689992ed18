"""Verification of all files of a log: segments, snapshots and event files."""

from pathlib import Path
from typing import NamedTuple

from loradock.controller.log.event_files import EventReader, event_files, event_frames
from loradock.controller.log.event_files import first_seq_of as first_event_of
from loradock.controller.log.segments import Verdict
from loradock.controller.log.segments import verify as verify_segments
from loradock.controller.log.snapshots import SnapshotVerdict, verify_snapshots
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.ids import Seq


class LogVerdict(NamedTuple):
    """The content of a log; `problems` are what is wrong outside of the segments.

    `snapshot_seq` is the last record of the newest valid snapshot, 0 without one. The events are
    those in files; later ones are made from the records after the snapshot.
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
    """Read all files of a log; damage is returned and not raised, and nothing is changed."""
    found = verify_segments(directory, storage)
    snapshots = list(verify_snapshots(directory, storage))
    valid = [one for one in snapshots if not one.problem]
    newest = valid[-1] if valid else None
    events = EventReader(directory, storage)
    problems = [one.problem for one in snapshots if one.problem]
    problems += _missing_records(directory, found, newest)
    problems += _damaged_event_files(directory, storage)
    return LogVerdict(
        segments=found,
        snapshots=len(snapshots),
        snapshot_seq=newest.seq if newest else 0,
        snapshot_bytes=newest.size_bytes if newest else 0,
        records_since_snapshot=max(0, found.last_seq - (newest.seq if newest else 0)),
        oldest_event=events.oldest_seq,
        newest_event=events.newest_seq,
        problems=tuple(problems),
    )


def _missing_records(directory: Path, found: Verdict, newest: SnapshotVerdict | None) -> list[str]:
    """Return which records a restart would miss."""
    contained = newest.seq if newest else 0
    if found.damage is not None or not found.segments:
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


def _damaged_event_files(directory: Path, storage: Storage) -> list[str]:
    """Return the event files with other bytes than their frames; the last one's end may be torn."""
    paths = event_files(directory, storage)
    damaged = []
    for path in paths[:-1]:
        data = storage.read(path)
        frames = event_frames(data, first_event_of(path))
        end = frames[-1].end if frames else 0
        if end != len(data):
            damaged.append(f"{path}: damaged at offset {end}; its later events can't be fetched")
    return damaged
