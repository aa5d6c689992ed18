"""The `bench` command: a quick load test of a running server, with a table of latencies."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from msgspec import Struct, field

from loradock.cli.context import (
    AsJson,
    InferenceTimeout,
    directory_of,
    open_client,
    output_of,
    settings_of,
)
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.client.session import GENERATION_TIMEOUT_S

if TYPE_CHECKING:
    from rich.table import Table

    from loradock.client import AsyncClient, LoradockError

app = typer.Typer()

_QUANTILES: Final = (0.5, 0.9, 0.99)

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        "-a",
        metavar="ADAPTER",
        help="Adapter to use; repeat for several, which take turns. Default: the base model.",
    ),
]
Requests = Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of generations.")]
Concurrency = Annotated[int, typer.Option(min=1, max=4096, help="Generations at a time.")]
Prompt = Annotated[str, typer.Option(help="The text to continue.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Largest number of output tokens.")]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Continue after the model's own end token, so that each output has --max-tokens.",
    ),
]
Compare = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also show the change since an earlier run, whose --json is in this file.",
    ),
]


class Tally(Struct):
    """Results of a measurement; durations in seconds."""

    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class Result(Struct, frozen=True):
    """The result of a run; quantiles in seconds under their names."""

    requests: int
    answered: int
    errors: dict[str, int]
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    first_token: dict[str, float]
    between_tokens: dict[str, float]
    request: dict[str, float]


@app.command()
def bench(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    adapter: Adapters = None,
    requests: Requests = 100,
    concurrency: Concurrency = 8,
    prompt: Prompt = "hello",
    max_tokens: MaxTokens = 32,
    ignore_eos: IgnoreEos = False,
    compare: Compare = None,
    timeout: InferenceTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Measure a running server: requests and tokens per second, and latencies.

    Ends with the error of a request if none was answered. Ctrl-C ends the measurement, and the
    results so far are printed; the exit code is that of Ctrl-C.
    """
    from loradock.client import AsyncClient

    output, settings = output_of(ctx, as_json), settings_of(ctx)
    with open_client(ctx):
        # Only checks that a server answers; the load has a separate client.
        pass
    names: Sequence[str | None] = adapter or (None,)
    before = None if compare is None else _read_result(compare)

    async def measure(on_end: Callable[[int], None]) -> tuple[Result, bool]:
        async with AsyncClient(
            None if settings.address else directory_of(ctx),
            address=settings.address,
            key=settings.key,
            server_key=settings.server_key,
            generation_timeout_s=GENERATION_TIMEOUT_S if timeout is None else timeout,
        ) as client:
            sampling = {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
            load = _Load(client, names, prompt, sampling, on_end)
            found = await load.run(requests, concurrency)
        if load.error is not None and not found.request:
            raise load.error
        return found, load.is_interrupted

    with output.progress("measuring", requests) as on_end:
        result, is_interrupted = asyncio.run(measure(on_end))
    if as_json:
        output.document(result)
    else:
        output.show(*_tables(result, before))
    if is_interrupted:
        raise CommandError(
            ExitCode.INTERRUPTED, f"interrupted: {result.answered} of {requests} were answered"
        )


def _read_result(file: Path) -> Result:
    """Return the result of an earlier run; raises `CommandError`."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Result)
    except msgspec.DecodeError as error:
        raise CommandError(
            ExitCode.USAGE,
            f"--compare {file} is no result of `loradock bench --json`: {error}",
            "write one with `loradock bench --json > FILE`",
        ) from error


class _Load:
    """Generations that take turns among the adapters."""

    def __init__(
        self,
        client: "AsyncClient",
        names: Sequence[str | None],
        prompt: str,
        sampling: Mapping[str, Any],
        on_end: Callable[[int], None],
    ) -> None:
        self._client = client
        self._names = itertools.cycle(names)
        self._prompt = prompt
        self._sampling = sampling
        self._on_end = on_end
        self._tally = Tally()
        self._left = 0
        self.error: LoradockError | None = None
        """The last error of a request."""
        self.is_interrupted = False

    async def run(self, requests: int, concurrency: int) -> Result:
        """Run all requests, `concurrency` at a time, or those before an interruption."""
        self._left = requests
        began = time.monotonic()
        workers = [asyncio.ensure_future(self._work()) for _ in range(min(concurrency, requests))]

        def interrupt() -> None:
            self.is_interrupted = True
            for worker in workers:
                worker.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        outcomes = await asyncio.gather(*workers, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return _result(self._tally, requests, time.monotonic() - began)

    async def _work(self) -> None:
        from loradock.client import LoradockError

        while self._left:
            self._left -= 1
            try:
                await self._one(next(self._names))
            except LoradockError as error:
                self.error = error
                code = error.code.value
                self._tally.errors[code] = self._tally.errors.get(code, 0) + 1
            self._on_end(1)

    async def _one(self, adapter: str | None) -> None:
        tally, began = self._tally, time.monotonic()
        last = 0.0
        async with await self._client.generate(
            self._prompt, adapter, **self._sampling
        ) as generation:
            async for chunk in generation:
                now, count = time.monotonic(), len(chunk.tokens)
                if not last:
                    tally.first_token_s.append(now - began)
                elif count:
                    tally.between_tokens_s.append((now - last) / count)
                last = now
                tally.tokens += count
        tally.request_s.append(time.monotonic() - began)


def _result(tally: Tally, requests: int, seconds: float) -> Result:
    answered = len(tally.request_s)
    return Result(
        requests=requests,
        answered=answered,
        errors=tally.errors,
        seconds=seconds,
        requests_per_s=answered / seconds,
        tokens_per_s=tally.tokens / seconds,
        first_token=quantiles(tally.first_token_s),
        between_tokens=quantiles(tally.between_tokens_s),
        request=quantiles(tally.request_s),
    )


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the quantiles of some durations, each a measured duration; empty without any."""
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {f"p{100 * q:g}": ordered[round(q * last)] for q in _QUANTILES}


def _tables(result: Result, before: Result | None = None) -> "list[Table | str]":
    """Return the tables of a run; with the changes since `before`, in percent."""
    from rich.box import SIMPLE
    from rich.table import Table

    from loradock.cli.output import field_table

    errors = ", ".join(f"{code} {count}" for code, count in sorted(result.errors.items()))
    fields = {
        "requests": f"{result.answered} of {result.requests} answered",
        "errors": errors or "none",
        "seconds": f"{result.seconds:.2f}",
        "requests/s": _figure(
            result.requests_per_s, None if before is None else before.requests_per_s
        ),
        "tokens/s": _figure(result.tokens_per_s, None if before is None else before.tokens_per_s),
    }
    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("milliseconds", *(f"p{100 * q:g}" for q in _QUANTILES)):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for name, field_name in (
        ("to the first token", "first_token"),
        ("between tokens", "between_tokens"),
        ("per request", "request"),
    ):
        old: dict[str, float] = {} if before is None else getattr(before, field_name)
        values: dict[str, float] = getattr(result, field_name)
        cells = (
            _figure(1000 * value, 1000 * old[quantile] if quantile in old else None)
            for quantile, value in values.items()
        )
        table.add_row(name, *cells)
    return [field_table(fields), table]


def _figure(value: float, before: float | None) -> str:
    """Return a number, and its change in percent if there is an earlier one."""
    return f"{value:.1f} ({value / before - 1:+.0%})" if before else f"{value:.1f}"
