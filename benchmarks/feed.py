"""Inputs for the core without an engine's work: every command succeeds at once.

What it is: the report that ends a command. What it is not: the oracle of the tests. One rule: used
only where the controller alone is measured.
"""

from collections.abc import Iterator

from controller.actions import Action, Command
from controller.core import Controller
from controller.limits import Limits
from messages import commands, records, reports, requests
from messages.records import Input

FINGERPRINT = "0123456789abcdef0123456789abcdef"


def report_on(command: commands.Command) -> reports.OperationReport | None:
    """The report of success; None for what has none."""
    match command:
        case commands.CheckAdapter():
            return reports.AdapterChecked(command.op, FINGERPRINT, 16, 1 << 20, 1 << 20)
        case commands.LoadWeights():
            return reports.WeightsLoaded(command.op)
        case commands.StageWeights():
            return reports.WeightsStaged(command.op)
        case commands.UnstageWeights():
            return reports.WeightsUnstaged(command.op)
        case commands.WriteSlot():
            return reports.SlotWritten(command.op)
        case commands.ResetSlot():
            return reports.SlotReset(command.op)
        case commands.DropWeights():
            return reports.WeightsDropped(command.op)
        case commands.SetMapping():
            return reports.MappingSet(command.op)
        case commands.StartGeneration():
            return reports.GenerationEnded(command.op, "stop", 16, 64)
    return None


class Feed:
    """A controller that is fed requests and the reports that follow; remembers its inputs."""

    def __init__(self, limits: Limits, *, remember: bool = False) -> None:
        self.controller = Controller(limits)
        self.inputs: list[Input] = []
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
                self.inputs.append(current)
            actions = self.controller.handle(current, self.controller.world.seq)
            pending += _reports(actions)

    def request_id(self) -> str:
        """A fresh one."""
        self._number += 1
        return f"bench-{self._number}"


def _reports(actions: list[Action]) -> Iterator[Input]:
    for action in actions:
        if isinstance(action, Command):
            report = report_on(action.message)
            if report is not None:
                yield report


def serve_traffic(feed: Feed, requests_count: int, adapters: int) -> None:
    """Generations over `adapters` names, some far more wanted than others, with some holds."""
    for number in range(requests_count):
        # A square of a low-discrepancy sequence: most requests want few of the adapters.
        share = (number * 0.618033988749895) % 1.0
        name = f"adapter-{int(share * share * adapters)}"
        if number % 50 == 0:
            feed.give(requests.HoldAdapter(feed.request_id(), name))
            feed.give(requests.ReleaseAdapter(feed.request_id(), name))
        if feed.controller.world.current(name) is None:
            feed.give(requests.LoadAdapter(feed.request_id(), name))
        feed.give(records.GenerationRequested(feed.request_id(), name))
