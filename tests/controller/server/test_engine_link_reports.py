"""Reports that are sent before an inventory: whose they are, and which are missing."""

import pytest

from loradock.controller.server.engine_link import EngineLink
from loradock.messages.wire import REPORTS
from tests.support.simulation.link_bench import LinkBench, beat, dropped, inventory, ops
from tests.support.simulation.link_simulation import TIMEOUT_NS


@pytest.mark.parametrize("engine_id", ["e", "f"])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_an_engine_reported_before_it_is_attached_answers_nothing(
    engine_id: str, restarts: bool
) -> None:
    """Not after a loss, after which the controller may have restarted, and not as another's."""
    bench = LinkBench().opened(3)
    assert ops(bench.receive(dropped(4))) == [4]
    bench.link.detach(bench.now_ns, ended=False)
    bench.take_sent()
    if restarts:
        bench = LinkBench()
    bench.receive(beat(engine_id, 5), peer=b"b")
    answer = inventory(engine_id, bench.inventory_request(b"b"), 5)
    inputs = bench.receive(dropped(4), dropped(5), answer, peer=b"b")
    assert inputs == [answer[0]]
    bench.link.open()
    assert ops(bench.receive(dropped(5), dropped(6), peer=b"b")) == [6]


@pytest.mark.parametrize("lost", [4, 5, 6])
def test_a_report_that_was_lost_inside_a_connection_is_requested_again(lost: int) -> None:
    bench = LinkBench("e", 3)
    bench.receive(beat("e", 6))
    numbers = (4, 5, 6)
    arrived = [dropped(seq) for seq in numbers if seq != lost]
    assert bench.receive(*arrived, inventory("e", bench.inventory_request(), 6)) == []
    answer = inventory("e", bench.inventory_request(), 6)
    assert ops(bench.receive(*map(dropped, numbers), answer)) == [4, 5, 6]


def test_reports_that_the_engine_no_longer_has_are_requested_once() -> None:
    """They were acknowledged by a log whose tail is lost."""
    bench = LinkBench("e", 3)
    bench.receive(beat("e", 7))
    for is_second in (False, True):
        answer = inventory("e", bench.inventory_request(), 7)
        inputs = bench.receive(dropped(6), dropped(7), answer)
        assert bool(inputs) == is_second
    assert ops(inputs) == [6, 7]


def test_nothing_is_received_before_an_epoch_is_in_the_log() -> None:
    bench = LinkBench()
    link = EngineLink(bench._on_send, TIMEOUT_NS)
    frame = REPORTS.encode(beat("e", 0)[0], 0, 0)
    assert link.receive([(b"a", frame)], bench.now_ns) == ([], [])
    assert bench.take_sent() == []
