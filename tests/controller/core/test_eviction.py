"""The least recently used adapter leaves a tier, wherever it is; and the other policies."""

from collections import OrderedDict
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.limits import RULES_READ
from loradock.messages import requests as rq
from tests.support.simulation.core_bench import CoreBench

PREPARED: dict[str, type] = {
    "cpu-cached": rq.LoadAdapter,
    "pinned": rq.StageAdapter,
    "gpu-slot": rq.ActivateAdapter,
}
"""The request that leaves an adapter in each state."""

HOST_MAX, SLOTS_MAX = 3, 2


class PolicyBench(CoreBench):
    """A deployment under another policy, or under former rules."""

    policy, rules = "lru", RULES_READ[-1]

    def start_controller(self) -> None:
        for name in ("controller", "shadow"):
            checked = name == "controller"
            made = Controller(self.limits, self.policy, rules=self.rules, checked=checked)
            setattr(self, name, made)
        self.oracle.world = self.controller.world
        super().start_controller()


class CheapestFirst(PolicyBench):
    policy = "cheapest-first"


class FormerRules(PolicyBench):
    rules = 2


@pytest.mark.parametrize("order", list(permutations(PREPARED)), ids=" ".join)
def test_the_host_loses_the_least_recently_used_adapter_of_any_state(order: Any) -> None:
    bench = CoreBench(slots=1, max_cpu_loras=3)
    for name, state in zip("abc", order, strict=True):
        bench.request(PREPARED[state], name)
    assert [bench.state(name) for name in "abc"] == list(order)
    bench.request(rq.LoadAdapter, "d")
    assert [bench.state(name) for name in "abc"] == ["evicted", *order[1:]]


@pytest.mark.parametrize("kind", [CheapestFirst, FormerRules])
@pytest.mark.parametrize("order", list(permutations(PREPARED)), ids=" ".join)
def test_another_policy_evicts_what_is_cheapest_to_load_again(
    order: Any, kind: type[CoreBench]
) -> None:
    bench = kind(slots=1, max_cpu_loras=3)
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


def test_each_policy_has_a_name() -> None:
    assert sorted(POLICIES) == ["cheapest-first", "lru", "none"]
