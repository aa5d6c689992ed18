"""The `example` command: the tiny model with its adapters, to try everything else with."""

import errno
import shutil
from pathlib import Path
from typing import Annotated, Final

import typer

from loradock.cli.context import AsJson, output_of

app = typer.Typer()

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_SOURCES: Final = (_PACKAGE / "tiny", _PACKAGE.parent / "examples" / "tiny")
"""Where the files are in an installation, and in a checkout."""

_PARTS: Final = ("model", "adapters")


@app.command()
def example(
    ctx: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Directory to write; must not exist yet.")
    ],
    as_json: AsJson = False,
) -> None:
    """Write an example to serve: a model of 0.8 million parameters and eight adapters, 7 MB.

    It changes words of lower-case letters: the adapter reverse answers olleh to "hello>".
    """
    output = output_of(ctx, as_json)
    write_example(directory)
    if as_json:
        output.document({name: directory / name for name in _PARTS})
        return
    typer.echo(
        f"{directory} has a model and eight adapters. Serve them, then use another terminal:\n"
        f"  loradock serve --model {directory}/model --adapter-root {directory}/adapters "
        "--max-lora-rank 64\n"
        "  loradock load reverse\n"
        "  loradock generate --adapter reverse 'hello>'\n"
        "  loradock chat --adapter reverse"
    )


def write_example(directory: Path) -> None:
    """Copy the example's files.

    Raises `BadParameter` for a directory that exists, `OSError` if it can't be written.
    """
    source = next((path for path in _SOURCES if path.is_dir()), None)
    if source is None:
        raise FileNotFoundError("this installation has no example; the sources have it")
    try:
        # What is removed after an error is of this process: another process can have begun as well.
        directory.mkdir(parents=True)
    except FileExistsError as error:
        raise typer.BadParameter(f"{directory} exists; name a new directory") from error
    try:
        for part in _PARTS:
            shutil.copytree(source / part, directory / part)
    except (OSError, shutil.Error) as error:
        # A directory that exists would be refused the next time.
        shutil.rmtree(directory, ignore_errors=True)
        reason = f"it can't be written: {_reason(error)}"
        raise OSError(errno.EIO, reason, str(directory)) from error


def _reason(error: OSError) -> str:
    """Return the first of the reasons of an error that `copytree` raises for all files."""
    if isinstance(error, shutil.Error) and error.args and error.args[0]:
        return str(error.args[0][0][2])
    return error.strerror or str(error)
