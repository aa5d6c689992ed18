"""Replay of a log: for recovery, for audits, and to see the state at any record.

The log's inputs are handled by the same core as before, and the recorded digests are compared with
the replayed state's. The replay stops at the first digest that differs. It begins with a snapshot
if there is one. Inputs that a later record skips are skipped in their place, whether or not
their handling would fail here.
"""

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from loradock.controller.core.actions import Action
from loradock.controller.core.controller import Controller
from loradock.controller.core.invariants import InvariantError
from loradock.controller.core.limits import RULES, known_limits, limits_from
from loradock.controller.log.format import (
    CHAIN_START,
    UNDECODABLE,
    LogError,
    LogForeign,
    decode_record,
    foreign_record,
)
from loradock.controller.log.policies import PolicyUnknownError, check_policy
from loradock.controller.log.segments import (
    LogPosition,
    Segment,
    segment_paths,
    skipped_inputs,
    walk_after,
    walk_from_start,
)
from loradock.controller.log.snapshots import Restored, Snapshot, restore_newest, snapshot_paths
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.ids import Epoch, Seq
from loradock.messages.records import Header, Record

Sink = Callable[[list[Action]], None]

Observe = Callable[[Record, list[Action]], None]
"""Receives each record that is replayed, with its actions; none if it is skipped."""

_GROUP: Final = 64
"""Records that are decoded before the first of them is handled."""


class HandlingFailed(LogError):  # noqa: N818 - named after the event, as its relatives
    """The handling of record `seq` raises an exception, and no later record skips it."""

    def __init__(self, seq: Seq, record: Record, error: Exception) -> None:
        super().__init__(
            f"handling record {seq} ({type(record.input).__name__}) fails: "
            f"{type(error).__name__}: {error}"
        )
        self.seq, self.record = seq, record


class Divergence(NamedTuple):
    """The first record whose digest, of the state before it, is not the replayed state's.

    `folded` is the replayed state's digest. The fields are keys of the command's JSON.
    """

    seq: Seq
    recorded: str
    folded: str


class ReplayResult(NamedTuple):
    """The state that a log leads to; `controller` is None for an empty log.

    `inputs` is the number of the last input, of which those after `snapshot` were handled here.
    `skipped` has the reasons why later snapshots were not used. `position` is that of the next
    record.
    """

    controller: Controller | None
    inputs: int
    digests_compared: int
    divergence: Divergence | None
    snapshot: Snapshot | None
    skipped: tuple[str, ...]
    position: LogPosition

    @property
    def digest(self) -> str:
        """The replayed state's digest, empty for an empty log."""
        return "" if self.controller is None else self.controller.digest()

    @property
    def snapshot_seq(self) -> Seq:
        """The last record of the snapshot that the replay began with, 0 without one."""
        return 0 if self.snapshot is None else self.snapshot.seq


class _Replayer:
    """A controller that handles segments, up to record `until`."""

    def __init__(self, until: Seq | None, sink: Sink | None, checked: bool) -> None:
        self.skips: Collection[Seq] = ()
        self.controller: Controller | None = None
        self.compared = 0
        self.divergence: Divergence | None = None
        self.observe: Observe | None = None
        self.position = LogPosition(1, 0, CHAIN_START)
        self._until = until
        self._sink = sink
        self._checked = checked

    def configure(self, header: Header) -> Controller:
        """Return the controller, with the limits and the policy of a segment."""
        is_own, policy = header.rules == RULES, header.policy
        limits = limits_from(header.limits if is_own else known_limits(header.limits))
        try:
            check_policy(policy)
        except PolicyUnknownError as error:
            raise LogForeign(f"its policy is needed for a replay: {error}") from error
        controller = self.controller
        if controller is None:
            controller = Controller(limits, policy, checked=self._checked)
            self.controller = controller
        elif (limits, policy) != controller.settings:
            actions = controller.reconfigure(limits, policy)
            if self._sink is not None:
                self._sink(actions)
        return controller

    @property
    def is_done(self) -> bool:
        """True if record `until` has been handled."""
        return self._until is not None and self.position.link.seq >= self._until

    def handle(self, segment: Segment) -> bool:
        """Handle a segment's records; return whether to continue with the next segment."""
        if self.controller is not None and self.is_done:
            return False
        header = segment.header
        controller = self.configure(header)
        count = None if self._until is None else self._until - self.position.link.seq
        with closing(segment.frames()) as frames:
            wanted = islice(frames, count)
            agrees = self._handle_frames(controller, wanted, segment.file, header)
        scan = segment.scan
        self.position = LogPosition(segment.first_seq, scan.offset, scan.link)
        return agrees and not self.is_done

    def _handle_frames(
        self,
        controller: Controller,
        frames: Iterator[tuple[Seq, Epoch, bytes]],
        file: Path,
        header: Header,
    ) -> bool:
        """Handle records; return whether the digests in them are those of the replayed states."""
        handle, sink, skips = controller.handle, self._sink, self.skips
        compares = header.rules == RULES
        for records in _decoded(frames, file):
            for seq, record in records:
                digest = record.digest
                if digest and compares and not self._matches(controller, seq, digest):
                    return False
                if seq in skips:
                    controller.skip(record.time_ns)
                    actions = []
                else:
                    try:
                        actions = handle(
                            record.input, record.time_ns, record.body, record.report_seq
                        )
                    except InvariantError:
                        raise
                    # Any exception: the caller skips this input, or reports it.
                    except Exception as error:
                        raise HandlingFailed(seq, record, error) from error
                if sink is not None:
                    sink(actions)
                if self.observe is not None:
                    self.observe(record, actions)
        return True

    def result(self, snapshot: Snapshot | None, skipped: tuple[str, ...]) -> ReplayResult:
        """Return the result of a replay that began with a snapshot, or with the first record."""
        return ReplayResult(
            self.controller,
            0 if self.controller is None else self.controller.world.seq,
            self.compared,
            self.divergence,
            snapshot,
            skipped,
            self.position,
        )

    def _matches(self, controller: Controller, seq: Seq, recorded: str) -> bool:
        self.compared += 1
        replayed = controller.digest()
        if replayed != recorded:
            self.divergence = Divergence(seq, recorded, replayed)
        return replayed == recorded


def _decoded(
    frames: Iterator[tuple[Seq, Epoch, bytes]], file: Path
) -> Iterator[list[tuple[Seq, Record]]]:
    """Yield the records in groups, with their numbers; raises `LogForeign` after the last group.

    Decoding and handling in turns takes 5 % longer: each displaces the other from the caches.
    """
    while group := tuple(islice(frames, _GROUP)):
        records = []
        try:
            for seq, _, body in group:
                records.append((seq, decode_record(body)))
        except UNDECODABLE as error:
            yield records
            raise foreign_record(seq, file, error) from error
        yield records


def replay(  # noqa: PLR0913 - one parameter per way of replaying
    directory: Path,
    until: Seq | None = None,
    sink: Sink | None = None,
    *,
    checked: bool = False,
    from_start: bool = False,
    storage: Storage = DISK,
    skips: Collection[Seq] = (),
    observe: Observe | None = None,
) -> ReplayResult:
    """Replay the log in `directory`, up to and including record `until`.

    It begins with the newest valid snapshot that contains no later record, or with the log's first
    record if there is none or with `from_start`. `sink` is called with the actions of each record
    that is replayed; `checked` verifies every invariant after it. `skips` are inputs to skip in
    addition to those that the log skips. `observe` is called with each record and its actions.

    Raises `LogError` for a log that can't be read or of which records are missing, `HandlingFailed`
    if the handling of a record fails, and `LimitsError` for limits of other rules.
    """
    replayer, restored = _Replayer(until, sink, checked), Restored(None, None, ())
    replayer.observe = observe
    with without_garbage_collection():
        if not from_start:
            restored = restore_newest(directory, until, checked=checked, storage=storage)
        if restored.snapshot is None:
            segments = walk_from_start(directory, storage)
            skips_of_log = skipped_inputs(directory, storage)
        else:
            replayer.controller = restored.controller
            replayer.position = restored.snapshot.position
            segments = walk_after(directory, replayer.position, storage)
            skips_of_log = restored.skips
        replayer.skips = frozenset(skips) | skips_of_log
        _replay_segments(replayer, segments)
    return replayer.result(restored.snapshot, restored.skipped)


def records_ahead(directory: Path, until: Seq | None = None, *, from_start: bool = False) -> int:
    """Return how many records a replay will handle, to show its progress; 0 if that is not known.

    It reads the last segment. A snapshot that turns out to be invalid leaves more records.
    """
    paths = segment_paths(directory)
    try:
        last = Segment(paths[-1], None, is_last=True)
        last_seq = sum(1 for _ in last.frames()) + last.first_seq - 1
    except (IndexError, LogError):
        return 0
    end = last_seq if until is None else min(until, last_seq)
    begins = [0, *(int(path.stem) for path in snapshot_paths(directory) if not from_start)]
    return end - max(seq for seq in begins if seq <= end)


def replay_approximately(directory: Path) -> ReplayResult:
    """Replay a whole log of any rules, without comparing its digests.

    The current ones are used: the state can differ from the one at that time in what they changed.
    """
    replayer = _Replayer(None, None, checked=False)
    replayer.skips = skipped_inputs(directory)
    with without_garbage_collection():
        _replay_segments(replayer, walk_from_start(directory), any_rules=True)
    return replayer.result(None, ())


def _replay_segments(
    replayer: _Replayer, segments: Iterator[Segment], *, any_rules: bool = False
) -> None:
    for segment in segments:
        if not any_rules:
            segment.check_rules(RULES)
        if not replayer.handle(segment):
            return


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection: a replay makes objects that stay, and each would visit them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
