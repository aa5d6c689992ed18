"""The commands `embed` and `classify`: one result per text, in the order of the texts.

All texts are sent in one request.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from loradock.cli.context import (
    AdapterOption,
    AsJson,
    InferenceTimeout,
    open_client,
    output_of,
)
from loradock.cli.exit_codes import CommandError, ExitCode

app = typer.Typer()

Texts = Annotated[
    list[str],
    typer.Argument(
        metavar="TEXT...", help="The texts; a single - reads them from stdin, one per line."
    ),
]
Attempts = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="Send the request up to this many times, as long as it fails for a temporary reason.",
    ),
]


@app.command()
def embed(
    ctx: typer.Context,
    texts: Texts,
    adapter: AdapterOption = None,
    attempts: Attempts = 1,
    timeout: InferenceTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Compute a vector per text and show how similar they are; --json prints the vectors."""
    from loradock.cli.render import embedding

    output, lines = output_of(ctx, as_json), _texts(texts)
    with output.progress("embedding"), open_client(ctx) as client:
        result = client.embed(lines, adapter, timeout_s=timeout, attempts=attempts)
    if as_json:
        output.document(result)
    else:
        output.show(*embedding(lines, result))


@app.command()
def classify(
    ctx: typer.Context,
    texts: Texts,
    adapter: AdapterOption = None,
    attempts: Attempts = 1,
    timeout: InferenceTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Compute a score per text and label of the model."""
    from loradock.cli.render import classification

    output, lines = output_of(ctx, as_json), _texts(texts)
    with output.progress("classifying"), open_client(ctx) as client:
        result = client.classify(lines, adapter, timeout_s=timeout, attempts=attempts)
    if as_json:
        output.document(result)
    else:
        output.show(*classification(lines, result))


def _texts(texts: Sequence[str]) -> list[str]:
    if list(texts) != ["-"]:
        return list(texts)
    try:
        lines = sys.stdin.read().splitlines()
    except UnicodeDecodeError as error:
        raise CommandError(ExitCode.USAGE, f"stdin is not UTF-8 text: {error}") from error
    if not lines:
        raise CommandError(ExitCode.USAGE, "stdin is empty", "write one text per line")
    return lines
