"""The entry point: global options, all groups of commands, and errors as exit codes.

An expected error ends in one line and a hint, never in a traceback.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from typing import Annotated, Any, Final, NoReturn

import typer

from loradock.cli.context import Settings, settings_of
from loradock.cli.exit_codes import EXIT_MEANINGS, CommandError, ExitCode, failure_of
from loradock.cli.pages.overview import Entry, OverviewGroup
from loradock.client.errors import LoradockError
from loradock.messages import VERSION

_HELP: Final = """Keep many LoRA adapters ready for one base model.

First steps, in a directory of your own; the last two in another terminal:

\b
  loradock example tiny
  loradock serve --model tiny/model --adapter-root tiny/adapters
  loradock load upper
  loradock generate --adapter upper 'hello>'
"""


def _adapters() -> typer.Typer:
    from loradock.cli import adapters

    return adapters.app


def _top() -> typer.Typer:
    from loradock.cli import top

    return top.app


def _streaming() -> typer.Typer:
    from loradock.cli import streaming

    return streaming.app


def _pooling() -> typer.Typer:
    from loradock.cli import pooling

    return pooling.app


def _bench() -> typer.Typer:
    from loradock.cli import bench

    return bench.app


def _serve() -> typer.Typer:
    from loradock.cli import serve

    return serve.app


def _gateway() -> typer.Typer:
    from loradock.cli import gateway

    return gateway.app


def _engine_commands() -> typer.Typer:
    from loradock.cli import engine_commands

    return engine_commands.app


def _log_state_commands() -> typer.Typer:
    from loradock.cli import log_state_commands

    return log_state_commands.app


def _keys() -> typer.Typer:
    from loradock.cli import keys

    return keys.app


def _timeline() -> typer.Typer:
    from loradock.cli import timeline

    return timeline.app


def _example() -> typer.Typer:
    from loradock.cli.example import command

    return command.app


def _life() -> typer.Typer:
    from loradock.cli.server import life

    return life.app


def _in_progress() -> typer.Typer:
    from loradock.cli.server import in_progress

    return in_progress.app


def _calibrate() -> typer.Typer:
    from loradock.cli import calibrate

    return calibrate.app


def _settings() -> typer.Typer:
    from loradock.cli.server import settings

    return settings.app


COMMANDS: Final = {
    "Server": (
        Entry(
            "example",
            _example,
            "Write an example to serve: a model of 0.8 million parameters and eight adapters, "
            "7 MB.",
        ),
        Entry(
            "serve",
            _serve,
            "Run a controller and its engine until Ctrl-C; both are restarted if they die or hang.",
        ),
        Entry(
            "ready",
            _life,
            "Wait until the server has an engine and answers; exit with 6 if it does not in time.",
        ),
        Entry(
            "status",
            _adapters,
            "Show the server, its engine and its memory; exit with 6 if no engine is attached.",
        ),
        Entry(
            "stop",
            _life,
            "End the server: new requests are refused, and those in progress end first.",
        ),
        Entry(
            "config", _settings, "Show and change the limits and the policy of a running server."
        ),
        Entry(
            "gateway",
            _gateway,
            "Serve the OpenAI protocol, metrics and a page over HTTP, for a server that runs here.",
        ),
        Entry("engine", _engine_commands, "Restart the engine."),
        Entry(
            "calibrate",
            _calibrate,
            "Measure this processor now, show what --dtype auto chooses, and store it for later "
            "starts.",
        ),
        Entry("keys", _keys, "Make keys, and decide which ones may connect to the server."),
    ),
    "Adapters": (
        Entry("load", _adapters, "Read and check an adapter, and keep it in host memory."),
        Entry("list", _adapters, "List every known adapter and where it is."),
        Entry(
            "show",
            _adapters,
            "Show everything that is known about one adapter, also why it was refused.",
        ),
        Entry(
            "prefetch",
            _adapters,
            "Move an adapter towards a slot ahead of its use; ends before it has moved.",
        ),
        Entry(
            "stage",
            _adapters,
            "Prepare an adapter in page-locked memory, ready to be copied to the device.",
        ),
        Entry(
            "activate",
            _adapters,
            "Copy one adapter, or all adapters of a batch, into device slots.",
        ),
        Entry(
            "deactivate",
            _adapters,
            "Remove an adapter from its slot; it stays in page-locked memory.",
        ),
        Entry("hold", _adapters, "Activate an adapter and exempt it from every eviction."),
        Entry("release", _adapters, "End a hold."),
        Entry(
            "evict",
            _adapters,
            "Drop an adapter's weights from all memory; it is loaded again when it is used.",
        ),
        Entry("remove", _adapters, "Forget an adapter; its name is free again."),
    ),
    "Inference": (
        Entry(
            "generate",
            _streaming,
            "Continue a prompt, with or without images, and print the text as it is generated.",
        ),
        Entry(
            "embed",
            _pooling,
            "Compute a vector per text and show how similar they are; --json prints the vectors.",
        ),
        Entry("classify", _pooling, "Compute a score per text and label of the model."),
        Entry(
            "requests",
            _in_progress,
            "List the requests in progress: id, adapter, age, and tokens sent so far.",
        ),
        Entry(
            "cancel",
            _in_progress,
            "Stop a running generation of any client; its client gets the output so far.",
        ),
        Entry(
            "bench",
            _bench,
            "Measure a running server: requests and tokens per second, and latencies.",
        ),
    ),
    "Monitoring": (
        Entry("top", _top, "Show slots, states, rates and waits, updated until Ctrl-C."),
        Entry(
            "slow",
            _in_progress,
            "Show the slowest operations on adapters and the slowest requests of the last hour.",
        ),
        Entry("events", _streaming, "Print the life-cycle events, in order and without gaps."),
    ),
    "Log": (
        Entry("log", _log_state_commands, "Check the log's files, and repair corruption."),
        Entry(
            "replay",
            _log_state_commands,
            "Rebuild the controller's state from the log, compare digests, and show the adapters.",
        ),
        Entry(
            "timeline",
            _timeline,
            "Draw the adapters of a log over time: a lane per slot, loads, evictions and failures.",
        ),
    ),
}
"""The panels of the overview, with the commands of each: their modules and summaries."""


_JSON: Final = "--json"
_UsageError: Final[Any] = typer.BadParameter.__bases__[0]
"""The base class of all errors in a command line; typer does not export it."""


def _end(
    ctx: typer.Context, error: LoradockError | CommandError | OSError, cause: Exception
) -> NoReturn:
    """Print an error, and end the command with its exit code."""
    from loradock.cli.output import Output

    failure, settings = failure_of(error), settings_of(ctx)
    Output(settings.as_json, settings.verbose).failure(failure)
    raise typer.Exit(failure.exit_code) from cause


class Commands(OverviewGroup):
    """All commands; an error of a command ends the program with its exit code."""

    panels = COMMANDS
    exit_codes = tuple((str(code.value), text) for code, text in EXIT_MEANINGS.items())

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the global options, and note the format of errors in the others."""
        ctx.meta[_JSON] = _JSON in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader of the output closed it; typer handles this.
            raise
        except _UsageError as error:
            if not ctx.meta[_JSON]:
                raise
            # The arguments could not be read, so neither was their format.
            settings_of(ctx).as_json = True
            hint = f"`{(error.ctx or ctx).command_path} --help` lists what is allowed"
            _end(ctx, CommandError(ExitCode.USAGE, error.format_message(), hint), error)
        except (LoradockError, CommandError, OSError) as error:
            _end(ctx, error, error)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=_HELP,
)


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
