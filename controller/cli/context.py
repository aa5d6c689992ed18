"""What every command has in common.

What it is: the shared options, the way to a client, and the way from a request to what is printed.
What it is not: a command. One rule: nothing heavy is imported before a command runs, so that help
and completion answer at once.
"""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from controller.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from controller.cli.output import Output
    from controller.client import Client

QUERY_TIMEOUT_S: Final = 5.0
"""Who only looks does not wait long for a controller that is not there."""

_COMPLETION_TIMEOUT_S: Final = 0.3


@dataclass
class Settings:
    """What was said before the command's name, and how the command is to print."""

    directory: str | None = None
    as_json: bool = False


def complete_adapter(ctx: typer.Context) -> list[str]:
    """The names that the controller knows; none where it does not answer at once."""
    from controller.client import Client, LoradockError, Timing
    from controller.client.sockets import runtime_directory

    directory = runtime_directory(ctx.find_root().params.get("directory"))
    if not (directory / "run" / "requests.sock").exists():
        return []
    try:
        timing = Timing(slack_s=0.0)
        with Client(directory, timeout_s=_COMPLETION_TIMEOUT_S, timing=timing) as client:
            return sorted({view.adapter for view in client.list().adapters})
    except (LoradockError, ValueError, OSError):
        return []


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
AdapterArgument = Annotated[
    str,
    typer.Argument(metavar="ADAPTER", help="Its name.", autocompletion=complete_adapter),
]
PathOption = Annotated[
    str,
    typer.Option(
        "--path",
        metavar="DIRECTORY",
        help="Its directory: absolute, or relative to an adapter root of the server. Its name, "
        "if not given.",
        show_default=False,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", min=0.001, max=3600, metavar="SECONDS", help="How long to wait at most."
    ),
]


def settings_of(ctx: typer.Context) -> Settings:
    """The settings of this run."""
    settings = ctx.find_root().obj
    return settings if isinstance(settings, Settings) else Settings()


def directory_of(ctx: typer.Context) -> Path:
    """The controller's directory."""
    from controller.client.sockets import runtime_directory

    return runtime_directory(settings_of(ctx).directory)


def output_of(ctx: typer.Context, as_json: bool) -> "Output":
    """The output of this run, which errors will use too."""
    from controller.cli.output import Output

    settings_of(ctx).as_json = as_json
    return Output(as_json)


@contextmanager
def open_client(ctx: typer.Context) -> "Iterator[Client]":
    """A client of the controller of `--dir`."""
    from controller.client import Client

    try:
        client = Client(settings_of(ctx).directory)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
    with client:
        yield client


def ask(ctx: typer.Context, as_json: bool, doing: str, request: "Callable[[Client], Any]") -> None:
    """Ask the controller, show that it takes time, print the answer."""
    from controller.cli.render import renderables

    output = output_of(ctx, as_json)
    with open_client(ctx) as client, output.busy(doing):
        reply = request(client)
    if as_json:
        output.document(reply)
    else:
        output.show(*renderables(reply))
