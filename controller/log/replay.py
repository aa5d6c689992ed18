"""Folding a log: to recover, to audit, to look at any past moment.

What it is: the log's inputs driven through the same core, with the digests compared that the log
took on its way. What it is not: a second core or a server. One rule: it stops at the first input
whose recorded digest is not the folded world's, and says which.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from controller.core.actions import Action
from controller.core.controller import Controller
from controller.core.eviction import POLICIES
from controller.core.limits import RULES, limits_from
from controller.log.format import LogForeign
from controller.log.segments import Entry, segments
from messages.ids import Seq
from messages.records import Header

Sink = Callable[[list[Action]], None]


class Divergence(NamedTuple):
    """The first input before which the folded world is not the recorded one."""

    seq: Seq
    recorded: str
    folded: str


class ReplayResult(NamedTuple):
    """What a log adds up to; `controller` is None where the log is empty."""

    controller: Controller | None
    inputs: int
    digests_compared: int
    divergence: Divergence | None

    @property
    def digest(self) -> str:
        """The folded world's digest, empty for an empty log."""
        return "" if self.controller is None else self.controller.digest()


class _Fold:
    def __init__(self, until: Seq | None, sink: Sink | None, checked: bool) -> None:
        self.controller: Controller | None = None
        self.compared = 0
        self.divergence: Divergence | None = None
        self._until = until
        self._sink = sink
        self._checked = checked

    def configure(self, header: Header) -> Controller:
        """The controller under a segment's limits."""
        limits = limits_from(header.limits)
        if header.policy not in POLICIES:
            raise LogForeign(
                f"decided by policy {header.policy!r}; this version knows {sorted(POLICIES)}; use "
                "one that knows it"
            )
        controller = self.controller
        if controller is None:
            self.controller = controller = Controller(limits, header.policy, checked=self._checked)
        elif (limits, header.policy) != (controller.limits, controller.policy_name):
            actions = controller.reconfigure(limits, header.policy)
            if self._sink is not None:
                self._sink(actions)
        return controller

    def take(self, controller: Controller, entries: Iterator[Entry]) -> bool:
        """Handle a segment's records; whether to go on with the next segment."""
        handle, sink, until = controller.handle, self._sink, self._until
        for seq, _, record in entries:
            if until is not None and seq > until:
                return False
            if record.digest and not self._agrees(controller, seq, record.digest):
                return False
            actions = handle(record.input, record.time_ns)
            if sink is not None:
                sink(actions)
        return True

    def _agrees(self, controller: Controller, seq: Seq, recorded: str) -> bool:
        self.compared += 1
        folded = controller.digest()
        if folded != recorded:
            self.divergence = Divergence(seq, recorded, folded)
        return folded == recorded


def replay(
    directory: Path, until: Seq | None = None, sink: Sink | None = None, *, checked: bool = False
) -> ReplayResult:
    """Fold the log in `directory`, up to and with record `until`; `sink` gets each one's actions.

    Raises `LogError` for a log that can't be read, and `LimitsError` for limits of other rules.
    """
    fold = _Fold(until, sink, checked)
    for header, entries in segments(directory, rules=(RULES,)):
        if until is not None and header.first_seq > until and fold.controller is not None:
            break
        controller = fold.configure(header)
        if not fold.take(controller, entries):
            break
    inputs = 0 if fold.controller is None else fold.controller.world.seq
    return ReplayResult(fold.controller, inputs, fold.compared, fold.divergence)
