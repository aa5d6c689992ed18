"""The life cycle as a `transitions` machine: the definition that everything else is drawn from.

What it is: the only place that imports `transitions`. What it is not: the hot path; a trigger
costs microseconds, so `table` compiles the machine once. One rule: no callbacks and no queue, for
an exception in one would leave a state that no report told; no auto-transitions, which are ways
round the table.
"""

from typing import Final

from transitions import Machine

from controller.states import cpu_cached, evicted, gpu_slot, pinned, unregistered
from controller.states.spec import State

STATES: Final[tuple[State, ...]] = (
    unregistered.STATE,
    evicted.STATE,
    cpu_cached.STATE,
    pinned.STATE,
    gpu_slot.STATE,
)
"""In order of height: each state holds more than the one before it."""


def build(model: object | None = None) -> Machine:
    """A machine over `model` (None: a machine that only defines)."""
    machine = Machine(
        model=model,
        states=[state.name for state in STATES],
        initial=STATES[0].name,
        auto_transitions=False,
        queued=False,
    )
    for state in STATES:
        for trigger, target in state.moves.items():
            machine.add_transition(trigger, state.name, target)
    return machine
