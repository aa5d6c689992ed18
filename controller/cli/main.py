"""The entry point: global options, all groups of commands, and errors as exit codes.

An expected error ends in one line and a hint, never in a traceback.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from typing import Annotated, Any

import typer

from controller.cli import (
    adapters,
    bench,
    engine_commands,
    gateway,
    keys,
    log_state_commands,
    pooling,
    serve,
    streaming,
    timeline,
    top,
)
from controller.cli.context import Settings, settings_of
from controller.cli.example import command as example
from controller.cli.exit_codes import EXIT_MEANINGS, CommandError, failure_of
from controller.cli.pages.help_pages import HelpGroup, with_help_pages
from controller.cli.server import in_progress, life, settings
from controller.client.errors import LoradockError
from messages.version import VERSION


class Commands(HelpGroup):
    """All commands; an error of a command ends the program with its exit code."""

    exit_codes = tuple((str(code.value), text) for code, text in EXIT_MEANINGS.items())

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader of the output closed it; typer handles this.
            raise
        except (LoradockError, CommandError, OSError) as error:
            from controller.cli.output import Output

            failure = failure_of(error)
            Output(settings_of(ctx).as_json).failure(failure)
            raise typer.Exit(failure.exit_code) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Keep many LoRA adapters ready for one base model.",
)
for group in (
    *(adapters.app, top.app, streaming.app, pooling.app, bench.app),
    *(example.app, serve.app, gateway.app, engine_commands.app, log_state_commands.app),
    *(life.app, in_progress.app, settings.app, keys.app, timeline.app),
):
    app.registered_commands += group.registered_commands
    app.registered_groups += group.registered_groups
with_help_pages(app.registered_commands, app.registered_groups)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"loradock {VERSION}")
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            envvar="LORADOCK_DIR",
            metavar="DIRECTORY",
            help="The controller's directory, with its log and its sockets.",
            show_default="./.loradock",
        ),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            envvar="LORADOCK_ADDRESS",
            metavar="tcp://HOST:PORT",
            help="The address of a controller on another machine, instead of --dir.",
            show_default=False,
        ),
    ] = "",
    key: Annotated[
        str,
        typer.Option(
            envvar="LORADOCK_KEY",
            metavar="FILE",
            help="Your key pair, made by `loradock keys new`; for --address.",
            show_default=False,
        ),
    ] = "",
    server_key: Annotated[
        str,
        typer.Option(
            envvar="LORADOCK_SERVER_KEY",
            metavar="FILE",
            help="The server's public key, keys/server.key.pub of its directory; for --address.",
            show_default=False,
        ),
    ] = "",
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Store the global options."""
    del version  # Its callback has already ended the program.
    ctx.obj = Settings(directory, False, address, key, server_key)


if __name__ == "__main__":
    app()
