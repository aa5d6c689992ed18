"""No step of the wall clock ends, delays or starts anything; recorded time never goes back.

The server is real, with its sockets and its log; its clocks are stepped.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.log.replay import replay
from loradock.controller.log.segments import read
from loradock.controller.server.inputs import SYSTEM_CLOCKS, LogicalClock
from loradock.controller.server.transport import Transport
from loradock.messages import records
from loradock.messages import requests as rq
from tests.support.simulation.shell_examples import eventually
from tests.support.simulation.stepped_clocks import (
    HOUR_NS,
    MS_NS,
    RequestClient,
    SteppedClocks,
    serving,
)

JUMPS = (HOUR_NS, -HOUR_NS)
SHORT = rq.LoadAdapter("short", "a", timeout_ms=500)
LONG = rq.LoadAdapter("long", "b", timeout_ms=60_000)
SHORT_EXPIRED, LONG_EXPIRED = [("short", "L011")], [("long", "L011")]
LAST_NS = 1_600_000_000_000_000_000


def recorded_times(directory: Path) -> list[int]:
    return [record.time_ns for _, _, record in read(directory / "log")]


@pytest.mark.parametrize("jump_ns", [0, *JUMPS])
def test_the_clock_continues_from_the_last_recorded_time(jump_ns: int) -> None:
    clocks = SteppedClocks(LAST_NS)
    clocks.jump(jump_ns)
    clock = LogicalClock(LAST_NS, clocks.clocks)
    assert clock.now_ns() == LAST_NS
    assert clock.wall_ns() == clocks.wall_ns
    assert LogicalClock(0, clocks.clocks).now_ns() == clocks.wall_ns


@given(steps=st.lists(st.tuples(st.integers(0, 10**6), st.integers(-(10**18), 10**18))))
def test_the_clock_advances_by_the_time_that_passes(steps: list[tuple[int, int]]) -> None:
    clocks = SteppedClocks()
    clock = LogicalClock(LAST_NS, clocks.clocks)
    passed_ms = 0
    for duration_ms, jump_ns in steps:
        clocks.jump(jump_ns)
        clocks.advance(duration_ms)
        passed_ms += duration_ms
        assert clock.now_ns() == LAST_NS + passed_ms * MS_NS


@pytest.mark.parametrize("jump_ns", JUMPS)
def test_a_jump_refuses_nothing_early_and_delays_nothing(tmp_path: Path, jump_ns: int) -> None:
    clocks = SteppedClocks()
    with serving(tmp_path, clocks.clocks) as client:
        client.send_request(SHORT)
        client.send_request(LONG)
        assert client.outcomes() == []
        clocks.jump(jump_ns)
        assert client.outcomes() == []
        clocks.advance(499)
        assert client.outcomes() == []
        clocks.advance(1)
        assert client.outcomes() == SHORT_EXPIRED
        clocks.jump(-2 * jump_ns)
        assert client.outcomes() == []
        clocks.advance(59_499)
        assert client.outcomes() == []
        clocks.advance(1)
        assert client.outcomes() == LONG_EXPIRED
    times = recorded_times(tmp_path)
    assert times == sorted(times)
    assert times[-1] - times[0] == 60_000 * MS_NS


@pytest.mark.parametrize("jump_ns", JUMPS)
def test_a_jump_between_two_epochs_changes_no_deadline(tmp_path: Path, jump_ns: int) -> None:
    clocks = SteppedClocks()
    with serving(tmp_path, clocks.clocks) as client:
        client.send_request(SHORT)
        client.send_request(LONG)
        assert client.outcomes() == []
        clocks.advance(400)
        client.call(rq.CancelGeneration("recorded", "nothing"))
    clocks.jump(jump_ns)
    # The time in which no controller runs does not count.
    clocks.advance(1_200_000)
    with serving(tmp_path, clocks.clocks) as client:
        client.send_request(SHORT)
        client.send_request(LONG)
        assert client.outcomes() == []
        clocks.advance(99)
        assert client.outcomes() == []
        clocks.advance(1)
        assert client.outcomes() == SHORT_EXPIRED
        clocks.advance(59_499)
        assert client.outcomes() == []
        clocks.advance(1)
        assert client.outcomes() == LONG_EXPIRED
    times = recorded_times(tmp_path)
    assert times == sorted(times)
    assert times[-1] - times[0] == 60_000 * MS_NS
    assert replay(tmp_path / "log", checked=True).divergence is None


@pytest.mark.parametrize("jump_ns", JUMPS)
def test_a_limit_is_awaited_on_the_monotonic_clock(tmp_path: Path, jump_ns: int) -> None:
    stepped = SteppedClocks()
    with serving(tmp_path, SYSTEM_CLOCKS._replace(wall_ns=lambda: stepped.wall_ns)) as client:
        client.send_request(SHORT)
        assert client.answers() == []
        stepped.jump(jump_ns)
        assert client.final_reply("short").code == "L011"
    records_of = {type(record.input): record for _, _, record in read(tmp_path / "log")}
    waited_ns = records_of[records.TimerFired].time_ns - records_of[rq.LoadAdapter].time_ns
    assert waited_ns >= 500 * MS_NS


@pytest.mark.parametrize("jump_ns", JUMPS)
def test_a_poll_ends_at_the_deadline(tmp_path: Path, jump_ns: int) -> None:
    timeouts_ms: list[int] = []

    class ObservedTransport(Transport):
        def poll(self, timeout_ms: int) -> set[int]:
            timeouts_ms.append(timeout_ms)
            return super().poll(timeout_ms)

    clocks = SteppedClocks()
    with serving(tmp_path, clocks.clocks, ObservedTransport) as client:
        client.send_request(rq.LoadAdapter("r", "a", timeout_ms=50))
        assert client.answers() == []
        clocks.jump(jump_ns)
        assert client.answers() == []
        before = len(timeouts_ms)
        # Time stands still: the deadline stays 50 ms ahead, and several beats pass.
        eventually(lambda: len(timeouts_ms) > before + 15)
        assert 0 < max(timeouts_ms[before:]) <= 50


def test_events_show_the_wall_time_of_their_epoch(tmp_path: Path) -> None:
    clocks, starts = SteppedClocks(), []
    for jump_ns in (0, HOUR_NS, -3 * HOUR_NS):
        clocks.jump(jump_ns)
        with serving(tmp_path, clocks.clocks) as client:
            epoch = client.status().epoch
            starts.append((epoch, clocks.wall_ns))
            clocks.advance(1000)
            client.call(rq.CancelGeneration(f"r{epoch}", "nothing"))
            fetched = client.call(rq.FetchEvents(client.new_id(), 1)).events
    assert [(item.event.epoch, item.time_ns) for item in fetched] == starts
    assert [epoch for epoch, _ in starts] == sorted({epoch for epoch, _ in starts})
    first_ns = starts[0][1]
    seconds = [(time_ns - first_ns) // (1000 * MS_NS) for time_ns in recorded_times(tmp_path)]
    assert seconds == [0, 1, 1, 2, 2, 3]


class Load(NamedTuple):
    """A request with this limit arrives."""

    timeout_ms: int


class Pass(NamedTuple):
    """Time passes."""

    duration_ms: int


class Restart(NamedTuple):
    """The server ends and starts again; clients send again what is unanswered."""


Step = Load | Pass | Restart
STEPS = st.lists(
    st.one_of(
        st.builds(Load, st.integers(1, 2000)),
        st.builds(Pass, st.integers(0, 1500)),
        st.just(Restart()),
    ),
    min_size=1,
    max_size=12,
)
JUMPS_NS = st.one_of(st.sampled_from(JUMPS), st.integers(-(10**17), 10**17))


class History:
    """What a server recorded and answered over some steps, while its wall clock jumps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clocks = SteppedClocks()
        self.sent: dict[str, rq.LoadAdapter] = {}
        self.outcomes: list[list[tuple[Any, ...]]] = []

    def run(self, steps: Sequence[Step], jumps_ns: Sequence[int]) -> None:
        """Take the steps, each after its jump; that of a restart is between the two lives."""
        left = list(zip(steps, jumps_ns, strict=True))
        while left:
            with serving(self.directory, self.clocks.clocks) as client:
                self._repeat(client)
                while left and not isinstance(left[0][0], Restart):
                    self._take(client, *left.pop(0))
            if left:
                self.clocks.jump(left.pop(0)[1])

    def _repeat(self, client: RequestClient) -> None:
        answered = {request_id for found in self.outcomes for request_id, _ in found}
        for request_id, request in self.sent.items():
            if request_id not in answered:
                client.send_request(request)
        self.outcomes.append(client.outcomes())

    def _take(self, client: RequestClient, step: Step, jump_ns: int) -> None:
        self.clocks.jump(jump_ns)
        if isinstance(step, Load):
            name = f"r{len(self.sent)}"
            self.sent[name] = rq.LoadAdapter(name, name, timeout_ms=step.timeout_ms)
            client.send_request(self.sent[name])
        elif isinstance(step, Pass):
            self.clocks.advance(step.duration_ms)
        self.outcomes.append(client.outcomes())

    def recorded(self) -> list[tuple[int, Any]]:
        """Return times and inputs, without the labels of an epoch."""
        return [(r.time_ns, without_labels(r.input)) for _, _, r in read(self.directory / "log")]


def without_labels(message: Any) -> Any:
    if isinstance(message, records.ControllerStarted):
        return msgspec.structs.replace(message, epoch=0, wall_offset_ns=0)
    return message


@given(data=st.data())
@settings(max_examples=2)
def test_a_history_does_not_depend_on_the_wall_clock(data: st.DataObject) -> None:
    steps = data.draw(STEPS, "steps")
    jumps_ns = data.draw(st.lists(JUMPS_NS, min_size=len(steps), max_size=len(steps)), "jumps")
    with tempfile.TemporaryDirectory() as quiet, tempfile.TemporaryDirectory() as jumping:
        histories = [History(Path(quiet)), History(Path(jumping))]
        for history, jumps in zip(histories, ([0] * len(steps), jumps_ns), strict=True):
            history.run(steps, jumps)
        without, with_jumps = histories
        assert with_jumps.outcomes == without.outcomes
        assert with_jumps.recorded() == without.recorded()
        times = recorded_times(with_jumps.directory)
        assert times == sorted(times)
