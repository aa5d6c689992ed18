"""The options of `serve` that are fields of the server's configuration: bounds, log, supervision.

Every bound of the controller is an option, with the default of its field in `Limits` or
`ServerConfig`.
"""

from typing import Any, Final

import msgspec
from msgspec.structs import FieldInfo

from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.options.groups import OptionGroup, in_milliseconds, settings
from loradock.controller.core.limits import SLOT_QUANTUM_MS, Limits, LimitsError, limits_from
from loradock.controller.server.config import ServeConfig, ServerConfig

LIMIT_OPTIONS: Final = {
    "slots_max": (
        "--slots",
        "Device slots: the largest number of different adapters in one batch.",
    ),
    "host_adapters_max": (
        "--host-adapters",
        "Largest number of adapters kept in host memory (RAM).",
    ),
    "host_bytes_max": ("--host-bytes", "Host memory for adapters that are loaded and not staged."),
    "pinned_bytes_max": (
        "--pinned-bytes",
        "Host memory for staged adapters; page-locked if the device is a CUDA device.",
    ),
    "device_bytes_max": (
        "--device-bytes",
        "Device memory for adapters, reserved when the engine starts.",
    ),
    "known_adapters_max": (
        "--known-adapters",
        "Largest number of adapter names remembered, including evicted ones.",
    ),
    "requests_max": (
        "--requests",
        "Largest number of requests in progress; further ones are refused (L015).",
    ),
    "answers_max": (
        "--answers",
        "Past answers to keep, so that a request that is sent again is not executed twice.",
    ),
    "answers_per_client_max": ("--answers-per-client", "Past answers to keep of one client."),
    "answers_kept_ms": ("--answers-kept", "How long past answers are kept."),
    "request_timeout_ms": (
        "--request-timeout",
        "Time limit of a request whose client sets none.",
    ),
    "generation_timeout_ms": (
        "--generation-timeout",
        "Time limit of a generation, an embedding or a classification whose client sets none.",
    ),
    "operation_timeout_ms": (
        "--operation-timeout",
        "Time limit of one operation of the engine, for example a load.",
    ),
    "rest_ms": (
        "--rest",
        "Delay before a failed operation on an adapter is retried; a new request for the adapter "
        "retries it at once.",
    ),
    "digest_interval": (
        "--digest-interval",
        "Records between two digests of the state in the log, which a replay compares.",
    ),
    "slot_quantum_ms": (
        "--slot-quantum",
        "How long an adapter keeps its slot while others wait for one; its running generations "
        "pause then and continue when it is its turn again. 0: until they end.",
    ),
}
_LOG_AND_SUPERVISION: Final = {
    "sync": (
        "--sync",
        "When to fsync the log: group (once per group of requests), always (after every record), "
        "interval (see --sync-interval) or never.",
    ),
    "sync_interval_ms": ("--sync-interval", "Time between fsyncs with --sync interval."),
    "segment_bytes_max": ("--segment-bytes", "Start a new log file when one reaches this size."),
    "engine_timeout_ms": (
        "--engine-timeout",
        "The engine counts as lost after this time without a message from it; the time of a step "
        "that is in progress is not counted (see --step-timeout).",
    ),
    "snapshot_interval": (
        "--snapshot-interval",
        "Make a snapshot of the state once per this number of records; a restart reads the last "
        "snapshot and the records after it.",
    ),
    "log_retention": (
        "--log-retention",
        "What is done with log files that no restart needs, once they are --log-keep-hours old: "
        "drop, archive:DIRECTORY (move them there) or keep.",
    ),
    "log_keep_hours": (
        "--log-keep-hours",
        "How long log files are kept that no restart needs, in hours of the server's running "
        "time; 0 keeps none.",
    ),
    "checked": ("--checked", "For debugging: verify every invariant after every input (slow)."),
}
_HANGS: Final = {
    "hang_timeout_ms": (
        "--hang-timeout",
        "The controller or the engine is killed within this time if it is stopped (SIGSTOP), and "
        "restarted.",
    ),
    "step_timeout_ms": (
        "--step-timeout",
        "The engine is killed and restarted if one step of its main loop, for example a forward "
        "pass, takes longer.",
    ),
}
"""Field -> its option and its help text."""


def _limits(values: dict[str, Any]) -> Limits:
    try:
        return limits_from(in_milliseconds(values))
    except LimitsError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _limit_fields() -> list[FieldInfo]:
    """The fields with a server's defaults; those of `Limits` are what an old log means."""
    return [
        msgspec.structs.replace(field, default=SLOT_QUANTUM_MS)
        if field.name == "slot_quantum_ms"
        else field
        for field in msgspec.structs.fields(Limits)
    ]


LIMITS: Final = OptionGroup(settings(_limit_fields(), LIMIT_OPTIONS, "Bounds"), _limits)
SERVER_SETTINGS: Final = OptionGroup(
    settings(
        msgspec.structs.fields(ServerConfig), _LOG_AND_SUPERVISION, panel="Log and supervision"
    ),
    in_milliseconds,
)
HANG_SETTINGS: Final = OptionGroup(
    settings(msgspec.structs.fields(ServeConfig), _HANGS, panel="Log and supervision"),
    in_milliseconds,
)
