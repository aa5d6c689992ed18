"""The life cycle of an adapter as two literal tables: what it becomes, and what is done next.

`TRANSITIONS` has the state after each input. `STEPS` has the step towards each goal. Every state
has its row in both, and what a row does not list is illegal.
"""

from typing import Final, Literal

from loradock.messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED, UNREGISTERED, AdapterState

STATES: Final[tuple[AdapterState, ...]] = (
    # The controller knows nothing, or a load has not succeeded yet. No memory.
    UNREGISTERED,
    # Dropped by policy, by request or with its engine; a use loads it again. No memory.
    EVICTED,
    # Read and checked against the model, in pageable memory: counts against the host budget.
    CPU_CACHED,
    # Packed and scaled in one page-locked blob, ready to copy: counts against the pinned budget.
    # A hold is something else: it exempts an adapter from eviction.
    PINNED,
    # In a device slot, which batches can use. Its blob stays page-locked, so that leaving the slot
    # costs no copy back.
    GPU_SLOT,
)
"""All states; each one after the first two holds more of the adapter than the one before it."""

RESIDENCY_LEVEL: Final[dict[AdapterState, int]] = {s: level for level, s in enumerate(STATES)}
"""Rank of a state by how much of an adapter is held: each step towards a goal goes up or down."""

# An input is called like the message that carries it.
WEIGHTS_LOADED: Final = "WeightsLoaded"
WEIGHTS_STAGED: Final = "WeightsStaged"
WEIGHTS_UNSTAGED: Final = "WeightsUnstaged"
WEIGHTS_DROPPED: Final = "WeightsDropped"
SLOT_WRITTEN: Final = "SlotWritten"
SLOT_RESET: Final = "SlotReset"
ENGINE_LOST: Final = "EngineLost"
ADAPTER_REMOVED: Final = "AdapterRemoved"

# fmt: off
TRANSITIONS: Final[dict[AdapterState, dict[str, AdapterState]]] = {
    UNREGISTERED: {WEIGHTS_LOADED: CPU_CACHED, ADAPTER_REMOVED: UNREGISTERED},
    EVICTED:      {WEIGHTS_LOADED: CPU_CACHED, ADAPTER_REMOVED: UNREGISTERED},
    CPU_CACHED:   {WEIGHTS_STAGED: PINNED, WEIGHTS_DROPPED: EVICTED, ENGINE_LOST: EVICTED},
    PINNED:       {SLOT_WRITTEN: GPU_SLOT, WEIGHTS_UNSTAGED: CPU_CACHED, WEIGHTS_DROPPED: EVICTED,
                   ENGINE_LOST: EVICTED},
    # A slot is reset before its weights are dropped.
    GPU_SLOT:     {SLOT_RESET: PINNED, ENGINE_LOST: EVICTED},
}
"""State -> input -> next state: only a report or the loss of the engine changes a state."""

Step = Literal["stay", "load", "stage", "write", "reset", "unstage", "drop", "forget"]

STEPS: Final[dict[AdapterState, tuple[Step, Step, Step, Step, Step]]] = {
    # Goal:        unregistered  evicted   cpu-cached  pinned   gpu-slot
    UNREGISTERED: ("forget",    "forget", "load",     "load",  "load"),
    EVICTED:      ("forget",    "stay",   "load",     "load",  "load"),
    CPU_CACHED:   ("drop",      "drop",   "stay",     "stage", "stage"),
    PINNED:       ("drop",      "drop",   "unstage",  "stay",  "write"),
    GPU_SLOT:     ("reset",     "reset",  "reset",    "reset", "stay"),
}
"""State -> the next step towards each goal, in the order of `STATES`; every pair has one."""
# fmt: on
