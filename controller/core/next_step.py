"""One adapter's next step, from the fact that is there towards the goal that somebody has.

What it is: a literal table over (state, goal). What it is not: whether there is room for the step
(`room`) or how it is taken (`drive`). One rule: every pair has its row, also the still ones.
"""

from enum import Enum, auto
from typing import Final

from messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED, UNREGISTERED, AdapterState


class Step(Enum):
    """What to do next; `LOAD` of an adapter without a fingerprint is preceded by a check."""

    STAY = auto()
    LOAD = auto()
    STAGE = auto()
    WRITE = auto()
    RESET = auto()
    UNSTAGE = auto()
    DROP = auto()
    FORGET = auto()


_S = Step

NEXT_STEP: Final[dict[AdapterState, dict[AdapterState, Step]]] = {
    UNREGISTERED: {
        UNREGISTERED: _S.FORGET,
        EVICTED: _S.FORGET,
        CPU_CACHED: _S.LOAD,
        PINNED: _S.LOAD,
        GPU_SLOT: _S.LOAD,
    },
    EVICTED: {
        UNREGISTERED: _S.FORGET,
        EVICTED: _S.STAY,
        CPU_CACHED: _S.LOAD,
        PINNED: _S.LOAD,
        GPU_SLOT: _S.LOAD,
    },
    CPU_CACHED: {
        UNREGISTERED: _S.DROP,
        EVICTED: _S.DROP,
        CPU_CACHED: _S.STAY,
        PINNED: _S.STAGE,
        GPU_SLOT: _S.STAGE,
    },
    PINNED: {
        UNREGISTERED: _S.DROP,
        EVICTED: _S.DROP,
        CPU_CACHED: _S.UNSTAGE,
        PINNED: _S.STAY,
        GPU_SLOT: _S.WRITE,
    },
    GPU_SLOT: {
        UNREGISTERED: _S.RESET,
        EVICTED: _S.RESET,
        CPU_CACHED: _S.RESET,
        PINNED: _S.RESET,
        GPU_SLOT: _S.STAY,
    },
}
