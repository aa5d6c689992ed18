"""Queries that wait for an answer, taken from the clients in turn."""

from typing import Final, Generic, TypeVar

from loradock.messages.ids import RequestId

QueryT = TypeVar("QueryT")

QUERIES_PER_CLIENT_MAX: Final = 64
"""Bound on the waiting queries of one client; further ones are refused."""

QUERIES_MAX: Final = 8192
"""Bound on the waiting queries of all clients."""


class QueryQueue(Generic[QueryT]):
    """Waiting queries: one client's in the order of their arrival, the clients in turn.

    A query that waits already is not added again: a client repeats one under the same id.
    """

    def __init__(self) -> None:
        # The client whose turn is next comes first.
        self._by_client: dict[bytes, dict[RequestId, QueryT]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of waiting queries."""
        return self._count

    def add(self, client: bytes, request_id: RequestId, query: QueryT) -> bool:
        """Add a query; False if a bound does not allow it."""
        waiting = self._by_client.get(client, {})
        if request_id in waiting:
            return True
        if self._count >= QUERIES_MAX or len(waiting) >= QUERIES_PER_CLIENT_MAX:
            return False
        self._by_client.setdefault(client, waiting)[request_id] = query
        self._count += 1
        return True

    def take(self) -> tuple[bytes, QueryT]:
        """Remove and return the next query and its client; the queue must not be empty."""
        client = next(iter(self._by_client))
        waiting = self._by_client.pop(client)
        query = waiting.pop(next(iter(waiting)))
        self._count -= 1
        if waiting:
            self._by_client[client] = waiting
        return client, query
