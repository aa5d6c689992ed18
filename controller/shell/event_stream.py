"""Published events: the latest are kept in memory, older ones are read back from the log.

An event has the same number whether it is published, fetched from memory or replayed.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Final

from controller.core.actions import Action, PublishEvent
from controller.log.format import LogError
from controller.log.replay import replay
from messages.errors import ErrorCode
from messages.events import Published
from messages.ids import Seq
from messages.requests import EventsFetched, FetchEvents, Refused, Reply

EVENTS_KEPT: Final = 65_536
FETCHES_MAX: Final = 8
"""Bound on the fetches that read the log at a time; further ones are refused."""

Answer = Callable[[Reply], None]
"""Sends a reply to the client that fetches."""


class EventStream:
    """The latest events, and a thread that reads older ones; `wake_fd` is readable when it did."""

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._kept: deque[Published] = deque(maxlen=EVENTS_KEPT)
        self._batch: list[Published] = []
        self._readers = ThreadPoolExecutor(1, "events-from-log")
        self._fetches: list[tuple[Future[Reply], Answer]] = []
        self._closing = Event()
        self.wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, event: Published) -> None:
        """Keep a new event, and add it to the next batch."""
        self._kept.append(event)
        self._batch.append(event)

    def add_recovered(self, actions: list[Action]) -> None:
        """Keep the events of a recovery; one that is tried again brings the same ones again."""
        last_seq = self._kept[-1].seq if self._kept else 0
        published = (action.message for action in actions if isinstance(action, PublishEvent))
        self._kept.extend(event for event in published if event.seq > last_seq)

    def take_batch(self) -> tuple[Published, ...]:
        """Return and clear the events that were added since the last batch."""
        batch = tuple(self._batch)
        self._batch.clear()
        return batch

    def fetch(self, message: FetchEvents, last_seq: Seq, answer: Answer) -> None:
        """Answer with events from `first_seq` on: at once, or after the log is read."""
        first_kept = self._kept[0].seq if self._kept else last_seq + 1
        if message.first_seq >= first_kept or message.first_seq > last_seq:
            first = min(max(message.first_seq - first_kept, 0), len(self._kept))
            events = tuple(islice(self._kept, first, first + message.count_max))
            answer(EventsFetched(message.request_id, events, last_seq))
        elif len(self._fetches) >= FETCHES_MAX:
            busy = f"{FETCHES_MAX} subscribers are reading old events; try again later"
            answer(Refused(message.request_id, ErrorCode.OVERLOADED, busy))
        else:
            future = self._readers.submit(self._from_log, message, last_seq)
            future.add_done_callback(lambda _: os.eventfd_write(self.wake_fd, 1))
            self._fetches.append((future, answer))

    def deliver(self) -> None:
        """Answer the fetches that are complete; call it only while `wake_fd` is readable."""
        os.eventfd_read(self.wake_fd)
        done = [fetch for fetch in self._fetches if fetch[0].done()]
        self._fetches = [fetch for fetch in self._fetches if not fetch[0].done()]
        for future, answer in done:
            answer(future.result())

    def close(self) -> None:
        """End the reading thread, also in the middle of the log."""
        self._closing.set()
        self._readers.shutdown(wait=True, cancel_futures=True)
        os.close(self.wake_fd)

    def _from_log(self, message: FetchEvents, last_seq: Seq) -> Reply:
        collected: list[Published] = []
        last = min(message.first_seq + message.count_max - 1, last_seq)

        def collect(actions: list[Action]) -> None:
            if self._closing.is_set():
                raise _ReadingDone
            for action in actions:
                if isinstance(action, PublishEvent) and action.message.seq >= message.first_seq:
                    collected.append(action.message)
                    if action.message.seq >= last:
                        raise _ReadingDone

        try:
            replay(self._log_directory, sink=collect)
        except _ReadingDone:
            pass
        except LogError as error:
            return Refused(message.request_id, ErrorCode.LOG_UNAVAILABLE, str(error))
        return EventsFetched(message.request_id, tuple(collected), last_seq)


class _ReadingDone(Exception):  # noqa: N818 - not an error
    """Ends a replay before the end of the log."""
