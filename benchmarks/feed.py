"""Inputs for the core without an engine's work: every command succeeds at once.

What it is: the report that ends a command. What it is not: the oracle of the tests. One rule: used
only where the controller alone is measured.
"""

from collections.abc import Callable, Iterator
from typing import Final

from controller.core.actions import Action, Command
from controller.core.controller import Controller
from controller.core.limits import Limits
from messages import commands, records, reports, requests
from messages.records import Input

# How unequal the adapters are: with 64 of them, one request in twenty wants one of the rarer half.
SKEW = 13.5
FINGERPRINT = "0123456789abcdef0123456789abcdef"


_SUCCESS: Final[dict[type, Callable[[int], reports.OperationReport]]] = {
    commands.CheckAdapter: lambda op: reports.AdapterChecked(op, FINGERPRINT, 16, 1 << 20, 1 << 20),
    commands.LoadWeights: reports.WeightsLoaded,
    commands.StageWeights: reports.WeightsStaged,
    commands.UnstageWeights: reports.WeightsUnstaged,
    commands.WriteSlot: reports.SlotWritten,
    commands.ResetSlot: reports.SlotReset,
    commands.DropWeights: reports.WeightsDropped,
    commands.SetMapping: reports.MappingSet,
    commands.StartGeneration: lambda op: reports.GenerationEnded(op, "stop", 16, 64),
}
"""The report of success on each operation."""


class Feed:
    """A controller that is fed requests and the reports that follow.

    `inputs` are those that it remembers, as a log's record has them: input, client, digest.
    """

    def __init__(self, limits: Limits, *, remember: bool = False) -> None:
        self.controller = Controller(limits)
        self.inputs: list[tuple[Input, bytes, str]] = []
        self._remember = remember
        self._number = 0
        self.give(records.ControllerStarted(1))
        self.give(reports.EngineInventory("engine", 1, "model", limits.slots_max, 1 << 40))

    def give(self, message: Input) -> None:
        """Handle an input and every report that its commands lead to."""
        pending: list[Input] = [message]
        while pending:
            current = pending.pop(0)
            if self._remember:
                self.inputs.append((current, b"", self._digest()))
            actions = self.controller.handle(current, self.controller.world.seq)
            pending += _reports(actions)

    def _digest(self) -> str:
        due = self.controller.world.seq % self.controller.limits.digest_interval == 0
        return self.controller.digest() if due else ""

    def request_id(self) -> str:
        """A fresh one."""
        self._number += 1
        return f"bench-{self._number}"


def _reports(actions: list[Action]) -> Iterator[Input]:
    for action in actions:
        if isinstance(action, Command):
            command = action.message
            if isinstance(command, commands.Operation):
                yield _SUCCESS[type(command)](command.op)


def serve_traffic(feed: Feed, requests_count: int, adapters: int) -> None:
    """Generations over `adapters` names, some far more wanted than others, with some holds."""
    for number in range(requests_count):
        # A low-discrepancy sequence, skewed: most requests want few of the adapters.
        share = (number * 0.618033988749895) % 1.0
        name = f"adapter-{int(share**SKEW * adapters)}"
        if number % 50 == 0:
            feed.give(requests.HoldAdapter(feed.request_id(), name))
            feed.give(requests.ReleaseAdapter(feed.request_id(), name))
        if feed.controller.world.current(name) is None:
            feed.give(requests.LoadAdapter(feed.request_id(), name))
        feed.give(records.GenerationRequested(feed.request_id(), name))
