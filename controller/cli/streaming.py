"""The commands `generate` and `events`, which print each part of their stream at once."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.context import (
    AdapterOption,
    AsJson,
    InferenceTimeout,
    open_client,
    output_of,
)
from controller.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from controller.cli.output import Output
    from controller.client import Generation
    from controller.client.session import SamplingOptions

app = typer.Typer()


Prompt = Annotated[
    str,
    typer.Argument(
        metavar="PROMPT",
        help="The text to continue; - reads it from stdin. With images it contains the "
        "placeholder of the model, as its processor writes it, once per image.",
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="An image file; repeat the option for several, in the order of the placeholders.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="Largest number of output tokens. Default: 128, or as many as the model's context "
        "leaves for the prompt.",
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        min=0,
        max=100,
        help="Sampling temperature; 0 always chooses the most likely token. Default: 0.",
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        min=0, metavar="K", help="Sample only from the K most likely tokens; 0 for all. Default: 0."
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        metavar="P",
        help="Sample only from the smallest set of most likely tokens whose probabilities sum to "
        "P; 1 for all.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="NUMBER", help="Seed that makes sampling repeatable. Default: random."
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="End the output before this text; repeat for several. Default: none."
    ),
]
Attempts = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="Attempts in all, while a failure may be temporary and no token has arrived.",
    ),
]
Since = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="EVENT",
        help="Start after the event with this number; 0 starts with the oldest. Default: now with "
        "--follow, the oldest with --no-follow.",
    ),
]
Follow = Annotated[bool, typer.Option(help="Continue with new events until Ctrl-C.")]
WithSnapshot = Annotated[
    bool,
    typer.Option(
        "--snapshot", help="Show all adapters in place of events that are not kept any more."
    ),
]


@app.command()
def generate(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    prompt: Prompt,
    adapter: AdapterOption = None,
    image: Images = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    attempts: Attempts = 1,
    timeout: InferenceTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, with or without images, and print the text as it is generated."""
    sampling: SamplingOptions = {
        "max_tokens": max_tokens or 0,
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
        raise CommandError(ExitCode.USAGE, f"stdin is not UTF-8 text: {error}") from error


def _print_generation(output: "Output", running: "Generation") -> None:
    started = time.monotonic()
    with output.progress("waiting for the first token"):
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


@app.command()
def events(
    ctx: typer.Context,
    since: Since = None,
    follow: Follow = True,
    snapshot: WithSnapshot = False,
    as_json: AsJson = False,
) -> None:
    """Print the life-cycle events, in order and without gaps."""
    from controller.cli.render import event_line

    output = output_of(ctx, as_json)
    start = 0 if since is None and not follow else since
    with open_client(ctx) as client, client.events(start, follow, snapshot) as stream:
        for item in stream:
            if as_json:
                output.document(item)
            else:
                output.text(event_line(item) + "\n")
