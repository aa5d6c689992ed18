"""The inference commands: `generate`, `embed`, `classify` and `events`.

Streams are printed as they arrive. `embed` and `classify` send all texts in one request and print
one result per text, in the order of the texts.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec
import typer
from msgspec import Struct

from loradock.cli.context import (
    AdapterOption,
    AsJson,
    InferenceTimeout,
    complete_adapter,
    open_client,
    output_of,
)
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.model_text import ModelOption, TemplateOption, find_model, read_model_text
from loradock.cli.options import with_options
from loradock.messages.options import option
from loradock.messages.prompts import LOGPROBS_MAX, N_MAX, Sampling, Structure

if TYPE_CHECKING:
    from loradock.cli.output import Output
    from loradock.client import Generation
    from loradock.messages.requests import TokensStreamed
    from loradock.messages.views import TokenLogprob

app = typer.Typer()

TokenText = Callable[[int], str]

_STRUCTURES: Final = ("json_schema", "regex", "choice")


class SamplingOptions(Struct, frozen=True, kw_only=True):
    """The options of `generate` that become fields of `loradock.messages.prompts.Sampling`."""

    PANEL: ClassVar = "Sampling"
    VARIABLES: ClassVar = False

    max_tokens: Annotated[
        int | None,
        option(
            "Largest number of output tokens. Default: 128, or as many as the model's context "
            "leaves for the prompt.",
            ge=1,
        ),
    ] = None
    temperature: Annotated[
        float,
        option(
            "Sampling temperature; 0 always chooses the most likely token. Default: 0.",
            ge=0,
            le=100,
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        option(
            "Sample only from the K most likely tokens; 0 for all. Default: 0.", ge=0, metavar="K"
        ),
    ] = 0
    top_p: Annotated[
        float,
        option(
            "Sample only from the smallest set of most likely tokens whose probabilities sum to "
            "P; 1 for all.",
            ge=0,
            le=1,
            metavar="P",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        option(
            "Sample only from tokens with at least P times the largest probability. Default: 0.",
            ge=0,
            le=1,
            metavar="P",
        ),
    ] = 0.0
    seed: Annotated[
        int | None, option("Seed that makes sampling repeatable. Default: random.", ge=0)
    ] = None
    n: Annotated[
        int, option("Number of outputs of the prompt.", ge=1, le=N_MAX, flags="--n,-n")
    ] = 1
    presence_penalty: Annotated[
        float,
        option(
            "Subtract this from the logit of each token that is in the output already. Default: 0.",
            ge=-2,
            le=2,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        option(
            "Subtract this from the logit of each token once per occurrence in the output. "
            "Default: 0.",
            ge=-2,
            le=2,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        option(
            "Divide positive logits of tokens that have occurred by this, and multiply negative "
            "ones by it; 1 changes nothing.",
            ge=0.01,
            le=100,
        ),
    ] = 1.0
    logit_bias: Annotated[
        tuple[str, ...],
        option(
            "Add BIAS to the logit of the token with the number TOKEN, for example 42=-5.5; "
            "repeat for several.",
            flag="--logit-bias",
            metavar="TOKEN=BIAS",
        ),
    ] = ()
    min_tokens: Annotated[int, option("Smallest number of output tokens. Default: 0.", ge=0)] = 0
    stop: Annotated[
        tuple[str, ...],
        option(
            "End the output before this text; repeat for several. Default: none.", metavar="TEXT"
        ),
    ] = ()
    include_stop: Annotated[
        bool, option("Print the text of --stop that ended the output, too.")
    ] = False
    stop_token_ids: Annotated[
        tuple[int, ...],
        option(
            "End the output before this token; repeat for several. Default: none.",
            ge=0,
            metavar="TOKEN",
        ),
    ] = ()
    ignore_eos: Annotated[bool, option("Continue after the model's own end token.")] = False
    skip_special_tokens: Annotated[
        bool,
        option(
            "Leave special tokens out of the text, or print them.",
            flags="--skip-special-tokens/--special-tokens",
        ),
    ] = True
    logprobs: Annotated[
        int | None,
        option(
            "Print the log-probability of each token, and of the NUMBER most likely tokens.",
            ge=0,
            le=LOGPROBS_MAX,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        option(
            "Print the log-probability of each token of the prompt, and of the NUMBER most likely "
            "tokens.",
            ge=0,
            le=LOGPROBS_MAX,
        ),
    ] = None
    json_schema: Annotated[
        str | None,
        option(
            "Generate JSON that this schema allows: the schema itself, or its file; {} allows any"
            " JSON. This, --regex and --choice need the extra `structured`.",
            metavar="JSON|FILE",
        ),
    ] = None
    regex: Annotated[
        str | None,
        option(
            "Generate a text that matches this regular expression as a whole.", metavar="PATTERN"
        ),
    ] = None
    choice: Annotated[
        tuple[str, ...], option("Generate one of these texts; repeat for each.", metavar="TEXT")
    ] = ()

    def fields(self) -> dict[str, Any]:
        """Return the fields of `Sampling` that differ from their defaults; raises `ValueError`."""
        sampling = msgspec.structs.asdict(self)
        for name in _STRUCTURES:
            del sampling[name]
        sampling["max_tokens"] = self.max_tokens or 0
        sampling["logit_bias"] = tuple(map(_bias, self.logit_bias))
        sampling["structure"] = _structure(self)
        defaults = Sampling()
        return {name: one for name, one in sampling.items() if one != getattr(defaults, name)}


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        return int(token), float(bias if separator else "")
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not TOKEN=BIAS, such as 42=-5.5") from None


def _structure(options: SamplingOptions) -> Structure | None:
    given = [name for name in _STRUCTURES if getattr(options, name)]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise typer.BadParameter(f"{flags} exclude each other")
    if options.json_schema:
        return Structure("json_schema", _schema(options.json_schema))
    if options.regex:
        return Structure("regex", options.regex)
    return Structure("choice", choices=options.choice) if options.choice else None


def _schema(value: str) -> str:
    """Return a JSON schema, which `value` is or names a file of."""
    if value.lstrip().startswith(("{", "true", "false")):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--json-schema is neither JSON nor a file: {error}") from error


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
        help="Send the request up to this many times, as long as it fails for a temporary reason, "
        "and before the first token of a stream.",
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
    str | None,
    typer.Option(
        metavar="EVENT|TIME",
        help="Start after the event with this number, 0 for the oldest, or with the events of the "
        "last time, for example 10m (s, m, h or d). Default: now with --follow, the oldest with "
        "--no-follow.",
    ),
]
OfAdapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        "-a",
        metavar="PATTERN",
        help="Print only events of adapters whose names match, for example 'acme-*'; repeat for "
        "several.",
        autocompletion=complete_adapter,
    ),
]
OfTypes = Annotated[
    list[str] | None,
    typer.Option(
        "--type", metavar="TYPE", help="Print only events of this type; repeat for several."
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
@with_options
def generate(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    prompt: Prompt,
    sampling: SamplingOptions,
    adapter: AdapterOption = None,
    image: Images = None,
    priority: Priority = 0,
    attempts: Attempts = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")
    ] = False,
    model: ModelOption = None,
    chat_template: TemplateOption = None,
    timeout: InferenceTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, with or without images, and print the text as it is generated."""
    typed = _prompt(prompt)
    text: str | tuple[int, ...] = typed
    output = output_of(ctx, as_json)
    if chat and image:
        raise CommandError(
            ExitCode.USAGE, "--chat excludes --image", "the HTTP gateway serves chats with images"
        )
    if chat:
        message = {"role": "user", "content": typed}
        text = read_model_text(ctx, model, chat_template).prompt_of([message])
    has_scores = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    text_of = _token_text(ctx, model, output) if has_scores and not as_json else None
    with (
        open_client(ctx) as client,
        client.generate(
            text,
            adapter,
            images=image or (),
            timeout_s=timeout,
            attempts=attempts,
            priority=priority,
            **sampling.fields(),
        ) as running,
    ):
        _print_generation(output, running, GeneratedText(output, sampling.n, text_of))


def _prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(ExitCode.USAGE, f"stdin is not UTF-8 text: {error}") from error


def _token_text(ctx: typer.Context, model: Path | None, output: "Output") -> TokenText | None:
    """Return the texts of tokens; None, with a note, if the model is not known on this machine."""
    if find_model(ctx, model):
        return read_model_text(ctx, model).token_text
    output.note("tokens are shown by their ids: --model names a directory with the tokenizer")
    return None


def _print_generation(output: "Output", running: "Generation", shown: "GeneratedText") -> None:
    started = time.monotonic()
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


class GeneratedText:
    """Prints the chunks of a generation with `count` outputs.

    The text of one output is printed as it arrives, and its log-probabilities after it. Several
    outputs are printed whole, each below its number, as they end.
    """

    def __init__(self, output: "Output", count: int, text_of: TokenText | None = None) -> None:
        """`text_of`: the quoted text of a token, None to print its id alone."""
        self._output = output
        self._text_of = text_of
        self._count = count
        self._texts = [""] * count
        self._prompt: tuple[TokenLogprob | None, ...] = ()
        self._scores: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._ended: list[int] = []

    def add(self, chunk: "TokensStreamed") -> None:
        """Print what can be printed."""
        if self._output.as_json:
            self._output.document(chunk)
            return
        index = chunk.index
        self._texts[index] += chunk.text
        self._scores[index] += chunk.logprobs
        self._prompt = self._prompt or chunk.prompt_logprobs
        if self._count == 1:
            self._output.text(chunk.text)
        elif chunk.finish_reason is not None:
            self._print_whole(index)

    def end(self) -> None:
        """Print what is left after the last chunk."""
        if self._count > 1:
            for index in range(self._count):
                if index not in self._ended:
                    self._print_whole(index)
            self._print_scores("prompt", self._prompt)
            return
        self._end_line(self._texts[0])
        self._print_scores("prompt", self._prompt)
        self._print_scores("output", self._scores[0])

    def _print_whole(self, index: int) -> None:
        self._ended.append(index)
        self._output.text(f"[{index}] {self._texts[index]}")
        self._end_line(self._texts[index] or "-")
        self._print_scores(f"output {index}", self._scores[index])

    def _end_line(self, text: str) -> None:
        if text and not text.endswith("\n"):
            self._output.text("\n")

    def _print_scores(
        self, name: str, scores: "list[TokenLogprob] | tuple[TokenLogprob | None, ...]"
    ) -> None:
        """Print a line per token: its id, log-probability, rank, and the most likely tokens."""
        for entry in scores:
            if entry is not None:
                best = "  ".join(f"{self._shown(token)} {score:.4f}" for token, score in entry.top)
                line = f"{name} {self._shown(entry.token):>7} {entry.logprob:>10.4f}"
                self._output.text(f"{line} rank {entry.rank}  {best}".rstrip() + "\n")

    def _shown(self, token: int) -> str:
        return str(token) if self._text_of is None else f"{token} {self._text_of(token)}"


@app.command()
def events(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    since: Since = None,
    follow: Follow = True,
    snapshot: WithSnapshot = False,
    adapter: OfAdapters = None,
    event_type: OfTypes = None,
    as_json: AsJson = False,
) -> None:
    """Print the life-cycle events, in order and without gaps."""
    from loradock.cli.event_filter import EventFilter, start_of
    from loradock.cli.render import event_line

    output = output_of(ctx, as_json)
    start, since_ns = start_of(since, follow=follow)
    selected = EventFilter(adapter or (), event_type or (), start or 0, since_ns)
    with open_client(ctx) as client:
        newest = client.status().events_seq
        if start is not None and start > newest:
            text = f"event {start} is not there yet: the newest is event {newest}"
            if not follow:
                raise CommandError(ExitCode.NOT_FOUND, text)
            output.remark(f"{text}; waiting for event {start + 1}")
            start = newest
        with client.events(start, follow, snapshot) as stream:
            for item in filter(selected.has, stream):
                if as_json:
                    output.document(item)
                else:
                    output.text(event_line(item) + "\n")


Texts = Annotated[
    list[str],
    typer.Argument(
        metavar="TEXT", help="The texts; a single - reads them from stdin, one per line."
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
