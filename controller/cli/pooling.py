"""What an adapter says of whole texts: `embed` and `classify`.

What it is: two commands over the client's calls. What it is not: a batch tool; all texts go in one
request. One rule: one result a text, in the order in which the texts were given.
"""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from controller.cli.context import AsJson, Timeout, complete_adapter, open_client, output_of
from controller.cli.exit_codes import CommandError, ExitCode

app = typer.Typer()

Texts = Annotated[
    list[str], typer.Argument(help="The texts; - alone reads them from stdin, one a line.")
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        "-a",
        help="Use this adapter; without, the base model.",
        autocompletion=complete_adapter,
    ),
]
Attempts = Annotated[int, typer.Option(min=1, help="Try so often where that may help.")]


@app.command(rich_help_panel="Using")
def embed(
    ctx: typer.Context,
    texts: Texts,
    adapter: Adapter = None,
    attempts: Attempts = 1,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Turn texts into vectors, and show how similar they are; --json prints the vectors."""
    from controller.cli.render import embedding

    output, lines = output_of(ctx, as_json), _texts(texts)
    with open_client(ctx) as client, output.busy("embedding"):
        result = client.embed(lines, adapter, timeout_s=timeout, attempts=attempts)
    if as_json:
        output.document(result)
    else:
        output.show(*embedding(lines, result))


@app.command(rich_help_panel="Using")
def classify(
    ctx: typer.Context,
    texts: Texts,
    adapter: Adapter = None,
    attempts: Attempts = 1,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Score texts by the model's labels."""
    from controller.cli.render import classification

    output, lines = output_of(ctx, as_json), _texts(texts)
    with open_client(ctx) as client, output.busy("classifying"):
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
        raise CommandError(ExitCode.USAGE, f"stdin is no UTF-8 text: {error}") from error
    if not lines:
        raise CommandError(ExitCode.USAGE, "stdin is empty", "give one text a line")
    return lines
