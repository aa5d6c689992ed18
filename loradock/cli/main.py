"""The entry point: global options, all groups of commands, and errors as exit codes.

An expected error ends in one line and a hint, never in a traceback.
"""

from typing import Annotated, Any, Final, NoReturn

import typer

from loradock.cli.context import Settings, settings_of
from loradock.cli.contexts import chosen
from loradock.cli.exit_codes import EXIT_MEANINGS, CommandError, ExitCode, failure_of
from loradock.cli.help import USAGE_ERROR, WIDTH_MAX, Entry, OverviewGroup
from loradock.cli.words import ANSWERS, command_for, for_serve
from loradock.messages import VERSION
from loradock.messages.errors import LoradockError

_HELP: Final = """Keep many LoRA adapters ready for one base model.

First steps, in a directory of your own; the last two in another terminal:

\b
  loradock example tiny
  loradock serve --model tiny/model --adapter-root tiny/adapters
  loradock load upper
  loradock generate --adapter upper 'hello>'
"""


COMMANDS: Final = {
    "Server": (
        Entry(
            "example",
            "example",
            "Write an example to serve: a model of 0.8 million parameters and eight adapters, "
            "7 MB.",
        ),
        Entry(
            "serve",
            "serve.command",
            "Run a controller and its engine until Ctrl-C; both are restarted if they die or hang.",
        ),
        Entry(
            "ready",
            "life",
            "Wait until the server takes new work; exit with 6 and say why if it does not in time.",
        ),
        Entry(
            "status",
            "adapters",
            "Show the server, its engine and its memory; exit with 6 if no engine is attached.",
        ),
        Entry(
            "stop",
            "life",
            "End the server: new requests are refused, and those in progress end first.",
        ),
        Entry(
            "config", "running", "Show and change the limits and the policy of a running server."
        ),
        Entry(
            "gateway",
            "gateway",
            "Serve the OpenAI protocol, metrics and a page over HTTP, for a server that runs here.",
        ),
        Entry(
            "engine",
            "engine_commands",
            "Run an engine for a server elsewhere, or restart the engine.",
        ),
        Entry("keys", "keys", "Make keys, and decide which keys can connect to the server."),
        Entry("fleet", "serve.fleet_commands", "Serve with many machines behind one address."),
        Entry("context", "contexts", "Name servers, and choose the server that commands are for."),
    ),
    "Adapters": (
        Entry("load", "adapters", "Read and check an adapter, and keep it in host memory."),
        Entry(
            "adapters",
            "adapters",
            "List the known adapters, as `list` does, or with --available all below the roots.",
        ),
        Entry("list", "adapters", "List every known adapter and where it is."),
        Entry(
            "show",
            "adapters",
            "Show everything that is known about one adapter, also why it was refused.",
        ),
        Entry(
            "prefetch",
            "adapters",
            "Move an adapter towards a slot ahead of its use; ends before it has moved.",
        ),
        Entry(
            "stage",
            "adapters",
            "Prepare an adapter in page-locked memory, ready to be copied to the device.",
        ),
        Entry(
            "activate",
            "adapters",
            "Copy one adapter, or all adapters of a batch, into device slots.",
        ),
        Entry(
            "deactivate",
            "adapters",
            "Remove an adapter from its slot; it stays in page-locked memory.",
        ),
        Entry("hold", "adapters", "Activate an adapter and exempt it from every eviction."),
        Entry("release", "adapters", "End a hold."),
        Entry(
            "evict",
            "adapters",
            "Drop an adapter's weights from all memory; it is loaded again when it is used.",
        ),
        Entry("remove", "adapters", "Forget an adapter; its name is free again."),
    ),
    "Inference": (
        Entry(
            "generate",
            "inference",
            "Continue a prompt, with or without images, and print the text as it is generated.",
        ),
        Entry(
            "chat",
            "chat",
            "Chat with the model: one message per line, /help lists what else can be typed.",
        ),
        Entry(
            "embed",
            "inference",
            "Compute a vector per text and show how similar they are; --json prints the vectors.",
        ),
        Entry("classify", "inference", "Compute a score per text and label of the model."),
        Entry(
            "requests",
            "running",
            "List the requests in progress: id, adapter, age, and tokens sent so far.",
        ),
        Entry(
            "cancel",
            "running",
            "Stop a running generation of any client; its client gets the output so far.",
        ),
        Entry(
            "bench",
            "bench",
            "Measure a running server: requests and tokens per second, and latencies.",
        ),
    ),
    "Monitoring": (
        Entry("top", "top", "Show slots, states, rates and waits, updated until Ctrl-C."),
        Entry(
            "slow",
            "running",
            "Show the slowest operations on adapters and the slowest requests of the last hour.",
        ),
        Entry("events", "inference", "Print the life-cycle events, in order and without gaps."),
    ),
    "Log": (
        Entry("log", "log_commands", "Check the log's files, and repair corruption."),
        Entry(
            "replay",
            "log_commands",
            "Rebuild the controller's state from the log, compare digests, and show the adapters.",
        ),
        Entry(
            "timeline",
            "timeline",
            "Draw the adapters of a log over time: a lane per slot, loads, evictions and failures.",
        ),
        Entry(
            "advise",
            "lab",
            "Show which changes of the settings would have gained most for the logged requests.",
        ),
        Entry(
            "lab",
            "lab",
            "Compare eviction policies on generated workloads and public traces, with an offline "
            "bound.",
        ),
    ),
}
"""The panels of the overview, with the commands of each: their modules and summaries."""


_JSON: Final = "--json"
_GLOBAL: Final = ("--dir", "--address", "--key", "--server-key", "--context")
"""The global options with a value; they are accepted after the command too."""


def _end(
    ctx: typer.Context, error: LoradockError | CommandError | OSError, cause: Exception
) -> NoReturn:
    """Print an error, and end the command with its exit code."""
    # rich is imported only to print.
    from loradock.cli.output import Output

    failure, settings = failure_of(error), settings_of(ctx)
    if settings.context:
        failure = failure._replace(
            line=f"[{settings.context}] {failure.line}",
            fields={**failure.fields, "context": settings.context},
        )
    # The format is not known yet if the command itself could not be read.
    is_json = settings.as_json or ctx.meta[_JSON]
    Output(is_json, settings.verbose).failure(failure)
    raise typer.Exit(failure.exit_code) from cause


def load(module: str) -> typer.Typer:  # noqa: C901, PLR0912 - a case per module
    """Import a module of commands; return its application."""
    # Help and completion answer at once because the others are not imported.
    # ruff: noqa: PLC0415
    match module:
        case "adapters":
            from loradock.cli.adapters import app as found
        case "bench":
            from loradock.cli.bench import app as found
        case "chat":
            from loradock.cli.chat import app as found
        case "contexts":
            from loradock.cli.contexts import app as found
        case "engine_commands":
            from loradock.cli.engine_commands import app as found
        case "example":
            from loradock.cli.example import app as found
        case "serve.fleet_commands":
            from loradock.cli.serve.fleet_commands import app as found
        case "gateway":
            from loradock.cli.gateway import app as found
        case "inference":
            from loradock.cli.inference import app as found
        case "keys":
            from loradock.cli.keys import app as found
        case "lab":
            from loradock.cli.lab import app as found
        case "life":
            from loradock.cli.life import app as found
        case "log_commands":
            from loradock.cli.log_commands import app as found
        case "running":
            from loradock.cli.running import app as found
        case "serve.command":
            from loradock.cli.serve.command import app as found
        case "timeline":
            from loradock.cli.timeline import app as found
        case "top":
            from loradock.cli.top import app as found
        case _:
            raise ValueError(f"{module} is not a module of commands")
    return found


class Commands(OverviewGroup):
    """All commands; an error of a command ends the program with its exit code."""

    panels = COMMANDS
    load = staticmethod(load)
    exit_codes = tuple((str(code.value), text) for code, text in EXIT_MEANINGS.items())

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the global options, also those after the command; note the format of errors."""
        ctx.meta[_JSON] = _JSON in args
        return super().parse_args(ctx, self._with_global_first(ctx, args))

    def _with_global_first(self, ctx: Any, args: list[str]) -> list[str]:
        """Move global options that follow a command before it, unless the command has them too."""
        front, rest, is_end = list[str](), list[str](), False
        words = iter(args)
        for word in words:
            flag, equals, _ = word.partition("=")
            is_end = is_end or word == "--"
            if is_end or flag not in _GLOBAL or self._has_option(ctx, rest, flag):
                rest.append(word)
                continue
            front += [word, *([] if equals else [next(words, "")])]
        return front + rest

    def _has_option(self, ctx: Any, words: list[str], flag: str) -> bool:
        """Return whether the command that `words` begins with has an option of its own."""
        command: Any = self
        for place, word in enumerate(words):
            name = word if place else command_for(word)
            if name not in getattr(command, "commands", {}):
                break
            command = command.commands[name]
        return command is not self and any(flag in one.opts for one in command.get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names, here or in another program."""
        word, *rest = args
        if word == "help":
            if not rest:
                typer.echo(ctx.get_help())
                raise typer.Exit
            word, *rest = (*rest, "--help")
        if word in ANSWERS:
            raise CommandError(ExitCode.USAGE, f"{word!r} is not a command", ANSWERS[word])
        name = command_for(word)
        if name == "serve":
            params = self.commands[name].get_params(ctx)
            rest = for_serve(
                rest,
                frozenset(f for one in params if getattr(one, "is_flag", False) for f in one.opts),
            )
        return super().resolve_command(ctx, [name, *rest])

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader of the output closed it; typer handles this.
            raise
        except USAGE_ERROR as error:
            if not ctx.meta[_JSON]:
                raise
            hint = f"`{(error.ctx or ctx).command_path} --help` lists what is allowed"
            _end(ctx, CommandError(ExitCode.USAGE, error.format_message(), hint), error)
        except (LoradockError, CommandError, OSError) as error:
            _end(ctx, error, error)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": WIDTH_MAX, "help_option_names": ["--help", "-h"]},
    help=_HELP,
)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"loradock {VERSION}")
        raise typer.Exit


@app.callback()
def main(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            envvar="LORADOCK_DIR",
            metavar="DIRECTORY",
            help="The controller's directory, with its log and its sockets. Default: ./.loradock.",
            show_default=False,
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
    context: Annotated[
        str,
        typer.Option(
            envvar="LORADOCK_CONTEXT",
            metavar="NAME",
            help="The server's name, as `loradock context add` has stored it, instead of --dir and "
            "--address. Default: the server of `loradock context use`.",
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
    ctx.obj = chosen(Settings(directory, False, address, key, server_key), context)


if __name__ == "__main__":
    app()
