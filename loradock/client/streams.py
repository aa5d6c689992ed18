"""Streams of life-cycle events: each event once and in order.

In any order of arrival and with any repetition, an `EventCursor` yields a prefix of the complete
stream, or a `Gap` or a `Snapshot` in place of missing events.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Self

from msgspec import Struct

from loradock.messages.events import EventWithheld, Published
from loradock.messages.requests import (
    AdaptersListed,
    EventsFetched,
    EventsTooOld,
    FetchEvents,
)
from loradock.messages.views import AdapterView
from loradock.messages.wire import EVENTS, WireError

EVENTS_PER_FETCH: Final = 1024

SILENCE_S: Final = 1.0
"""A subscription to a remote controller without a frame for this long is not admitted, or lost.

A subscription receives heartbeats, and a key that is limited to some adapters can only fetch
events.
"""

WAIT_S: Final = 60.0
"""Time after which a waiting reader looks whether its stream was closed."""


class Gap(Struct, frozen=True, tag=True):
    """The event stream continues with number `found` where `expected` was due.

    `found > expected`: the controller does not keep the events between them any more.
    `found < expected`: the log was replaced or lost its end, and its numbers start again.
    """

    expected: int
    found: int


class Snapshot(Struct, frozen=True, tag=True):
    """All adapters as of event `seq`, in place of the events from number `expected` to `seq`.

    The stream continues with the next event. An adapter may already be as a later event leaves it:
    applying that event again leads to the same state.
    """

    expected: int
    seq: int
    adapters: tuple[AdapterView, ...]


EventItem = Published | Gap | Snapshot
"""An item of an event stream: an event, or what stands for events that are not kept."""

FetchReply = EventsFetched | EventsTooOld | AdaptersListed
"""The answer to a fetch of events; a snapshot is completed to a list."""


class EventCursor:
    """The position of one reader in the event stream.

    While `needs_fetch` is true, the reader fetches from `next_seq` and leaves the subscription's
    frames in their queue. They are read after the fetch, so that no frame has to be dropped and
    fetched again.
    """

    def __init__(self, next_seq: int, needs_fetch: bool, wants_snapshot: bool = False) -> None:
        self.next_seq = next_seq
        self.seq = next_seq - 1
        self.ready: deque[EventItem] = deque()
        self._wants_snapshot = wants_snapshot
        self._last_seq = next_seq if needs_fetch else next_seq - 1
        self._frame_seq = 0

    @property
    def needs_fetch(self) -> bool:
        """Return whether events are known to be published that have not arrived."""
        return self._last_seq >= self.next_seq

    def pop(self) -> EventItem:
        """Return the next item of `ready` and set `seq` to its number."""
        item = self.ready.popleft()
        self.seq = item.found - 1 if isinstance(item, Gap) else item.seq
        return item

    def fetch_request(self) -> FetchEvents:
        """Return the request for the missing events, which the session has not numbered yet."""
        return FetchEvents("", self.next_seq, EVENTS_PER_FETCH, self._wants_snapshot)

    def expect_more(self) -> None:
        """Suppose that events were published, because the subscription has been silent."""
        self._last_seq = max(self._last_seq, self.next_seq)

    def on_frame(self, data: bytes) -> None:
        """Process a frame of the subscription; a malformed one is ignored like a lost one."""
        try:
            frame = EVENTS.decode(data)
        except WireError:
            return
        if frame.seq < self._frame_seq:
            self._restart_numbers()
        self._frame_seq = frame.seq
        self._last_seq = max(self._last_seq, frame.seq)
        self._append(frame.message)

    def on_fetched(self, reply: FetchReply) -> None:
        """Process the reply to `fetch_request`; `next_seq` or `needs_fetch` is then another one."""
        last_seq = reply.events_seq if isinstance(reply, AdaptersListed) else reply.last_seq
        if last_seq < self.next_seq - 1:
            self._restart_numbers()
            return
        self._last_seq = last_seq
        due = self.next_seq
        if isinstance(reply, AdaptersListed):
            self._append_snapshot(reply)
        elif isinstance(reply, EventsTooOld):
            self._skip_to(min(reply.oldest_seq, last_seq + 1))
        else:
            self._skip_to(max(due, reply.events[0].seq) if reply.events else last_seq + 1)
            self._append(reply.events)
        if self.next_seq == due and self.needs_fetch:
            self._skip_to(last_seq + 1)

    def _append_snapshot(self, listed: AdaptersListed) -> None:
        if listed.events_seq >= self.next_seq:
            self.ready.append(Snapshot(self.next_seq, listed.events_seq, listed.adapters))
            self.next_seq = listed.events_seq + 1

    def _append(self, batch: tuple[Published, ...]) -> None:
        for published in batch:
            if published.seq == self.next_seq:
                if not isinstance(published.event, EventWithheld):
                    self.ready.append(published)
                self.next_seq += 1

    def _skip_to(self, seq: int) -> None:
        if seq > self.next_seq:
            self.ready.append(Gap(self.next_seq, seq))
            self.next_seq = seq

    def _restart_numbers(self) -> None:
        self.ready.append(Gap(self.next_seq, 1))
        self.next_seq = 1
        self._last_seq = 1
        self._frame_seq = 0


class Subscription(ABC):
    """A subscription to published events, by a socket of ZeroMQ."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return bool(self._socket.closed)

    @abstractmethod
    async def receive(self, timeout_s: float) -> bytes | None:
        """Return the next frame; None if none arrives in that time."""

    def close(self) -> None:
        """End it."""
        self._socket.close()


class AsyncEventStream:
    """The life-cycle events, each once and in order; `Gap` or `Snapshot` for those not kept.

    Events that a subscription missed, by being late, slow or restarted, are fetched automatically.
    An error of such a fetch ends one step; another step continues the stream at its position.
    """

    def __init__(
        self,
        fetch: Callable[[FetchEvents], Awaitable[FetchReply]],
        subscription: Subscription | None,
        cursor: EventCursor,
        *,
        is_remote: bool,
    ) -> None:
        self._fetch = fetch
        self._subscription = subscription
        self._cursor = cursor
        # A local subscription can be silent.
        self._silence_s = SILENCE_S if is_remote else math.inf
        self._received_at = time.monotonic()

    @property
    def seq(self) -> int:
        """The number of the last event returned: `since` for a stream that continues from here."""
        return self._cursor.seq

    def __aiter__(self) -> AsyncIterator[EventItem]:
        return self

    async def __anext__(self) -> EventItem:
        while (item := await self.next_within(WAIT_S)) is None:
            if self._subscription is None or self._subscription.closed:
                raise StopAsyncIteration
        return item

    async def next_within(self, timeout_s: float) -> EventItem | None:
        """Return the next event; None if none arrived in that time, or at the stream's end."""
        until = time.monotonic() + timeout_s
        while not self._cursor.ready:
            if self._cursor.needs_fetch:
                self._cursor.on_fetched(await self._fetch(self._cursor.fetch_request()))
            elif not await self._read(until):
                return None
        return self._cursor.pop()

    async def _read(self, until: float) -> bool:
        """Process a frame of the subscription; False if none arrived until then."""
        if self._subscription is None or self._subscription.closed:
            return False
        silent_at = self._received_at + self._silence_s
        frame = await self._subscription.receive(min(until, silent_at) - time.monotonic())
        if frame is None and time.monotonic() < silent_at:
            return False
        self._received_at = time.monotonic()
        if frame is None:
            self._cursor.expect_more()
        else:
            self._cursor.on_frame(frame)
        return True

    def close(self) -> None:
        """End the subscription."""
        if self._subscription is not None:
            self._subscription.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()
