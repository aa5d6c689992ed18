"""Retention: which records and events of a log are no longer needed, and what is done with them.

A restart needs the two newest valid snapshots and the segments after the older one. Segments and
events before it are kept for some hours of recorded time. Then segments are dropped or archived,
and events are dropped: a replay of the archive makes them again. No wall clock is read, so no jump
of it removes anything.
"""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from loradock.controller.log.events import EventWriter
from loradock.controller.log.format import LogError
from loradock.controller.log.segments import segment_paths
from loradock.controller.log.settings import LOG_KEEP_HOURS
from loradock.controller.log.snapshots import (
    SNAPSHOTS_KEPT,
    Mark,
    Snapshot,
    SnapshotInvalidError,
    read_valid,
    snapshot_paths,
)
from loradock.controller.log.storage import DISK, Storage, write_file

_NANOS_PER_HOUR: Final = 3_600_000_000_000
_ARCHIVE: Final = "archive:"


class Retention(Struct, frozen=True):
    """Treatment of records and events that no restart needs, once they are `hours` old.

    `archive` is the directory to which `action` "archive" moves segments.
    """

    action: Literal["drop", "archive", "keep"] = "drop"
    hours: float = LOG_KEEP_HOURS
    archive: str = ""


def retention_from(text: str, hours: float = LOG_KEEP_HOURS) -> Retention:
    """Return the retention for `drop`, `keep` or `archive:DIRECTORY`; raises `ValueError`."""
    match text:
        case "drop" | "keep":
            return Retention(text, hours)
        case _ if text.startswith(_ARCHIVE) and text != _ARCHIVE:
            return Retention("archive", hours, text.removeprefix(_ARCHIVE))
    raise ValueError(f"log retention {text!r} is not drop, keep or archive:DIRECTORY")


def prune_snapshots(directory: Path, storage: Storage = DISK) -> list[Snapshot]:
    """Remove all but the newest valid snapshots, and return those that are kept, newest first."""
    kept: list[Snapshot] = []
    removed = False
    for path in reversed(snapshot_paths(directory, storage)):
        if len(kept) < SNAPSHOTS_KEPT:
            with suppress(SnapshotInvalidError):
                kept.append(read_valid(path, storage)[0])
                continue
        storage.remove(path)
        removed = True
    if removed:
        storage.sync_directory(directory)
    return kept


def _unneeded_before(kept: list[Snapshot], retention: Retention) -> Mark | None:
    """Return the mark before which retention applies, None if it applies to nothing.

    `kept` are the snapshots that are kept, newest first; with fewer than two, all files are needed.
    """
    if retention.action == "keep" or len(kept) < SNAPSHOTS_KEPT:
        return None
    until_ns = kept[0].marks[-1].time_ns - int(retention.hours * _NANOS_PER_HOUR)
    old = [mark for mark in kept[-1].marks if mark.time_ns <= until_ns]
    return old[-1] if old else None


def apply_retention(
    directory: Path, kept: list[Snapshot], retention: Retention, storage: Storage = DISK
) -> list[Path]:
    """Drop or archive segments that are no longer needed, and return their paths; drop events.

    An interrupted run is continued by the next one. Raises `OSError`, and `LogError` if the archive
    has another file of a name.
    """
    mark = _unneeded_before(kept, retention)
    if mark is None:
        return []
    segments = segment_paths(directory, storage)
    unneeded = [path for path, later in pairwise(segments) if int(later.stem) <= mark.seq + 1]
    for path in unneeded:
        if retention.action == "archive":
            _copy(path, Path(retention.archive), storage)
        storage.remove(path)
    if unneeded:
        storage.sync_directory(directory)
    with EventWriter(directory, storage) as events:
        events.drop_before(mark.events_seq + 1)
    return unneeded


def _copy(path: Path, archive: Path, storage: Storage) -> None:
    if not storage.is_directory(archive):
        storage.make_directory(archive)
    data = storage.read(path)
    copy = archive / path.name
    if path.name in storage.names(archive):
        if storage.read(copy) != data:
            raise LogError(f"{copy} is a file of another log; archive this log elsewhere")
        return
    write_file(copy, data, storage)
