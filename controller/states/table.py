"""The life cycle's table, compiled from the machine once, for the hot path.

What it is: a dict and a function. What it is not: a second definition; a test holds it equal to the
machine on every pair. One rule: a pair that is not in the table raises and changes nothing.
"""

from typing import Final, cast

from controller.states.machine import STATES, build
from messages.ids import AdapterState


class IllegalMoveError(Exception):
    """An input that this state does not know; names adapter, state and input."""

    def __init__(self, adapter: str, state: AdapterState, trigger: str) -> None:
        super().__init__(f"adapter {adapter!r} is {state}; {trigger} does not apply to that state")
        self.adapter = adapter
        self.state = state
        self.trigger = trigger


def _compile() -> dict[tuple[str, str], AdapterState]:
    return {
        (source, trigger): cast(AdapterState, transition.dest)
        for trigger, event in build().events.items()
        for source, transitions in event.transitions.items()
        for transition in transitions
    }


MOVES: Final = _compile()

HEIGHT: Final[dict[AdapterState, int]] = {state.name: height for height, state in enumerate(STATES)}
"""How much of an adapter is there: every step towards a goal goes up or down by this order."""


def move(adapter: str, state: AdapterState, trigger: str) -> AdapterState:
    """The state after `trigger`; raises `IllegalMoveError` where the table has no row."""
    target = MOVES.get((state, trigger))
    if target is None:
        raise IllegalMoveError(adapter, state, trigger)
    return target
