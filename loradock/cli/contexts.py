"""Named servers: `context add`, `use`, `list` and `remove`, and the file that keeps them."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from msgspec import Struct, field

from loradock.cli.context import AsJson, Settings, output_of
from loradock.cli.exit_codes import CommandError, ExitCode

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

app = typer.Typer()
context_app = typer.Typer(
    no_args_is_help=True, help="Name servers, and choose the server that commands are for."
)
app.add_typer(context_app, name="context")


class Server(Struct, frozen=True):
    """Where a server is: its directory on this machine, or its address with two key files."""

    directory: str | None = None
    address: str = ""
    key: str = ""
    server_key: str = ""


class Contexts(Struct):
    """The servers by name; `selected` is used by commands that name no server, if not empty."""

    selected: str = ""
    servers: dict[str, Server] = field(default_factory=dict)

    def server(self, name: str) -> Server:
        """Return a server; raises `CommandError` for an unknown name."""
        if name not in self.servers:
            known = ", ".join(self.servers) or "none"
            raise CommandError(
                ExitCode.NOT_FOUND,
                f"no server is named {name!r}; known: {known}",
                "`loradock context add NAME --address tcp://HOST:PORT` names one",
            )
        return self.servers[name]


def contexts_path() -> Path:
    """Return the file of the named servers, in the user's configuration directory."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "loradock" / "contexts.json"


def read_contexts() -> Contexts:
    """Return the named servers, none without a file; raises `CommandError` for a wrong file."""
    path = contexts_path()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except msgspec.DecodeError as error:
        raise CommandError(
            ExitCode.USAGE, f"{path} is not a file of servers: {error}", "correct or remove it"
        ) from error


def _write(contexts: Contexts) -> None:
    path = contexts_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(contexts), indent=2) + b"\n")
    new.replace(path)


def chosen(settings: Settings, name: str) -> Settings:
    """Return the settings with the server of a name; without one, of the selected name.

    A name precedes a directory and an address, and these precede the selected name.
    """
    if not name and (settings.directory or settings.address):
        return settings
    contexts = read_contexts()
    if not (name or contexts.selected):
        return settings
    server = contexts.server(name or contexts.selected)
    return replace(settings, **msgspec.structs.asdict(server), context=name or contexts.selected)


def _complete() -> list[str]:
    return sorted(read_contexts().servers)


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The server's name.", autocompletion=_complete)
]


@context_app.command()
def add(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of your choice.")],
    address: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Address of a server elsewhere.")
    ] = "",
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your key pair; for --address.")
    ] = None,
    server_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's public key; for --address.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIRECTORY", help="Directory of a server on this machine."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name a server; a known name gets the new address."""
    from loradock.client.sockets import connection_to

    output_of(ctx, as_json)
    if not _NAME.fullmatch(name):
        raise CommandError(
            ExitCode.USAGE, f"{name!r} is not a name", "use up to 64 of A-Z a-z 0-9 . _ -"
        )
    files = {"directory": directory, "key": key, "server_key": server_key}
    # A command can be run in any directory.
    paths = {one: str(path.absolute()) for one, path in files.items() if path is not None}
    if not (address or directory):
        raise CommandError(ExitCode.USAGE, "a server has an --address or a --dir; none is named")
    server = Server(address=address, **paths)
    try:
        connection_to(**msgspec.structs.asdict(server))
    except (ValueError, OSError) as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
    contexts = read_contexts()
    contexts.servers[name] = server
    _write(contexts)
    _show(ctx, as_json, contexts)


@context_app.command()
def use(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The server's name. Default: none.", autocompletion=_complete
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Choose the server that commands without --context, --dir and --address are for."""
    output_of(ctx, as_json)
    contexts = read_contexts()
    if name:
        contexts.server(name)
    contexts.selected = name
    _write(contexts)
    _show(ctx, as_json, contexts)


@context_app.command()
def remove(ctx: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """Forget a server's name; the server itself is not touched."""
    output_of(ctx, as_json)
    contexts = read_contexts()
    contexts.server(name)
    del contexts.servers[name]
    if contexts.selected == name:
        contexts.selected = ""
    _write(contexts)
    _show(ctx, as_json, contexts)


@context_app.command("list")
def list_(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the named servers; an asterisk marks the selected one, which commands are for."""
    _show(ctx, as_json, read_contexts())


def _show(ctx: typer.Context, as_json: bool, contexts: Contexts) -> None:
    from loradock.cli.output import FittingTable

    output = output_of(ctx, as_json)
    if as_json:
        output.document(contexts)
        return
    if not contexts.servers:
        output.show("no servers are named")
        return
    rows = (
        (
            name,
            "*" if name == contexts.selected else "",
            one.address or str(one.directory),
            one.key,
        )
        for name, one in contexts.servers.items()
    )
    output.show(FittingTable(("name", "selected", "server", "key"), rows, kept=3))
