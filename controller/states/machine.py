"""A `transitions` machine made from the tables, and compiled look-ups of the hot path.

A trigger of the machine takes microseconds, so the hot path looks `NEXT_STATE` up instead.
"""

from typing import Final, cast

from transitions import Machine

from loradock.controller.states.table import STATES, STEPS, TRANSITIONS, Step
from loradock.messages.ids import AdapterState


class IllegalTransitionError(Exception):
    """An input that does not apply to an adapter's state."""

    def __init__(self, adapter: str, state: AdapterState, trigger: str) -> None:
        super().__init__(f"adapter {adapter!r} is {state}; {trigger} does not apply to that state")
        self.adapter = adapter
        self.state = state
        self.trigger = trigger


def build(model: object | None = None) -> Machine:
    """Return a machine that moves `model`, or a machine without a model, which only defines.

    It has no callbacks and no queue: an exception in a callback would leave the new state in place.
    It has no automatic transitions: they bypass the table.
    """
    machine = Machine(
        model=model,
        states=list(STATES),
        initial=STATES[0],
        auto_transitions=False,
        queued=False,
    )
    for source, row in TRANSITIONS.items():
        for trigger, target in row.items():
            machine.add_transition(trigger, source, target)
    return machine


def _compile(machine: Machine) -> dict[tuple[str, str], AdapterState]:
    return {
        (source, trigger): cast(AdapterState, transition.dest)
        for trigger, event in machine.events.items()
        for source, transitions in event.transitions.items()
        for transition in transitions
    }


NEXT_STATE: Final = _compile(build())
"""State and input to next state: every transition of the machine and nothing else."""

NEXT_STEP: Final[dict[tuple[AdapterState, AdapterState], Step]] = {
    (state, goal): step
    for state, row in STEPS.items()
    for goal, step in zip(STATES, row, strict=True)
}
"""State and goal to the next step towards the goal."""


def next_state(adapter: str, state: AdapterState, trigger: str) -> AdapterState:
    """Return the state after `trigger`; raises `IllegalTransitionError` if there is none."""
    target = NEXT_STATE.get((state, trigger))
    if target is None:
        raise IllegalTransitionError(adapter, state, trigger)
    return target
