"""Statistics: steps, queue times and tokens of requests, each counted once."""

from loradock.engine.worker.meter import Meter
from loradock.messages.errors import ErrorCode
from loradock.messages.reports import GenerationEnded, OperationFailed, PoolingEnded, WeightsLoaded
from loradock.messages.requests import TokensStreamed
from loradock.messages.views import DURATION_BOUNDS_S

SECOND_NS = 1_000_000_000


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_ns = 7 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)


class Bench:
    """A meter and the steps of an engine."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.meter = Meter(self.clock)

    def step(self, *running: int, waiting: tuple[int, ...] = (), seconds: float = 1.0) -> None:
        self.meter.begin_step()
        self.clock.advance(seconds)
        self.meter.end_step(set(running), waiting)

    def found(self, *names: str) -> tuple[object, ...]:
        statistics = self.meter.statistics(0, 0)
        return tuple(getattr(statistics, name) for name in names)


def test_steps_and_their_time_are_summed() -> None:
    bench = Bench()
    bench.step(seconds=0.5)
    bench.clock.advance(9)
    bench.step(seconds=0.25)
    assert bench.found("steps", "step_ns") == (2, 3 * SECOND_NS // 4)


def test_a_request_is_queued_until_the_beginning_of_its_first_step() -> None:
    bench = Bench()
    bench.meter.arrived(1, "r1")
    bench.meter.arrived(2, "r2")
    bench.step(1)
    bench.step(1, 2)
    bench.step(1, 2)
    assert bench.found("queued", "queue_ns") == (2, SECOND_NS)
    counts = dict(zip((*DURATION_BOUNDS_S, 0.0), *bench.found("queue_counts"), strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {0.005: 1, 1.0: 1}


def test_a_request_of_one_step_is_counted_by_its_report() -> None:
    bench = Bench()
    bench.meter.arrived(1, "r1")
    bench.clock.advance(2)
    bench.step()
    bench.meter.on_report(GenerationEnded(1, "stop", 5, 3, 4))
    assert bench.found("queued", "queue_ns") == (1, 2 * SECOND_NS)
    assert bench.found("prompt_tokens", "output_tokens") == (1, 3)


def test_a_request_that_waits_again_is_preempted_once_per_time() -> None:
    bench = Bench()
    bench.meter.arrived(1, "r1")
    for running in ((1,), (), (), (1,), (), (1,)):
        bench.step(*running, waiting=() if running else (1,))
    assert bench.found("preempted", "queued") == (2, 1)
    # It ends in a step whose reports follow.
    bench.step()
    bench.meter.on_report(GenerationEnded(1, "length", 5, 3))
    bench.step()
    assert bench.found("preempted") == (2,)


def test_other_reports_and_failures_count_no_tokens() -> None:
    bench = Bench()
    bench.meter.arrived(1, "r1")
    bench.meter.on_report(OperationFailed(1, ErrorCode.NOT_RESIDENT, "stale"))
    bench.meter.on_report(WeightsLoaded(2))
    bench.meter.on_report(PoolingEnded(3, 2, 9))
    assert bench.found("queued", "prompt_tokens", "output_tokens") == (0, 9, 0)


def test_a_generation_has_phases() -> None:
    bench = Bench()
    bench.meter.arrived(1, "r1")
    bench.step(1, seconds=2)
    bench.meter.on_report(TokensStreamed("r1", 0, (5,)))
    bench.step(waiting=(1,), seconds=3)
    bench.step(1, seconds=4)
    bench.meter.on_report(TokensStreamed("r1", 1, (6,)))
    ended = bench.meter.on_report(GenerationEnded(1, "length", 9, 2, 4))
    assert ended == GenerationEnded(1, "length", 9, 2, 4, 2 * SECOND_NS)
    phases = [found.total for found in bench.found("prefill", "decode", "inference")]
    assert phases == [2 * SECOND_NS, 7 * SECOND_NS, 9 * SECOND_NS]
    assert [sum(found.counts) for found in bench.found("prefill", "decode", "inference")] == [1] * 3
    [preemptions, computed] = bench.found("preemptions", "computed_tokens")
    assert (preemptions.total, computed.total) == (1, 5)
    assert bench.found("prefix_queries", "prefix_hits") == (9, 4)


def test_a_generation_that_is_cancelled_before_its_first_token_was_not_computed() -> None:
    bench = Bench()
    bench.meter.arrived(1, "r1")
    bench.meter.on_report(TokensStreamed("r1", 0, (), finish_reason="cancelled"))
    ended = GenerationEnded(1, "cancelled", 9, 0)
    assert bench.meter.on_report(ended) == ended
    assert bench.found("queued", "prompt_tokens", "prefix_queries") == (0, 0, 0)
    assert sum(bench.found("prefill")[0].counts) == 0
