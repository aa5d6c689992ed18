"""Options, the client and the output that all commands share.

Heavy modules are imported when a command runs, so that help and completion answer at once.
"""

# See above.
# ruff: noqa: PLC0415

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from loradock.cli.exit_codes import CommandError, ExitCode, NotReached, ServerNotRunning
from loradock.client.session import GENERATION_TIMEOUT_S, TIMEOUT_S, TIMEOUT_S_MAX

if TYPE_CHECKING:
    from loradock.cli.output import Output
    from loradock.client import Client

QUERY_TIMEOUT_S: Final = 5.0
"""The default time limit of commands that only read."""

_COMPLETION_TIMEOUT_S: Final = 0.3


@dataclass
class Settings:
    """The global options, and the output format of the command; `verbose`: errors with details.

    `context`: the name of the server, empty if it has none.
    """

    directory: str | None = None
    as_json: bool = False
    address: str = ""
    key: str = ""
    server_key: str = ""
    verbose: bool = False
    context: str = ""


def completions(ctx: typer.Context, names: "Callable[[Client], Iterable[str]]") -> list[str]:
    """Return names that the server knows, sorted; none if it does not answer at once."""
    from loradock.client import Client, LoradockError, Timing
    from loradock.client.sockets import connection_to, runtime_directory, unserved_reason

    directory = runtime_directory(ctx.find_root().params.get("directory"))
    timing = Timing(slack_s=0.0)
    try:
        if unserved_reason(connection_to(directory)):
            return []
        with Client(directory, timeout_s=_COMPLETION_TIMEOUT_S, timing=timing) as client:
            return sorted(set(names(client)))
    except (LoradockError, ValueError, OSError):
        return []


def complete_adapter(ctx: typer.Context) -> list[str]:
    """Return the names of adapters that the server knows."""
    return completions(ctx, lambda client: [view.adapter for view in client.list().adapters])


def _timeout_option(default_s: float) -> Any:
    return typer.Option(
        "--timeout",
        min=0.001,
        max=TIMEOUT_S_MAX,
        metavar="SECONDS",
        help=f"Give up after this time. Default: {default_s:g} s.",
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
        metavar="ADAPTER",
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
    """Return the controller's directory; raises `CommandError` for a controller elsewhere."""
    from loradock.client.sockets import runtime_directory

    settings = settings_of(ctx)
    if settings.address:
        raise CommandError(
            ExitCode.USAGE,
            f"this command works on the directory of a server, and {settings.address} is elsewhere",
            "run it on the server's machine, or name a directory here with --dir",
        )
    return runtime_directory(settings.directory)


def output_of(ctx: typer.Context, as_json: bool, verbose: bool = False) -> "Output":
    """Return the output of this run; errors will have its format, with details if `verbose`."""
    from loradock.cli.output import Output

    settings = settings_of(ctx)
    settings.as_json, settings.verbose = as_json, verbose
    return Output(as_json, verbose)


@contextmanager
def open_client(ctx: typer.Context) -> "Iterator[Client]":
    """Open a client of the controller at `--address`, else of the controller of `--dir`.

    Raises `NotReached` if no server accepts connections.
    """
    from loradock.client import Client

    settings = settings_of(ctx)
    try:
        if settings.address:
            client = _remote_client(settings)
        else:
            directory = directory_of(ctx)
            _check_server(directory)
            client = Client(directory)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
    with client:
        yield client


def lock_holder(directory: Path) -> int:
    """Return the process that writes the log of a controller's directory; 0 for none.

    It takes no part in the locks.
    """
    try:
        status = os.stat(directory / "log")
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    # "1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF"
    for line in lines:
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK":
            continue
        major, minor, inode = fields[5].split(":")
        device = os.makedev(int(major, 16), int(minor, 16))
        if (device, int(inode)) == (status.st_dev, status.st_ino) and fields[4].isdecimal():
            return int(fields[4])
    return 0


def _is_installed(library: str) -> bool:
    """Return whether a package is found, without importing it, which takes seconds."""
    return any((Path(place) / library).is_dir() for place in sys.path)


def check_engine_installed() -> None:
    """Raise `CommandError` if this installation has no libraries for an engine."""
    missing = [name for name in ("torch", "transformers") if not _is_installed(name)]
    if missing:
        raise CommandError(
            ExitCode.USAGE,
            f"an engine needs {' and '.join(missing)}, not installed here",
            "install them with pip install 'loradock[serve]', or serve with --engine external and "
            "run the engine on another machine",
        )


def replace_process(command: Sequence[str]) -> NoReturn:
    """Run a command instead of this process (exec), so that its signals and exit status count."""
    sys.stdout.flush()
    os.execv(command[0], list(command))  # noqa: S606


def _check_server(directory: Path) -> None:
    """Raise `ServerNotRunning` unless a process accepts connections in the directory."""
    from loradock.client.sockets import connection_to, unserved_reason

    if reason := unserved_reason(connection_to(directory)):
        raise ServerNotRunning(directory, reason, lock_holder(directory))


def _remote_client(settings: Settings) -> "Client":
    from loradock.client import Client
    from loradock.messages.errors import EngineGone

    try:
        return Client(address=settings.address, key=settings.key, server_key=settings.server_key)
    except EngineGone as error:
        hint = "is `loradock serve --listen` running there, and does a firewall let the port pass?"
        raise NotReached(error.message, hint) from error


def run_request(
    ctx: typer.Context,
    as_json: bool,
    label: str,
    request: "Callable[[Client], Any]",
    *,
    verbose: bool = False,
) -> Any:
    """Send a request, show progress under `label`, and print and return the answer."""
    from loradock.cli.render import renderables

    output = output_of(ctx, as_json, verbose)
    with output.progress(label), open_client(ctx) as client:
        reply = request(client)
    if as_json:
        output.document(reply)
    else:
        output.show(*renderables(reply))
    return reply
