"""Turns of HTTP clients: a bounded number at a time, and at most one of each client.

A client is one key, header value or address (`loradock.gateway.http.security`). Those that wait
take turns, one each. So a client that waits for one turn waits at most for those that have begun
and for one of each other client that waits.
"""

import asyncio
from collections import deque
from typing import Final


class Turns:
    """Turns in one event loop; each `begin` that returns is followed by one `end`."""

    def __init__(self, turns_max: int) -> None:
        self._turns_max: Final = turns_max
        # Clients in the order of their turns, each with those that it waits for.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._running: set[str] = set()

    async def begin(self, client: str) -> None:
        """Wait for a turn of a client."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._begin_all()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(client)
            raise

    def end(self, client: str) -> None:
        """End the turn of a client."""
        self._running.discard(client)
        self._begin_all()

    def _begin_all(self) -> None:
        for client in list(self._waiting):
            if len(self._running) == self._turns_max:
                return
            if client not in self._running:
                self._begin_one(client)

    def _begin_one(self, client: str) -> None:
        """Begin a turn of a client, which is then the last in the order."""
        turns = self._waiting.pop(client)
        while turns:
            turn = turns.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self._running.add(client)
                break
        if turns:
            self._waiting[client] = turns
