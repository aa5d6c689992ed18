"""The controller's core: one pure function from an input to actions.

What it is: the dispatch of an input, and what follows every input. What it is not: a process; it
knows no socket, file, clock or chance. One rule: clients, replays and tests all drive this same
`handle`, which is the only writer of its `World`.
"""

from collections.abc import Callable
from typing import Any, Final

from controller.core import (
    deadlines,
    engine_lifecycle,
    pending_requests,
    reconcile,
    report_handlers,
    request_handlers,
)
from controller.core.actions import Action
from controller.core.context import Turn
from controller.core.eviction import POLICIES
from controller.core.invariants import check
from controller.core.limits import Limits, check_limits
from controller.core.world import World
from messages import records, reports
from messages.errors import ErrorCode


class Controller:
    """The adapters' residency, decided."""

    def __init__(self, limits: Limits, policy: str = "lru", *, checked: bool = False) -> None:
        """`checked` verifies every invariant after every input; for tests, and when in doubt."""
        self.limits = check_limits(limits)
        self.policy_name = policy
        self.world = World(limits)
        self.policy = POLICIES[policy]
        self._turn = Turn(self.world, self.limits, self.policy, [])
        self._checked = checked

    def handle(self, message: records.Input, time_ns: int) -> list[Action]:
        """Take one input at one time (nanoseconds); say what is to be done.

        A time before the last one counts as that one: clocks are set back, the log's time is not.
        """
        world, turn = self.world, self._turn
        world.seq += 1
        world.time_ns = max(world.time_ns, time_ns)
        actions: list[Action] = []
        turn.actions = actions
        _HANDLERS[type(message)](turn, message)
        self._finish(turn)
        return actions

    def reconfigure(self, limits: Limits, policy: str) -> list[Action]:
        """Go on under other limits; the engine that the old ones bounded counts as lost."""
        self.limits = check_limits(limits)
        self.policy_name, self.policy = policy, POLICIES[policy]
        self._turn = turn = Turn(self.world, self.limits, self.policy, [])
        engine_lifecycle.lose(turn, "the limits were changed")
        self.world.resize(limits.slots_max)
        self.world.set_bounds(limits)
        for request_id in tuple(self.world.waiting)[limits.requests_max :]:
            fewer = f"requests_max was lowered to {limits.requests_max}; try again later"
            pending_requests.refuse_request(turn, request_id, ErrorCode.OVERLOADED, fewer)
        while len(self.world.answers) > limits.answers_max:
            turn.forget_answer()
        self._finish(turn)
        return turn.actions

    def digest(self) -> str:
        """The world's digest."""
        return self.world.digest()

    def _finish(self, turn: Turn) -> None:
        world = self.world
        if turn.due or world.batches:
            reconcile.follow_up(turn)
        if world.deadlines and not 0 < world.timer_ns <= world.deadlines[0][0]:
            deadlines.set_timer(turn)
        if self._checked:
            check(world, self.limits)


_HANDLERS: Final[dict[type, Callable[[Turn, Any], None]]] = {
    **dict.fromkeys(request_handlers.REQUESTS, request_handlers.on_request),
    **dict.fromkeys(report_handlers.REPORTS, report_handlers.on_report),
    reports.EngineInventory: engine_lifecycle.on_inventory,
    records.EngineLost: engine_lifecycle.on_lost,
    records.PayloadLost: engine_lifecycle.on_payload_lost,
    records.ControllerStarted: engine_lifecycle.on_started,
    records.TimerFired: deadlines.on_timer,
}
