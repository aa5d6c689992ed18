"""The controller's configuration: every bound, with its unit. The log's header stores it.

A replay with the same limits makes the same decisions. The shell's options (paths, sockets) decide
nothing and are not here.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from loradock.controller.core.answers import WindowBounds

RULES = 3
"""The number of the core's rules. A change of what `handle` decides, or of a refusal's text (which
is part of the digest), needs a new one."""

RULES_READ = (2, 3)
"""The rules that logs are replayed by; inputs are added by the last one.

Rules 3 against rules 2: a victim is the least recently used adapter of all states that hold a tier,
not of one state after the other, and a move is no use. Inference that waits for an adapter when it
is removed is served first, not refused, and later requests find no adapter of its name.
"""

_GIB = 1 << 30

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
SizeBytes = Annotated[int, Meta(ge=0, le=1 << 50)]
DurationMs = Annotated[int, Meta(ge=1, le=3_600_000)]
QuantumMs = Annotated[int, Meta(ge=0, le=3_600_000)]


FIXED = ("slots_max", "device_bytes_max")
"""The limits that an engine is started with; the others can change while it runs."""


SLOT_QUANTUM_MS: Final = 250
"""The `slot_quantum_ms` of servers that are started without one."""


class LimitsError(ValueError):
    """Limits that contradict one another or exceed their bounds."""


class Limits(Struct, frozen=True):
    """The bounds of the controller; the one that is reached first decides."""

    slots_max: Annotated[int, Meta(ge=1, le=65_536)] = 8
    """Device slots, and so the most distinct adapters in one batch (vLLM's `max_loras`)."""
    host_adapters_max: Count = 64
    """Adapters with weights on the host, in any state (vLLM's `max_cpu_loras`)."""
    host_bytes_max: SizeBytes = 4 * _GIB
    """Pageable memory for `cpu-cached` adapters."""
    pinned_bytes_max: SizeBytes = 4 * _GIB
    """Page-locked memory for `pinned` and `gpu-slot` adapters."""
    device_bytes_max: SizeBytes = _GIB
    """The engine's arena."""
    known_adapters_max: Count = 1_000_000
    """Adapters known by name, evicted ones and replaced versions included."""
    requests_max: Count = 16_384
    """Pending requests, running generations included."""
    answers_max: Count = 262_144
    """Answers stored for repeated requests; beyond it, the client with the most loses its oldest.
    A request whose answer is dropped counts as new."""
    answers_per_client_max: Count = 1024
    """Answers stored of one client."""
    answers_kept_ms: DurationMs = 3_600_000
    """How long answers are stored."""
    request_timeout_ms: DurationMs = 30_000
    """How long a request waits if the client does not specify it."""
    generation_timeout_ms: DurationMs = 600_000
    """How long a generation may take if the client does not specify it."""
    operation_timeout_ms: DurationMs = 60_000
    """How long the engine may take for one operation before the waiting requests are refused."""
    rest_ms: DurationMs = 5_000
    """How long an adapter that the engine failed to move is not moved again without a request."""
    digest_interval: Count = 1024
    """Inputs between two digests in the log."""
    slot_quantum_ms: QuantumMs = 0
    """How long an adapter keeps its slot for running generations while others wait for one; 0: to
    the end of the generations. Logs without this limit are of that rule."""


def window_bounds(limits: Limits) -> WindowBounds:
    """Return the bounds on stored answers."""
    kept_ns = limits.answers_kept_ms * 1_000_000
    return WindowBounds(limits.answers_max, limits.answers_per_client_max, kept_ns)


def check_limits(limits: Limits) -> Limits:
    """Return `limits`; raises `LimitsError` with both values if two contradict."""
    if limits.host_adapters_max < limits.slots_max:
        raise LimitsError(
            f"host-adapters is {limits.host_adapters_max}, slots {limits.slots_max}: an adapter "
            "in a slot is on the host too; raise host-adapters or lower slots"
        )
    return limits


def rules_read() -> str:
    """Return the rules that logs are replayed by, as errors name them."""
    return " and ".join(map(str, RULES_READ))


def limits_from(values: dict[str, int]) -> Limits:
    """Return the limits of a log's header; raises `LimitsError` for unknown or invalid ones."""
    unknown = sorted(set(values) - set(Limits.__struct_fields__))
    if unknown:
        raise LimitsError(f"limits {unknown} are unknown to rules {RULES}")
    try:
        return check_limits(msgspec.convert(values, Limits))
    except msgspec.ValidationError as error:
        raise LimitsError(str(error)) from error


def limits_to(limits: Limits) -> dict[str, int]:
    """Return the limits as a log's header stores them."""
    return msgspec.structs.asdict(limits)
