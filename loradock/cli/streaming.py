"""The commands `generate` and `events`, which print each part of their stream at once."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loradock.cli.context import (
    AdapterOption,
    AsJson,
    InferenceTimeout,
    open_client,
    output_of,
)
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.options.groups import with_option_groups
from loradock.cli.options.sampling import SAMPLING

if TYPE_CHECKING:
    from loradock.cli.output import Output
    from loradock.client import Generation

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
Attempts = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="Send the request up to this many times, as long as it fails for a temporary reason "
        "before its first token.",
    ),
]
Priority = Annotated[
    int,
    typer.Option(
        metavar="NUMBER",
        help="Order among waiting requests: smaller numbers start first. Default: 0.",
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
@with_option_groups(sampling=SAMPLING)
def generate(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    prompt: Prompt,
    sampling: dict[str, Any],
    adapter: AdapterOption = None,
    image: Images = None,
    priority: Priority = 0,
    attempts: Attempts = 1,
    timeout: InferenceTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, with or without images, and print the text as it is generated."""
    text = _prompt(prompt)
    output = output_of(ctx, as_json)
    with (
        open_client(ctx) as client,
        client.generate(
            text,
            adapter,
            images=image or (),
            timeout_s=timeout,
            attempts=attempts,
            priority=priority,
            **sampling,
        ) as running,
    ):
        _print_generation(output, running, sampling.get("n", 1))


def _prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(ExitCode.USAGE, f"stdin is not UTF-8 text: {error}") from error


def _print_generation(output: "Output", running: "Generation", count: int) -> None:
    from loradock.cli.generated import GeneratedText

    started = time.monotonic()
    shown = GeneratedText(output, count)
    with output.progress("waiting for the first token"):
        chunk = next(running, None)
    while chunk is not None:
        shown.add(chunk)
        chunk = next(running, None)
    result = running.result
    if output.as_json:
        output.document(result)
        return
    shown.end()
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
    from loradock.cli.render import event_line

    output = output_of(ctx, as_json)
    start = 0 if since is None and not follow else since
    with open_client(ctx) as client, client.events(start, follow, snapshot) as stream:
        for item in stream:
            if as_json:
                output.document(item)
            else:
                output.text(event_line(item) + "\n")
