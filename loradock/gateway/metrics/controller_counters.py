"""Metric families of what the controller counted since its log began, and of its engine.

These do not begin again when a gateway starts, and are equal in all gateways.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric

from loradock.gateway.metrics.metric_types import counter, gauge, labelled_counter
from loradock.messages.views import AdapterCounters, EngineStatistics

_SECOND_NS: Final = 1_000_000_000
_TRANSITIONS: Final = ("check", "load", "stage", "write")
_COUNT_OF: Final = dict(
    zip(_TRANSITIONS, ("checks", "loads", "stagings", "activations"), strict=True)
)


def counter_families(counters: AdapterCounters) -> Iterator[Metric]:
    """Yield what was counted of all adapters."""
    moves = {name: getattr(counters, _COUNT_OF[name]) for name in _TRANSITIONS}
    yield labelled_counter(
        "loradock_transitions", "Moves of adapters towards a slot.", "transition", moves
    )
    yield _seconds_by(
        "loradock_transition_seconds",
        "Time of the engine for moves of adapters towards a slot.",
        "transition",
        {name: getattr(counters, f"{name}_ns") for name in _TRANSITIONS},
    )
    stalls = {"suffered": counters.stall_ns, "caused": counters.stall_caused_ns}
    yield _seconds_by(
        "loradock_stall_seconds", "Waits of adapters for room that others used.", "role", stalls
    )
    yield counter("loradock_stalls", "Waits of adapters for room.", counters.stalls)
    yield counter("loradock_slot_hits", "Requests that found their adapter in a slot.",
                  counters.hits)  # fmt: skip
    yield counter("loradock_slot_misses", "Requests that did not.", counters.misses)
    yield counter("loradock_prefetches", "Requests to prefetch.", counters.prefetches)
    yield counter(
        "loradock_residency_wait_seconds",
        "Waits of requests for their adapters.",
        counters.wait_ns / _SECOND_NS,
    )
    yield counter("loradock_policy_evictions", "Adapters moved down for others.",
                  counters.evictions)  # fmt: skip
    yield counter("loradock_served", "Inferences that ended.", counters.served)
    yield counter("loradock_served_prompt_tokens", "Their prompts' tokens.", counters.prompt_tokens)
    yield counter("loradock_served_output_tokens", "Their output's tokens.", counters.output_tokens)
    yield counter("loradock_prefix_hits", "Prompts that reused another one's KV cache.",
                  counters.prefix_hits)  # fmt: skip
    yield counter("loradock_prefix_tokens", "Tokens of prompts that were reused.",
                  counters.prefix_tokens)  # fmt: skip


def engine_families(engine: EngineStatistics) -> Iterator[Metric]:
    """Yield what the engine measured since its start; a new engine begins again."""
    yield counter("loradock_engine_steps", "Forward passes.", engine.steps)
    yield counter("loradock_engine_step_seconds", "Time of forward passes.",
                  engine.step_ns / _SECOND_NS)  # fmt: skip
    yield counter("loradock_engine_preemptions", "Requests that waited again.", engine.preempted)
    yield gauge("loradock_engine_running", "Requests in the batch.", engine.running)
    yield gauge("loradock_engine_waiting", "Requests in the engine's queue.", engine.waiting)
    yield gauge("loradock_kv_cache_bytes", "Memory of keys and values.", engine.kv_bytes)
    yield gauge("loradock_kv_cache_bytes_max", "Its budget; 0: none.", engine.kv_bytes_max)
    yield gauge("loradock_arena_bytes", "Memory of adapters on the device.", engine.arena_bytes)
    yield gauge("loradock_arena_bytes_max", "The size of that memory.", engine.arena_bytes_max)
    yield gauge("loradock_device_allocated_bytes", "Memory that the engine allocated on a GPU.",
                engine.allocated_bytes)  # fmt: skip
    yield counter("loradock_slot_writes", "Adapters copied into slots.", engine.slot_writes)
    yield counter("loradock_slot_resets", "Slots that were cleared.", engine.slot_resets)


def _seconds_by(name: str, text: str, label: str, values_ns: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, time_ns in values_ns.items():
        family.add_metric([value], time_ns / _SECOND_NS)
    return family
