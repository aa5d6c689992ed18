"""Commands on a log that no server writes: verify, compact, repair, skip a record.

A repair leaves the longest log that the files have (`chain.py`). It deletes no byte: files that are
not part of that log, and files that are written again without their corruption, stay in the
directory with suffix `.corrupt`. A record joins the log only where its checksum continues it.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from loradock.controller.log.chain import Chains, Piece, pieces_in, reframed
from loradock.controller.log.events import EventReader, events_path
from loradock.controller.log.format import LogCorrupt, LogError, LogForeign, LogFull
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import (
    EVENTS_NAME,
    NO_SYNC_FAILED,
    REPAIRING,
    Verdict,
    check_files,
    is_of_log,
    lock_directory,
    marked_segment,
    read,
    segment_path,
    segment_paths,
    walk,
)
from loradock.controller.log.segments import verify as verify_segments
from loradock.controller.log.snapshots import (
    SNAPSHOT_MARKER,
    Snapshot,
    SnapshotInvalidError,
    decode_snapshot,
    drop_snapshots,
    read_valid,
    restore_controller,
    restore_newest,
    snapshot_path,
    snapshot_paths,
)
from loradock.controller.log.snapshotter import SnapshotMade, SnapshotOrder, make_snapshot
from loradock.controller.log.storage import (
    DISK,
    Storage,
    UnreadableError,
    free_name,
    write_file,
)
from loradock.controller.log.writer import Log
from loradock.messages.ids import Seq
from loradock.messages.records import Header, InputSkipped, Record

EVENTS_PER_READ: Final = 8192

_DRAFT: Final = ".repair"
"""The suffix of what a repair has written and not named yet."""

_NUMBERED: Final = (".log", ".snap", _DRAFT)
"""The suffixes of the files with records or a snapshot."""


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
    snapshots, newest, problems = snapshot_paths(directory, storage), None, list[str]()
    for path in snapshots:
        try:
            read_valid(path, storage)
            newest = path
        except SnapshotInvalidError as error:
            problems.append(str(error))
    snapshot_seq = int(newest.stem) if newest else 0
    events = EventReader(directory, storage)
    if found.corruption is None:
        problems += _missing_records(directory, found, snapshot_seq, storage)
    if problem := events.problem(EVENTS_PER_READ):
        problems.append(problem)
        oldest_event = newest_event = 0
    else:
        oldest_event, newest_event = events.oldest_seq, events.newest_seq
    if not (problems or found.corruption):
        try:
            check_files(directory, storage)
        except LogCorrupt as error:
            problems.append(str(error))
    return LogVerdict(
        segments=found,
        snapshots=len(snapshots),
        snapshot_seq=snapshot_seq,
        snapshot_bytes=storage.size_bytes(newest) if newest else 0,
        records_since_snapshot=max(0, found.last_seq - snapshot_seq),
        oldest_event=oldest_event,
        newest_event=newest_event,
        problems=tuple(problems),
    )


def _missing_records(
    directory: Path, found: Verdict, contained: Seq, storage: Storage
) -> list[str]:
    """Return which records a restart would miss; `contained` is the newest snapshot's last one."""
    paths = segment_paths(directory, storage)
    last_seq = found.last_seq or (int(paths[-1].stem) - 1 if paths else 0)
    if found.records and found.first_seq > contained + 1:
        return [
            f"{directory}: records {contained + 1} to {found.first_seq - 1} are missing, and no "
            "valid snapshot contains them"
        ]
    if last_seq < contained:
        return [
            f"{directory}: records {last_seq + 1} to {contained} are missing, which the newest "
            "snapshot contains"
        ]
    if marked_segment(directory, storage) > (int(paths[-1].stem) if paths else 0):
        return [f"{directory}: the segment after record {last_seq} is missing"]
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
        if EventReader(directory, storage).problem(EVENTS_PER_READ):
            storage.remove(events_path(directory))
        return make_snapshot(directory, SnapshotOrder(log.next_seq - 1, retention), storage)


def record_at(directory: Path, seq: Seq, storage: Storage = DISK) -> Record:
    """Return a record; raises `RecordNotFoundError` and `LogError`."""
    for number, _, record in read(directory, seq, storage=storage):
        if number == seq:
            return record
        break
    raise RecordNotFoundError(f"{directory}: record {seq} is not in the log")


def skip(directory: Path, seq: Seq, storage: Storage = DISK) -> Seq:
    """Log that record `seq` is skipped, and return the number of that record.

    Snapshots that contain the skipped record are dropped first. Raises `LogBusy` while a process
    writes the log, and `RecordNotFoundError` for a record that can't be skipped.
    """
    with _opened(directory, storage) as log:
        record = record_at(directory, seq, storage)
        if isinstance(record.input, InputSkipped):
            raise RecordNotFoundError(f"{directory}: record {seq} is itself the skip of another")
        _check_base(directory, seq, storage)
        drop_snapshots(directory, seq, storage)
        last_ns = record_at(directory, log.next_seq - 1, storage).time_ns
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


def _opened(directory: Path, storage: Storage) -> Log:
    """Open a log for appending under the header that it has."""
    return Log(directory, _last_header(directory, storage), storage=storage)


def _last_header(directory: Path, storage: Storage) -> Header:
    paths = segment_paths(directory, storage)
    first_seq = int(paths[-1].stem) if paths else 0
    headers = [segment.header for segment in walk(directory, first_seq, storage)]
    if not headers:
        raise LogError(f"{directory}: the log has no segment with a header")
    return headers[-1]


class RepairPlan(NamedTuple):
    """A repair of all corruption, which leaves the longest log that the files have.

    It continues with record `next_seq`. `seen_until` is the last record that a file shows to have
    been there; later ones can have been there too, unless `is_end_known`: the log's end is intact.
    With `snapshot`, the segments after it are written again from their records. `put_aside` are
    renamed, and no byte of them is changed; `written` are their copies without the corruption.
    """

    problems: tuple[str, ...]
    next_seq: Seq
    seen_until: Seq
    is_end_known: bool
    snapshot: Path | None
    written: tuple[Path, ...]
    put_aside: tuple[Path, ...]

    @property
    def loss(self) -> str:
        """The records that the repaired log does not have."""
        if self.seen_until >= self.next_seq:
            return (
                f"the records from {self.next_seq} on are lost; the last that the files show is "
                f"{self.seen_until}"
            )
        if self.is_end_known:
            return "no record is lost"
        return f"records from {self.next_seq} on are lost, if there were any"


def repair_plan(directory: Path, storage: Storage = DISK) -> RepairPlan | None:
    """Return what `repair` would do; None if nothing is corrupt.

    Raises `LogForeign` for a file of another version.
    """
    return _Repair(directory, storage).plan


def repair(directory: Path, storage: Storage = DISK) -> RepairPlan | None:
    """Repair all corruption and return the plan; an interrupted repair can be repeated.

    Raises `LogBusy` while a process writes the log, `LogFull` without space for the copies, and as
    `repair_plan` does.
    """
    fd = lock_directory(directory, storage)
    try:
        found = _Repair(directory, storage)
        if found.plan is not None:
            found.carry_out(found.plan)
        return found.plan
    except OSError as error:
        raise LogFull(f"{directory}: not repaired: {error}; make space and repeat") from error
    finally:
        storage.close(fd)


class _Repair:
    """The content of a corrupt log's files, and the repair that follows from it."""

    def __init__(self, directory: Path, storage: Storage) -> None:
        self._directory = directory
        self._storage = storage
        names = sorted(storage.names(directory))
        self._files = [directory / name for name in names if is_of_log(name.removesuffix(_DRAFT))]
        self._sizes: dict[Path, int] = {}
        self._pieces: list[Piece] = []
        self._snapshots: dict[Path, Snapshot] = {}
        try:
            for path in self._files:
                self._read(path)
        except LogForeign as error:
            raise LogForeign(
                f"{error}; nothing is repaired while it is there: if it is not a part of this log, "
                "move it to another directory and repeat"
            ) from error
        chains = Chains(self._pieces, [*self._snapshots.values()], storage)
        self._chain = chains.longest()
        on = {snapshot.seq for snapshot in chains.on(self._chain)}
        # The files of the repaired log: the file that has the content, or the pieces that make it.
        self._sources: dict[Path, Path | list[Piece]] = {
            snapshot_path(directory, snapshot.seq): path
            for path, snapshot in self._snapshots.items()
            if snapshot.seq in on
        }
        self._add_segments()
        self.plan: Final = self._plan(REPAIRING in names)

    def _read(self, path: Path) -> None:
        if path.suffix not in _NUMBERED:
            return
        # By content: a file can have the name of another.
        with suppress(UnreadableError, SnapshotInvalidError):
            data = self._storage.read(path)
            if data.startswith(SNAPSHOT_MARKER):
                snapshot = decode_snapshot(data, path)
                restore_controller(snapshot, path)
                self._snapshots[path] = snapshot
            else:
                self._sizes[path] = len(data)
                self._pieces += pieces_in(path, data)

    def _add_segments(self) -> None:
        for seq, _ in self._reframed():
            self._sources[segment_path(self._directory, seq)] = []
        if self._chain.snapshot is not None:
            return
        pieces: list[Piece] = []
        for piece in self._chain.pieces:
            if piece.header is not None:
                pieces = []
                self._sources[segment_path(self._directory, piece.before.seq + 1)] = pieces
            pieces.append(piece)
        for path, source in [*self._sources.items()]:
            if isinstance(source, list) and self._is_intact(path, source):
                self._sources[path] = path

    def _is_intact(self, path: Path, pieces: list[Piece]) -> bool:
        """Return whether a file is this segment; a torn tail is left to the next start."""
        (piece, *more) = pieces
        if more or piece.file != path or piece.begin:
            return False
        is_last = piece is self._chain.pieces[-1]
        is_torn = not any(p.file == path and p.begin >= piece.end for p in self._pieces)
        return piece.end == self._sizes[path] or (is_last and is_torn)

    def _plan(self, is_unfinished: bool) -> RepairPlan | None:
        directory, chain = self._directory, self._chain
        written = [path for path, source in self._sources.items() if source != path]
        aside = [path for path in self._files if self._is_put_aside(path)]
        marked = marked_segment(directory, self._storage)
        last = max((int(p.stem) for p in self._sources if p.suffix == ".log"), default=0)
        if not (written or aside or is_unfinished or marked > last):
            return None
        found = verify(directory, self._storage)
        problems = (str(found.segments.corruption or ""), *found.problems)
        seen = (*(p.link.seq for p in self._pieces), *(s.seq for s in self._snapshots.values()))
        return RepairPlan(
            problems=tuple(filter(None, problems)),
            next_seq=chain.end.seq + 1,
            seen_until=max(*seen, marked - 1, 0),
            is_end_known=self._is_end_known(marked),
            snapshot=snapshot_path(directory, chain.snapshot.seq) if chain.snapshot else None,
            written=tuple(sorted(written)),
            put_aside=tuple(aside),
        )

    def _is_put_aside(self, path: Path) -> bool:
        if path.name == EVENTS_NAME:
            return bool(EventReader(self._directory, self._storage).problem(EVENTS_PER_READ))
        if path.suffix in _NUMBERED:
            return self._sources.get(path) != path
        return not self._storage.is_regular(path)

    def _is_end_known(self, marked: Seq) -> bool:
        """Return whether the chain ends where the last file does that is known to be there."""
        if not self._chain.pieces:
            return False
        last, snapshot = self._chain.pieces[-1], self._chain.snapshot
        begins = [p.before.seq + 1 for p in self._chain.pieces if p.header is not None]
        segment = begins[-1] if begins else snapshot.position.segment if snapshot else 0
        return last.end == self._sizes[last.file] and marked <= segment

    def carry_out(self, plan: RepairPlan) -> None:
        """Write the copies, rename the files that are put aside, and give the copies their names.

        No server starts in between, and the files that are there then lead to the same chain.
        """
        storage, unfinished = self._storage, self._directory / REPAIRING
        write_file(unfinished, b"", storage)
        drafts = {path.with_name(path.name + _DRAFT): path for path in plan.written}
        for draft, data in self._contents():
            write_file(draft, data, storage)
        for path in plan.put_aside:
            if path not in drafts:
                storage.rename(path, free_name(path, "corrupt", storage))
        storage.sync_directory(self._directory)
        for draft, path in drafts.items():
            storage.rename(draft, path)
        # The next start writes the last segment again, and then this file.
        if NO_SYNC_FAILED in storage.names(self._directory):
            storage.remove(self._directory / NO_SYNC_FAILED)
        storage.sync_directory(self._directory)
        storage.remove(unfinished)
        storage.sync_directory(self._directory)

    def _contents(self) -> Iterator[tuple[Path, bytes]]:
        """Yield the drafts and their contents."""
        for path, source in self._sources.items():
            draft = path.with_name(path.name + _DRAFT)
            if isinstance(source, list) and source:
                parts = (self._storage.read(p.file)[p.begin : p.end] for p in source)
                yield draft, b"".join(parts)
            elif isinstance(source, Path) and source != path:
                yield draft, self._storage.read(source)
        for seq, data in self._reframed():
            path = segment_path(self._directory, seq)
            yield path.with_name(path.name + _DRAFT), data

    def _reframed(self) -> Iterator[tuple[Seq, bytes]]:
        pieces, snapshot = self._chain
        return iter(()) if snapshot is None else reframed(snapshot, pieces, self._storage)
