"""The `gateway` command, and the options of a gateway, which `serve` has too."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import os
import sys
from collections.abc import Iterable
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import msgspec
import typer

from loradock.cli.context import Settings, settings_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.options.groups import OptionGroup, parameter, with_option_groups
from loradock.gateway.options import (
    HOST_DEFAULT,
    PORT_DEFAULT,
    GatewayConfig,
    GatewayOptions,
    parse_address,
)
from loradock.processes.subprocesses import python_arguments

app = typer.Typer()

_PANEL: Final = "HTTP gateway"


def flag_of(field: msgspec.structs.FieldInfo) -> str:
    """Return the option that sets a field of `GatewayOptions`."""
    return str(get_args(field.type)[1].extra["flag"])


def _parameter(field: msgspec.structs.FieldInfo) -> Parameter:
    kind, meta = get_args(field.type)
    is_repeated = get_args(kind)[1:] == (Ellipsis,)
    shown = typer.Option(
        flag_of(field),
        help=meta.description,
        rich_help_panel=_PANEL,
        metavar=meta.extra["metavar"],
        min=meta.ge,
        max=meta.le,
        # A key is not shown in the help text.
        show_default=field.default not in ("", 0, False, ()),
    )
    if is_repeated:
        return parameter(field.name, list[str] | None, None, shown)
    return parameter(field.name, kind, field.default, shown)


def _build(values: dict[str, Any]) -> GatewayOptions:
    fields = msgspec.structs.fields(GatewayOptions)
    repeated = {f.name: tuple(values[f.name] or ()) for f in fields if f.default == ()}
    return GatewayOptions(**{**values, **repeated})


GATEWAY_OPTIONS: Final = OptionGroup(
    tuple(map(_parameter, msgspec.structs.fields(GatewayOptions))), _build
)


def gateway_config(
    settings: Settings,
    http: str,
    model: str,
    options: GatewayOptions,
    adapter_roots: Iterable[Path],
) -> GatewayConfig:
    """Return the configuration of a gateway process; raises `CommandError` for a wrong address."""
    from loradock.client.sockets import runtime_directory

    try:
        host, port = parse_address(http)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, f"--http {error}") from error
    return GatewayConfig(
        **msgspec.structs.asdict(options),
        directory="" if settings.address else str(runtime_directory(settings.directory)),
        address=settings.address,
        key=settings.key,
        server_key=settings.server_key,
        host=host,
        port=port,
        model=model,
        adapter_roots=tuple(map(str, adapter_roots)),
    )


def gateway_arguments(config: GatewayConfig) -> tuple[str, ...]:
    """Return the arguments of Python for a gateway process."""
    return (*python_arguments("gateway"), msgspec.json.encode(config).decode())


Http = Annotated[
    str,
    typer.Option(
        "--http",
        metavar="HOST:PORT",
        help="Address to serve at. Port 0 selects a free one.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="DIRECTORY",
        help="Directory of the base model, for its tokenizer and chat template. Default: none, so "
        "that chats and texts of tokens are not served.",
        show_default=False,
    ),
]


AdapterRoots = Annotated[
    list[Path] | None,
    typer.Option(
        "--adapter-root",
        metavar="DIRECTORY",
        help="Directory of the server's adapters, to read the chat templates and generation "
        "defaults that are saved beside them; repeat for several. Default: none, so that the "
        "model's are used for all.",
    ),
]


@app.command()
@with_option_groups(options=GATEWAY_OPTIONS)
def gateway(
    ctx: typer.Context,
    options: GatewayOptions,
    http: Http = f"{HOST_DEFAULT}:{PORT_DEFAULT}",
    model: Model = "",
    adapter_root: AdapterRoots = None,
) -> None:
    """Serve the OpenAI protocol, metrics and a page over HTTP, for a server that runs here."""
    config = gateway_config(settings_of(ctx), http, model, options, adapter_root or ())
    # The gateway takes the place of this process, so signals and the exit status are its own.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *gateway_arguments(config)])  # noqa: S606
