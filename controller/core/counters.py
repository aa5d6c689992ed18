"""The counters of one adapter: numbers and durations that no decision depends on.

They are a part of the state, so that a replay leads to the same numbers. `World.totals` has the sum
of all, `World.past_counters` the sum of removed adapters, `World.base_counters` the base model's.
"""

from typing import Final

from msgspec import Struct

from loradock.controller.core.fast_assignment import fast_assignment
from loradock.messages import commands
from loradock.messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED, UNREGISTERED, AdapterState


@fast_assignment
class Counters(Struct, array_like=True, gc=False):
    """Counts of an adapter's events under one name; durations in nanoseconds of logical time.

    `loradock.messages.views.AdapterCounters` describes each field.
    """

    hits: int = 0
    misses: int = 0
    prefetches: int = 0
    failures: int = 0
    evictions: int = 0
    evictions_caused: int = 0
    loads: int = 0
    unloads: int = 0
    stagings: int = 0
    unstagings: int = 0
    activations: int = 0
    deactivations: int = 0
    checks: int = 0
    check_ns: int = 0
    load_ns: int = 0
    stage_ns: int = 0
    write_ns: int = 0
    wait_ns: int = 0
    stalls: int = 0
    stall_ns: int = 0
    stall_caused_ns: int = 0
    unregistered_ns: int = 0
    evicted_ns: int = 0
    cpu_cached_ns: int = 0
    pinned_ns: int = 0
    gpu_slot_ns: int = 0
    served: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0

    @property
    def uses(self) -> int:
        """The number of requests that used the adapter."""
        return self.hits + self.misses

    def add(self, other: "Counters") -> None:
        """Add other counters to these."""
        for name in FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


FIELDS: Final = Counters.__struct_fields__

TIME_IN: Final[dict[AdapterState, str]] = {
    UNREGISTERED: "unregistered_ns",
    EVICTED: "evicted_ns",
    CPU_CACHED: "cpu_cached_ns",
    PINNED: "pinned_ns",
    GPU_SLOT: "gpu_slot_ns",
}
"""The field with the time that an adapter spent in a state, until it left the state."""

COUNTS_OF_TRANSITION: Final[dict[tuple[AdapterState, AdapterState], tuple[str, ...]]] = {
    (UNREGISTERED, CPU_CACHED): ("loads",),
    (EVICTED, CPU_CACHED): ("loads",),
    (CPU_CACHED, PINNED): ("stagings",),
    (PINNED, GPU_SLOT): ("activations",),
    (GPU_SLOT, PINNED): ("deactivations",),
    (PINNED, CPU_CACHED): ("unstagings",),
    (CPU_CACHED, EVICTED): ("unloads",),
    (PINNED, EVICTED): ("unstagings", "unloads"),
    (GPU_SLOT, EVICTED): ("deactivations", "unstagings", "unloads"),
}
"""The tiers that an adapter enters or leaves by a transition."""

DURATION_OF: Final[dict[type, str]] = {
    commands.CheckAdapter: "check_ns",
    commands.LoadWeights: "load_ns",
    commands.StageWeights: "stage_ns",
    commands.WriteSlot: "write_ns",
}
"""The field with the duration of the operations of a kind."""
