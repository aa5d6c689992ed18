"""Each prefetch is useful, useless or harmful, and `prefetch=history` makes useful ones."""

from typing import Any

import msgspec

from loradock.lab.prefetches import PrefetchMeter
from loradock.lab.simulator import Changes, simulate
from loradock.lab.workloads import make_workload
from loradock.messages.records import GenerationRequested
from loradock.messages.requests import EvictAdapter, LoadAdapter, PrefetchAdapter
from tests.support.simulation.core_bench import CoreBench


class WatchedBench(CoreBench):
    """A deployment whose prefetches are judged: useful, useless, harmful."""

    def __init__(self, **limits: int) -> None:
        self.watches = False
        super().__init__(**limits)
        self.meter, self.watches = PrefetchMeter(self.world), True

    def handle(self, message: Any) -> None:
        if self.watches:
            self.meter.before(message)
        super().handle(message)
        if self.watches:
            self.meter.after(message)

    def judged(self) -> tuple[int, int, int]:
        return self.meter.useful, self.meter.useless, self.meter.harmful


def test_a_use_that_finds_the_adapter_moved_or_moving_makes_it_useful() -> None:
    bench = WatchedBench()
    bench.request(PrefetchAdapter, "a")
    bench.send(PrefetchAdapter, "b")
    assert bench.judged() == (0, 0, 0)
    for name in "abab":
        bench.send(GenerationRequested, name)
    assert bench.judged() == (2, 0, 0)


def test_an_eviction_or_the_end_before_a_use_makes_it_useless() -> None:
    bench = WatchedBench()
    bench.request(PrefetchAdapter, "a")
    bench.request(EvictAdapter, "a")
    bench.request(PrefetchAdapter, "b")
    bench.send(GenerationRequested, "a")
    assert bench.judged() == (0, 1, 0)
    bench.meter.end()
    assert bench.judged() == (0, 2, 0)


def test_a_sooner_use_of_what_it_evicted_makes_it_harmful() -> None:
    for first, judged in (("b", (0, 0, 1)), ("a", (1, 0, 0))):
        bench = WatchedBench(max_cpu_loras=2)
        bench.request(LoadAdapter, "b")
        bench.request(LoadAdapter, "c")
        bench.request(PrefetchAdapter, "a")
        assert bench.state("b") == "evicted"
        bench.send(GenerationRequested, first)
        assert bench.judged() == judged


def test_one_without_anything_to_move_is_none_of_these() -> None:
    bench = WatchedBench()
    bench.activate("a")
    bench.request(PrefetchAdapter, "a")
    bench.send(GenerationRequested, "a")
    bench.meter.end()
    assert bench.judged() == (0, 0, 0)


def test_prefetches_from_history_are_useful_for_jobs_and_shorten_waits() -> None:
    traffic = make_workload("jobs", 60, 2_000).traffic(0.1, host_share=0.3)
    base, changed = (simulate(traffic, Changes(prefetch=p)).outcome for p in ("none", "history"))
    assert base.prefetches == base.prefetches_useful == 0
    judged = changed.prefetches_useful, changed.prefetches_useless, changed.prefetches_harmful
    assert sum(judged) <= changed.prefetches
    assert judged[0] > 0.8 * sum(judged) > 100
    assert changed.wait_s.p50 <= base.wait_s.p50
    assert changed.first_token_s.p95 < base.first_token_s.p95
    # The same requests are served, and one run is repeated.
    assert changed.served == base.served
    again = simulate(traffic, Changes(prefetch="history")).outcome
    assert msgspec.structs.asdict(again) == msgspec.structs.asdict(changed)
