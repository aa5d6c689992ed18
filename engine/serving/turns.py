"""Turns of adapters in the slots: when each one leaves its slot for another.

The controller orders an adapter to leave as soon as others wait for a slot, and this room decides
when its turn is over, because tokens are counted here. A turn ends once a generation has the tokens
of a turn since the slot was written, and the oldest has one. So, regardless of the order of turns,
each completes something, or a part of a prompt that is kept until the next one.

A slot whose turn is over is reported as reset at once, and its generations are computed until the
next adapter is copied (`Residency.vacate_slot`, `GenerationScheduler.leave`): no slot is unused
while the controller decides and the copy runs.
"""

from collections.abc import Callable
from typing import Final

from loradock.engine.serving.scheduler import Scheduler
from loradock.messages.commands import PreemptSlot
from loradock.messages.ids import OpId

PROMPT_STEPS_MAX: Final = 128
"""A turn has at most this many steps more than tokens: its generations may wait for the batch."""

TURN_S_MAX: Final = 15.0
"""A turn that takes longer than this many seconds after the order is over: steps may be so slow
that its tokens would take longer than the controller allows an operation."""


class SlotTurns:
    """The slots whose adapters are to leave them at the end of their turns.

    `vacate` executes an order: it reports the slot as reset.
    """

    def __init__(self, scheduler: Scheduler, vacate: Callable[[PreemptSlot], None]) -> None:
        self._scheduler = scheduler
        self._vacate = vacate
        # The orders, with the steps since each of them, and the time of the first one.
        self._orders: dict[OpId, PreemptSlot] = {}
        self._steps: dict[OpId, int] = {}
        self._since_s: dict[OpId, float] = {}

    @property
    def operations(self) -> tuple[OpId, ...]:
        """The operations that have not ended."""
        return tuple(self._orders)

    def add(self, order: PreemptSlot) -> None:
        """Let an adapter leave its slot at the end of its turn, which `after_step` finds."""
        self._orders[order.op] = order

    def after_step(self, now_s: float) -> None:
        """Let the adapters leave whose turns are over; `now_s` is equal on all ranks."""
        for order in tuple(self._orders.values()):
            steps = self._steps[order.op] = self._steps.get(order.op, 0) + 1
            since_s = self._since_s.setdefault(order.op, now_s)
            is_late = steps > order.tokens + PROMPT_STEPS_MAX or now_s > since_s + TURN_S_MAX
            place = (order.slot, order.generation)
            if is_late or self._scheduler.is_turn_over(*place, order.tokens):
                del self._orders[order.op], self._steps[order.op], self._since_s[order.op]
                self._scheduler.leave(*place)
                self._vacate(order)
