"""Handling of logged inputs, and of those that the core can't handle.

An input whose handling raises an exception is a defect of the core, and raises it again at every
start. So the log gets a record that skips it, and the state is rebuilt from the log, as if the
input had never come. Every later replay skips it too.
"""

import time
from collections.abc import Callable
from typing import Final, get_args

import structlog
from msgspec import Struct

from loradock.controller.core.actions import Action
from loradock.controller.core.controller import Controller
from loradock.controller.core.invariants import InvariantError
from loradock.controller.log.format import LogError, LogFull, LogSyncFailed
from loradock.controller.log.replay import HandlingFailed, replay
from loradock.controller.log.segments import read
from loradock.controller.log.writer import Log
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.event_stream import EventStream
from loradock.controller.server.snapshot_process import SnapshotProcess
from loradock.messages import records
from loradock.messages.ids import Seq
from loradock.messages.records import Input, InputSkipped, Record
from loradock.messages.reports import LoggedReport
from loradock.processes.progress import Progress

REBUILD_BOUND_S: Final = 3_600.0
"""The bound of rebuilding the state from the log, a step that is reported to the supervisor."""

OWN_SKIPS_MAX: Final = 8
"""The most inputs of the server itself that one process skips before it ends."""

RECOVERED_SKIPS_MAX: Final = 64
"""The most inputs that a recovery skips; each one costs a replay."""

_NOTED: Final = frozenset(
    {records.EngineLost, *get_args(records.InferenceRequested), *get_args(LoggedReport)}
)
"""Inputs that the shell notes before they are handled: then their operations are still known."""

log = structlog.get_logger("controller")


class GroupInput(Struct, frozen=True, gc=False):
    """An input of a group: the hash of a client's request, or the number of a report's frame."""

    message: Input
    body: int = 0
    report_seq: Seq = 0


class DivergedError(LogError):
    """Replaying the log's inputs leads to another state than when they were written."""


class InputHandler:
    """The controller of a server, whose inputs are in the log when they are handled."""

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

    def log_and_handle(
        self, batch: list[Record], note: Callable[[Input], None]
    ) -> list[list[Action] | None]:
        """Log a group, and handle it during its sync; return the actions of each input.

        They are None, and nothing is changed, where the handling of an input fails.
        `note` is called with each inference request, report and loss of an engine before it is
        handled. The group is durable once the log's `end_group` has returned: nothing that
        follows from it may leave the process before. Raises `LogFull` and `LogSyncFailed`.
        """
        last_seq = self._log.begin_group(batch, self._controller.world.epoch)
        results: list[list[Action] | None] = []
        handle = self._controller.handle
        for seq, record in enumerate(batch, last_seq - len(batch) + 1):
            message = record.input
            if type(message) in _NOTED:
                note(message)
            try:
                actions = handle(message, record.time_ns, record.body, record.report_seq)
            except InvariantError:
                raise
            # Any exception: the log would raise it again at every start.
            except Exception as error:
                self._skip(seq, record, error)
                results.append(None)
            else:
                results.append(actions)
        self._end_group(batch[0].time_ns)
        return results

    def _end_group(self, time_ns: int) -> None:
        """Handle the records that skip inputs of a group: in the log they follow the group."""
        for skipped in self._skips:
            self._controller.handle(skipped, time_ns)
        self._skips.clear()

    def _skip(self, seq: Seq, record: Record, error: Exception) -> None:
        """Log that an input is skipped, and return to the state before it.

        Raises the error where the server can't do without this input.
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
    """Whether an input is before the log's last group, of which all records have one time.

    Every group is handled, or its inputs are skipped, before the next one is logged.
    """
    last = failed.record
    for _, _, record in read(opened.directory, failed.seq, storage=opened.storage):
        last = record
    return last.time_ns != failed.record.time_ns


def _skip_of(seq: Seq, record: Record) -> InputSkipped:
    return InputSkipped(seq, getattr(record.input, "request_id", ""))


def recover(
    config: ServerConfig, opened: Log, events: EventStream, snapshots: SnapshotProcess
) -> tuple[Controller, list[InputSkipped]]:
    """Return the state of the log, and the inputs that were skipped and are not in the log so.

    `snapshots` notes the one that it begins with.
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
            # The process that logged it may have ended before it logged that it is skipped.
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
    snapshots.note_recovered(result.snapshot)
    return result.controller, list(skips.values())
