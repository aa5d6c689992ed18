"""An event has one number, whether it is published, fetched from memory or read from the log."""

import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.core.actions import Action
from controller.core.controller import Controller
from controller.core.limits import RULES, Limits, limits_to
from controller.log.writer import Log
from controller.shell import event_stream
from controller.shell.event_stream import FETCHES_MAX, EventStream
from messages.errors import ErrorCode
from messages.events import Published
from messages.records import FORMAT, ControllerStarted, Header, Record
from messages.requests import EventsFetched, FetchEvents, Refused, Reply
from tests.support.simulation.log_examples import flip
from tests.support.waiting import HANG_S

EPOCHS = 40
KEPT = 8
HEADER = Header(FORMAT, RULES, "lru", limits_to(Limits()), 0)


@pytest.fixture
def actions_of_records(tmp_path: Path) -> list[list[Action]]:
    """Write a log whose every record publishes one event; return the actions of each record."""
    controller = Controller(Limits())
    records = [Record(seq, ControllerStarted(seq)) for seq in range(1, EPOCHS + 1)]
    with Log.open(tmp_path / "log", HEADER) as log:
        log.append(records, 1)
    return [controller.handle(record.input, record.time_ns) for record in records]


@pytest.fixture
def events(
    tmp_path: Path, actions_of_records: list[list[Action]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[EventStream]:
    """A stream that keeps the last few events in memory."""
    monkeypatch.setattr(event_stream, "EVENTS_KEPT", KEPT)
    found = EventStream(tmp_path / "log")
    for actions in actions_of_records:
        found.add_recovered(actions)
    yield found
    found.close()


def ready(events: EventStream, timeout_s: float = 0) -> bool:
    return bool(select.select([events.wake_fd], [], [], timeout_s)[0])


def fetch(events: EventStream, first_seq: int, count_max: int = 1024) -> EventsFetched:
    """Return the answer; wait for it if it has to be read from the log."""
    answers: list[Reply] = []
    events.fetch(FetchEvents("f", first_seq, count_max), EPOCHS, answers.append)
    while not answers:
        assert ready(events, HANG_S)
        events.deliver()
    [answer] = answers
    assert isinstance(answer, EventsFetched), answer
    assert answer.last_seq == EPOCHS
    assert answer.request_id == "f"
    return answer


def published(actions_of_records: list[list[Action]]) -> list[Published]:
    return [action.message for actions in actions_of_records for action in actions]


@pytest.mark.parametrize("count_max", [1, 3, 1024])
@pytest.mark.parametrize("first_seq", [1, 2, 31, 32, 33, 34, 39, 40, 41, 2**63 - 1])
def test_any_event_can_be_fetched_unchanged(
    events: EventStream, actions_of_records: list[list[Action]], first_seq: int, count_max: int
) -> None:
    expected = published(actions_of_records)[first_seq - 1 :][:count_max]
    assert fetch(events, first_seq, count_max).events == tuple(expected)
    assert not ready(events)


def test_from_the_beginning_means_from_the_first_one(events: EventStream) -> None:
    assert fetch(events, 0, 3).events[0].seq == 1


def test_an_empty_stream_has_no_events(tmp_path: Path) -> None:
    empty = EventStream(tmp_path / "log")
    answers: list[Reply] = []
    empty.fetch(FetchEvents("f", 1), 0, answers.append)
    empty.close()
    assert answers == [EventsFetched("f", (), 0)]


def test_a_batch_is_what_was_added_since_the_last_one(
    events: EventStream, actions_of_records: list[list[Action]]
) -> None:
    assert events.take_batch() == ()
    late = [Published(EPOCHS + i, 0, published(actions_of_records)[0].event) for i in (1, 2)]
    for event in late:
        events.add(event)
    assert events.take_batch() == tuple(late)
    assert events.take_batch() == ()
    assert fetch(events, EPOCHS + 1).events == tuple(late)


def test_the_number_of_fetches_from_the_log_is_bounded(events: EventStream) -> None:
    answers: list[Reply] = []
    for number in range(FETCHES_MAX + 1):
        events.fetch(FetchEvents(f"f-{number}", 1), EPOCHS, answers.append)
    [refused] = answers
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.code) == (f"f-{FETCHES_MAX}", ErrorCode.OVERLOADED)
    while len(answers) < FETCHES_MAX + 1:
        assert ready(events, HANG_S)
        events.deliver()
    assert len(fetch(events, 1).events) == EPOCHS


def test_a_log_that_can_not_be_read_refuses_the_fetch(events: EventStream, tmp_path: Path) -> None:
    [segment] = (tmp_path / "log").glob("*.log")
    flip(segment, segment.stat().st_size // 2)
    answers: list[Reply] = []
    events.fetch(FetchEvents("f", EPOCHS - KEPT), EPOCHS, answers.append)
    assert ready(events, HANG_S)
    events.deliver()
    [refused] = answers
    assert isinstance(refused, Refused)
    assert refused.code == ErrorCode.LOG_UNAVAILABLE


def test_a_wake_up_for_a_delivered_fetch_is_cleared(events: EventStream) -> None:
    answers: list[Reply] = []
    for number in range(3):
        events.fetch(FetchEvents(f"f-{number}", 1), EPOCHS, answers.append)
    while len(answers) < 3:
        assert ready(events, HANG_S)
        events.deliver()
    while ready(events):
        events.deliver()
    assert len(answers) == 3


def test_closing_does_not_wait_for_a_long_log(events: EventStream) -> None:
    for number in range(FETCHES_MAX):
        events.fetch(FetchEvents(f"f-{number}", 1), EPOCHS, lambda reply: None)
    events._closing.set()
    answer = events._from_log(FetchEvents("f", 1), EPOCHS)
    assert answer == EventsFetched("f", (), EPOCHS)
