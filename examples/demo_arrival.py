"""The demo's part on arrivals: a cold adapter and a long prompt come while others stream.

What is shown are the times between the tokens of the streams, before and meanwhile.
"""

import asyncio
import time
from itertools import pairwise
from statistics import median

from rich.console import Console

from examples.transformations import answer_of, prompt_of
from loradock.client import AsyncClient
from loradock.messages.requests import TokensStreamed

STREAMING = (None, "reverse", "upper")
"""Adapters of the streams; None is the base model. One slot of the three is left."""

COLD = "double"
WORD = "orchard"
STREAM_TOKENS = 400
TOKENS_BEFORE = 100
LONG_PROMPT = 450
"""The tokens of the long prompt, of the 512 of the model's context."""


async def show_arrivals(client: AsyncClient, console: Console) -> list[str]:
    """Print the times between tokens, before the arrivals and meanwhile; return wrong outputs."""
    await client.evict(COLD)
    stamps: list[list[float]] = [[] for _ in STREAMING]
    streams = [
        asyncio.create_task(_stream(client, adapter, found))
        for adapter, found in zip(STREAMING, stamps, strict=True)
    ]
    while min(map(len, stamps)) < TOKENS_BEFORE and not any(one.done() for one in streams):
        await asyncio.sleep(0.01)
    start = time.monotonic()
    cold, _ = await asyncio.gather(_answer(client), _read_long(client))
    end = time.monotonic()
    streamed = await asyncio.gather(*streams)
    console.print(
        f"Three outputs stream. Meanwhile adapter {COLD!r} (only in its files until now) and a "
        f"prompt of {LONG_PROMPT}\ntokens arrive. The streams' times between two tokens:"
    )
    for title, first, last in (("before", 0.0, start), ("meanwhile", start, end)):
        console.print(f"  {title:<9}  {_shown(_gaps(stamps, first, last))}")
    console.print(f"  both requests were answered within {1000 * (end - start):.0f} ms")
    return [*_wrong(COLD, cold == _right(COLD)), *_wrong_streams(streamed)]


def _gaps(stamps: list[list[float]], first: float, last: float) -> list[float]:
    """Return the times between the tokens of each stream that began from `first` to `last`."""
    return [
        after - before
        for found in stamps
        for before, after in pairwise(found)
        if first <= before < last
    ]


def _wrong_streams(texts: list[str]) -> list[str]:
    # A stream continues after its answer, because it ignores the end of the text.
    pairs = zip(STREAMING, texts, strict=True)
    return [line for name, text in pairs for line in _wrong(name, text.startswith(_right(name)))]


def _right(adapter: str | None) -> str:
    return WORD if adapter is None else answer_of(adapter, WORD)


def _wrong(adapter: str | None, is_right: bool) -> list[str]:
    return [] if is_right else [f"the output of {adapter or 'the base model'} during the arrivals"]


async def _stream(client: AsyncClient, adapter: str | None, stamps: list[float]) -> str:
    generation = await client.generate(
        prompt_of(WORD), adapter, max_tokens=STREAM_TOKENS, ignore_eos=True
    )
    pieces: list[str] = []

    def on_chunk(chunk: TokensStreamed) -> None:
        stamps.append(time.monotonic())
        pieces.append(chunk.text)

    await generation.read(on_chunk)
    return "".join(pieces)


async def _answer(client: AsyncClient) -> str:
    generation = await client.generate(prompt_of(WORD), COLD, max_tokens=32)
    return await generation.text()


async def _read_long(client: AsyncClient) -> None:
    generation = await client.generate("a" * LONG_PROMPT, max_tokens=1)
    await generation.text()


def _shown(gaps: list[float]) -> str:
    if not gaps:
        return "no token"
    return f"median {1000 * median(gaps):5.1f} ms, longest {1000 * max(gaps):5.1f} ms"
