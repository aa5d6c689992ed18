"""The controller's configuration: every bound, with its unit.

What it is: one frozen Struct that the log's header keeps. What it is not: the shell's options
(paths, sockets), which decide nothing. One rule: a replay with the same limits decides the same.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

RULES = 1
"""The number of the core's rules; a change of what `handle` decides gets a new one."""

_GIB = 1 << 30

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
SizeBytes = Annotated[int, Meta(ge=0, le=1 << 50)]
DurationMs = Annotated[int, Meta(ge=1, le=3_600_000)]


class LimitsError(ValueError):
    """Limits that contradict one another or their bounds."""


class Limits(Struct, frozen=True):
    """Whichever bound is hit first decides."""

    slots_max: Annotated[int, Meta(ge=1, le=65_536)] = 8
    """Device slots, and so the most distinct adapters in one batch (vLLM's `max_loras`)."""
    host_adapters_max: Count = 64
    """Adapters with weights on the host, in whatever state (vLLM's `max_cpu_loras`)."""
    host_bytes_max: SizeBytes = 4 * _GIB
    """Pageable memory for `cpu-cached` adapters."""
    pinned_bytes_max: SizeBytes = 4 * _GIB
    """Page-locked memory for `pinned` and `gpu-slot` adapters."""
    device_bytes_max: SizeBytes = _GIB
    """The engine's arena."""
    known_adapters_max: Count = 1_000_000
    """Adapters known by name, evicted ones and old versions included."""
    requests_max: Count = 16_384
    """Requests waiting for their fact, generations included."""
    answers_max: Count = 65_536
    """Answers kept for repeated requests; a request older than these is not recognised."""
    request_timeout_ms: DurationMs = 30_000
    """How long a request waits where the client does not say."""
    generation_timeout_ms: DurationMs = 600_000
    """How long a generation may take where the client does not say."""
    operation_timeout_ms: DurationMs = 60_000
    """How long the engine may take for one operation before its clients are told."""
    rest_ms: DurationMs = 5_000
    """How long an adapter that the engine failed to move is left alone, if nobody asks for it."""
    digest_interval: Count = 1024
    """Inputs between two digests in the log."""


def check_limits(limits: Limits) -> Limits:
    """`limits` itself; raises `LimitsError` naming both values where two contradict."""
    if limits.host_adapters_max < limits.slots_max:
        raise LimitsError(
            f"host_adapters_max is {limits.host_adapters_max}, slots_max {limits.slots_max}: an "
            "adapter in a slot is on the host too; raise host_adapters_max or lower slots_max"
        )
    return limits


def limits_from(values: dict[str, int]) -> Limits:
    """The limits that a log's header kept; raises `LimitsError` for unknown or bad ones."""
    unknown = sorted(set(values) - set(Limits.__struct_fields__))
    if unknown:
        raise LimitsError(f"limits {unknown} are unknown to rules {RULES}")
    try:
        return check_limits(msgspec.convert(values, Limits))
    except msgspec.ValidationError as error:
        raise LimitsError(str(error)) from error


def limits_to(limits: Limits) -> dict[str, int]:
    """The limits as a log's header keeps them."""
    return msgspec.structs.asdict(limits)
