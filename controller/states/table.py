"""The life cycle as one literal table: states, inputs and transitions."""

from typing import Final

from loradock.messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED, UNREGISTERED, AdapterState

# An input is called like the message that carries it.
WEIGHTS_LOADED: Final = "WeightsLoaded"
WEIGHTS_STAGED: Final = "WeightsStaged"
WEIGHTS_UNSTAGED: Final = "WeightsUnstaged"
WEIGHTS_DROPPED: Final = "WeightsDropped"
SLOT_WRITTEN: Final = "SlotWritten"
SLOT_RESET: Final = "SlotReset"
ENGINE_LOST: Final = "EngineLost"
ADAPTER_REMOVED: Final = "AdapterRemoved"

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
    # In a device slot, which batches may use. Its blob stays page-locked, so that leaving the slot
    # costs no copy back.
    GPU_SLOT,
)
"""All states; each one after the first two holds more of the adapter than the one before it."""

RESIDENCY_LEVEL: Final[dict[AdapterState, int]] = {s: level for level, s in enumerate(STATES)}
"""How much of an adapter is held: every step towards a goal follows this order up or down."""

TRANSITIONS: Final[tuple[tuple[AdapterState, str, AdapterState], ...]] = (
    (UNREGISTERED, WEIGHTS_LOADED, CPU_CACHED),
    (UNREGISTERED, ADAPTER_REMOVED, UNREGISTERED),
    (EVICTED, WEIGHTS_LOADED, CPU_CACHED),
    (EVICTED, ADAPTER_REMOVED, UNREGISTERED),
    (CPU_CACHED, WEIGHTS_STAGED, PINNED),
    (CPU_CACHED, WEIGHTS_DROPPED, EVICTED),
    (CPU_CACHED, ENGINE_LOST, EVICTED),
    (PINNED, SLOT_WRITTEN, GPU_SLOT),
    (PINNED, WEIGHTS_UNSTAGED, CPU_CACHED),
    (PINNED, WEIGHTS_DROPPED, EVICTED),
    (PINNED, ENGINE_LOST, EVICTED),
    # A slot is reset before its weights are dropped.
    (GPU_SLOT, SLOT_RESET, PINNED),
    (GPU_SLOT, ENGINE_LOST, EVICTED),
)
"""State, input, next state. Every pair that is not listed is illegal."""
