"""Slots that are taken from running generations, once these have used them.

A slot is left at once if the oldest generation that uses it has generated a token since the slot
was written. So, regardless of the order of turns, every turn completes something, or a part of a
prompt that is kept until the next one.
"""

from typing import Final

from loradock.engine.inference.scheduler import Scheduler
from loradock.engine.residency.residency import Residency
from loradock.messages.commands import PreemptSlot
from loradock.messages.ids import OpId

STEPS_MAX: Final = 128
"""After this many steps a slot is left anyway: the generation may wait for a row of the batch."""


class SlotPreemption:
    """The slots that are to be reset, as soon as their generations may be suspended."""

    def __init__(self, inference: Scheduler, residency: Residency) -> None:
        self._inference = inference
        self._residency = residency
        # The steps since each command.
        self._steps: dict[OpId, int] = {}
        self._commands: dict[OpId, PreemptSlot] = {}

    @property
    def operations(self) -> tuple[OpId, ...]:
        """The operations that have not ended."""
        return tuple(self._commands)

    def add(self, command: PreemptSlot) -> None:
        """Suspend the generations of a slot and reset it, now or after a later step."""
        self._commands[command.op] = command
        self._steps[command.op] = 0
        self._suspend_ready()

    def after_step(self) -> None:
        """Suspend and reset what has waited for this step."""
        for op in self._steps:
            self._steps[op] += 1
        self._suspend_ready()

    def _suspend_ready(self) -> None:
        for op, command in tuple(self._commands.items()):
            place = (command.slot, command.generation)
            if self._inference.has_progressed(*place) or self._steps[op] >= STEPS_MAX:
                del self._commands[op], self._steps[op]
                self._inference.suspend(*place)
                self._residency.execute(command)
