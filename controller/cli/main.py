"""The command's entry.

What it is: the global options, all groups of commands together, and one place where errors become
exit codes. What it is not: a command. One rule: an error that is foreseen ends in a line and a
hint, never in a traceback.
"""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from controller.cli import adapters, log_commands, pooling, serve, streaming
from controller.cli.context import Settings, settings_of
from controller.cli.exit_codes import CommandError, failure_of, table_of_exits
from controller.client.errors import LoradockError

VERSION: Final = "0.1.0"


class Commands(TyperGroup):
    """All commands; ends with the exit code of whatever error they raise."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Who read our output has enough.
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
    rich_markup_mode="markdown",
    epilog=table_of_exits(),
    help="Keep many LoRA adapters ready for one base model.",
)
for group in (adapters.app, streaming.app, pooling.app, serve.app, log_commands.app):
    app.registered_commands += group.registered_commands
    app.registered_groups += group.registered_groups


def _version(wanted: bool) -> None:
    if wanted:
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
            help="The controller's directory: its log and its sockets.",
            show_default="./.loradock",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit."),
    ] = False,
) -> None:
    """Take the global options."""
    del version  # Its callback has ended the command already.
    ctx.obj = Settings(directory)


if __name__ == "__main__":
    app()
