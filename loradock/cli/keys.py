"""The commands on keys: `keys new`, `allow`, `revoke` and `list`.

They work on files, so a running server is not needed; a running server applies a change at once.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from loradock.cli.context import AsJson, directory_of, output_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.processes.key_files import public_key_path, read_public_key, write_key_pair, write_new

if TYPE_CHECKING:
    from loradock.controller.server.keys import AllowedKey, KeyStore

app = typer.Typer()
keys_app = typer.Typer(
    no_args_is_help=True, help="Make keys, and decide which keys can connect to the server."
)
app.add_typer(keys_app, name="keys")

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The key's name on the server, up to 16 characters.")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="PATTERN",
        help="Limit the key to adapters whose names match, for example 'acme-*'; repeat for "
        "several. Default: all adapters.",
    ),
]
RightOption = Annotated[
    Literal["read", "operate", "administrate", "engine"],
    typer.Option(
        "--right",
        help="read: lists, status, events. operate: also load and use adapters. administrate: "
        "also hold, evict, replace and remove them. engine: attach as the engine, nothing else.",
    ),
]


@keys_app.command()
def new(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to store the key pair; must not exist.")
    ],
    as_json: AsJson = False,
) -> None:
    """Make a key pair in FILE, and its public key in FILE.pub, which `keys allow` reads."""
    from loradock.controller.server.keys import new_pair

    output = output_of(ctx, as_json)
    pair = new_pair()
    try:
        write_key_pair(file, pair)
        write_new(public_key_path(file), f"{pair.public}\n".encode(), 0o644)
    except FileExistsError as error:
        raise CommandError(
            ExitCode.REFUSED, f"{error.filename} exists", "choose another file: keys are kept"
        ) from error
    if as_json:
        output.document({"public": pair.public, "file": str(file)})
    else:
        output.show(pair.public)


@keys_app.command()
def allow(
    ctx: typer.Context,
    name: NameArgument,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A public key, or the file that contains it.")
    ],
    right: RightOption = "read",
    adapters: Adapters = None,
    as_json: AsJson = False,
) -> None:
    """Allow a public key; clients also need the server's own, whose file is printed."""
    from loradock.controller.server.keys import AllowedKey

    store = _store(ctx)
    with _refused():
        public = read_public_key(key) if Path(key).is_file() else key
        allowed = AllowedKey(name, public, right, tuple(adapters or ()))
        store.server_pair()
        store.allow(allowed)
    _show(ctx, as_json, store, (allowed,))


@keys_app.command()
def revoke(ctx: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """Revoke a key; a running server closes its connections."""
    store = _store(ctx)
    with _refused():
        store.revoke(name)
        keys = store.read()
    _show(ctx, as_json, store, keys)


@keys_app.command("list")
def list_keys(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the allowed keys, and the file of the server's public key."""
    store = _store(ctx)
    with _refused():
        keys = store.read()
    _show(ctx, as_json, store, keys)


@contextmanager
def _refused() -> Iterator[None]:
    """End the command for a key that can't be allowed, or files that can't be used."""
    from loradock.controller.server.keys import DirectoryRefused

    try:
        yield
    except (ValueError, DirectoryRefused) as error:
        raise CommandError(ExitCode.REFUSED, str(error)) from error


def _store(ctx: typer.Context) -> "KeyStore":
    from loradock.controller.server.keys import KeyStore

    return KeyStore(directory_of(ctx))


def _show(
    ctx: typer.Context, as_json: bool, store: "KeyStore", keys: "tuple[AllowedKey, ...]"
) -> None:
    from rich.table import Table

    output = output_of(ctx, as_json)
    if as_json:
        output.document({"server_key": str(store.server_public_path), "keys": keys})
        return
    table = Table("name", "right", "adapters", "public key", box=None)
    for key in keys:
        table.add_row(key.name, key.right, " ".join(key.adapters) or "all", key.public)
    output.show(table, f"server's public key: {store.server_public_path}")
