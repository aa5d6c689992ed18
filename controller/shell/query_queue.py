"""Queries that wait for an answer, taken from the clients in turn."""

from collections import deque
from typing import Final

from messages.requests import Query

QUERIES_PER_CLIENT_MAX: Final = 64
"""Bound on the waiting queries of one client; further ones are refused."""

QUERIES_MAX: Final = 8192
"""Bound on the waiting queries of all clients."""


class QueryQueue:
    """Waiting queries: one client's in the order of their arrival, the clients in turn."""

    def __init__(self) -> None:
        # The client whose turn is next comes first.
        self._by_client: dict[bytes, deque[Query]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of waiting queries."""
        return self._count

    def add(self, client: bytes, query: Query) -> bool:
        """Add a query; False if a bound does not allow it."""
        waiting = self._by_client.get(client, ())
        if self._count >= QUERIES_MAX or len(waiting) >= QUERIES_PER_CLIENT_MAX:
            return False
        self._by_client.setdefault(client, deque()).append(query)
        self._count += 1
        return True

    def take(self) -> tuple[bytes, Query]:
        """Remove and return the next query and its client; the queue must not be empty."""
        client = next(iter(self._by_client))
        waiting = self._by_client.pop(client)
        query = waiting.popleft()
        self._count -= 1
        if waiting:
            self._by_client[client] = waiting
        return client, query
