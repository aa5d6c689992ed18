"""The counters of one adapter: numbers and durations that no decision depends on.

They are a part of the state, so that a replay leads to the same numbers. `World.totals` has the sum
of all, `World.past_counters` the sum of removed adapters, `World.base_counters` the base model's.
"""

from typing import Final, TypeVar

from msgspec import Struct

from loradock.messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED, UNREGISTERED, AdapterState
from loradock.messages.views import CounterFields

S = TypeVar("S", bound=Struct)


def fast_assignment(kind: type[S]) -> type[S]:
    """Let the interpreter assign the fields of a struct with `gc=False`; a class decorator.

    msgspec's own assignment is there for the garbage collector, which does not visit these structs,
    and hides from the interpreter where a field is: it takes several times as long.
    """
    # Both: they are one function of the type. In the class's body msgspec would replace them.
    kind.__setattr__ = object.__setattr__  # type: ignore[method-assign]
    kind.__delattr__ = object.__delattr__  # type: ignore[method-assign]
    return kind


@fast_assignment
class Counters(CounterFields, array_like=True, gc=False):
    """Counts of an adapter's events under one name; durations in nanoseconds of logical time.

    `loradock.messages.views.AdapterCounters` describes each field.
    """

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

DURATION_OF: Final = {
    "CheckAdapter": "check_ns",
    "LoadWeights": "load_ns",
    "StageWeights": "stage_ns",
    "WriteSlot": "write_ns",
}
"""The field with the duration of the operations of a kind."""
