"""Events of a real server: old ones, too old ones, a snapshot in their place, and idle beats."""

from pathlib import Path

import pytest

from loradock.client import Client, Gap, Snapshot
from loradock.controller.core.actions import PublishEvent
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import RULES, limits_to
from loradock.controller.log.events import EventWriter
from loradock.controller.log.writer import Log
from loradock.controller.server import event_stream
from loradock.controller.server.event_stream import EVENTS_BEAT_NS, EventStream
from loradock.controller.server.inputs import SYSTEM_CLOCKS
from loradock.controller.server.transport import Transport
from loradock.messages.events import Published
from loradock.messages.records import FORMAT, ControllerStarted, Header, Record
from loradock.messages.requests import EventsTooOld, FetchEvents, LoadAdapter, SnapshotFetched
from loradock.messages.wire import EVENTS
from tests.support.parallel.processes import LIMITS
from tests.support.simulation.shell_examples import RawClient
from tests.support.simulation.stepped_clocks import SteppedClocks, serving
from tests.support.waiting import HANG_S, wait_until

EPOCHS = 12


class ObservedTransport(Transport):
    """Remembers the longest time that the loop waits, and counts the frames without events."""

    timeouts_ms: list[int]
    beats: int

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.timeouts_ms, self.beats = [], 0
        ObservedTransport.latest = self

    latest: "ObservedTransport"

    def poll(self, timeout_ms: int) -> set[int]:
        self.timeouts_ms.append(timeout_ms)
        return super().poll(timeout_ms)

    def publish(self, frame: bytes) -> None:
        self.beats += not EVENTS.decode(frame).message
        super().publish(frame)


@pytest.fixture
def events(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Published, ...]:
    """Write a log whose every record publishes an event; servers keep four in memory."""
    monkeypatch.setattr(event_stream, "EVENTS_KEPT", 4)
    monkeypatch.setattr(event_stream, "EVENTS_KEPT_MAX", 4)
    controller = Controller(LIMITS)
    records = [Record(seq, ControllerStarted(seq)) for seq in range(1, EPOCHS + 1)]
    with Log(directory / "log", Header(FORMAT, RULES, "lru", limits_to(LIMITS), 0)) as log:
        log.append(records, 1)
    actions = [controller.handle(record.input, record.time_ns) for record in records]
    return tuple(action.message for [action] in actions if isinstance(action, PublishEvent))


def test_old_events_are_read_from_the_files_and_the_rest_from_memory(
    directory: Path, events: tuple[Published, ...]
) -> None:
    with EventWriter(directory / "log") as writer:
        writer.add(events)
    with serving(directory, SYSTEM_CLOCKS), Client(directory, timeout_s=HANG_S) as client:
        found = list(client.events(since=0, follow=False))
    assert found[:EPOCHS] == list(events)
    assert [item.seq for item in found] == list(range(1, EPOCHS + 2))


@pytest.mark.usefixtures("events")
def test_events_that_are_not_kept_are_answered_as_too_old(directory: Path) -> None:
    with serving(directory, SYSTEM_CLOCKS) as raw, Client(directory, timeout_s=HANG_S) as client:
        answer = raw.call(FetchEvents(raw.new_id(), 1))
        assert isinstance(answer, EventsTooOld)
        assert (answer.oldest_seq, answer.last_seq) == (EPOCHS - 2, EPOCHS + 1)
        gap, *rest = client.events(since=0, follow=False)
        assert gap == Gap(1, EPOCHS - 2)
        assert [item.seq for item in rest] == list(range(EPOCHS - 2, EPOCHS + 2))

        shown = raw.call(FetchEvents(raw.new_id(), 1, snapshot=True))
        assert isinstance(shown, SnapshotFetched)
        assert (shown.adapters, shown.more) == ((), False)
        assert shown.events_seq == EPOCHS + 1
        [snapshot] = client.events(since=0, follow=False, snapshot=True)
        assert snapshot == Snapshot(1, EPOCHS + 1, ())


def test_an_idle_server_beats_in_the_stated_interval(directory: Path) -> None:
    with serving(directory, SYSTEM_CLOCKS, ObservedTransport) as raw:
        transport = ObservedTransport.latest
        raw.status()
        before = transport.beats
        with Client(directory, timeout_s=HANG_S) as client, client.events(since=None) as stream:
            # A subscriber without events waits for beats.
            while transport.beats < before + 3:
                assert stream.next_within(EVENTS_BEAT_NS / 1e9) is None
    assert max(transport.timeouts_ms) <= EVENTS_BEAT_NS // 1_000_000 <= 100


def test_the_fetches_of_a_client_end_when_an_answer_finds_it_gone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[bytes] = []
    monkeypatch.setattr(EventStream, "drop_client", lambda _, client: dropped.append(client))
    clocks = SteppedClocks()
    with serving(directory, clocks.clocks) as client:

        def finds_it_gone() -> bool:
            with RawClient(directory) as other:
                other.send_request(LoadAdapter(other.new_id(), "a", timeout_ms=1000))
                other.status()
            clocks.advance(2000)
            client.status()
            return bool(dropped)

        wait_until(finds_it_gone)
