"""The `serve` command: the configuration made from its options, and checks of it."""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loradock.cli.available import available, with_rank
from loradock.cli.context import (
    AsJson,
    Settings,
    check_engine_installed,
    directory_of,
    lock_holder,
    output_of,
    settings_of,
)
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.fleet import fleet_errors
from loradock.cli.gateway import check_certificate, gateway_config
from loradock.cli.last_run import LastRun, changes, read_last_run, run_of, write_last_run
from loradock.cli.options import read_config_file, with_options
from loradock.cli.serve.config import ServeConfig, ServeOptions
from loradock.controller.core.limits import Limits, LimitsError, check_limits
from loradock.controller.server.config import ServerConfig, ServerOptions
from loradock.controller.server.preloads import DefaultPaths
from loradock.gateway.address import open_listener
from loradock.gateway.options import GatewayConfig, GatewayOptions
from loradock.messages.addresses import endpoint, with_port_offset
from loradock.messages.engine_options import EngineOptions, LoRAOptions
from loradock.messages.ids import NAME_PATTERN
from loradock.messages.options import options_of

app = typer.Typer()

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_config_file,
        rich_help_panel="Server",
        help="TOML file with any of these options, named without their dashes: max-loras = 4. The "
        "command line and the environment precede it. Default: none.",
    ),
]


CheckOnly = Annotated[
    bool,
    typer.Option(
        "--check",
        rich_help_panel="Server",
        help="Check everything that is checked at a start, print it, and end without serving.",
    ),
]


@app.command()
@with_options
def serve(  # noqa: PLR0913, PLR0917 - one parameter per group of options
    ctx: typer.Context,
    options: ServeOptions,
    limits: Limits,
    server: ServerOptions,
    lora: LoRAOptions,
    engine: EngineOptions,
    gateway: GatewayOptions,
    config: ConfigFile = None,
    check: CheckOnly = False,
    as_json: AsJson = False,
) -> None:
    """Run a controller and its engine until Ctrl-C; both are restarted if they die or hang.

    Each option is also an environment variable: LORADOCK_MAX_LORAS for --max-loras.
    """
    del config  # Its callback has made its values the defaults.
    if as_json:
        options = msgspec.structs.replace(options, log_format="json")
    lora = with_rank(lora, options.adapter_roots)
    output_of(ctx, options.log_format == "json")
    _check_limits(limits)
    _check_policy(server.policy)
    server_config = ServerConfig(
        **msgspec.structs.asdict(server),
        directory=str(directory_of(ctx)),
        limits=limits,
        listen=_checked_address(options.listen),
        default_mm_loras=_default_paths(lora),
        preloads=_preloads(options.adapters),
    )
    serve_config = ServeConfig(
        server_config, options, lora, engine, _gateway(ctx, options, engine, gateway)
    )
    _check_start(serve_config)
    if check:
        _report_check(ctx, serve_config, as_json)
        return
    _record_start(serve_config)
    _run(ctx, serve_config, as_json)


def _report_check(ctx: typer.Context, config: ServeConfig, as_json: bool) -> None:
    """Print what would be served; the engine's own checks, which load the model, are not made."""
    from loradock.cli.log_commands import print_fields

    options, lora = config.options, config.lora
    found = available(options.adapter_roots, lora.max_lora_rank)
    fields = {
        "checked": True,
        "directory": config.server.directory,
        "model": options.model,
        "adapter_roots": options.adapter_roots,
        "adapters": len(found),
        "not_loadable": {one.name: one.problem for one in found if one.problem} or None,
        "max_lora_rank": lora.max_lora_rank,
        "max_loras": config.server.limits.max_loras,
        "http": options.http or None,
        "listen": options.listen or None,
    }
    print_fields(output_of(ctx, as_json), fields)


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


def _check_start(config: ServeConfig) -> None:
    """End the command for what can't be served, before any process is started."""
    from loradock.cli.serve import start_checks
    from loradock.controller.server.access import Access
    from loradock.controller.server.keys import (
        DirectoryRefused,
        KeyStore,
        check_controller_directory,
    )

    directory, options = Path(config.server.directory), config.options
    try:
        if options.engine == "managed":
            check_engine_installed()
            start_checks.check_start(start_checks.start_of(config))
        endpoint(directory.absolute(), "requests.sock")
        check_controller_directory(directory)
        has_clients = not options.listen or Access(KeyStore(directory)).clients
    except start_checks.StartRefused as error:
        raise CommandError(ExitCode.USAGE, str(error), error.hint) from error
    except (OSError, DirectoryRefused, ValueError) as error:
        reason = getattr(error, "strerror", "") or str(error)
        raise CommandError(
            ExitCode.USAGE if isinstance(error, ValueError) else ExitCode.UNREACHABLE,
            f"--dir {directory} can't be used: {reason}",
            "name a directory that your user can create and write, with loradock --dir DIRECTORY",
        ) from error
    if not has_clients:
        raise CommandError(
            ExitCode.USAGE,
            f"--listen {options.listen}: no client is allowed, so none could connect",
            "make a key with `loradock keys new FILE`, and allow it with "
            f"`loradock --dir {directory} keys allow NAME FILE.pub`",
        )
    holder = lock_holder(directory)
    if holder:
        raise CommandError(
            ExitCode.LOG,
            f"a server runs in {directory} already (process {holder})",
            f"end it with `loradock --dir {directory} stop`, or serve in another --dir",
        )
    if gateway := config.gateway:
        check_certificate(gateway.ssl_certfile, gateway.ssl_keyfile, gateway.ssl_ca_certs)
        _check_free(gateway.host, gateway.port)
    _confirm_changes(config)


def _check_free(host: str, port: int) -> None:
    """Raise `CommandError` if the gateway can't listen at an address."""
    try:
        open_listener(host, port).close()
    except OSError as error:
        raise CommandError(
            ExitCode.UNREACHABLE,
            f"--http {host}:{port} can't be used: {error.strerror or error}",
            "name another port, or an address of this machine",
        ) from error


def _run_of(config: ServeConfig) -> LastRun:
    options, server = config.options, config.server
    rank = config.lora.max_lora_rank
    return run_of(options.model, server.limits, options.adapter_roots, rank)


def _confirm_changes(config: ServeConfig) -> None:
    """Require a confirmation or an option if adapters would be evicted or refused."""
    directory, options = Path(config.server.directory), config.options
    now = _run_of(config)
    changed = changes(read_last_run(directory), now)
    if not changed or options.accept_changes:
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


def _record_start(config: ServeConfig) -> None:
    """Record what the directory is served with, for the check of the next start."""
    directory = Path(config.server.directory)
    now = _run_of(config)
    try:
        write_last_run(directory, now)
    except OSError as error:
        raise CommandError(
            ExitCode.LOG, f"--dir {directory} can't be written: {error.strerror}"
        ) from error


def _checked_address(address: str) -> str:
    try:
        return address and with_port_offset(address, 0)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _gateway(
    ctx: typer.Context, options: ServeOptions, engine: EngineOptions, gateway: GatewayOptions
) -> GatewayConfig | None:
    """Return the configuration of a gateway; None without an address."""
    if not options.http:
        _check_no_gateway_option(gateway)
        if options.join:
            raise CommandError(
                ExitCode.USAGE,
                "--join needs --http, where the fleet's fronts reach this server",
                "add --http 0.0.0.0:8001",
            )
        return None
    # It is on this machine, so it needs no key of the server.
    local = Settings(settings_of(ctx).directory)
    config = gateway_config(
        local, gateway, options.http, options.model, options.adapter_roots, engine.max_model_len
    )
    return _joined(config, options.join) if options.join else config


def _joined(config: GatewayConfig, join: str) -> GatewayConfig:
    """Return the configuration of a dock's gateway, which the fleet's own key can follow."""
    with fleet_errors():
        from loradock.fleet.config import read_config

        fleet = read_config(join)
    if config.ssl_certfile:
        raise CommandError(
            ExitCode.USAGE,
            "fronts reach docks over HTTP, and --ssl-certfile makes it HTTPS",
            "give the certificate to `loradock fleet front`, and keep docks in a private network",
        )
    return msgspec.structs.replace(config, fleet=str(Path(join).resolve()), fleet_key=fleet.key)


def _check_no_gateway_option(gateway: GatewayOptions) -> None:
    """Refuse options of a gateway if none is started, instead of ignoring them."""
    for option in options_of(GatewayOptions):
        if getattr(gateway, option.field) != option.default:
            raise CommandError(
                ExitCode.USAGE,
                f"{option.flag} is an option of the HTTP gateway, and none is started without "
                "--http",
                "add --http 127.0.0.1:8000"
                + ("; --adapter loads adapters without it" if "lora-mod" in option.flag else ""),
            )


def _check_limits(limits: Limits) -> None:
    try:
        check_limits(limits)
    except LimitsError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _check_policy(policy: str) -> None:
    from loradock.controller.log.policies import PolicyUnknownError, check_policy

    try:
        check_policy(policy)
    except PolicyUnknownError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _default_paths(lora: LoRAOptions) -> DefaultPaths:
    try:
        return msgspec.convert(lora.default_mm_loras or {}, DefaultPaths)
    except msgspec.ValidationError as error:
        raise CommandError(
            ExitCode.USAGE,
            f"--default-mm-lora must be image=PATH, got {dict(lora.default_mm_loras or {})}",
        ) from error


def _run(ctx: typer.Context, config: ServeConfig, as_json: bool) -> None:
    from loradock.cli.serve.supervisor import serve as run
    from loradock.processes import process_log

    options = config.options
    output = output_of(ctx, options.log_format == "json")
    if as_json:
        output.document(msgspec.to_builtins(config))
    process_log.configure(options.log_format, "serve", options.log_level)
    ended = run(config)
    process_log.flush()
    if ended.status:
        # A status of the children that is an exit code of commands is kept.
        known = ended.status in ExitCode.__members__.values()
        exit_code = ExitCode(ended.status) if known else ExitCode.FAILURE
        raise CommandError(exit_code, f"the server has ended: {ended.reason or 'see above'}")
