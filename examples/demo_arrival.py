"""The demo's part on arrivals: a cold adapter and a long prompt come while others stream.

What is shown are the times between the tokens of the streams, before and meanwhile.
"""

import asyncio
import time
from itertools import pairwise
from statistics import median

from rich.console import Console

from controller.client import AsyncClient
from examples.transformations import answer_of, prompt_of

STREAMING = (None, "reverse", "upper")
"""Adapters of the streams; None is the base model. One slot of the three is left."""

COLD = "double"
WORD = "orchard"
STREAM_TOKENS = 400
TOKENS_BEFORE = 100
LONG_PROMPT = 450
"""The tokens of the long prompt, of the 512 of the model's context."""


async def show_arrivals(client: AsyncClient, console: Console) -> bool:
    """Print the gaps between tokens; returns whether the cold adapter's output is right."""
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
    await asyncio.gather(*streams)
    console.print("Three streams, and a cold adapter and a long prompt that arrive meanwhile:")
    for title, first, last in (("before", 0.0, start), ("meanwhile", start, end)):
        gaps = [
            after - before
            for found in stamps
            for before, after in pairwise(found)
            if first <= before < last
        ]
        console.print(f"  gaps between tokens {title:>9}: {_shown(gaps)}")
    console.print(f"  both arrivals were answered within {1000 * (end - start):.0f} ms")
    return cold == answer_of(COLD, WORD)


async def _stream(client: AsyncClient, adapter: str | None, stamps: list[float]) -> None:
    generation = await client.generate(
        prompt_of(WORD), adapter, max_tokens=STREAM_TOKENS, ignore_eos=True
    )
    await generation.read(lambda _: stamps.append(time.monotonic()))


async def _answer(client: AsyncClient) -> str:
    generation = await client.generate(prompt_of(WORD), COLD, max_tokens=32)
    return await generation.text()


async def _read_long(client: AsyncClient) -> None:
    generation = await client.generate("a" * LONG_PROMPT, max_tokens=1)
    await generation.text()


def _shown(gaps: list[float]) -> str:
    if not gaps:
        return "none"
    return f"median {1000 * median(gaps):5.1f} ms, longest {1000 * max(gaps):5.1f} ms"
