"""Folding a log: to recover, to audit, to look at any past moment.

What it is: the log's inputs driven through the same core, with the digests compared that the log
took on its way. What it is not: a second core or a server. One rule: it stops at the first input
whose recorded digest is not the folded world's, and says which.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from controller.actions import Action
from controller.core import Controller
from controller.limits import RULES, limits_from
from controller.shell.log import Entry, segments
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
        limits = limits_from(header.limits)
        controller = self.controller
        if controller is None:
            self.controller = controller = Controller(limits, header.policy, checked=self._checked)
        elif (limits, header.policy) != (controller.limits, controller.policy_name):
            self._emit(controller.reconfigure(limits, header.policy))
        return controller

    def take(self, controller: Controller, entry: Entry) -> bool:
        """Whether to go on with the next one."""
        seq, _, record = entry
        if self._until is not None and seq > self._until:
            return False
        if record.digest:
            self.compared += 1
            folded = controller.digest()
            if folded != record.digest:
                self.divergence = Divergence(seq, record.digest, folded)
                return False
        actions = controller.handle(record.input, record.time_ns)
        if self._sink is not None:
            self._sink(actions)
        return True

    def _emit(self, actions: list[Action]) -> None:
        if self._sink is not None:
            self._sink(actions)


def replay(
    directory: Path, until: Seq | None = None, sink: Sink | None = None, *, checked: bool = False
) -> ReplayResult:
    """Fold the log in `directory`, up to and with record `until`; `sink` gets each one's actions.

    Raises `LogError` for a log that can't be read, and `LimitsError` for limits of other rules.
    """
    fold = _Fold(until, sink, checked)
    for header, entries in segments(directory, rules=(RULES,)):
        controller = fold.configure(header)
        if not all(fold.take(controller, entry) for entry in entries):
            break
    inputs = 0 if fold.controller is None else fold.controller.world.seq
    return ReplayResult(fold.controller, inputs, fold.compared, fold.divergence)
