"""The snapshotter: makes a snapshot and the database of events from the log, in a separate process.

Its process, with the arguments DIRECTORY ORDER PARENT_PID, continues the newest valid
snapshot with the records after it, so no request waits for it. Its output is a `SnapshotMade` in
JSON. It ends with status 1 and a message if it fails, and with 3 if another one is running. It also
ends with the process that started it, so that its lock is free for the next one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from loradock.controller.core.actions import PublishEvent
from loradock.controller.core.limits import LimitsError
from loradock.controller.log.events import EventWriter
from loradock.controller.log.format import LogError
from loradock.controller.log.replay import ReplayResult, Sink, replay
from loradock.controller.log.retention import Retention, apply_retention, prune_snapshots
from loradock.controller.log.segments import LOCK_NAME, segment_paths
from loradock.controller.log.snapshots import take_snapshot, write_snapshot
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.ids import Seq
from loradock.processes.parent import end_with

EXIT_FAILED: Final = 1
EXIT_BUSY: Final = 3

NICENESS: Final = 19
"""The priority of the process, set by the one that starts it: its imports take time too."""


class SnapshotOrder(Struct, frozen=True):
    """Order to a snapshotter; `until` is the last record that its server has handled."""

    until: Seq
    retention: Retention = Retention()


class SnapshotMade(Struct, frozen=True):
    """A snapshot's last record and event, its size, and how it was made.

    `inputs` were handled after the snapshot `base`, 0 for none. `removed` files were dropped or
    archived. `skipped`: why later snapshots were not used, and why lost events stay lost.
    """

    seq: Seq
    events_seq: Seq
    time_ns: int
    size_bytes: int
    base: Seq
    inputs: int
    removed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


class SnapshotterBusyError(LogError):
    """Another process makes a snapshot of this log."""


def make_snapshot(
    directory: Path, order: SnapshotOrder, storage: Storage = DISK
) -> SnapshotMade | None:
    """Make the snapshot after record `order.until` and apply retention; None for an empty log.

    The log can be written meanwhile. After a failure or a crash at any step the log has the
    snapshots and segments that a restart needs. Raises `LogError`, `LimitsError` and `OSError`.
    """
    with _locked(directory, storage):
        _remove_drafts(directory, storage)
        result, notes = _replay(directory, order.until, storage)
        controller = result.controller
        if controller is None or not result.inputs:
            return None
        if result.snapshot_seq < result.inputs:
            _sync_segments(directory, result, storage)
            marks = () if result.snapshot is None else result.snapshot.marks
            snapshot = take_snapshot(controller, result.position, marks)
            write_snapshot(directory, snapshot, storage)
        kept = prune_snapshots(directory, storage)
        removed = apply_retention(directory, kept, order.retention, storage)
    world = controller.world
    return SnapshotMade(
        seq=world.seq,
        events_seq=world.events_seq,
        time_ns=world.time_ns,
        size_bytes=len(kept[0].world),
        base=result.snapshot_seq,
        inputs=result.inputs - result.snapshot_seq,
        removed=tuple(str(path) for path in removed),
        skipped=notes,
    )


@contextmanager
def _locked(directory: Path, storage: Storage) -> Iterator[None]:
    """Exclude other snapshotters, for example one that a command started."""
    fd = storage.create(directory / LOCK_NAME)
    try:
        try:
            storage.lock(fd)
        except BlockingIOError as error:
            busy = f"{directory}: another process makes a snapshot of this log; try again later"
            raise SnapshotterBusyError(busy) from error
        yield
    finally:
        storage.close(fd)


def _remove_drafts(directory: Path, storage: Storage) -> None:
    """Remove drafts of snapshots, and the files that events were in before the database."""
    for name in storage.names(directory):
        if name.endswith((".snap.new", ".evt", ".evt.new")):
            storage.remove(directory / name)


def _replay(directory: Path, until: Seq, storage: Storage) -> tuple[ReplayResult, tuple[str, ...]]:
    """Replay up to record `until` and write the events; return the result and what was lost."""
    with EventWriter(directory, storage) as events:
        newest_event = events.newest_seq
        result = replay(directory, until, _sink_of(events), storage=storage)
        if result.divergence is not None:
            seq, recorded, replayed = result.divergence
            raise LogError(
                f"{directory}: before record {seq} the digest was {recorded}, its replay computes "
                f"{replayed}; no snapshot is made"
            )
        notes = (*result.skipped, *filter(None, (events.removed,)))
        if result.controller is not None:
            # The records of later ones have been cut from the log.
            events.cut_after(result.controller.world.events_seq)
            notes += _add_missing_events(directory, result, newest_event, events, storage)
    return result, notes


def _sink_of(events: EventWriter) -> Sink:
    """Return a function that writes the events among a record's actions."""
    return lambda actions: events.add(
        [action.message for action in actions if isinstance(action, PublishEvent)]
    )


def _add_missing_events(
    directory: Path, result: ReplayResult, newest_event: Seq, events: EventWriter, storage: Storage
) -> tuple[str, ...]:
    """Add the events before the replay's snapshot to a database that lacked some: it is new.

    That needs the log's first record. Returns why it fails, if it does.
    """
    base, paths = result.snapshot, segment_paths(directory, storage)
    if base is None or newest_event >= base.marks[-1].events_seq or int(paths[0].stem) != 1:
        return ()
    try:
        replay(directory, base.seq, _sink_of(events), from_start=True, storage=storage)
    except LogError as error:
        return (f"the events before record {base.seq} are not made again: {error}",)
    return ()


def _sync_segments(directory: Path, result: ReplayResult, storage: Storage) -> None:
    """Make the records that were read durable: a snapshot must not have more than the log."""
    last = result.position.segment
    first = last if result.snapshot is None else result.snapshot.position.segment
    for path in segment_paths(directory, storage):
        if result.snapshot is None or first <= int(path.stem) <= last:
            fd = storage.open_end(path)
            try:
                storage.sync_data(fd)
            finally:
                storage.close(fd)


def main() -> int:
    """Make a snapshot by the arguments of the command line; return the exit status."""
    directory, order = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=SnapshotOrder)
    try:
        # That also ends one that is stopped, which would keep its lock until it is continued.
        end_with(int(sys.argv[3]))
        made = make_snapshot(directory, order)
    except SnapshotterBusyError as error:
        print(error, file=sys.stderr)
        return EXIT_BUSY
    except (LogError, LimitsError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(msgspec.json.encode(made).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
