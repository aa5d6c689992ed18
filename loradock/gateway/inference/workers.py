"""Threads for work that would stop the event loop, shared equally among HTTP clients.

A client is one key, header value or address (`loradock.gateway.http.security`). It occupies at most
one thread; the others of its pieces of work wait, as do the pieces of all clients while no thread
is free. Clients take turns, a piece each. So a client with one piece waits at most for the pieces
that run and for one piece of each other client that waits.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from loradock.gateway.http.endpoint import CLIENT

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
        self._threads_max: Final = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="worker")
        # Clients in the order of their turns, each with its pieces of work that wait.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._running: set[str] = set()

    async def run(self, size: int, work: Callable[[], R]) -> R:
        """Return the result of work of this many characters or tokens, in the client's turn."""
        if size <= INLINE_SIZE:
            return work()
        client = CLIENT.get()
        await self._wait_for_turn(client)
        loop = asyncio.get_running_loop()

        def on_done(_: object) -> None:
            # The loop may be closed, and with it the gateway.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end_turn, client)

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

    async def _wait_for_turn(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._begin_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end_turn(client)
            raise

    def _begin_turns(self) -> None:
        for client in list(self._waiting):
            if len(self._running) == self._threads_max:
                return
            if client not in self._running:
                self._begin_turn(client)

    def _begin_turn(self, client: str) -> None:
        """Begin the turn of a client, which is then the last in the order."""
        turns = self._waiting.pop(client)
        while turns:
            turn = turns.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self._running.add(client)
                break
        if turns:
            self._waiting[client] = turns

    def _end_turn(self, client: str) -> None:
        self._running.discard(client)
        self._begin_turns()


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
