"""Queries: reads of the state, which wait for their turn and take bounded time from the main loop.

They are taken from the clients in turn. While no other request arrives, they take a slice of every
iteration. While others do, the slices are short and pauses follow them, so that few requests find
the loop busy with a query. Times are nanoseconds of a monotonic clock.
"""

import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from loradock.controller.core.context import Refusal
from loradock.controller.core.controller import Controller
from loradock.controller.core.views import AdapterPages
from loradock.controller.server.access import Access
from loradock.controller.server.admin import Admin
from loradock.controller.server.clients import Outbox
from loradock.controller.server.event_stream import EventStream
from loradock.messages import requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import RequestId

QUERY_RETRY_MS: Final = 100

QUERIES_PER_CLIENT_MAX: Final = 64
"""Bound on the waiting queries of one client; further ones are refused."""

QUERIES_MAX: Final = 8192
"""Bound on the waiting queries of all clients."""

QUIET_SLICE_NS: Final = 2_000_000
"""Bound on the time for queries per iteration while no other request arrives."""

BUSY_SLICE_NS: Final = 150_000
"""The same while others arrive; the last query of either can exceed it."""

PAUSE_FACTOR: Final = 40
"""A pause is this many times as long as the slice before it."""

PAUSE_NS_MAX: Final = 200_000_000
"""Bound on a pause: what made a slice so long was not its queries, but a busy machine."""

BUSY_NS: Final = 100_000_000
"""Requests arrive if one arrived during this time."""

QueryT = TypeVar("QueryT")


class Queries:
    """Queries of clients that wait for their answers; they are answered between the inputs.

    `can_reply`: whether a client has read enough earlier replies to be sent a long one.
    """

    def __init__(
        self,
        controller: Controller,
        events: EventStream,
        admin: Admin,
        outbox: Outbox,
        access: Access,
        can_reply: Callable[[bytes], bool],
    ) -> None:
        self._world = controller.world
        self._pages = AdapterPages(controller.world)
        self._events = events
        self._admin = admin
        self._outbox = outbox
        self._access = access
        self._can_reply = can_reply
        self._waiting: QueryQueue[tuple[str, requests.Query]] = QueryQueue()
        self._budget: Final = QueryBudget()

    @property
    def is_waiting(self) -> bool:
        """True if queries wait for their answers."""
        return len(self._waiting) > 0

    def on_request(self, now_ns: int) -> None:
        """Give queries less time, because other requests arrive."""
        self._budget.on_request(now_ns)

    def add(self, route: bytes, user: str, message: requests.Query) -> None:
        """Let a query wait for its answer, or refuse it."""
        if not self._can_reply(route):
            busy = "earlier answers wait to be read; read them and try again"
        elif not self._waiting.add(route, message.request_id, (user, message)):
            busy = f"at most {QUERIES_PER_CLIENT_MAX} queries of a client wait; try again later"
        else:
            return
        code = ErrorCode.OVERLOADED
        self._outbox.add(route, requests.Refused(message.request_id, code, busy, QUERY_RETRY_MS))

    def answer(self) -> None:
        """Answer queries of the clients in turn, until their time in this iteration has passed.

        Called at the end of an iteration, when its inputs were handled.
        """
        if not self._waiting or not self._budget.begin(time.monotonic_ns()):
            return
        while self._waiting:
            route, (user, message) = self._waiting.take()
            self._answer(route, user, message)
            if self._budget.is_over(time.monotonic_ns()):
                break
        self._budget.end(time.monotonic_ns())

    def wait_ns(self, now_ns: int) -> int | None:
        """Return when waiting queries are answered, from now on; None if none wait."""
        return self._budget.wait_ns(now_ns) if self._waiting else None

    def _answer(self, route: bytes, user: str, message: requests.Query) -> None:
        add, sees = self._outbox.add, self._access.sees
        try:
            match message:
                case requests.ListAdapters():
                    add(route, self._pages.answer(message, sees(user)))
                case requests.ShowAdapter():
                    shown = self._admin.show_adapter(message)
                    add(route, self._access.shown(user, shown))
                case requests.ShowStatus():
                    add(route, self._admin.status(message, sees(user)))
                case requests.FetchEvents():
                    self._fetch_events(route, user, message)
                case _:
                    add(route, self._admin.answer(message))
        except Refusal as refusal:
            add(route, refusal.reply(message.request_id))

    def _fetch_events(self, route: bytes, user: str, message: requests.FetchEvents) -> None:
        def answer(reply: requests.Reply) -> None:
            if message.snapshot and isinstance(reply, requests.EventsTooOld):
                reply = self._pages.snapshot(message, self._access.sees(user))
            self._outbox.add(route, self._access.shown(user, reply))

        self._events.fetch(route, message, self._world.events_seq, answer)


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


class QueryBudget:
    """The end of the current slice, and when the next one can begin."""

    def __init__(self) -> None:
        self._busy_until = 0
        self._next_ns = 0
        self._started_ns = 0
        self._ends_ns = 0

    def on_request(self, now_ns: int) -> None:
        """Record the arrival of a request that is not a query."""
        self._busy_until = now_ns + BUSY_NS

    def wait_ns(self, now_ns: int) -> int:
        """Return how long queries have to wait for the next slice, 0 if it can begin."""
        return max(0, self._next_ns - now_ns)

    def begin(self, now_ns: int) -> bool:
        """Begin a slice; False if a pause has not ended."""
        if now_ns < self._next_ns:
            return False
        self._started_ns = now_ns
        is_busy = now_ns < self._busy_until
        self._ends_ns = now_ns + (BUSY_SLICE_NS if is_busy else QUIET_SLICE_NS)
        return True

    def is_over(self, now_ns: int) -> bool:
        """Return whether the slice has ended."""
        return now_ns >= self._ends_ns

    def end(self, now_ns: int) -> None:
        """End the slice; a pause follows while other requests arrive."""
        pause_ns = min(PAUSE_FACTOR * (now_ns - self._started_ns), PAUSE_NS_MAX)
        self._next_ns = now_ns + pause_ns if now_ns < self._busy_until else 0
