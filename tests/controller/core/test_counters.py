"""Counters per adapter: what is counted, for which adapter, and that nothing is lost with it.

`loradock.controller.core.invariants` compares the sums with the tiers and slots after every input.
"""

from typing import Any

import pytest

from loradock.controller.core.counters import TIME_IN
from loradock.controller.core.invariants import InvariantError, check
from loradock.controller.core.views import show_adapter, show_status
from loradock.messages import records, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import (
    ActivateAdapter,
    EvictAdapter,
    LoadAdapter,
    RemoveAdapter,
    StageAdapter,
)
from loradock.messages.views import AdapterCounters
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.engine_records import Content

SECOND_NS = 1_000_000_000


def counters(bench: CoreBench, name: str) -> Any:
    return bench.adapter(name).counters


def named(counters: Any, *names: str) -> tuple[int, ...]:
    return tuple(getattr(counters, name) for name in names)


def test_the_core_and_the_messages_have_the_same_counters() -> None:
    bench = CoreBench()
    assert AdapterCounters.__struct_fields__ == type(bench.world.totals).__struct_fields__


def test_each_move_and_each_use_is_counted_once() -> None:
    bench = CoreBench(slots=1)
    tiers = ("loads", "unloads", "stagings", "unstagings", "activations", "deactivations")
    bench.request(LoadAdapter, "a")
    assert named(counters(bench, "a"), *tiers) == (1, 0, 0, 0, 0, 0)
    bench.activate("a", "a", "b", "a")
    assert named(counters(bench, "a"), "hits", "misses", "checks") == (1, 2, 1), "a load is no use"
    assert named(counters(bench, "a"), *tiers) == (1, 0, 1, 0, 2, 1)
    assert named(counters(bench, "b"), *tiers) == (1, 0, 1, 0, 1, 1)
    assert named(counters(bench, "a"), "evictions", "evictions_caused") == (1, 1)
    assert named(counters(bench, "b"), "evictions", "evictions_caused") == (1, 1)
    bench.request(EvictAdapter, "a")
    assert named(counters(bench, "a"), *tiers) == (1, 1, 1, 1, 2, 2)
    assert counters(bench, "a").evictions == 1, "a client's own request is no eviction by policy"
    bench.lose_engine()
    assert named(counters(bench, "b"), *tiers) == (1, 1, 1, 1, 1, 1)


def test_the_time_of_each_state_is_that_between_transitions() -> None:
    bench = CoreBench()
    began = bench.now + 1
    for kind in (LoadAdapter, StageAdapter, ActivateAdapter, EvictAdapter):
        bench.request(kind, "a")
        bench.now += SECOND_NS
    found = {s: getattr(counters(bench, "a"), name) // SECOND_NS for s, name in TIME_IN.items()}
    resident = dict.fromkeys(("cpu-cached", "pinned", "gpu-slot"), 1)
    # That of the present state is not counted yet.
    assert found == {"unregistered": 0, "evicted": 0, **resident}
    bench.request(RemoveAdapter, "a")
    past = bench.world.past_counters
    assert sum(named(past, *TIME_IN.values())) == bench.world.time_ns - began


def test_the_engines_time_and_the_requests_wait_are_counted() -> None:
    bench = CoreBench()
    request = bench.send(ActivateAdapter, "a")
    fields = ("check_ns", "load_ns", "stage_ns", "write_ns")
    for number in range(4):
        bench.transmit(10)
        bench.now += (number + 1) * SECOND_NS
        bench.finish("a")
    assert bench.reply(request).state == "gpu-slot"
    seconds = [value // SECOND_NS for value in named(counters(bench, "a"), *fields)]
    assert seconds == [1, 2, 3, 4]
    assert counters(bench, "a").wait_ns // SECOND_NS == 10
    bench.generate("a")
    assert counters(bench, "a").wait_ns // SECOND_NS == 10, "a hit waits for nothing"


@pytest.mark.parametrize("fails", [False, True])
def test_events_say_how_long_a_use_waited_and_how_long_a_request_took(fails: bool) -> None:
    bench = CoreBench(slots=1)
    bench.request(ActivateAdapter, "a")
    bench.request(StageAdapter, "b")
    running = bench.generate("a")
    published = bench.record_events()
    waiting = bench.generate("b")
    # A load is no use.
    bench.request(LoadAdapter, "b")
    bench.now += 3 * SECOND_NS
    bench.end_generation(running)
    bench.settle()
    bench.now += 2 * SECOND_NS
    bench.end_generation(waiting, ErrorCode.NOT_SERVED if fails else None)
    found = [(type(event).__name__, event.adapter) for event in published]
    seconds = [
        getattr(event, name, -SECOND_NS) // SECOND_NS
        for event, name in zip(
            published, ("duration_ns", "", "wait_ns", "duration_ns"), strict=True
        )
    ]
    assert found == [
        ("GenerationFinished", "a"),
        ("AdapterDeactivated", "a"),
        ("AdapterActivated", "b"),
        ("GenerationFinished", "b"),
    ]
    assert seconds == [3, -1, 3, 5]


def test_a_wait_for_room_is_counted_for_the_adapter_that_waits_and_the_one_that_leaves() -> None:
    bench = CoreBench(slots=1)
    bench.request(StageAdapter, "b")
    bench.activate("a")
    running = bench.generate("a")
    bench.send(ActivateAdapter, "b")
    bench.settle()
    bench.now += 5 * SECOND_NS
    bench.end_generation(running)
    assert bench.in_slots() == {"b"}
    assert counters(bench, "b").stalls == 1
    suffered, caused = counters(bench, "b").stall_ns, counters(bench, "a").stall_caused_ns
    assert suffered == caused
    assert suffered // SECOND_NS == 5


def test_a_wait_that_no_departure_ends_is_counted_for_no_adapter() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    bench.generate("a")
    bench.request(StageAdapter, "b")
    bench.send(ActivateAdapter, "b", timeout_ms=1000)
    bench.settle()
    bench.advance(2000)
    assert counters(bench, "b").stall_ns > 0
    assert counters(bench, "a").stall_caused_ns == 0
    assert bench.world.past_counters.stall_caused_ns == counters(bench, "b").stall_ns


def test_tokens_are_counted_for_the_adapter_or_the_base_model() -> None:
    bench = CoreBench()
    bench.activate("a")
    for name in ("a", None, "a"):
        bench.end_generation(bench.generate(name))
    bench.end_generation(bench.pool("a"))
    base = bench.world.base_counters
    assert named(counters(bench, "a"), "served") == (3,)
    assert base.served == 1
    assert base.prompt_tokens > 0
    assert counters(bench, "a").prompt_tokens == 2 * base.prompt_tokens + 7
    assert counters(bench, "a").output_tokens == 2 * base.output_tokens


def test_the_counters_of_a_name_pass_to_its_next_version_and_then_to_the_removed_ones() -> None:
    bench = CoreBench()
    bench.activate("a")
    running = bench.generate("a")
    bench.files["other"] = Content("other content", 10, 10)
    bench.request(LoadAdapter, "a", "other", True)
    assert named(counters(bench, "a"), "loads", "unloads") == (2, 0)
    assert counters(bench, "a").uses == 2
    bench.end_generation(running)
    assert named(counters(bench, "a"), "loads", "unloads", "served") == (2, 1, 1)
    bench.request(RemoveAdapter, "a")
    assert named(bench.world.past_counters, "loads", "unloads", "served") == (2, 2, 1)
    assert bench.world.totals.uses == 2


@pytest.mark.parametrize("kind", [LoadAdapter, StageAdapter, requests.HoldAdapter])
def test_a_request_that_only_prepares_an_adapter_is_neither_hit_nor_miss(kind: type) -> None:
    bench = CoreBench()
    request = bench.send(kind, "a")
    bench.now += SECOND_NS
    bench.settle()
    assert bench.reply(request).adapter == "a"
    assert named(counters(bench, "a"), "hits", "misses", "wait_ns") == (0, 0, 0)
    bench.request(kind, "a")
    assert named(counters(bench, "a"), "hits", "misses", "wait_ns") == (0, 0, 0)
    bench.generate("a")
    assert counters(bench, "a").uses == 1


def test_a_lost_prompt_is_no_use() -> None:
    bench = CoreBench()
    bench.activate("a")
    bench.send(records.GenerationRequested, "a")
    assert named(counters(bench, "a"), "hits", "misses") == (1, 1)
    bench.restart_controller()
    bench.settle()
    assert named(counters(bench, "a"), "hits", "misses") == (0, 1)


def test_views_have_the_counters_with_the_time_in_the_present_state() -> None:
    bench = CoreBench()
    bench.activate("a")
    bench.now += SECOND_NS
    bench.request(requests.ActivateAdapter, "b")
    shown = show_adapter(bench.world, requests.ShowAdapter("q", "a")).adapter.counters
    assert shown.gpu_slot_ns == bench.world.time_ns - bench.adapter("a").state_since_ns
    assert shown.gpu_slot_ns > SECOND_NS
    status = show_status(bench.controller, requests.ShowStatus("q"))
    assert named(status.counters, "activations", "misses") == (2, 2)


@pytest.mark.parametrize("field", ["loads", "stagings", "activations", "hits", "stall_caused_ns"])
def test_counters_that_disagree_are_found(field: str) -> None:
    bench = CoreBench()
    bench.activate("a")
    changed = [bench.adapter("a").counters]
    if field != "hits":
        changed.append(bench.world.totals)
    for counters in changed:
        setattr(counters, field, getattr(counters, field) + 1)
    bench.world.adapters.mark_changed(bench.adapter("a").id)
    with pytest.raises(InvariantError):
        check(bench.world, bench.limits)


def test_tokens_that_the_engine_had_computed_before_are_counted() -> None:
    bench = CoreBench()
    bench.activate("a")
    running = bench.generate("a")
    op = bench.world.pending_requests[running].op
    bench.controller.handle(
        reports.GenerationEnded(op, "stop", 5, 2, prefix_tokens=4), bench.now + 1
    )
    for counters in (bench.adapter("a").counters, bench.world.totals):
        assert (counters.prefix_hits, counters.prefix_tokens) == (1, 4)
