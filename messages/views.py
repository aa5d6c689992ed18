"""Parts of replies and reports."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from loradock.messages.base import Value
from loradock.messages.errors import DETAIL_CHARACTERS_MAX, DETAILS_MAX, ErrorCode
from loradock.messages.ids import AdapterName, AdapterState, Bytes, Generation, Path, Slot
from loradock.messages.prompts import TokenId

FinishReason = Literal["stop", "length", "cancelled"]
PoolingTask = Literal["embed", "classify"]
PrefetchTarget = Literal["cpu-cached", "pinned", "gpu-slot"]

Details = Annotated[
    tuple[Annotated[str, Meta(max_length=DETAIL_CHARACTERS_MAX)], ...], Meta(max_length=DETAILS_MAX)
]
"""All that is wrong, one finding each, where a message names the first of many; never logged."""

Warnings = Details
"""Findings about an adapter that is served all the same, for its users."""

Vector = Annotated[bytes, Meta(max_length=1 << 22)]
"""A sequence of float32 numbers, little-endian."""


class CounterFields(Struct, array_like=True, gc=False):
    """The fields of `AdapterCounters`, which describes them."""

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


# The core counts in the same fields, which are frozen here.
class AdapterCounters(  # type: ignore[misc]
    CounterFields, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Counts of an adapter's events under one name; durations in nanoseconds of recorded time.

    `hits`: requests to use it that found it in a slot; `misses`: others. Loads, stagings and holds
    only prepare it and are neither. `evictions`: how often a policy moved it down for others;
    `evictions_caused`: how often it moved others down. `loads` to `deactivations` count how often
    it entered and left each tier, `checks` complete checks of its files, `check_ns` to `write_ns`
    how long the engine took for them. `wait_ns`: the time that requests to use it waited for it,
    summed over requests. `stalls`, `stall_ns`: its waits for room that others used;
    `stall_caused_ns`: waits of others that ended when it left. `unregistered_ns` to `gpu_slot_ns`:
    the time that it was in each state. `served`: generations and poolings that ended, with their
    tokens; `prefix_hits`: those that reused an earlier prompt's KV cache, for `prefix_tokens`
    tokens.
    """


class AdapterView(Value, frozen=True):
    """State of one adapter; sizes in bytes, times in nanoseconds (UTC).

    `uses` to `failures` are also in `counters`, with all that was counted under its name.
    `warnings` are what the check of its files found.
    """

    adapter: AdapterName
    adapter_id: int
    state: AdapterState
    goal: AdapterState
    path: Path
    fingerprint: str
    rank: int
    slot: Slot
    generation: Generation
    held: bool
    retired: bool
    leases: int
    waiting: int
    host_bytes: Bytes
    pinned_bytes: Bytes
    device_bytes: Bytes
    uses: int
    loads: int
    hits: int
    evictions: int
    failures: int
    last_used_ns: int
    counters: AdapterCounters = AdapterCounters()
    warnings: Warnings = ()


class FailureView(Value, frozen=True):
    """Why the latest operation on an adapter failed, as long as none has succeeded since."""

    code: ErrorCode
    message: str
    details: Details = ()
    age_ms: int = 0


KVLayout = Literal["", "paged", "padded"]
"""Layout of keys and values: in blocks, as rows of equal length, or not at all."""

Batching = Literal["", "paged", "padded", "together", "single", "whole"]
"""Batching modes of an engine's steps, the fastest first; empty if it generates nothing.

In blocks, as one left-padded batch, together with states of any kind, one after another with a
state, or one after another with all tokens at each step.
"""

DURATION_BOUNDS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_BOUNDS: Final = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
PREEMPTION_BOUNDS: Final = (0, 1, 2, 3, 4, 5, 10, 20)
"""Inclusive upper bounds of the classes of a `Distribution`; another class follows."""


class Distribution(Value, frozen=True):
    """Observed values: their sum, and their number per class; no `counts` before the first one."""

    total: int = 0
    counts: tuple[int, ...] = ()


class EngineStatistics(Value, frozen=True):
    """Measurements of an engine since its start, and its memory; durations in nanoseconds.

    `steps` are forward passes, which took `step_ns`; they computed `prompt_tokens` and
    `output_tokens`. `running` requests take part in the next step, `waiting` requests are in the
    engine's queue; `preempted` counts those that waited again. A request was queued from its
    arrival in the engine until its first step: `queued` requests for `queue_ns` in all, by
    `DURATION_BOUNDS_S` in `queue_counts`. `slot_writes` and `slot_resets` count complete changes of
    the arena's directory. `kernels` names the implementation of the LoRA kernels. `allocated_bytes`
    is 0 on a CPU. `kv_layout` is empty if no keys and values are kept, and without an engine.
    `batching_refusal` is the first reason why `batching` is not a faster one; empty if there is
    none.

    Of a paged cache, `kv_blocks` blocks have `kv_block_tokens` tokens each. Where it
    `shares_prefixes`, `prefix_queries` tokens of prompts were looked up, of which `prefix_hits`
    were found. Each generation that ended is in the distributions: `prefill` from its first step
    until its first token, `decode` from there to its end, `inference` both (by
    `DURATION_BOUNDS_S`), how often it was preempted (by `PREEMPTION_BOUNDS`), and the tokens of its
    prompt that were computed (by `TOKEN_BOUNDS`).
    """

    kernels: str = ""
    steps: int = 0
    step_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    waiting: int = 0
    running: int = 0
    preempted: int = 0
    queued: int = 0
    queue_ns: int = 0
    queue_counts: tuple[int, ...] = ()
    slot_writes: int = 0
    slot_resets: int = 0
    kv_bytes: Bytes = 0
    kv_bytes_max: Bytes = 0
    arena_bytes: Bytes = 0
    arena_bytes_max: Bytes = 0
    host_bytes: Bytes = 0
    pinned_bytes: Bytes = 0
    allocated_bytes: Bytes = 0
    kv_layout: KVLayout = ""
    kv_blocks: int = 0
    kv_block_tokens: int = 0
    shares_prefixes: bool = False
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefill: Distribution = Distribution()
    decode: Distribution = Distribution()
    inference: Distribution = Distribution()
    preemptions: Distribution = Distribution()
    computed_tokens: Distribution = Distribution()
    batching: Batching = ""
    batching_refusal: str = ""


class TierView(Value, frozen=True):
    """Usage and bounds of a tier; `count` is adapters on the host or slots on the device."""

    name: Literal["host", "pinned", "device"]
    count: int
    count_max: int
    size_bytes: Bytes
    size_bytes_max: Bytes


class AdapterUse(Value, frozen=True):
    """An adapter that is in a slot or has requests, at the moment of a status.

    `slot`, `leases` and `waiters` are its current version's, as in `AdapterView`. The others
    count generations and poolings of all its versions: `running` ones take part in the engine's
    next step, `queued` ones wait in the engine, `waiting` ones wait for a slot.
    """

    adapter: AdapterName
    slot: Slot
    leases: int = 0
    waiters: int = 0
    running: int = 0
    queued: int = 0
    waiting: int = 0


class Placement(Value, frozen=True):
    """The slot of one adapter of a batch."""

    adapter: AdapterName
    slot: Slot
    generation: Generation


class TokenLogprob(Value, frozen=True):
    """The natural logarithm of a token's probability under the model's own logits.

    Temperature, penalties, biases and structures don't change it. `rank`: 1 for the most likely
    token. `top`: the most likely tokens with theirs, in descending order.
    """

    token: TokenId
    logprob: float
    rank: int
    top: tuple[tuple[TokenId, float], ...] = ()
