"""Published events: the latest are kept in memory, older ones are read from the database.

An event has the same number whether it is published, fetched from memory or from the database. A
thread reads the database. Its work for a client is bounded, and a repeated request adds none.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from loradock.controller.core.actions import Action, PublishEvent
from loradock.controller.log.events import EventReader, EventsCorrupt, EventWriter
from loradock.controller.log.format import LogError, LogForeign
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.errors import ErrorCode
from loradock.messages.events import Published
from loradock.messages.ids import RequestId, Seq
from loradock.messages.requests import EventsFetched, EventsTooOld, FetchEvents, Refused, Reply

EVENTS_KEPT: Final = 65_536
"""The number of events in memory, unless more of them are not in the database yet."""

EVENTS_KEPT_MAX: Final = 262_144
"""Bound on the events in memory: then the oldest are dropped although the database lacks them."""

FETCHES_PER_CLIENT_MAX: Final = 4
"""Bound on a client's fetches that wait for the database; further ones are refused."""

FETCHES_MAX: Final = 256
"""Bound on the fetches of all clients that wait for the database."""

FETCH_RETRY_MS: Final = 100
"""When a refused fetch can be sent again: each answer of the database leaves space for another."""

EVENTS_BEAT_NS: Final = 100_000_000
"""Longest time without a frame of events; an empty one has the last event's number."""

# While events in memory exceed `EVENTS_KEPT`, the database is searched once per this many events.
_SEARCH_INTERVAL: Final = 4096

log = structlog.get_logger("controller")

Answer = Callable[[Reply], None]
"""Sends a reply to the client that fetches."""


@dataclass(frozen=True)
class _Fetch:
    """A fetch that waits for `future`: events, or the number of the first one after a gap."""

    message: FetchEvents
    last_seq: Seq
    future: "Future[tuple[tuple[Published, ...], Seq]]"
    answer: Answer


REMADE: Final = "the next snapshot makes the database of events again"


class EventStream:
    """The latest events, and fetches of older ones; `wake_fd` is readable when one is complete."""

    def __init__(
        self, log_directory: Path, storage: Storage = DISK, executor: Executor | None = None
    ) -> None:
        self._directory = log_directory
        self._storage = storage
        # By number, without gaps.
        self._kept: dict[Seq, Published] = {}
        self._oldest_seq: Seq = 0
        self._search_at: Seq = 0
        self._batch: list[Published] = []
        # Adds a new event to the next batch; fetches find it once that is taken. It is the list's
        # own method, because it is called for each event.
        self.add: Final[Callable[[Published], None]] = self._batch.append
        # From now on the reader belongs to the executor's only thread.
        self._reader = EventReader(log_directory, storage)
        self._stored_seq: Seq = self._newest_stored()
        self._executor = executor or ThreadPoolExecutor(1, "events-from-database")
        self._fetches: dict[tuple[bytes, RequestId], _Fetch] = {}
        self._fetches_of: Counter[bytes] = Counter()
        self.wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add_recovered(self, actions: list[Action]) -> None:
        """Keep the events of a recovery, which an earlier epoch published."""
        events = [action.message for action in actions if isinstance(action, PublishEvent)]
        if events:
            self._keep(events)

    def end_recovery(self, last_seq: Seq) -> None:
        """Drop the events after `last_seq` from the database: a repair has cut their records."""
        if self._stored_seq <= last_seq:
            return
        try:
            with EventWriter(self._directory, self._storage) as writer:
                writer.cut_after(last_seq)
            self._stored_seq = last_seq
        except EventsCorrupt as error:
            log.warning(REMADE, error=str(error))
            self._stored_seq = 0

    def _newest_stored(self) -> Seq:
        """Return the newest event's number; a database that can't be read is replaced."""
        try:
            return self._reader.newest_seq
        except (EventsCorrupt, LogForeign) as error:
            log.warning(REMADE, error=str(error))
            with EventWriter(self._directory, self._storage) as writer:
                return writer.newest_seq

    def take_batch(self) -> tuple[Published, ...]:
        """Return, keep and clear the events that were added since the last batch."""
        if not self._batch:
            return ()
        batch = tuple(self._batch)
        self._batch.clear()
        self._keep(batch)
        return batch

    def fetch(self, client: bytes, message: FetchEvents, last_seq: Seq, answer: Answer) -> None:
        """Answer with events from `first_seq` on: at once, or after the database is read.

        A repetition of a request that waits for the database is ignored: its answer will come.
        """
        first_seq, key = max(1, message.first_seq), (client, message.request_id)
        if first_seq > last_seq or first_seq in self._kept:
            answer(self._from_memory(message, last_seq))
        elif key in self._fetches:
            return
        elif (
            self._fetches_of[client] >= FETCHES_PER_CLIENT_MAX or len(self._fetches) >= FETCHES_MAX
        ):
            busy = (
                f"at most {FETCHES_PER_CLIENT_MAX} requests of a client and {FETCHES_MAX} of all "
                "wait for old events; try again later"
            )
            code = ErrorCode.OVERLOADED
            answer(Refused(message.request_id, code, busy, FETCH_RETRY_MS))
        else:
            future = self._executor.submit(self._read, first_seq, message.count_max)
            self._fetches[key] = _Fetch(message, last_seq, future, answer)
            self._fetches_of[client] += 1
            future.add_done_callback(lambda _: os.eventfd_write(self.wake_fd, 1))

    def deliver(self) -> None:
        """Answer the fetches that are complete; call it only while `wake_fd` is readable."""
        os.eventfd_read(self.wake_fd)
        for key in [key for key, fetch in self._fetches.items() if fetch.future.done()]:
            fetch = self._forget(key)
            fetch.answer(self._reply(fetch))

    def drop_client(self, client: bytes) -> None:
        """End the fetches of a client that is gone."""
        for key in [key for key in self._fetches if key[0] == client]:
            self._forget(key).future.cancel()

    def close(self) -> None:
        """End the reading thread, after at most one answer."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        os.close(self.wake_fd)

    def _keep(self, events: Sequence[Published]) -> None:
        """Keep events, whose numbers have no gaps."""
        kept, first_seq = self._kept, events[0].seq
        if first_seq - 1 not in kept:
            kept.clear()
            self._oldest_seq = first_seq
        kept.update(zip(range(first_seq, first_seq + len(events)), events, strict=True))
        if len(kept) > EVENTS_KEPT:
            self._drop_oldest(2 * len(events))

    def _drop_oldest(self, count_max: int) -> None:
        """Drop events that exceed the bounds, if possible those that the database has."""
        kept = self._kept
        if self._oldest_seq > self._stored_seq and self._oldest_seq + len(kept) >= self._search_at:
            self._search_at = self._oldest_seq + len(kept) + _SEARCH_INTERVAL
            self._executor.submit(self._search)
        for _ in range(count_max):
            is_stored = self._oldest_seq <= self._stored_seq
            if len(kept) <= (EVENTS_KEPT if is_stored else EVENTS_KEPT_MAX):
                return
            del kept[self._oldest_seq]
            self._oldest_seq += 1

    def _from_memory(self, message: FetchEvents, last_seq: Seq) -> EventsFetched:
        first_seq = max(1, message.first_seq)
        end = min(first_seq + message.count_max, self._oldest_seq + len(self._kept))
        events = tuple(self._kept[seq] for seq in range(first_seq, end))
        return EventsFetched(message.request_id, events, last_seq)

    def _search(self) -> None:
        """Find the number of the newest event in the database; in the executor."""
        self._stored_seq = self._reader.newest_seq

    def _read(self, first_seq: Seq, count_max: int) -> tuple[tuple[Published, ...], Seq]:
        """Return events, or the number of the first one after a gap; in the executor."""
        try:
            events = self._reader.read(first_seq, count_max)
            return events, 0 if events else self._reader.next_seq(first_seq)
        except EventsCorrupt as error:
            log.warning("stored events are skipped", error=str(error))
        with suppress(EventsCorrupt):
            return (), self._reader.next_seq(first_seq + 1)
        return (), 0

    def _reply(self, fetch: _Fetch) -> Reply:
        message, last_seq = fetch.message, fetch.last_seq
        try:
            events, next_seq = fetch.future.result()
        except (LogError, OSError) as error:
            return Refused(message.request_id, ErrorCode.LOG_UNAVAILABLE, str(error))
        if events:
            return EventsFetched(message.request_id, events, last_seq)
        later = [seq for seq in (next_seq, self._oldest_seq) if seq > max(1, message.first_seq)]
        return EventsTooOld(message.request_id, min([*later, last_seq + 1]), last_seq)

    def _forget(self, key: tuple[bytes, RequestId]) -> _Fetch:
        fetch = self._fetches.pop(key)
        self._fetches_of[key[0]] -= 1
        if not self._fetches_of[key[0]]:
            del self._fetches_of[key[0]]
        return fetch
