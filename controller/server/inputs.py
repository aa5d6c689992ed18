"""Inputs of the log: their recorded time, their handling, their recovery, and those that fail.

Recorded time continues from the log, advances by a monotonic clock and never jumps. Every deadline
is a recorded time and is awaited in recorded time, so no step of the wall clock ends, delays or
starts anything. The wall clock is a label: each epoch records at its start how far the wall clock
is ahead, and a later step changes no label of that epoch. Time does not count against deadlines
while no controller runs or the machine is suspended. Neither does the time between the last record
and the end of a process, because nothing has recorded it.

An input whose handling raises an exception is a defect of the core, and raises it again at every
start. So the log gets a record that skips it, and the state is rebuilt from the log, as if the
input had never come. Every later replay skips it too.

`LogHealth` says whether inputs can be logged at all.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog
from msgspec import Struct

from loradock.controller.core.actions import Action
from loradock.controller.core.context import Checked
from loradock.controller.core.controller import Controller
from loradock.controller.core.invariants import InvariantError
from loradock.controller.log.format import LogError, LogFull, LogSyncFailed
from loradock.controller.log.replay import HandlingFailed, replay
from loradock.controller.log.segments import read
from loradock.controller.log.storage import Storage
from loradock.controller.log.writer import Log
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.event_stream import EventStream
from loradock.controller.server.snapshot_process import SnapshotProcess
from loradock.messages import records
from loradock.messages.ids import Seq
from loradock.messages.records import Input, InputSkipped, Record
from loradock.processes.progress import Progress

REBUILD_BOUND_S: Final = 3_600.0
"""The bound of rebuilding the state from the log, a step that is reported to the supervisor."""

OWN_SKIPS_MAX: Final = 8
"""The most inputs of the server itself that one process skips before it ends."""

RECOVERED_SKIPS_MAX: Final = 64
"""The most inputs that a recovery skips; each one costs a replay."""

GRACE_NS: Final = 1_000_000_000
"""A failure that lasts longer is reported to the clients whose answers wait for the log."""

log = structlog.get_logger("controller")


class Clocks(NamedTuple):
    """Clocks of a machine, in nanoseconds; only `wall_ns` (UTC) can jump."""

    wall_ns: Callable[[], int]
    monotonic_ns: Callable[[], int]


SYSTEM_CLOCKS: Final = Clocks(time.time_ns, time.monotonic_ns)


class LogicalClock:
    """The clock of one epoch's records."""

    def __init__(self, last_ns: int, clocks: Clocks) -> None:
        """Continue from `last_ns`, the last recorded time; from wall time if that is 0."""
        self._clocks: Final = clocks
        self._offset_ns: Final = (last_ns or clocks.wall_ns()) - clocks.monotonic_ns()

    def now_ns(self) -> int:
        """Return the recorded time of this moment, in nanoseconds; it never decreases."""
        return self._clocks.monotonic_ns() + self._offset_ns

    def wall_ns(self) -> int:
        """Return the wall clock's time (UTC) in nanoseconds, for a label or an epoch's number."""
        return self._clocks.wall_ns()


class GroupInput(Struct, frozen=True, gc=False):
    """An input of a group: the hash of a client's request, or the number of a report's frame.

    `checked`: what the check of the request found, before the group was logged.
    """

    message: Input
    body: int = 0
    report_seq: Seq = 0
    checked: Checked | None = None


class LogHealth:
    """Whether a log can be written, and the space that its disk has, as of the last `measure`.

    Both an attempt to write and the file system itself can show that it can't be written: an idle
    server learns of a full disk before the first request does. Times are nanoseconds of a monotonic
    clock.
    """

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


class DivergedError(LogError):
    """Replaying the log's inputs leads to another state than when they were written."""


class InputHandler:
    """The log and the controller of a server: an input is in the log when it is handled."""

    def __init__(
        self, controller: Controller, opened: Log, checked: bool, progress: Progress
    ) -> None:
        self._controller = controller
        self._log = opened
        self._checked = checked
        self._progress = progress
        # Skips that are in the log and have not been handled: the group's other inputs come first.
        self._skips: list[InputSkipped] = []
        self._own_skips = 0
        self._digest_seq = 0
        # The recorded time of the current group.
        self._time_ns = 0

    def log(self, group: Sequence[GroupInput], time_ns: int) -> Seq:
        """Begin to write a group at a recorded time; returns the number of its first record.

        The group is durable once the log's `end_group` has returned: nothing that follows from it
        may leave the process before. Raises `LogFull` and `LogSyncFailed`.
        """
        world, self._time_ns = self._controller.world, time_ns
        records = [Record(time_ns, g.message, "", g.body, g.report_seq) for g in group]
        if world.seq - self._digest_seq >= self._controller.limits.digest_interval:
            self._digest_seq = world.seq
            records[0] = msgspec.structs.replace(records[0], digest=world.digest())
        return self._log.begin_group(records, world.epoch) - len(records) + 1

    def handle(self, seq: Seq, received: GroupInput) -> list[Action] | None:
        """Handle an input of the current group, which was logged under `seq`; returns its actions.

        They are None, and nothing is changed, if its handling fails.
        """
        try:
            return self._controller.handle(
                received.message,
                self._time_ns,
                received.body,
                received.report_seq,
                received.checked,
            )
        except InvariantError:
            raise
        # Any exception: the log would raise it again at every start.
        except Exception as error:
            self._skip(seq, Record(self._time_ns, received.message), error)
            return None

    def end_group(self) -> None:
        """Handle the records that skip inputs of a group: in the log they follow the group."""
        for skipped in self._skips:
            self._controller.handle(skipped, self._time_ns)
        self._skips.clear()

    def _skip(self, seq: Seq, record: Record, error: Exception) -> None:
        """Log that an input is skipped, and return to the state before it.

        Raises the error if the server can't do without this input.
        """
        log.error("an input can't be handled and is skipped", seq=seq, exc_info=error)
        is_of_client = isinstance(record.input, records.InferenceRequested)
        is_own = isinstance(record.input, records.ShellInput) and not is_of_client
        self._own_skips += is_own
        is_vital = isinstance(record.input, records.ControllerStarted)
        if is_vital or self._own_skips > OWN_SKIPS_MAX:
            raise error
        skipped = _skip_of(seq, record)
        try:
            # Before anything that follows from it: another process may not fail to handle it.
            self._log.append([Record(record.time_ns, skipped)], self._controller.world.epoch)
        except LogFull as full:
            raise LogSyncFailed(f"record {seq} can't be skipped ({error}): {full}") from full
        self._skips.append(skipped)
        self._rebuild(seq)

    def _rebuild(self, until: Seq) -> None:
        """Replace the state by that of the log's inputs up to `until`."""
        before = self._progress.read()
        self._progress.enter("recover", REBUILD_BOUND_S)
        directory, storage = self._log.directory, self._log.storage
        result = replay(directory, until, checked=self._checked, storage=storage)
        if result.controller is None or result.divergence is not None:
            raise DivergedError(f"{directory}: its replay diverges: {result.divergence}")
        self._controller.adopt(result.controller)
        if before is not None:
            self._progress.enter(before.name, before.bound_ns / 1e9)


def _was_handled(opened: Log, failed: HandlingFailed) -> bool:
    """Return whether an input is before the log's last group, of which all records have one time.

    Every group is handled, or its inputs are skipped, before the next one is logged. What skips
    inputs of the last group is no group: a start can have ended before it has logged all of it.
    """
    last = failed.record
    for _, _, record in read(opened.directory, failed.seq, storage=opened.storage):
        if not isinstance(record.input, InputSkipped):
            last = record
    return last.time_ns != failed.record.time_ns


def _skip_of(seq: Seq, record: Record) -> InputSkipped:
    return InputSkipped(seq, getattr(record.input, "request_id", ""))


def recover(
    config: ServerConfig, opened: Log, events: EventStream, snapshots: SnapshotProcess
) -> tuple[Controller, list[InputSkipped]]:
    """Return the state of the log, and the inputs that were skipped and are not in the log so.

    `snapshots` is told the one that it begins with.
    """
    started = time.monotonic()
    directory, skips = opened.directory, dict[Seq, InputSkipped]()
    while True:
        try:
            result = replay(
                directory,
                sink=events.add_recovered,
                checked=config.checked,
                storage=opened.storage,
                skips=skips,
            )
            break
        except HandlingFailed as failed:
            # The process that logged it can have ended before it logged that it is skipped.
            if _was_handled(opened, failed):
                raise DivergedError(
                    f"{failed}; a former process has handled it: serve the log with the version "
                    f"that wrote it, or skip it with `loradock log skip {failed.seq}`"
                ) from failed
            log.exception("an input can't be handled and is skipped", seq=failed.seq)
            if len(skips) == RECOVERED_SKIPS_MAX:
                raise
            skips[failed.seq] = _skip_of(failed.seq, failed.record)
    for reason in result.skipped:
        log.warning("a snapshot can't be used", reason=reason)
    if result.divergence is not None:
        seq, recorded, replayed = result.divergence
        raise DivergedError(
            f"{directory}: before record {seq} the digest was {recorded}, its replay computes "
            f"{replayed}; serve it with the version that wrote it"
        )
    log.info(
        "recovered",
        snapshot=result.snapshot_seq,
        inputs=result.inputs - result.snapshot_seq,
        digests_compared=result.digests_compared,
        seconds=round(time.monotonic() - started, 3),
    )
    if result.controller is None:
        raise DivergedError(f"{directory}: the log has no header")
    # A snapshot must not have a record of which the log does not say yet that it is skipped.
    snapshots.on_recovered(result.snapshot, 0 if skips else result.inputs)
    return result.controller, list(skips.values())
