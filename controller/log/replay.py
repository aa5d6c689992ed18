"""Replay of a log: for recovery, for audits, and to see the state at any record.

The log's inputs are handled by the same core as before, and the recorded digests are compared with
the replayed state's. The replay stops at the first digest that differs. Inputs that a later record
skips are skipped in their place, whether or not their handling would fail here.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from controller.core.actions import Action
from controller.core.controller import Controller
from controller.core.eviction import POLICIES
from controller.core.invariants import InvariantError
from controller.core.limits import RULES, limits_from
from controller.log.format import LogError, LogForeign
from controller.log.segments import NumberedRecord, segments
from controller.log.skips import skipped_inputs
from controller.log.storage import DISK, Storage
from messages.ids import Seq
from messages.records import Header, Record

Sink = Callable[[list[Action]], None]


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
    """The state that a log leads to; `controller` is None for an empty log."""

    controller: Controller | None
    inputs: int
    digests_compared: int
    divergence: Divergence | None

    @property
    def digest(self) -> str:
        """The replayed state's digest, empty for an empty log."""
        return "" if self.controller is None else self.controller.digest()


class _Replayer:
    """A controller that handles segments, up to record `until`."""

    def __init__(
        self, until: Seq | None, sink: Sink | None, checked: bool, skips: Collection[Seq]
    ) -> None:
        self.controller: Controller | None = None
        self.compared = 0
        self.divergence: Divergence | None = None
        self._until = until
        self._sink = sink
        self._checked = checked
        self._skips = skips
        self.policy = ""
        """Replaces the log's policy; its digests are not compared then."""

    def configure(self, header: Header) -> Controller:
        """Return the controller, with the limits and the policy of a segment."""
        limits, policy = limits_from(header.limits), self.policy or header.policy
        if policy not in POLICIES:
            raise LogForeign(
                f"written with policy {policy!r}; this version knows {sorted(POLICIES)}; "
                "use one that knows it"
            )
        controller = self.controller
        if controller is None:
            self.controller = controller = Controller(limits, policy, checked=self._checked)
        elif (limits, policy) != (controller.limits, controller.policy_name):
            actions = controller.reconfigure(limits, policy)
            if self._sink is not None:
                self._sink(actions)
        return controller

    def handle(self, controller: Controller, records: Iterator[NumberedRecord]) -> bool:
        """Handle a segment's records; return whether to continue with the next segment."""
        sink, until, compares = self._sink, self._until, not self.policy
        for seq, _, record in records:
            if until is not None and seq > until:
                return False
            if record.digest and compares and not self._matches(controller, seq, record.digest):
                return False
            actions = self._handle(controller, seq, record)
            if sink is not None:
                sink(actions)
        return True

    def _handle(self, controller: Controller, seq: Seq, record: Record) -> list[Action]:
        if seq in self._skips:
            controller.skip(record.time_ns)
            return []
        try:
            return controller.handle(record.input, record.time_ns, record.report_seq)
        except InvariantError:
            raise
        # Any exception: the caller skips this input, or reports it.
        except Exception as error:
            raise HandlingFailed(seq, record, error) from error

    def _matches(self, controller: Controller, seq: Seq, recorded: str) -> bool:
        self.compared += 1
        replayed = controller.digest()
        if replayed != recorded:
            self.divergence = Divergence(seq, recorded, replayed)
        return replayed == recorded


def replay(
    directory: Path,
    until: Seq | None = None,
    sink: Sink | None = None,
    *,
    checked: bool = False,
    storage: Storage = DISK,
    skips: Collection[Seq] = (),
    policy: str = "",
) -> ReplayResult:
    """Replay the log in `directory`, up to and including record `until`.

    `sink` is called with the actions of each record; `checked` verifies every invariant after it.
    `skips` are inputs to skip besides those that the log skips. With a `policy` it is replayed as
    if that had been the log's, without comparing digests: reports that no longer fit are refused.
    Raises `LogError` for a log that can't be read, `HandlingFailed` where the handling of a record
    fails, and `LimitsError` for limits of other rules.
    """
    skips = frozenset(skips) | skipped_inputs(directory, storage)
    replayer = _Replayer(until, sink, checked, skips)
    replayer.policy = policy
    for header, records in segments(directory, rules=(RULES,), storage=storage):
        if until is not None and header.first_seq > until and replayer.controller is not None:
            break
        controller = replayer.configure(header)
        if not replayer.handle(controller, records):
            break
    inputs = 0 if replayer.controller is None else replayer.controller.world.seq
    return ReplayResult(replayer.controller, inputs, replayer.compared, replayer.divergence)
