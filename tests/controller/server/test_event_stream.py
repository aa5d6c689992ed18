"""An event has one number, whether it is published, fetched from memory or read from a file."""

import select
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from loradock.controller.core.actions import PublishEvent
from loradock.controller.log.events import EventReader, EventWriter, events_path
from loradock.controller.log.format import LogError
from loradock.controller.server import event_stream
from loradock.controller.server.event_stream import (
    FETCH_RETRY_MS,
    FETCHES_MAX,
    FETCHES_PER_CLIENT_MAX,
    Answer,
    EventStream,
)
from loradock.messages.errors import ErrorCode
from loradock.messages.events import AdapterCached, Published
from loradock.messages.requests import EventsFetched, EventsTooOld, FetchEvents, Refused, Reply
from tests.support.simulation.memory_storage import MemoryStorage
from tests.support.waiting import HANG_S

LAST = 40
STORED = 35
"""The newest event in the database."""
KEPT = 8
KEPT_MAX = 20

pytestmark = pytest.mark.usefixtures("small_memory")


def published(first: int, last: int, name: str = "a") -> tuple[Published, ...]:
    return tuple(
        Published(seq, 10 * seq, AdapterCached(f"{name}-{seq}")) for seq in range(first, last + 1)
    )


def store(directory: Path, events: tuple[Published, ...]) -> None:
    """Write events to the database, as a snapshotter does."""
    with EventWriter(directory) as writer:
        writer.add(events)


class HeldExecutor(Executor):
    """Runs what was submitted when `run` is called, in the same thread."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: work(*args, **kwargs)))
        return future

    def run(self) -> None:
        for future, work in self.waiting:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except (OSError, LogError) as error:
                    future.set_exception(error)
        self.waiting.clear()


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "EVENTS_KEPT", KEPT)
    monkeypatch.setattr(event_stream, "EVENTS_KEPT_MAX", KEPT_MAX)
    monkeypatch.setattr(event_stream, "_SEARCH_INTERVAL", 1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a database of the first events."""
    store(tmp_path, published(1, STORED))
    return tmp_path


@pytest.fixture
def events(directory: Path) -> Iterator[EventStream]:
    """A stream with events in the database and in memory, as after a recovery from a snapshot."""
    stream = EventStream(directory)
    stream.add_recovered([PublishEvent(event) for event in published(30, LAST)])
    stream.end_recovery(LAST)
    yield stream
    stream.close()


def held(directory: Path) -> tuple[EventStream, HeldExecutor]:
    executor = HeldExecutor()
    return EventStream(directory, executor=executor), executor


def ready(events: EventStream, timeout_s: float = 0) -> bool:
    return bool(select.select([events.wake_fd], [], [], timeout_s)[0])


def fetch(events: EventStream, first_seq: int, count_max: int = 1024, last: int = LAST) -> Reply:
    """Return the answer; wait for it if it is read from a file."""
    answers: list[Reply] = []
    events.fetch(b"c", FetchEvents("f", first_seq, count_max), last, answers.append)
    while not answers:
        assert ready(events, HANG_S)
        events.deliver()
    [answer] = answers
    assert answer.request_id == "f"
    return answer


def fetched(events: EventStream, first_seq: int, last: int = LAST) -> tuple[Published, ...]:
    """Return all events from `first_seq` on, in one answer or more."""
    found: list[Published] = []
    while (next_seq := first_seq + len(found)) <= last:
        answer = fetch(events, next_seq, last=last)
        assert isinstance(answer, EventsFetched), answer
        found += answer.events
    return tuple(found)


def ignore(_: Reply) -> None:
    """An answer that is not looked at."""


@pytest.mark.parametrize("count_max", [1, 3, 1024])
@pytest.mark.parametrize("first_seq", [1, 2, 29, 30, 31, 34, 35, 36, 39, 40, 41, 2**63 - 1])
def test_any_event_can_be_fetched_unchanged(
    events: EventStream, first_seq: int, count_max: int
) -> None:
    answer = fetch(events, first_seq, count_max)
    assert isinstance(answer, EventsFetched)
    assert answer.last_seq == LAST
    expected = published(1, LAST)[first_seq - 1 :][:count_max]
    assert answer.events == expected[: len(answer.events)]
    assert bool(answer.events) is bool(expected)
    assert fetched(events, first_seq) == published(1, LAST)[first_seq - 1 :]
    assert not ready(events)


def test_from_the_beginning_means_from_the_first_one(events: EventStream) -> None:
    answer = fetch(events, 0, 3)
    assert isinstance(answer, EventsFetched)
    assert answer.events == published(1, 3)


def test_an_empty_stream_has_no_events(tmp_path: Path) -> None:
    empty, _ = held(tmp_path)
    assert fetch(empty, 1, last=0) == EventsFetched("f", (), 0)
    assert empty.take_batch() == ()


def test_a_batch_is_what_was_added_since_the_last_one(events: EventStream) -> None:
    assert events.take_batch() == ()
    late = published(LAST + 1, LAST + 2)
    for event in late:
        events.add(event)
    assert events.take_batch() == late
    assert events.take_batch() == ()
    assert fetched(events, LAST - 1, LAST + 2) == published(LAST - 1, LAST + 2)


@pytest.mark.parametrize("first_seq", [0, 1, 5, 19])
def test_events_that_are_not_kept_are_too_old(
    events: EventStream, directory: Path, first_seq: int
) -> None:
    with EventWriter(directory) as writer:
        writer.drop_before(20)
    assert fetch(events, first_seq) == EventsTooOld("f", 20, LAST)
    assert fetched(events, 20) == published(20, LAST)


def test_without_a_database_the_oldest_event_is_the_one_in_memory(
    events: EventStream, directory: Path
) -> None:
    events_path(directory).unlink()
    answer = fetch(events, 1)
    assert isinstance(answer, EventsTooOld)
    assert LAST - KEPT_MAX < answer.oldest_seq <= 35
    assert fetched(events, answer.oldest_seq) == published(answer.oldest_seq, LAST)


def test_if_no_event_is_kept_the_next_one_is_the_oldest(tmp_path: Path) -> None:
    empty, executor = held(tmp_path)
    answers: list[Reply] = []
    empty.fetch(b"c", FetchEvents("f", 7), LAST, answers.append)
    executor.run()
    empty.deliver()
    assert answers == [EventsTooOld("f", LAST + 1, LAST)]


def test_memory_has_what_the_database_lacks_up_to_a_bound(tmp_path: Path) -> None:
    stream, executor = held(tmp_path)
    sizes = []
    for event in published(1, LAST):
        stream.add(event)
        stream.take_batch()
        executor.run()
        sizes.append(len(stream._kept))
    assert sizes == [min(seq, KEPT_MAX) for seq in range(1, LAST + 1)]
    # Once the database has them, they leave the memory, a few with each new event.
    store(tmp_path, published(1, LAST - 2))
    for event in published(LAST + 1, LAST + KEPT_MAX):
        stream.add(event)
        stream.take_batch()
        executor.run()
        first = min(stream._kept)
        assert fetched(stream, first, event.seq) == published(first, event.seq)
        sizes.append(len(stream._kept))
    assert first == LAST + 1
    assert min(sizes[LAST:]) <= KEPT_MAX - KEPT


def test_events_in_database_and_memory_overlap_at_any_time(tmp_path: Path) -> None:
    """Whenever a snapshot's events are written, no event in between is missing."""
    stream, executor = held(tmp_path)
    for event in published(1, 3 * LAST):
        stream.add(event)
        stream.take_batch()
        executor.run()
        if event.seq % 11 == 0:
            store(tmp_path, published(1, event.seq - 3))
        assert min(stream._kept) <= EventReader(tmp_path).newest_seq + 1
    assert len(stream._kept) <= KEPT + 11


def test_a_repeated_request_queues_nothing(directory: Path) -> None:
    stream, executor = held(directory)
    answers: list[Reply] = []
    for _ in range(100):
        stream.fetch(b"c", FetchEvents("f", 1), LAST, answers.append)
    assert len(executor.waiting) == 1
    executor.run()
    stream.deliver()
    assert len(answers) == 1
    stream.fetch(b"c", FetchEvents("f", 1), LAST, answers.append)
    assert len(executor.waiting) == 1


def test_the_work_for_a_client_and_for_all_is_bounded(directory: Path) -> None:
    stream, executor = held(directory)

    def fetch_of(client: int, number: int, answer: Answer) -> None:
        stream.fetch(f"c-{client}".encode(), FetchEvents(f"f-{number}", 1), LAST, answer)

    refusals: list[Reply] = []
    for number in range(FETCHES_PER_CLIENT_MAX + 3):
        fetch_of(0, number, refusals.append)
    assert len(executor.waiting) == FETCHES_PER_CLIENT_MAX
    assert [(type(reply), reply.request_id) for reply in refusals] == [
        (Refused, f"f-{FETCHES_PER_CLIENT_MAX + number}") for number in range(3)
    ]
    for client in range(1, FETCHES_MAX + 2):
        fetch_of(client, 1, refusals.append)
    assert len(executor.waiting) == FETCHES_MAX
    last = refusals[-1]
    assert isinstance(last, Refused)
    assert (last.code, last.retry_after_ms) == (ErrorCode.OVERLOADED, FETCH_RETRY_MS)
    assert FETCH_RETRY_MS > 0
    executor.run()
    stream.deliver()
    refusals.clear()
    fetch_of(0, 1, refusals.append)
    assert not refusals


def test_a_client_s_work_ends_with_it(directory: Path) -> None:
    stream, executor = held(directory)
    answers: list[Reply] = []
    for client in (b"a", b"b"):
        for number in range(FETCHES_PER_CLIENT_MAX):
            stream.fetch(client, FetchEvents(f"{client!r}-{number}", 1), LAST, answers.append)
    stream.drop_client(b"a")
    stream.drop_client(b"never seen")
    done = [future for future, _ in executor.waiting if future.cancelled()]
    assert len(done) == FETCHES_PER_CLIENT_MAX
    executor.run()
    while ready(stream):
        stream.deliver()
    assert [reply.request_id for reply in answers] == [f"b'b'-{n}" for n in range(4)]
    stream.fetch(b"a", FetchEvents("f", 1), LAST, answers.append)
    assert executor.waiting


def test_the_events_of_records_that_a_repair_has_cut_are_dropped(directory: Path) -> None:
    stream, _ = held(directory)
    stream.add_recovered([PublishEvent(event) for event in published(1, 20)])
    stream.end_recovery(20)
    assert EventReader(directory).newest_seq == 20
    for event in published(21, 2 * LAST, "new"):
        stream.add(event)
    assert stream._stored_seq == 20
    assert EventReader(directory).read(1, LAST) == published(
        1, len(EventReader(directory).read(1, LAST))
    )


def test_corrupt_events_are_a_gap_and_not_an_error(events: EventStream, directory: Path) -> None:
    data = events_path(directory).read_bytes()
    events_path(directory).write_bytes(data.replace(b"a-7", b"b-7"))
    assert fetched(events, 1, 6) == published(1, 6)
    assert fetch(events, 7) == EventsTooOld("f", 8, LAST)
    assert fetched(events, 8) == published(8, LAST)
    # The table's only page.
    events_path(directory).write_bytes(data[:4096] + bytes(len(data) - 4096))
    assert fetch(events, 5) == EventsTooOld("f", min(events._kept), LAST)


def test_a_database_that_is_none_is_replaced_at_the_start(directory: Path) -> None:
    events_path(directory).write_bytes(b"no database" * 1000)
    stream, _ = held(directory)
    assert stream._stored_seq == 0
    assert EventReader(directory).read(1, LAST) == ()


def test_a_database_that_can_not_be_read_refuses_the_fetch(tmp_path: Path) -> None:
    class Broken(MemoryStorage):
        broken = False

        def read(self, path: Path, offset: int = 0, size_bytes: int = -1) -> bytes:
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().read(path, offset, size_bytes)

    storage = Broken()
    storage.make_directory(tmp_path)
    with EventWriter(tmp_path, storage) as writer:
        writer.add(published(1, STORED))
    stream = EventStream(tmp_path, storage)
    storage.broken = True
    answer = fetch(stream, 1)
    stream.close()
    assert isinstance(answer, Refused)
    assert answer.code == ErrorCode.LOG_UNAVAILABLE


def test_a_wake_up_for_a_delivered_fetch_is_cleared(events: EventStream) -> None:
    answers: list[Reply] = []
    for number in range(3):
        events.fetch(b"c", FetchEvents(f"f-{number}", 1), LAST, answers.append)
    while len(answers) < 3:
        assert ready(events, HANG_S)
        events.deliver()
    while ready(events):
        events.deliver()
    assert len(answers) == 3


def test_closing_ends_what_waits(directory: Path) -> None:
    stream = EventStream(directory)
    for client in range(FETCHES_MAX):
        stream.fetch(f"{client}".encode(), FetchEvents("f", 1), LAST, ignore)
    stream.close()
