"""The `serve` command: its options, the configuration made from them, and checks of it."""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from loradock.cli.context import AsJson, Settings, directory_of, output_of, settings_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.gateway import GATEWAY_OPTIONS, flag_of, gateway_arguments, gateway_config
from loradock.cli.options.engine import ENGINE_OPTIONS
from loradock.cli.options.groups import with_option_groups
from loradock.cli.serve_settings import HANG_SETTINGS, LIMITS, SERVER_SETTINGS
from loradock.controller.core.limits import Limits
from loradock.controller.server.config import EngineKind, ServeConfig, ServerConfig
from loradock.controller.server.preloads import DefaultPaths, default_paths
from loradock.controller.server.startup.config_file import ConfigFileError, read_config_file
from loradock.gateway.options import GatewayOptions
from loradock.messages.addresses import with_port_offset
from loradock.messages.engine_options import EngineOptions, LogFormat, LogLevel
from loradock.messages.ids import NAME_PATTERN

app = typer.Typer()


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a file the defaults of all options; the command line precedes them."""
    if path is None:
        return None
    options = {
        name.removeprefix("--"): str(one.name)
        for one in ctx.command.params
        for name in one.opts
        if name.startswith("--") and name not in ("--config", "--help")
    }
    try:
        values = read_config_file(path, options)
    except ConfigFileError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
    for one in ctx.command.params:
        value = values.get(str(one.name))
        if getattr(one, "multiple", False) and value is not None and not isinstance(value, list):
            values[str(one.name)] = [value]
    ctx.default_map = values
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_read_config,
        help="TOML file with any of these options, named without their dashes: slots = 4. The "
        "command line precedes it. Default: none.",
    ),
]
Preloads = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=PATH",
        help="Adapter to load when the server starts; PATH as in `loradock load`. Repeat for "
        "several. Default: none.",
    ),
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="Serve a directory with another model, or with less room, than before. Adapters that "
        "do not fit are evicted or refused.",
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option(help="Least important lines of the log that are written.")
]
Model = Annotated[
    str,
    typer.Option(
        metavar="DIRECTORY",
        help="Directory of the base model. Needed, except with --engine external.",
        show_default=False,
    ),
]
AdapterRoots = Annotated[
    list[Path] | None,
    typer.Option(
        "--adapter-root",
        metavar="DIRECTORY",
        help="Directory to load adapters from; repeat for several. Adapters outside are refused; "
        "links may lead to places below a root. Default: none, so that no adapter can be loaded.",
    ),
]
Engine = Annotated[
    EngineKind,
    typer.Option(
        help="managed starts an engine; external waits for one that is started elsewhere."
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="Number of processes that hold the model together, one per device.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which adapter is evicted when space is needed: lru (the least recently used), "
        "cheapest-first (the least recently used of those that are cheapest to load again: slots "
        "last) or none (evict nothing).",
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
    typer.Option(help="Format of the log on stderr, for all processes; --json implies json."),
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


@app.command()
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
    config: ConfigFile = None,
    model: Model = "",
    adapter_root: AdapterRoots = None,
    adapter: Preloads = None,
    engine: Engine = "managed",
    tensor_parallel_size: TensorParallelSize = 1,
    policy: Policy = "lru",
    listen: Listen = "",
    log_format: LogFormatOption = "console",
    log_level: LogLevelOption = "info",
    http: Http = "",
    accept_changes: AcceptChanges = False,
    as_json: AsJson = False,
) -> None:
    """Run a controller and its engine until Ctrl-C; both are restarted if they die or hang."""
    del config  # Its callback has made its values the defaults.
    hangs |= {"log_format": "json" if as_json else log_format, "log_level": log_level}
    output_of(ctx, hangs["log_format"] == "json")
    _check_policy(policy)
    if not http:
        _check_no_gateway_option(gateway_options)
    server_config = ServerConfig(
        directory=str(directory_of(ctx)),
        limits=limits,
        policy=policy,
        listen=_checked_address(listen),
        default_mm_loras=_default_paths(engine_options),
        preloads=_preloads(adapter or ()),
        **server,
    )
    if not gateway_options.max_model_len:
        context = engine_options.context_tokens_max
        gateway_options = msgspec.structs.replace(gateway_options, max_model_len=context)
    serve_config = ServeConfig(
        server_config,
        model,
        tuple(str(root) for root in adapter_root or ()),
        engine,
        engine_options,
        tensor_parallel_size,
        gateway=_gateway_arguments(
            ctx, http, model, gateway_options, adapter_root or (), hangs["log_format"]
        ),
        **hangs,
    )
    _check_start(serve_config, accept_changes)
    _run(ctx, serve_config, as_json)


def _preloads(options: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse `NAME=PATH` options."""
    found: dict[str, str] = {}
    for option in options:
        name, _, path = option.partition("=")
        if not re.search(NAME_PATTERN, name) or name in found:
            reason = "names an adapter twice" if name in found else "has no valid adapter name"
            raise CommandError(
                ExitCode.USAGE,
                f"--adapter {option} {reason}",
                "write NAME=PATH, with a name of A-Z a-z 0-9 . _ - and the adapter's directory",
            )
        found[name] = path
    return tuple(found.items())


def _check_start(config: ServeConfig, accept_changes: bool) -> None:
    """End the command for what can't be served, before any process is started."""
    from loradock.client.sockets import requests_endpoint
    from loradock.controller.server.keys import (
        DirectoryRefused,
        check_controller_directory,
    )
    from loradock.controller.server.startup import previous_start, start_checks
    from loradock.controller.server.startup.locks import lock_holder

    directory = Path(config.server.directory)
    try:
        if config.engine == "managed":
            if not config.model:
                raise start_checks.StartRefused(
                    "an engine needs a base model",
                    "name its directory with --model, or wait for an engine with --engine external",
                )
            start_checks.check_start(
                start_checks.Start(
                    Path(config.model),
                    tuple(map(Path, config.adapter_roots)),
                    config.engine_options,
                    config.server.limits,
                    config.tensor_parallel_size,
                )
            )
        requests_endpoint(directory)
        check_controller_directory(directory)
    except start_checks.StartRefused as error:
        raise CommandError(ExitCode.USAGE, str(error), error.hint) from error
    except (OSError, DirectoryRefused, ValueError) as error:
        reason = getattr(error, "strerror", "") or str(error)
        raise CommandError(
            ExitCode.USAGE if isinstance(error, ValueError) else ExitCode.UNREACHABLE,
            f"--dir {directory} can't be used: {reason}",
            "name a directory that your user may create and write, with loradock --dir DIRECTORY",
        ) from error
    holder = lock_holder(directory)
    if holder:
        raise CommandError(
            ExitCode.LOG,
            f"a server runs in {directory} already (process {holder})",
            f"end it with `loradock --dir {directory} stop`, or serve in another --dir",
        )
    _confirm_changes(config, directory, accept_changes)
    now = previous_start.served(config.model, config.server.limits, config.server.policy)
    try:
        previous_start.write_served(directory, now)
    except OSError as error:
        raise CommandError(
            ExitCode.LOG, f"--dir {directory} can't be written: {error.strerror}"
        ) from error


def _confirm_changes(config: ServeConfig, directory: Path, accept_changes: bool) -> None:
    """Need a confirmation or an option where adapters would be evicted or refused."""
    from loradock.controller.server.startup import previous_start

    now = previous_start.served(config.model, config.server.limits, config.server.policy)
    changed = previous_start.changes(previous_start.read_served(directory), now)
    if not changed or accept_changes:
        return
    text = f"{directory} was served differently before: {'; '.join(changed)}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        typer.echo(f"{text}. Adapters that do not fit are evicted or refused.", err=True)
        if typer.confirm("Serve it anyway?", err=True):
            return
    raise CommandError(
        ExitCode.REFUSED,
        text,
        "add --accept-changes to serve it anyway, or serve in another --dir",
    )


def _checked_address(address: str) -> str:
    try:
        return address and with_port_offset(address, 0)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _gateway_arguments(
    ctx: typer.Context,
    http: str,
    model: str,
    options: GatewayOptions,
    adapter_roots: Iterable[Path],
    log_format: LogFormat,
) -> tuple[str, ...]:
    """Return the arguments of Python for a gateway; none without an address."""
    if not http:
        return ()
    # It is on this machine, so it needs no key of the server.
    local = Settings(settings_of(ctx).directory)
    config = gateway_config(local, http, model, options, adapter_roots)
    return gateway_arguments(msgspec.structs.replace(config, log_format=log_format))


def _check_no_gateway_option(options: GatewayOptions) -> None:
    """Refuse options of a gateway where none is started, instead of ignoring them."""
    for field in msgspec.structs.fields(GatewayOptions):
        if getattr(options, field.name) != field.default:
            flag = flag_of(field)
            raise CommandError(
                ExitCode.USAGE,
                f"{flag} is an option of the HTTP gateway, and none is started without --http",
                "add --http 127.0.0.1:8000"
                + ("; --adapter loads adapters without it" if flag == "--lora-modules" else ""),
            )


def _check_policy(policy: str) -> None:
    from loradock.controller.log.policies import PolicyUnknownError, check_policy

    try:
        check_policy(policy)
    except PolicyUnknownError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _default_paths(options: EngineOptions) -> DefaultPaths:
    try:
        return default_paths(options.default_mm_loras)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _run(ctx: typer.Context, config: ServeConfig, as_json: bool) -> None:
    from loradock.controller.server.supervisor import serve as run
    from loradock.processes import process_log

    output = output_of(ctx, config.log_format == "json")
    if as_json:
        output.document(config)
    process_log.configure(config.log_format, "serve", config.log_level)
    ended = run(config)
    process_log.flush()
    if ended.status:
        # A status of the children that is one of the command's exit codes is kept.
        known = ended.status in ExitCode.__members__.values()
        exit_code = ExitCode(ended.status) if known else ExitCode.FAILURE
        raise CommandError(exit_code, f"the server has ended: {ended.reason or 'see above'}")
