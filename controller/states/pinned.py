"""`pinned`: packed into one page-locked blob, scaling folded in, ready to copy.

What it is: this state's row group. What it is not: a hold; *pinned* means page-locked memory and
nothing else. One rule: it counts against the pinned budget.
"""

from controller.states.spec import (
    ENGINE_LOST,
    SLOT_WRITTEN,
    WEIGHTS_DROPPED,
    WEIGHTS_UNSTAGED,
    State,
)
from messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED

STATE = State(
    name=PINNED,
    fact="packed and scaled in one page-locked blob, ready to copy",
    host="page-locked",
    device="-",
    moves={
        SLOT_WRITTEN: GPU_SLOT,
        WEIGHTS_UNSTAGED: CPU_CACHED,
        WEIGHTS_DROPPED: EVICTED,
        ENGINE_LOST: EVICTED,
    },
)
