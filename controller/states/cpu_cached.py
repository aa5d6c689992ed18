"""`cpu-cached`: weights read and checked against the model, in pageable memory.

What it is: this state's row group. What it is not: ready to copy; it has to be staged first. One
rule: it counts against the host budget.
"""

from controller.states.spec import ENGINE_LOST, WEIGHTS_DROPPED, WEIGHTS_STAGED, State
from messages.ids import CPU_CACHED, EVICTED, PINNED

STATE = State(
    name=CPU_CACHED,
    fact="weights read and checked against the model",
    host="pageable",
    device="-",
    moves={WEIGHTS_STAGED: PINNED, WEIGHTS_DROPPED: EVICTED, ENGINE_LOST: EVICTED},
)
