"""The controller's configuration: every bound, with its unit. The log's header stores it.

A replay with the same limits makes the same decisions. The shell's options (paths, sockets) decide
nothing and are not here.
"""

from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta, Struct, field

from loradock.controller.core.answers import WindowBounds
from loradock.messages.engine_options import (
    DEVICE_BYTES_DEFAULT,
    PINNED_BYTES_DEFAULT,
    MaxLoras,
)
from loradock.messages.options import option

RULES = 7
"""The number of the core's rules, the only ones that logs are replayed by. A change of what
`handle` decides, or of a refusal's text (which is part of the digest), needs a new number."""

_GIB = 1 << 30

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
SizeBytes = Annotated[int, Meta(ge=0, le=1 << 50)]
DurationMs = Annotated[int, Meta(ge=1, le=3_600_000)]


FIXED = ("max_loras", "device_bytes_max")
"""The limits that an engine is started with; the others can change while it runs."""


TURNS: Final = (("none", 0), ("latency", 8), ("balanced", 24), ("throughput", 64))
"""The tokens of an adapter's turn in a slot, by the goal that an operator states."""

TURN_TOKENS_DEFAULT: Final = dict(TURNS)["balanced"]
"""The `turn_tokens` of servers that are started without a goal."""


class LimitsError(ValueError):
    """Limits that contradict one another or exceed their bounds."""


class Limits(Struct, frozen=True):
    """The bounds of the controller; the bound that is reached first decides."""

    PANEL: ClassVar = "Bounds"

    max_loras: MaxLoras = field(default=8, name="slots_max")
    max_cpu_loras: Annotated[
        Count,
        option(
            "Largest number of adapters kept in host memory (RAM), those in slots included.",
            former="--host-adapters",
            is_common=True,
        ),
    ] = field(default=64, name="host_adapters_max")
    host_bytes_max: Annotated[
        SizeBytes,
        option(
            "Host memory for adapters that are loaded and not staged.",
            unit="bytes",
            is_common=True,
        ),
    ] = 4 * _GIB
    pinned_bytes_max: Annotated[
        SizeBytes,
        option(
            "Host memory for staged adapters and those in slots; page-locked and reserved at start "
            "if the device is a CUDA device.",
            unit="bytes",
        ),
    ] = PINNED_BYTES_DEFAULT
    device_bytes_max: Annotated[
        SizeBytes,
        option(
            "Device memory for adapters, reserved when the engine starts.",
            unit="bytes",
            is_common=True,
        ),
    ] = DEVICE_BYTES_DEFAULT
    known_adapters_max: Annotated[
        Count,
        option(
            "Largest number of adapter names remembered, including evicted adapters and replaced "
            "versions."
        ),
    ] = 1_000_000
    requests_max: Annotated[
        Count,
        option(
            "Largest number of requests in progress, running generations included; further "
            "requests are refused (L015)."
        ),
    ] = 16_384
    answers_max: Annotated[
        Count,
        option(
            "Past answers to keep, so that a request that is sent again is not executed twice. "
            "Beyond it, the client with the most answers loses its oldest."
        ),
    ] = 262_144
    answers_per_client_max: Annotated[Count, option("Past answers to keep of one client.")] = 1024
    answers_kept_ms: Annotated[
        DurationMs, option("How long past answers are kept.", unit="seconds")
    ] = 3_600_000
    request_timeout_ms: Annotated[
        DurationMs,
        option("Time limit of a request whose client sets none.", unit="seconds"),
    ] = 30_000
    generation_timeout_ms: Annotated[
        DurationMs,
        option(
            "Time limit of a generation, an embedding or a classification whose client sets none.",
            unit="seconds",
        ),
    ] = 600_000
    operation_timeout_ms: Annotated[
        DurationMs,
        option(
            "Time limit of one operation of the engine, for example a load, before the waiting "
            "requests are refused.",
            unit="seconds",
        ),
    ] = 60_000
    retry_backoff_ms: Annotated[
        DurationMs,
        option(
            "Delay before a failed operation on an adapter is retried; a new request for the "
            "adapter retries it at once.",
            former="--rest",
            unit="seconds",
        ),
    ] = field(default=5_000, name="rest_ms")
    digest_interval: Annotated[
        Count,
        option("Records between two digests of the state in the log, which a replay compares."),
    ] = 1024
    turn_tokens: Annotated[
        int,
        Meta(ge=0, le=65_536),
        option(
            "How adapters take turns while more of them are used than there are slots: the "
            "generations of one have 8 tokens each (latency), 24 (balanced) or 64 (throughput), "
            "then they pause until its next turn. none: an adapter keeps its slot until its "
            "generations have ended.",
            flag="--turns",
            former="--slot-quantum",
            names=TURNS,
            metavar="GOAL",
            default=TURN_TOKENS_DEFAULT,
        ),
    ] = 0
    """0: generations leave no slot for adapters that wait."""


LOGGED_NAMES: Final = dict(
    zip(Limits.__struct_fields__, Limits.__struct_encode_fields__, strict=True)
)
"""Field -> its name in logs, snapshots and frames, which is an earlier name for some."""


def window_bounds(limits: Limits) -> WindowBounds:
    """Return the bounds on stored answers."""
    kept_ns = limits.answers_kept_ms * 1_000_000
    return WindowBounds(limits.answers_max, limits.answers_per_client_max, kept_ns)


def check_limits(limits: Limits) -> Limits:
    """Return `limits`; raises `LimitsError` with both values if two contradict."""
    if limits.max_cpu_loras < limits.max_loras:
        raise LimitsError(
            f"max-cpu-loras must be at least max-loras, which is {limits.max_loras}, got "
            f"{limits.max_cpu_loras}: an adapter in a slot is on the host too"
        )
    return limits


def limits_from(values: dict[str, int]) -> Limits:
    """Return the limits of a log's header; raises `LimitsError` for unknown or invalid values."""
    unknown = sorted(set(values) - set(Limits.__struct_encode_fields__))
    if unknown:
        raise LimitsError(f"limits {unknown} are unknown to rules {RULES}")
    try:
        return check_limits(msgspec.convert(values, Limits))
    except msgspec.ValidationError as error:
        raise LimitsError(str(error)) from error


def known_limits(values: dict[str, int]) -> dict[str, int]:
    """Return the limits that there are here, of those that another version has written."""
    return {name: n for name, n in values.items() if name in Limits.__struct_encode_fields__}


def limits_to(limits: Limits) -> dict[str, int]:
    """Return the limits as a log's header stores them."""
    values: dict[str, int] = msgspec.to_builtins(limits)
    return values
