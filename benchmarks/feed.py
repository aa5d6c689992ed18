"""Input for the controller's core without an engine: every command succeeds at once.

For measurements of the controller alone.
"""

from collections.abc import Callable, Iterator
from typing import Final

from loradock.controller.core.actions import Action, PublishEvent, SendCommand
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.messages import commands, records, reports, requests
from loradock.messages.events import Published
from loradock.messages.records import Input

SKEW = 13.5
"""The skew of requests over adapters: one in twenty is for the rarer half of 64 adapters."""
FINGERPRINT = "0123456789abcdef0123456789abcdef"


_SUCCESS: Final[dict[type, Callable[[int], reports.OperationReport]]] = {
    commands.CheckAdapter: lambda op: reports.AdapterChecked(op, FINGERPRINT, 16, 1 << 20, 1 << 20),
    commands.LoadWeights: reports.WeightsLoaded,
    commands.StageWeights: reports.WeightsStaged,
    commands.UnstageWeights: reports.WeightsUnstaged,
    commands.WriteSlot: reports.SlotWritten,
    commands.ResetSlot: reports.SlotReset,
    commands.DropWeights: reports.WeightsDropped,
    commands.StartGeneration: lambda op: reports.GenerationEnded(op, "stop", 16, 64),
}
"""Command type -> its report of success, from the operation's number."""


class CoreFeed:
    """A controller core that handles requests and the reports that follow.

    `inputs`: those recorded, in the form of log records: input, digest. `events`: what they led to.
    """

    def __init__(self, limits: Limits, *, record: bool = False) -> None:
        self.controller = Controller(limits)
        self.inputs: list[tuple[Input, str]] = []
        self.events: list[Published] = []
        self._records_inputs = record
        self._number = 0
        self.handle(records.ControllerStarted(1))
        self.handle(reports.EngineInventory("engine", 1, "model", limits.max_loras, 1 << 40))

    def handle(self, message: Input) -> None:
        """Handle an input and every report that its commands lead to."""
        pending: list[Input] = [message]
        while pending:
            current = pending.pop(0)
            if self._records_inputs:
                self.inputs.append((current, self._digest()))
            actions = self.controller.handle(current, self.controller.world.seq)
            if self._records_inputs:
                self.events += [a.message for a in actions if isinstance(a, PublishEvent)]
            pending += _reports(actions)

    def _digest(self) -> str:
        due = self.controller.world.seq % self.controller.limits.digest_interval == 0
        return self.controller.digest() if due else ""

    def request_id(self) -> str:
        """Return a new request id."""
        self._number += 1
        return f"bench-{self._number}"


def _reports(actions: list[Action]) -> Iterator[Input]:
    for action in actions:
        if isinstance(action, SendCommand):
            command = action.message
            if isinstance(command, commands.Operation):
                yield _SUCCESS[type(command)](command.op)


def serve_traffic(feed: CoreFeed, generations: int, adapters: int) -> None:
    """Request generations from `adapters` names with skewed frequencies, and some holds."""
    for number in range(generations):
        # A low-discrepancy sequence, skewed so that most requests are for few of the adapters.
        share = (number * 0.618033988749895) % 1.0
        name = f"adapter-{int(share**SKEW * adapters)}"
        if number % 50 == 0:
            feed.handle(requests.HoldAdapter(feed.request_id(), name))
            feed.handle(requests.ReleaseAdapter(feed.request_id(), name))
        if feed.controller.world.current(name) is None:
            feed.handle(requests.LoadAdapter(feed.request_id(), name))
        feed.handle(records.GenerationRequested(feed.request_id(), name))
