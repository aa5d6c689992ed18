"""Options, the client and the output that all commands share.

Heavy modules are imported when a command runs, so that help and completion answer at once.
"""

# See above.
# ruff: noqa: PLC0415

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from controller.cli.exit_codes import CommandError, ExitCode, ServerNotRunning
from controller.client.session import GENERATION_TIMEOUT_S, TIMEOUT_S, TIMEOUT_S_MAX

if TYPE_CHECKING:
    from controller.cli.output import Output
    from controller.client import Client

QUERY_TIMEOUT_S: Final = 5.0
"""The default time limit of commands that only read."""

SERVER_START_S: Final = 3.0
"""How long a command waits for a server to accept connections: one may just have been started."""

_COMPLETION_TIMEOUT_S: Final = 0.3
_CONNECT_INTERVAL_S: Final = 0.05


@dataclass
class Settings:
    """The global options, and the output format of the command."""

    directory: str | None = None
    as_json: bool = False
    address: str = ""
    key: str = ""
    server_key: str = ""


def complete_adapter(ctx: typer.Context) -> list[str]:
    """Return the names that the controller knows; none if it does not answer at once."""
    from controller.client import Client, LoradockError, Timing
    from controller.client.sockets import connection_to, runtime_directory, unserved_reason

    directory = runtime_directory(ctx.find_root().params.get("directory"))
    timing = Timing(slack_s=0.0)
    try:
        if unserved_reason(connection_to(directory)):
            return []
        with Client(directory, timeout_s=_COMPLETION_TIMEOUT_S, timing=timing) as client:
            return sorted({view.adapter for view in client.list().adapters})
    except (LoradockError, ValueError, OSError):
        return []


def _timeout_option(default_s: float) -> Any:
    return typer.Option(
        "--timeout",
        min=0.001,
        max=TIMEOUT_S_MAX,
        metavar="SECONDS",
        help=f"Give up after this many seconds (default {default_s:g}).",
        show_default=False,
    )


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
AdapterArgument = Annotated[
    str,
    typer.Argument(metavar="ADAPTER", help="The adapter's name.", autocompletion=complete_adapter),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        "-a",
        help="The adapter to use. Default: the base model.",
        autocompletion=complete_adapter,
    ),
]
PathOption = Annotated[
    str,
    typer.Option(
        "--path",
        metavar="DIRECTORY",
        help="The adapter's directory, relative to the server's --adapter-root (not to your "
        "shell), or absolute inside it. Default: the adapter's name.",
        show_default=False,
    ),
]
Timeout = Annotated[float | None, _timeout_option(TIMEOUT_S)]
InferenceTimeout = Annotated[float | None, _timeout_option(GENERATION_TIMEOUT_S)]
QueryTimeout = Annotated[float | None, _timeout_option(QUERY_TIMEOUT_S)]


def settings_of(ctx: typer.Context) -> Settings:
    """Return the settings of this run."""
    settings = ctx.find_root().obj
    return settings if isinstance(settings, Settings) else Settings()


def directory_of(ctx: typer.Context) -> Path:
    """Return the controller's directory."""
    from controller.client.sockets import runtime_directory

    return runtime_directory(settings_of(ctx).directory)


def output_of(ctx: typer.Context, as_json: bool) -> "Output":
    """Return the output of this run; errors will have its format."""
    from controller.cli.output import Output

    settings_of(ctx).as_json = as_json
    return Output(as_json)


@contextmanager
def open_client(ctx: typer.Context) -> "Iterator[Client]":
    """Open a client of the controller at `--address`, else of the one of `--dir`.

    For the latter, raises `ServerNotRunning` if no server accepts connections after
    `SERVER_START_S`, or after the command's own `--timeout` if that is shorter.
    """
    from controller.client import Client

    settings = settings_of(ctx)
    try:
        if settings.address:
            client = Client(
                address=settings.address, key=settings.key, server_key=settings.server_key
            )
        else:
            directory = directory_of(ctx)
            _wait_for_server(directory, ctx.params.get("timeout"))
            client = Client(directory)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
    with client:
        yield client


def _wait_for_server(directory: Path, timeout: float | None) -> None:
    from controller.client.sockets import connection_to, unserved_reason

    connection = connection_to(directory)
    until = time.monotonic() + min(SERVER_START_S, timeout or SERVER_START_S)
    while reason := unserved_reason(connection):
        if time.monotonic() >= until:
            raise ServerNotRunning(directory, reason)
        time.sleep(_CONNECT_INTERVAL_S)


def run_request(
    ctx: typer.Context, as_json: bool, label: str, request: "Callable[[Client], Any]"
) -> None:
    """Send a request, show progress under `label`, and print the answer."""
    from controller.cli.render import renderables

    output = output_of(ctx, as_json)
    with output.progress(label), open_client(ctx) as client:
        reply = request(client)
    if as_json:
        output.document(reply)
    else:
        output.show(*renderables(reply))
