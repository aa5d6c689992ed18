"""What comes bit by bit: `generate` and `events`.

What it is: two commands over the client's streams. What it is not: the streams' repair, which the
client does. One rule: what came is printed at once.
"""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.context import (
    AsJson,
    Timeout,
    complete_adapter,
    open_client,
    output_of,
)
from controller.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from controller.cli.output import Output
    from controller.client import Generation
    from controller.client.session import SamplingOptions

app = typer.Typer()


@app.command(rich_help_panel="Using")
def generate(  # noqa: PLR0913, PLR0917 - one parameter an option
    ctx: typer.Context,
    prompt: Annotated[
        str,
        typer.Argument(
            help="The text to continue; - reads it from stdin. With images it has the placeholder "
            "of the model, as its processor writes it, once for each."
        ),
    ],
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            "-a",
            help="Generate with this adapter; without, with the base model.",
            autocompletion=complete_adapter,
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="An image, in the order of the placeholders; repeatable.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of the k likeliest only; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Of this share only.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; repeatable.")
    ] = None,
    attempts: Annotated[int, typer.Option(min=1, help="Try so often while no token has come.")] = 1,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, with or without images, and print the text as it comes."""
    sampling: SamplingOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    text = _prompt(prompt)
    output = output_of(ctx, as_json)
    with (
        open_client(ctx) as client,
        client.generate(
            text, adapter, images=image or (), timeout_s=timeout, attempts=attempts, **sampling
        ) as running,
    ):
        _print_generation(output, running)


def _prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(ExitCode.USAGE, f"stdin is no UTF-8 text: {error}") from error


def _print_generation(output: "Output", running: "Generation") -> None:
    started = time.monotonic()
    with output.busy("waiting for the first token"):
        chunk = next(running, None)
    ends_line = True
    while chunk is not None:
        if output.as_json:
            output.document(chunk)
        elif chunk.text:
            output.text(chunk.text)
            ends_line = chunk.text.endswith("\n")
        chunk = next(running, None)
    result = running.result
    if output.as_json:
        output.document(result)
        return
    if not ends_line:
        output.text("\n")
    if result is not None:
        seconds = time.monotonic() - started
        output.note(
            f"{result.finish_reason}: {result.prompt_tokens} prompt tokens, "
            f"{result.output_tokens} output tokens, {seconds:.2f} s"
        )


@app.command(rich_help_panel="Looking")
def events(
    ctx: typer.Context,
    since: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Begin after this number; 0 begins with the oldest. Without it, --follow begins "
            "now and --no-follow with the oldest.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option(help="Go on with what happens from now on.")] = True,
    as_json: AsJson = False,
) -> None:
    """The life-cycle events, in order and without gaps."""
    from controller.cli.render import event_line

    output = output_of(ctx, as_json)
    start = 0 if since is None and not follow else since
    with open_client(ctx) as client, client.events(start, follow) as stream:
        for item in stream:
            if as_json:
                output.document(item)
            else:
                output.text(event_line(item) + "\n")
