"""The `serve` command: its options, and the configuration made from them.

Every bound of the controller is an option, with the default of its field in `Limits` or
`ServerConfig`.
"""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from controller.cli.context import AsJson, Settings, directory_of, output_of, settings_of
from controller.cli.engine_options import ENGINE_OPTIONS
from controller.cli.exit_codes import CommandError, ExitCode
from controller.cli.gateway import GATEWAY_OPTIONS, gateway_arguments, gateway_config
from controller.cli.option_groups import (
    OptionGroup,
    in_milliseconds,
    settings,
    with_option_groups,
)
from controller.core.limits import Limits, LimitsError, limits_from
from controller.shell.config import EngineKind, ServeConfig, ServerConfig
from controller.shell.default_adapters import DefaultPaths, default_paths
from gateway.options import GatewayOptions
from messages.addresses import with_port_offset
from messages.engine_options import EngineOptions, LogFormat

app = typer.Typer()

_LIMITS: Final = {
    "slots_max": ("--slots", "Device slots: the largest number of adapters in one batch."),
    "host_adapters_max": ("--host-adapters", "Largest number of adapters in host memory."),
    "host_bytes_max": ("--host-bytes", "Pageable host memory for adapters."),
    "pinned_bytes_max": ("--pinned-bytes", "Page-locked host memory for adapters."),
    "device_bytes_max": ("--device-bytes", "Device memory for adapters."),
    "known_adapters_max": (
        "--known-adapters",
        "Largest number of adapter names remembered, including evicted ones.",
    ),
    "requests_max": ("--requests", "Largest number of requests in progress."),
    "answers_max": (
        "--answers",
        "Past answers to keep, so that a repeated request is not executed twice.",
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
        "Write a digest of the state to the log once per this number of records.",
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


LIMITS: Final = OptionGroup(settings(msgspec.structs.fields(Limits), _LIMITS, "Bounds"), _limits)
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

Model = Annotated[
    str,
    typer.Option(metavar="DIRECTORY", help="Directory of the base model.", show_default=False),
]
AdapterRoots = Annotated[
    list[Path] | None,
    typer.Option(
        "--adapter-root",
        metavar="DIRECTORY",
        help="Directory to load adapters from; repeat for several. Adapters outside are refused, "
        "and symbolic links below it are not followed. Default: none, so that no adapter can be "
        "loaded.",
    ),
]
Engine = Annotated[
    EngineKind,
    typer.Option(help="Start an engine, or wait for one that is started elsewhere."),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="Number of engine processes (ranks) that share the model, started with torchrun.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which adapter is evicted when space is needed: lru (the least recently used) or none "
        "(evict nothing).",
    ),
]

Listen = Annotated[
    str,
    typer.Option(
        metavar="tcp://HOST:PORT",
        help="Accept clients over a network, at this port and the two after it, encrypted and with "
        "a key that `loradock keys allow` has admitted. Default: only local clients.",
        show_default=False,
    ),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(help="Format of the log on stderr, of the engine too; --json implies json."),
]
Http = Annotated[
    str,
    typer.Option(
        "--http",
        metavar="HOST:PORT",
        help="Also serve the OpenAI protocol, metrics and a page at this address. Default: no "
        "HTTP.",
        show_default=False,
    ),
]


@app.command(rich_help_panel="Server and log")
@with_option_groups(
    limits=LIMITS,
    server=SERVER_SETTINGS,
    hangs=HANG_SETTINGS,
    engine_options=ENGINE_OPTIONS,
    gateway_options=GATEWAY_OPTIONS,
)
def serve(  # noqa: PLR0913, PLR0917 - one parameter per option or group of options
    ctx: typer.Context,
    limits: Limits,
    server: dict[str, Any],
    hangs: dict[str, Any],
    engine_options: EngineOptions,
    gateway_options: GatewayOptions,
    model: Model = "",
    adapter_root: AdapterRoots = None,
    engine: Engine = "managed",
    tensor_parallel_size: TensorParallelSize = 1,
    policy: Policy = "lru",
    listen: Listen = "",
    log_format: LogFormatOption = "console",
    http: Http = "",
    as_json: AsJson = False,
) -> None:
    """Run a controller and its engine until Ctrl-C; both are restarted if they die or hang."""
    if engine == "managed" and not model:
        raise CommandError(
            ExitCode.USAGE,
            "an engine needs a base model",
            "name its directory with --model, or wait for an engine with --engine external",
        )
    _check_policy(policy)
    server_config = ServerConfig(
        directory=str(directory_of(ctx)),
        limits=limits,
        policy=policy,
        listen=_checked_address(listen),
        default_mm_loras=_default_paths(engine_options),
        **server,
    )
    hangs["log_format"] = "json" if as_json else log_format
    roots = tuple(str(root) for root in adapter_root or ())
    if not gateway_options.max_model_len:
        context = engine_options.context_tokens_max
        gateway_options = msgspec.structs.replace(gateway_options, max_model_len=context)
    gateway = _gateway_arguments(ctx, http, model, gateway_options, hangs["log_format"])
    config = ServeConfig(
        server_config,
        model,
        roots,
        engine,
        engine_options,
        tensor_parallel_size,
        gateway=gateway,
        **hangs,
    )
    _run(ctx, config, as_json)


def _checked_address(address: str) -> str:
    try:
        return address and with_port_offset(address, 0)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _gateway_arguments(
    ctx: typer.Context, http: str, model: str, options: GatewayOptions, log_format: LogFormat
) -> tuple[str, ...]:
    """Return the arguments of Python for a gateway; none without an address."""
    if not http:
        return ()
    # It is on this machine, so it needs no key of the server.
    local = Settings(settings_of(ctx).directory)
    config = gateway_config(local, http, model, options)
    return gateway_arguments(msgspec.structs.replace(config, log_format=log_format))


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


def _run(ctx: typer.Context, config: ServeConfig, as_json: bool) -> None:
    from controller.shell.supervisor import serve as run
    from messages import process_log

    output = output_of(ctx, config.log_format == "json")
    if as_json:
        output.document(config)
    process_log.configure(config.log_format, "serve")
    status = run(config)
    process_log.flush()
    if status:
        # A status of the children that is one of the command's exit codes is kept.
        known = status in ExitCode.__members__.values()
        exit_code = ExitCode(status) if known else ExitCode.FAILURE
        raise CommandError(
            exit_code, "the server has ended", "its last messages above contain the reason"
        )
