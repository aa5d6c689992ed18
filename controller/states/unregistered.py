"""`unregistered`: the controller knows nothing, or a load has not succeeded yet.

What it is: this state's row group. What it is not: a resting place; a record in it is on its way
in or out. One rule: it takes no memory anywhere.
"""

from controller.states.spec import ADAPTER_REMOVED, WEIGHTS_LOADED, State
from messages.ids import CPU_CACHED, UNREGISTERED

STATE = State(
    name=UNREGISTERED,
    fact="the controller knows nothing, or a load has not succeeded yet",
    host="-",
    device="-",
    moves={WEIGHTS_LOADED: CPU_CACHED, ADAPTER_REMOVED: UNREGISTERED},
)
