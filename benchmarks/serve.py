"""The figures `serve.*`: an engine under load, against itself and against other servers.

`python -m benchmarks.serve --small` prints them for a small model, without storing anything.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from statistics import median
from typing import Final, TypeVar

from rich.console import Console

from benchmarks.figures import Figure
from benchmarks.rounds import threads
from benchmarks.serve_engine import MeasuredLoad, ServedEngine, served_engine
from benchmarks.serve_floor import vs_floor
from benchmarks.serve_load import (
    ADAPTER_FILES,
    ADAPTERS,
    CACHE_TOKENS,
    CLIENTS,
    LARGE_BYTES,
    LARGE_FILES,
    LONG_TOKENS,
    PROMPT_TOKENS,
    RANK,
    SHAPE,
    SMALL,
    Load,
    Prompt,
    Prompts,
    Shape,
    large_name,
    model_files,
)
from benchmarks.serve_rivals import Rivals
from loradock.messages import requests
from loradock.messages.engine_options import LORA_RANKS
from loradock.messages.ids import RequestId
from loradock.messages.prompts import Sampling

ROUNDS: Final = 3
SLOW_ROUNDS: Final = 2
"""The rounds in which the slowest ways take part."""
_SLOW: Final = ("peft", "continuous")
LOGPROBS: Final = 5
Result = TypeVar("Result")

_MIXED: Final = tuple(range(ADAPTERS))

_RATES: Final = (
    ("serve.vs_base", "mixed", "base", "the base in the same loop", 0.85),
    ("serve.vs_generate", "base", "generate", "transformers' generate", 1.2),
    ("serve.vs_peft", "mixed", "peft", "PEFT's generate with adapter_names", 2.5),
    ("serve.vs_continuous", "base", "continuous", "transformers' continuous batching", 2.0),
    ("serve.logprobs", "logprobs", "mixed", "without log-probabilities", 0.9),
)
"""Each figure that compares rates: its name, the two works, the second in words, and its aim."""


def run(shape: Shape = SHAPE) -> Iterator[Figure]:
    """Measure every figure of the group."""
    prompts = Prompts(shape.vocabulary)
    with model_files(shape) as root:
        with served_engine(root, shape, RANK) as engine:
            yield from rates(engine, Rivals(root), prompts)
            yield gap_prefill(engine, prompts)
            yield cliff(engine, prompts)
        yield vs_floor(root, shape, prompts)
        rank_max = min(rank for rank in LORA_RANKS if rank >= shape.large_rank)
        with served_engine(root, shape, rank_max, ADAPTERS + 1) as engine:
            yield gap_loading(engine, prompts)


def rates(engine: ServedEngine, rivals: Rivals, prompts: Prompts) -> Iterator[Figure]:
    """Return the figures that compare tokens per second, of alternating runs of the same load."""
    scored = Sampling(logprobs=LOGPROBS)
    works: dict[str, Callable[[], Load]] = {
        "mixed": lambda: engine.run(prompts.mixed(_MIXED)).load,
        "base": lambda: engine.run(prompts.mixed([None])).load,
        "logprobs": lambda: engine.run(prompts.mixed(_MIXED), scored).load,
        "generate": lambda: rivals.generate(prompts.mixed([None])),
        "peft": lambda: rivals.peft(prompts.mixed(_MIXED)),
        "continuous": lambda: rivals.continuous(prompts.mixed([None])),
    }
    # A cache's memory is provided when it is first written, as it is once in an engine's life.
    engine.run(prompts.mixed(_MIXED, CACHE_TOKENS // max(PROMPT_TOKENS)))
    found = _alternate(works)
    for name, own, other, text, ratio_min in _RATES:
        pairs = list(zip(found[own], found[other], strict=False))
        ratio = median(one.tokens_per_s / another.tokens_per_s for one, another in pairs)
        rate, other_rate = (
            median(load.tokens_per_s for load in column) for column in zip(*pairs, strict=True)
        )
        yield Figure(
            name,
            rate,
            "tokens/s",
            f"{text}: {other_rate:.1f} tokens/s",
            ratio,
            f"ratio >= {ratio_min:g}",
            ratio >= ratio_min,
        )


def gap_prefill(engine: ServedEngine, prompts: Prompts) -> Figure:
    """Return the p95 gap between tokens while long prompts arrive, against none arriving.

    As soon as the token of one has been generated, the next one arrives.
    """
    running: list[RequestId] = []

    def arrive() -> None:
        if not running or engine.is_done(running[0]):
            long = Prompt(None, prompts.of_length(LONG_TOKENS))
            running[:] = [engine.generate(long, Sampling(max_tokens=1))]

    text = f"prompts of {LONG_TOKENS} tokens arrive one after another"
    return _gaps("serve.gap_prefill", text, engine, prompts, arrive, 2.5)


def gap_loading(engine: ServedEngine, prompts: Prompts) -> Figure:
    """Return the p95 gap while large adapters are loaded into a slot and evicted without pause."""
    names = cycle(large_name(number) for number in range(LARGE_FILES))
    steps = cycle((requests.ActivateAdapter, requests.EvictAdapter))
    current = [next(names)]
    running: list[RequestId] = []

    def load() -> None:
        if running and not engine.is_done(running[0]):
            return
        step = next(steps)
        if step is requests.ActivateAdapter:
            current[:] = [next(names)]
        running[:] = [engine.start(step, current[0])]

    text = f"adapters of {LARGE_BYTES // 10**6} MB are loaded"
    return _gaps("serve.gap_loading", text, engine, prompts, load, 1.25)


def _gaps(
    name: str,
    text: str,
    engine: ServedEngine,
    prompts: Prompts,
    meanwhile: Callable[[], None],
    ratio_max: float,
) -> Figure:
    """Return a figure of the gaps in wall time, of requests that all run from the beginning."""

    def streams(work: Callable[[], None]) -> MeasuredLoad:
        engine.drain()
        return engine.run(prompts.mixed(_MIXED, CLIENTS), meanwhile=work)

    found = _alternate(
        {"meanwhile": lambda: streams(meanwhile), "alone": lambda: streams(lambda: None)}
    )
    engine.drain()
    pairs = [
        (own.gap_p95_s, other.gap_p95_s)
        for own, other in zip(found["meanwhile"], found["alone"], strict=True)
    ]
    ratio = median(own / other for own, other in pairs)
    own, other = (1e3 * median(column) for column in zip(*pairs, strict=True))
    return Figure(
        name,
        own,
        f"ms between tokens (p95) while {text}",
        f"without: {other:.0f} ms",
        ratio,
        f"ratio <= {ratio_max:g}",
        ratio <= ratio_max,
    )


def cliff(engine: ServedEngine, prompts: Prompts) -> Figure:
    """Return the median time to first token with two adapters per slot."""
    found = _alternate(
        {
            "more": lambda: engine.run(prompts.mixed(range(ADAPTER_FILES))),
            "fit": lambda: engine.run(prompts.mixed(_MIXED)),
        }
    )
    pairs = [
        (own.first_token_s, other.first_token_s)
        for own, other in zip(found["more"], found["fit"], strict=True)
    ]
    ratio = median(own / other for own, other in pairs)
    own, other = (median(column) for column in zip(*pairs, strict=True))
    rates = {name: median(run.load.tokens_per_s for run in runs) for name, runs in found.items()}
    return Figure(
        "serve.cliff",
        own,
        f"s to the first token, {ADAPTER_FILES} adapters on {ADAPTERS} slots, "
        f"at {rates['more']:.0f} tokens/s",
        f"{ADAPTERS} adapters: {other:.2f} s, at {rates['fit']:.0f} tokens/s",
        ratio,
        "ratio <= 2",
        ratio <= 2.0,
    )


def _alternate(works: Mapping[str, Callable[[], Result]]) -> dict[str, list[Result]]:
    """Run the works in turn, `ROUNDS` times, and return the results of each.

    Two results are compared within a round only: the machine's speed drifts between rounds.
    """
    found: dict[str, list[Result]] = {name: [] for name in works}
    for number in range(ROUNDS):
        # The order alternates, so that no work always follows the same one.
        for name in works if number % 2 else reversed(list(works)):
            if number < SLOW_ROUNDS or name not in _SLOW:
                found[name].append(works[name]())
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure an engine under load.")
    parser.add_argument("--small", action="store_true", help="a small model, for a first look")
    arguments = parser.parse_args()
    shape = SMALL if arguments.small else SHAPE
    with threads(1):
        for figure in run(shape):
            Console(width=180).print(figure)


if __name__ == "__main__":
    main()
