"""Replay of a log: for recovery, for audits, and to see the state at any record.

The log's inputs are handled by the same core as before, and the recorded digests are compared with
the replayed state's. The replay stops at the first digest that differs.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from controller.core.actions import Action
from controller.core.controller import Controller
from controller.core.eviction import POLICIES
from controller.core.limits import RULES, limits_from
from controller.log.format import LogForeign
from controller.log.segments import NumberedRecord, segments
from controller.log.storage import DISK, Storage
from messages.ids import Seq
from messages.records import Header

Sink = Callable[[list[Action]], None]


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

    def __init__(self, until: Seq | None, sink: Sink | None, checked: bool) -> None:
        self.controller: Controller | None = None
        self.compared = 0
        self.divergence: Divergence | None = None
        self._until = until
        self._sink = sink
        self._checked = checked

    def configure(self, header: Header) -> Controller:
        """Return the controller, with the limits and the policy of a segment."""
        limits = limits_from(header.limits)
        if header.policy not in POLICIES:
            raise LogForeign(
                f"written with policy {header.policy!r}; this version knows {sorted(POLICIES)}; "
                "use one that knows it"
            )
        controller = self.controller
        if controller is None:
            self.controller = controller = Controller(limits, header.policy, checked=self._checked)
        elif (limits, header.policy) != (controller.limits, controller.policy_name):
            actions = controller.reconfigure(limits, header.policy)
            if self._sink is not None:
                self._sink(actions)
        return controller

    def handle(self, controller: Controller, records: Iterator[NumberedRecord]) -> bool:
        """Handle a segment's records; return whether to continue with the next segment."""
        handle, sink, until = controller.handle, self._sink, self._until
        for seq, _, record in records:
            if until is not None and seq > until:
                return False
            if record.digest and not self._matches(controller, seq, record.digest):
                return False
            actions = handle(record.input, record.time_ns)
            if sink is not None:
                sink(actions)
        return True

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
) -> ReplayResult:
    """Replay the log in `directory`, up to and including record `until`.

    `sink` is called with the actions of each record; `checked` verifies every invariant after it.
    Raises `LogError` for a log that can't be read, and `LimitsError` for limits of other rules.
    """
    replayer = _Replayer(until, sink, checked)
    for header, records in segments(directory, rules=(RULES,), storage=storage):
        if until is not None and header.first_seq > until and replayer.controller is not None:
            break
        controller = replayer.configure(header)
        if not replayer.handle(controller, records):
            break
    inputs = 0 if replayer.controller is None else replayer.controller.world.seq
    return ReplayResult(replayer.controller, inputs, replayer.compared, replayer.divergence)
