"""A controller under other settings, with another's state, and with inputs that are skipped."""

import msgspec
import pytest

from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.messages import records, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import ActivateAdapter
from tests.support.simulation.core_bench import CoreBench


@pytest.mark.parametrize(
    ("limit", "lowered", "text"),
    [
        ("max_loras", 1, "fixed while an engine runs"),
        ("max_cpu_loras", 2, "3 are in use"),
        ("known_adapters_max", 2, "3 are in use"),
        ("pinned_bytes_max", 19, "20 are in use"),
        ("host_bytes_max", 9, "10 are in use"),
        ("requests_max", 1, ""),
    ],
)
def test_limits_can_not_be_lowered_below_what_is_in_use(
    limit: str, lowered: int, text: str
) -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    bench.request(requests.LoadAdapter, "c")
    limits = {name: getattr(bench.limits, name) for name in Limits.__struct_fields__}
    refusal = bench.controller.change_refusal(Limits(**{**limits, limit: lowered}))
    assert text in refusal
    assert bool(text) == bool(refusal)


def test_a_running_request_that_was_refused_is_not_refused_again() -> None:
    bench = CoreBench()
    bench.activate("a")
    first, second = bench.generate("a"), bench.generate("a")
    bench.advance(bench.limits.generation_timeout_ms)
    assert {bench.reply(one).code for one in (first, second)} == {ErrorCode.ENGINE_GONE}
    assert bench.world.pending_requests[second].answered
    answered = bench.world.answered
    bench.controller.reconfigure(msgspec.structs.replace(bench.limits, requests_max=1), "lru")
    assert (bench.world.answered, len(bench.world.pending_requests)) == (answered, 2)


def test_an_adopted_state_continues_and_a_skipped_input_only_counts() -> None:
    controller, other = (Controller(Limits(), checked=True) for _ in range(2))
    world = controller.world
    for number in range(2):
        other.handle(ActivateAdapter(f"r{number}", "a"), 5)
    controller.adopt(other)
    assert (controller.world, controller.digest()) == (world, other.digest())
    controller.handle(records.ControllerStarted(1), 6)
    before = (world.seq, len(world.pending_requests))
    controller.skip(9)
    assert (world.seq, world.time_ns, len(world.pending_requests)) == (before[0] + 1, 9, before[1])
    controller.skip(1)
    assert world.time_ns == 9


def test_the_number_of_the_last_report_never_decreases() -> None:
    controller = Controller(Limits(), checked=True)
    controller.handle(records.ControllerStarted(1), 1)
    controller.handle(reports.EngineInventory("e", 1, "m", 2, 100), 2, report_seq=4)
    for seq, last in ((3, 4), (6, 6)):
        controller.handle(reports.WeightsDropped(99), 3, report_seq=seq)
        assert controller.world.engine is not None
        assert controller.world.engine.reported == last
    controller.handle(records.EngineLost("e", "gone"), 4, report_seq=9)
    assert controller.world.engine is None
