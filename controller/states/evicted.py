"""`evicted`: the weights are dropped; source, fingerprint and history are kept.

What it is: this state's row group. What it is not: forgetting; a use loads the adapter again. One
rule: it takes no memory for weights.
"""

from controller.states.spec import ADAPTER_REMOVED, WEIGHTS_LOADED, State
from messages.ids import CPU_CACHED, EVICTED, UNREGISTERED

STATE = State(
    name=EVICTED,
    fact="dropped by policy, by request or with its engine; a use reloads it",
    host="-",
    device="-",
    moves={WEIGHTS_LOADED: CPU_CACHED, ADAPTER_REMOVED: UNREGISTERED},
)
