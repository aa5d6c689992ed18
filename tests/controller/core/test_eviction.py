"""The least recently used adapter leaves a tier, wherever it is; and the other policies."""

from collections import OrderedDict
from itertools import permutations
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.core import views
from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.rankings import Ranking
from loradock.controller.core.world import Adapter
from loradock.messages import events
from loradock.messages import requests as rq
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.deployment import FAILING_POLICIES

PREPARED: dict[str, type] = {
    "cpu-cached": rq.LoadAdapter,
    "pinned": rq.StageAdapter,
    "gpu-slot": rq.ActivateAdapter,
}
"""The request that leaves an adapter in each state."""

HOST_MAX, SLOTS_MAX = 3, 2


@pytest.mark.parametrize("order", list(permutations(PREPARED)), ids=" ".join)
def test_the_host_loses_the_least_recently_used_adapter_of_any_state(order: Any) -> None:
    bench = CoreBench(slots=1, max_cpu_loras=3)
    for name, state in zip("abc", order, strict=True):
        bench.request(PREPARED[state], name)
    assert [bench.state(name) for name in "abc"] == list(order)
    bench.request(rq.LoadAdapter, "d")
    assert [bench.state(name) for name in "abc"] == ["evicted", *order[1:]]


@pytest.mark.parametrize("order", list(permutations(PREPARED)), ids=" ".join)
def test_cheapest_first_evicts_what_is_cheapest_to_load_again(order: Any) -> None:
    bench = CoreBench(slots=1, max_cpu_loras=3, policy="cheapest-first")
    for name, state in zip("abc", order, strict=True):
        bench.request(PREPARED[state], name)
    by_state = dict(zip(order, "abc", strict=True))
    # The ones in page-locked memory are next, and the slot is last.
    for gone, new in zip(("cpu-cached", "pinned"), "de", strict=True):
        bench.request(rq.StageAdapter, new)
        assert bench.state(by_state[gone]) == "evicted"
    bench.request(rq.StageAdapter, by_state["cpu-cached"])
    assert [bench.state(name) for name in "de"] == ["evicted", "pinned"]
    assert bench.in_slots() == {by_state["gpu-slot"]}


def test_pages_that_were_loaded_last_are_kept_before_slots_that_nobody_used_for_a_day() -> None:
    bench = CoreBench(slots=2, max_cpu_loras=4)
    bench.activate("a", "b")
    bench.advance(86_400_000)
    for name in ("c", "d", "e"):
        bench.request(rq.LoadAdapter, name)
    assert [bench.state(name) for name in "abcde"] == [
        *("evicted", "gpu-slot"),
        *("cpu-cached",) * 3,
    ]


def test_page_locked_memory_loses_the_least_recently_used_adapter_of_any_state() -> None:
    bench = CoreBench(slots=1, pinned_bytes_max=20)
    bench.activate("a")
    bench.request(rq.StageAdapter, "b")
    bench.request(rq.StageAdapter, "c")
    assert [bench.state(name) for name in "abc"] == ["cpu-cached", "pinned", "pinned"]


def test_leaving_a_slot_is_no_use() -> None:
    bench = CoreBench(slots=1, max_cpu_loras=3)
    bench.activate("a")
    bench.request(rq.StageAdapter, "b")
    # It displaces `a` from its slot, later than `b` was used.
    bench.activate("c")
    bench.request(rq.LoadAdapter, "d")
    assert [bench.state(name) for name in "abc"] == ["evicted", "pinned", "gpu-slot"]


def test_the_end_of_a_request_is_a_use() -> None:
    bench = CoreBench(slots=2, max_cpu_loras=2)
    bench.activate("a")
    running = bench.generate("a")
    bench.activate("b")
    bench.end_generation(running)
    bench.request(rq.LoadAdapter, "c")
    assert [bench.state(name) for name in "ab"] == ["gpu-slot", "evicted"]


def test_another_engine_loads_in_another_order_and_the_order_of_use_stays() -> None:
    bench = CoreBench(slots=1, max_cpu_loras=3)
    for name in "abc":
        bench.request(rq.StageAdapter, name)
    bench.lose_engine()
    bench.start_engine()
    bench.settle()
    assert {bench.state(name) for name in "abc"} == {"pinned"}
    for gone, new in zip("abc", "dea", strict=True):
        bench.request(rq.StageAdapter, new)
        assert bench.state(gone) == "evicted"


USES = st.lists(st.tuples(st.sampled_from([*PREPARED, "generate"]), st.sampled_from("abcde")))


@given(uses=USES)
def test_host_and_slots_have_the_most_recently_used_adapters(uses: list[tuple[str, str]]) -> None:
    """Both tiers are compared with plain LRU caches of the requests."""
    bench = CoreBench(slots=SLOTS_MAX, max_cpu_loras=HOST_MAX)
    host, slots = OrderedDict[str, None](), OrderedDict[str, None]()
    for use, name in uses:
        if use == "generate" and name in host:
            bench.end_generation(bench.generate(name))
        else:
            bench.request(PREPARED.get(use, rq.ActivateAdapter), name)
        for cache in (host, slots):
            if cache is host or name in slots or use in ("gpu-slot", "generate"):
                cache[name] = None
                cache.move_to_end(name)
        if len(host) > HOST_MAX:
            slots.pop(host.popitem(last=False)[0], None)
        if len(slots) > SLOTS_MAX:
            slots.popitem(last=False)
        resident = {a.name for a in bench.world.adapters.values() if a.on_host}
        assert (resident, bench.in_slots()) == (set(host), set(slots))


@pytest.mark.parametrize(
    ("policy", "evicted"),
    [("lru", "b"), ("fifo", "a"), ("sieve", "b"), ("gdsf", "b"), ("adaptive", "b")],
)
def test_a_policy_chooses_among_idle_adapters(policy: str, evicted: str) -> None:
    bench = CoreBench(slots=3, policy=policy)
    bench.activate("a", "b", "c", "a", "a")
    running = bench.generate("c")
    bench.activate("d")
    assert bench.in_slots() == {"a", "b", "c", "d"} - {evicted}
    bench.end_generation(running)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_held_and_leased_adapters_are_no_victims(policy: str) -> None:
    bench = CoreBench(slots=3, policy=policy)
    bench.activate("a", "b")
    bench.request(rq.HoldAdapter, "a")
    bench.generate("b")
    for name in "cdede":
        bench.request(rq.ActivateAdapter, name)
    assert {"a", "b"} < bench.in_slots()


@pytest.mark.parametrize("policy", sorted(FAILING_POLICIES))
def test_lru_replaces_a_policy_that_fails_and_nothing_is_lost(policy: str) -> None:
    bench = CoreBench(slots=2, policy=policy)
    published = bench.record_events()
    bench.activate("a", "b")
    bench.request(rq.HoldAdapter, "a")
    bench.activate("c")
    assert bench.in_slots() == {"a", "c"}
    failed = [event for event in published if isinstance(event, events.PolicyFailed)]
    assert [event.policy for event in failed] == [policy]
    assert bench.world.policy_failure == failed[0].reason
    assert views.show_status(bench.controller, rq.ShowStatus("r")).policy == "lru"
    bench.restart_controller()
    assert bench.world.policy_failure == failed[0].reason


def test_another_policy_ranks_what_is_there_already() -> None:
    bench = CoreBench(slots=2, policy="raises")
    bench.activate("a", "b", "a", "c")
    controller = bench.controller
    controller.reconfigure(bench.limits, "sieve")
    assert controller.world.policy_failure == ""
    assert [len(list(ranking)) for ranking in controller.world.rankings.values()] == [3, 3, 2]
    controller.reconfigure(bench.limits, "lru")
    assert not controller.world.rankings


def test_the_cost_of_a_return_is_the_mean_of_what_it_took() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    a, b = (bench.adapter(name) for name in "ab")
    for adapter, loads_ns in ((a, 60), (b, 20)):
        counters = adapter.counters
        counters.load_ns, counters.stage_ns, counters.write_ns = loads_ns, 0, 5
    assert bench.world.return_costs_ns(a) == {"host": 66, "pinned": 6, "device": 6}
    totals = bench.world.totals
    totals.load_ns, totals.stage_ns, totals.write_ns = 80, 0, 10
    assert bench.world.return_costs_ns(Adapter(9, "x", "x"))["host"] == 1 + 40 + 5


@pytest.mark.parametrize("policy", ["fifo", "sieve", "gdsf", "adaptive"])
def test_a_choice_among_many_adapters_looks_at_few(policy: str) -> None:
    """Where LRU looks at one candidate, no ranking looks at more than a few on average."""
    ranking = cast("type[Ranking]", POLICIES[policy])()
    for adapter_id in range(1, 10_001):
        ranking.enter(adapter_id, 10, 5)
    asked = 0

    def accepts(_adapter_id: int) -> bool:
        nonlocal asked
        asked += 1
        return True

    for adapter_id in range(10_001, 11_001):
        ranking.use(adapter_id, 10, 5)
        victim = ranking.choose(accepts)
        assert victim is not None
        ranking.leave(victim)
        ranking.enter(adapter_id, 10, 5)
    assert asked <= 2_000


def test_each_policy_has_a_name() -> None:
    names = ["adaptive", "cheapest-first", "fifo", "gdsf", "lru", "none", "sieve"]
    assert sorted(POLICIES) == names
