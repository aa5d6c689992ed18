"""`serve`: a controller and its engine, from the command line's options.

What it is: options to `ServeConfig`. What it is not: the processes, which are
`controller.shell.supervisor`'s. One rule: every bound that a person can set is an option here,
with the default that `controller.core.limits` gives it.
"""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from controller.cli.context import AsJson, directory_of, output_of
from controller.cli.engine_options import with_engine_options
from controller.cli.exit_codes import CommandError, ExitCode
from controller.cli.sizes import format_size, parse_size
from controller.core.limits import Limits, LimitsError, limits_from
from controller.shell.default_adapters import DefaultPaths, default_paths
from controller.shell.engine_options import EngineOptions

if TYPE_CHECKING:
    from controller.shell.supervisor import ServeConfig

app = typer.Typer()

_DEFAULTS: Final = Limits()
_BOUNDS: Final = "Bounds"
_LOG: Final = "Log and supervision"

# `controller.shell.server.ServerConfig`'s own, which is too heavy to import for a help text.
_SEGMENT_BYTES: Final = 64 << 20
_SYNC_INTERVAL_S: Final = 0.1
_ENGINE_TIMEOUT_S: Final = 10.0


class EngineKind(StrEnum):
    """Who starts the engine."""

    MANAGED = "managed"
    EXTERNAL = "external"


class Sync(StrEnum):
    """When what is logged is made durable."""

    GROUP = "group"
    ALWAYS = "always"
    INTERVAL = "interval"
    NEVER = "never"


def _bytes(value: str | int) -> int:
    try:
        return parse_size(str(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _size(flag: str, default: int, told: str, panel: str = _BOUNDS) -> Any:
    return typer.Option(
        flag,
        parser=_bytes,
        metavar="SIZE",
        help=told,
        show_default=format_size(default),
        rich_help_panel=panel,
    )


def _count(flag: str, told: str) -> Any:
    return typer.Option(flag, min=1, metavar="NUMBER", help=told, rich_help_panel=_BOUNDS)


def _seconds(flag: str, told: str, panel: str = _BOUNDS) -> Any:
    return typer.Option(
        flag, min=0.001, max=3600, metavar="SECONDS", help=told, rich_help_panel=panel
    )


Model = Annotated[
    str,
    typer.Option(metavar="DIRECTORY", help="The base model's directory.", show_default=False),
]
AdapterRoots = Annotated[
    list[Path] | None,
    typer.Option(
        "--adapter-root",
        metavar="DIRECTORY",
        help="Adapters may lie below this directory; repeatable.",
    ),
]
Engine = Annotated[
    EngineKind,
    typer.Option(help="Start an engine, or wait for one that is started elsewhere."),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        min=1, metavar="NUMBER", help="Processes that hold the model together, with torchrun."
    ),
]
Policy = Annotated[str, typer.Option(metavar="NAME", help="Who has to leave when room is needed.")]
Slots = Annotated[int, _count("--slots", "Device slots: the most adapters in one batch.")]
HostAdapters = Annotated[int, _count("--host-adapters", "Adapters on the host, in any state.")]
HostBytes = Annotated[
    int, _size("--host-bytes", _DEFAULTS.host_bytes_max, "Pageable memory for adapters.")
]
PinnedBytes = Annotated[
    int, _size("--pinned-bytes", _DEFAULTS.pinned_bytes_max, "Page-locked memory for adapters.")
]
DeviceBytes = Annotated[
    int, _size("--device-bytes", _DEFAULTS.device_bytes_max, "Device memory for adapters.")
]
KnownAdapters = Annotated[int, _count("--known-adapters", "Names, evicted ones included.")]
Requests = Annotated[int, _count("--requests", "Requests under way at a time.")]
Answers = Annotated[int, _count("--answers", "Answers kept for requests that are repeated.")]
RequestTimeout = Annotated[
    float, _seconds("--request-timeout", "For a request whose client does not say.")
]
GenerationTimeout = Annotated[
    float, _seconds("--generation-timeout", "For a generation whose client does not say.")
]
OperationTimeout = Annotated[
    float, _seconds("--operation-timeout", "For one operation of the engine.")
]
Rest = Annotated[
    float, _seconds("--rest", "For an adapter that the engine failed to move, unless asked for.")
]
DigestInterval = Annotated[int, _count("--digest-interval", "Records between two digests.")]
SyncOption = Annotated[
    Sync, typer.Option("--sync", help="When the log is made durable.", rich_help_panel=_LOG)
]
SyncInterval = Annotated[float, _seconds("--sync-interval", "For --sync interval.", _LOG)]
SegmentBytes = Annotated[
    int, _size("--segment-bytes", _SEGMENT_BYTES, "A file of the log ends with this.", _LOG)
]
EngineTimeout = Annotated[
    float, _seconds("--engine-timeout", "Silence after which the engine counts as gone.", _LOG)
]
Checked = Annotated[
    bool,
    typer.Option(
        "--checked", help="Verify every invariant after every input; slow.", rich_help_panel=_LOG
    ),
]


@app.command(rich_help_panel="Server and log")
@with_engine_options
def serve(  # noqa: PLR0913, PLR0917 - one parameter an option
    ctx: typer.Context,
    engine_options: EngineOptions,
    model: Model = "",
    adapter_root: AdapterRoots = None,
    engine: Engine = EngineKind.MANAGED,
    tensor_parallel_size: TensorParallelSize = 1,
    policy: Policy = "lru",
    slots: Slots = _DEFAULTS.slots_max,
    host_adapters: HostAdapters = _DEFAULTS.host_adapters_max,
    host_bytes: HostBytes = _DEFAULTS.host_bytes_max,
    pinned_bytes: PinnedBytes = _DEFAULTS.pinned_bytes_max,
    device_bytes: DeviceBytes = _DEFAULTS.device_bytes_max,
    known_adapters: KnownAdapters = _DEFAULTS.known_adapters_max,
    requests: Requests = _DEFAULTS.requests_max,
    answers: Answers = _DEFAULTS.answers_max,
    request_timeout: RequestTimeout = _DEFAULTS.request_timeout_ms / 1000,
    generation_timeout: GenerationTimeout = _DEFAULTS.generation_timeout_ms / 1000,
    operation_timeout: OperationTimeout = _DEFAULTS.operation_timeout_ms / 1000,
    rest: Rest = _DEFAULTS.rest_ms / 1000,
    digest_interval: DigestInterval = _DEFAULTS.digest_interval,
    sync: SyncOption = Sync.GROUP,
    sync_interval: SyncInterval = _SYNC_INTERVAL_S,
    segment_bytes: SegmentBytes = _SEGMENT_BYTES,
    engine_timeout: EngineTimeout = _ENGINE_TIMEOUT_S,
    checked: Checked = False,
    as_json: AsJson = False,
) -> None:
    """Run a controller and its engine until Ctrl-C; both are started again if they die."""
    if engine is EngineKind.MANAGED and not model:
        raise CommandError(
            ExitCode.USAGE,
            "an engine needs a base model",
            "give its directory with --model, or --engine external to wait for an engine",
        )
    from controller.shell.server import ServerConfig
    from controller.shell.supervisor import ServeConfig

    _check_policy(policy)
    limits = _limits(
        slots_max=slots,
        host_adapters_max=host_adapters,
        host_bytes_max=host_bytes,
        pinned_bytes_max=pinned_bytes,
        device_bytes_max=device_bytes,
        known_adapters_max=known_adapters,
        requests_max=requests,
        answers_max=answers,
        request_timeout_ms=round(request_timeout * 1000),
        generation_timeout_ms=round(generation_timeout * 1000),
        operation_timeout_ms=round(operation_timeout * 1000),
        rest_ms=round(rest * 1000),
        digest_interval=digest_interval,
    )
    server = ServerConfig(
        directory=str(directory_of(ctx)),
        limits=limits,
        policy=policy,
        sync=sync.value,
        sync_interval_ms=round(sync_interval * 1000),
        segment_bytes_max=segment_bytes,
        engine_timeout_ms=round(engine_timeout * 1000),
        default_mm_loras=_default_paths(engine_options),
        checked=checked,
    )
    roots = tuple(str(root) for root in adapter_root or ())
    config = ServeConfig(server, model, roots, engine.value, engine_options, tensor_parallel_size)
    _run(ctx, config, as_json)


def _check_policy(policy: str) -> None:
    from controller.core.eviction import POLICIES

    if policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise CommandError(ExitCode.USAGE, f"policy {policy!r} is not known; known are {known}")


def _default_paths(options: EngineOptions) -> DefaultPaths:
    try:
        return default_paths(options.default_mm_loras)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _limits(**values: int) -> Limits:
    try:
        return limits_from(values)
    except LimitsError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _run(ctx: typer.Context, config: "ServeConfig", as_json: bool) -> None:
    import structlog

    from controller.shell.supervisor import serve as run

    output = output_of(ctx, as_json)
    if as_json:
        output.document(config)
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.JSONRenderer(),
            ]
        )
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    status = run(config)
    if status:
        # The children's exit codes are ours where we have such a one.
        known = status in ExitCode.__members__.values()
        exit_code = ExitCode(status) if known else ExitCode.FAILURE
        raise CommandError(exit_code, "the server has ended", "its messages above say why")
