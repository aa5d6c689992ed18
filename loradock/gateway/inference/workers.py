"""Threads for work that would stop the event loop, shared equally among HTTP clients.

A client occupies at most one thread; the others of its pieces of work wait, as do the pieces of all
clients while no thread is free. Clients take turns (`turns.py`), a piece each.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from loradock.gateway.http.endpoint import CLIENT
from loradock.gateway.inference.turns import Turns

R = TypeVar("R")
T = TypeVar("T")

THREADS: Final = 4

INLINE_SIZE: Final = 4096
"""The characters or tokens that are processed on the event loop: a thread would cost more."""

PIECE_SIZE: Final = 65_536
"""Bound on the characters of several texts that are one piece of work."""


class Workers:
    """The threads of one event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="worker")
        self._turns = Turns(threads)

    async def run(self, size: int, work: Callable[[], R]) -> R:
        """Return the result of work of this many characters or tokens, in the client's turn."""
        if size <= INLINE_SIZE:
            return work()
        client = CLIENT.get()
        await self._turns.begin(client)
        loop = asyncio.get_running_loop()

        def on_done(_: object) -> None:
            # The loop may be closed, and with it the gateway.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._turns.end, client)

        running = self._threads.submit(work)
        # The thread may run on after its request was cancelled.
        running.add_done_callback(on_done)
        return await asyncio.wrap_future(running)

    async def map(self, work: Callable[[str], R], texts: Sequence[str]) -> list[R]:
        """Return the result for each text; texts share a piece up to `PIECE_SIZE` characters."""
        results: list[R] = []
        for piece in _pieces(texts):
            size = sum(map(len, piece))
            # A list of empty texts is work too.
            results += await self.run(size + len(piece), partial(_mapped, work, piece))
        return results

    def close(self) -> None:
        """Start no further work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _pieces(texts: Iterable[str]) -> Iterable[list[str]]:
    piece: list[str] = []
    size = 0
    for text in texts:
        if piece and size + len(text) > PIECE_SIZE:
            yield piece
            piece, size = [], 0
        piece.append(text)
        size += len(text) + 1
    if piece:
        yield piece


def _mapped(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    return [work(item) for item in items]
