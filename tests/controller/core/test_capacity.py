"""Budgets, victims and fairness: which adapter enters, which leaves for it, in which order."""

from typing import Any

import pytest

from loradock.controller.core.limits import Limits, LimitsError, check_limits
from loradock.messages import commands, records, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import (
    ActivateAdapter,
    ActivateBatch,
    AdapterDone,
    HoldAdapter,
    LoadAdapter,
    ReleaseAdapter,
    StageAdapter,
)
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.engine_records import Content


def test_slots_bind_before_bytes() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b", "c")
    assert bench.in_slots() == {"b", "c"}
    assert bench.state("a") == "pinned"


def test_device_bytes_bind_before_slots() -> None:
    bench = CoreBench(slots=5, device_bytes_max=25)
    bench.activate("a", "b", "c")
    assert bench.in_slots() == {"b", "c"}
    assert bench.state("a") == "pinned"


def test_an_engine_with_less_than_the_limits_binds() -> None:
    bench = CoreBench(slots=3)
    bench.lose_engine()
    engine = bench.start_engine()
    engine.max_loras, engine.device_bytes_max = 2, 10_000
    bench.settle()
    bench.activate("a", "b", "c")
    assert bench.in_slots() == {"b", "c"}
    parts = ("3 slots", "2 slots")
    bench.refused(ErrorCode.NO_ROOM, parts, ActivateBatch, ("a", "b", "c"))


def test_host_places_bind_before_bytes() -> None:
    bench = CoreBench(slots=1, max_cpu_loras=2)
    for name in ("a", "b", "c"):
        bench.request(LoadAdapter, name)
    assert [bench.state(name) for name in ("a", "b", "c")] == [
        "evicted",
        "cpu-cached",
        "cpu-cached",
    ]


def test_host_bytes_bind_before_places() -> None:
    bench = CoreBench(slots=1, host_bytes_max=25)
    for name in ("a", "b", "c"):
        bench.request(LoadAdapter, name)
    assert [bench.state(name) for name in ("a", "b", "c")] == [
        "evicted",
        "cpu-cached",
        "cpu-cached",
    ]


def test_pinned_bytes_bind_and_the_victim_stays_on_the_host_where_it_can() -> None:
    bench = CoreBench(slots=1, pinned_bytes_max=25)
    for name in ("a", "b", "c"):
        bench.request(StageAdapter, name)
    assert [bench.state(name) for name in ("a", "b", "c")] == ["cpu-cached", "pinned", "pinned"]


def test_a_victim_of_pinned_room_is_dropped_without_pageable_room() -> None:
    bench = CoreBench(slots=1, pinned_bytes_max=25, host_bytes_max=10)
    for name in ("a", "b", "c"):
        bench.request(StageAdapter, name)
    # While c was in pageable memory, a did not fit there.
    assert [bench.state(name) for name in ("a", "b", "c")] == ["evicted", "pinned", "pinned"]


def test_an_unstaging_that_fails_frees_what_it_reserved() -> None:
    bench = CoreBench(slots=1, pinned_bytes_max=25)
    for name in ("a", "b"):
        bench.request(StageAdapter, name)
    bench.send(StageAdapter, "c")
    # Its check and its load.
    bench.finish("c")
    bench.finish("c")
    assert bench.world.tiers["host"].size_bytes == 20
    bench.fail("UnstageWeights", ErrorCode.DOES_NOT_FIT)
    assert bench.world.tiers["host"].size_bytes == 20
    assert (bench.adapter("a").host_bytes, bench.adapter("b").host_bytes) == (0, 10)
    bench.settle()
    assert [bench.state(name) for name in ("a", "b", "c")] == ["pinned", "cpu-cached", "pinned"]


def test_an_adapter_larger_than_a_budget_is_refused_with_numbers_and_evicts_none() -> None:
    for tier in ("host", "pinned", "device"):
        bench = CoreBench(slots=2, **{f"{tier}_bytes_max": 25})
        bench.activate("a", "b")
        bench.files["c"] = Content("content of c", 30, 30)
        reply = bench.request(ActivateAdapter, "c")
        assert reply.code is ErrorCode.NO_ROOM
        for part in ("'c'", "30 bytes", f"of {tier} memory", "25", f"{tier}_bytes_max"):
            assert part in reply.message
        assert bench.in_slots() == {"a", "b"}
        assert "c" not in bench.world.names


def loads_of(bench: CoreBench) -> list[Any]:
    """Return the commands that load weights, from now on."""
    sent: list[Any] = []
    on_command = bench.oracle.on_command

    def record(command: Any) -> None:
        if isinstance(command, commands.LoadWeights):
            sent.append(command)
        on_command(command)

    bench.oracle.on_command = record  # type: ignore[method-assign]
    return sent


def test_a_request_that_can_not_be_granted_loads_nothing() -> None:
    bench = CoreBench(slots=1)
    bench.request(requests.HoldAdapter, "a")
    loads, before = loads_of(bench), bench.snapshot()["tiers"]
    assert bench.request(ActivateAdapter, "b").code is ErrorCode.NO_ROOM
    assert loads == []
    assert bench.snapshot()["tiers"] == before
    # A load can be granted, and then the activation's refusal leaves it as it was.
    assert bench.request(requests.LoadAdapter, "b").state == "cpu-cached"
    assert bench.request(ActivateAdapter, "b").code is ErrorCode.NO_ROOM
    assert bench.state("b") == "cpu-cached"


@pytest.mark.parametrize(
    ("granted", "left"),
    [(None, None), (requests.LoadAdapter, "cpu-cached"), (requests.StageAdapter, "pinned")],
)
def test_a_late_refusal_undoes_what_was_loaded_for_its_request_alone(
    granted: type | None, left: str | None
) -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    running = bench.generate("a")
    if granted is not None:
        bench.request(granted, "b")
    before = bench.snapshot()["tiers"]
    waiting = bench.send(ActivateAdapter, "b", timeout_ms=50)
    bench.settle()
    assert bench.state("b") == "pinned"
    bench.advance(51)
    bench.settle()
    assert bench.reply(waiting).code is ErrorCode.NO_ROOM
    assert left == (bench.state("b") if "b" in bench.world.names else None)
    assert bench.snapshot()["tiers"] == before
    bench.end_generation(running)


def test_a_refusal_leaves_what_another_request_was_granted_meanwhile() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    bench.generate("a")
    waiting = bench.send(ActivateAdapter, "b", timeout_ms=50)
    assert bench.request(requests.LoadAdapter, "b").state in ("cpu-cached", "pinned")
    bench.advance(51)
    bench.settle()
    assert bench.reply(waiting).code is ErrorCode.NO_ROOM
    assert bench.state("b") == "cpu-cached"


def test_every_tier_counts_its_adapters() -> None:
    bench = CoreBench(slots=2)

    def counts() -> tuple[int, ...]:
        return tuple(bench.world.tiers[tier].count for tier in ("host", "pinned", "device"))

    bench.request(requests.LoadAdapter, "a")
    assert counts() == (1, 0, 0)
    bench.request(requests.StageAdapter, "a")
    assert counts() == (1, 1, 0)
    bench.activate("b", "c")
    assert counts() == (3, 3, 2)
    bench.request(requests.EvictAdapter, "b")
    assert counts() == (2, 2, 1)
    bench.lose_engine()
    assert counts() == (0, 0, 0)


def test_an_invalid_adapter_evicts_none() -> None:
    bench = CoreBench(slots=2, max_cpu_loras=2)
    bench.activate("a", "b")
    parts = ("adapters", "slots", "tiers", "order", "names")
    before = {part: bench.snapshot()[part] for part in parts}
    for code in (ErrorCode.NOT_FOUND, ErrorCode.DOES_NOT_FIT, ErrorCode.NOT_FINITE):
        request = bench.send(ActivateAdapter, "c")
        bench.fail("CheckAdapter", code)
        bench.settle()
        assert bench.reply(request).code is code
        assert {part: bench.snapshot()[part] for part in parts} == before


def test_a_failed_operation_leaves_every_other_adapter_and_this_one_where_they_were() -> None:
    steps = {"LoadWeights": "evicted", "StageWeights": "cpu-cached", "WriteSlot": "pinned"}
    for kind, state in steps.items():
        bench = CoreBench(slots=2)
        bench.activate("a", "b")
        bench.request(requests.EvictAdapter, "b")
        request = bench.send(ActivateAdapter, "b")
        while not any(type(c).__name__ == kind for c in bench.channel):
            bench.transmit(10)
            bench.complete(0)
            bench.deliver(10)
        used = {tier: (t.count, t.size_bytes) for tier, t in bench.world.tiers.items()}
        bench.fail(kind, ErrorCode.DEVICE_OUT_OF_MEMORY)
        assert bench.reply(request).code is ErrorCode.DEVICE_OUT_OF_MEMORY
        assert (bench.state("a"), bench.state("b")) == ("gpu-slot", state)
        assert bench.adapter("b").counters.failures == 1
        assert used != {tier: (t.count, t.size_bytes) for tier, t in bench.world.tiers.items()}
        assert bench.request(ActivateAdapter, "b").state == "gpu-slot"


def test_the_least_recently_used_leaves_first_and_a_hit_counts_as_use() -> None:
    bench = CoreBench(slots=3)
    bench.activate("a", "b", "c")
    bench.activate("a")
    bench.activate("d")
    assert bench.in_slots() == {"a", "c", "d"}
    bench.activate("e")
    assert bench.in_slots() == {"a", "d", "e"}
    assert bench.adapter("b").counters.evictions == 1
    assert (bench.adapter("a").counters.uses, bench.adapter("a").counters.hits) == (2, 1)


def test_a_held_adapter_is_no_victim_until_its_release() -> None:
    bench = CoreBench(slots=2)
    bench.request(HoldAdapter, "a")
    bench.activate("b", "c", "d")
    assert bench.in_slots() == {"a", "d"}
    bench.request(ReleaseAdapter, "a")
    bench.activate("e")
    assert bench.in_slots() == {"d", "e"}


def test_an_idle_victim_is_preferred_to_a_leased_one() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    bench.generate("a")
    bench.activate("c")
    assert bench.in_slots() == {"a", "c"}


def test_a_leased_adapter_stays_until_its_last_request_ends() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    first, second = bench.generate("a"), bench.generate("a")
    request = bench.send(ActivateAdapter, "b")
    bench.settle()
    bench.end_generation(first)
    assert bench.in_slots() == {"a"}
    assert bench.reply(request) is None
    bench.end_generation(second)
    assert bench.in_slots() == {"b"}
    assert isinstance(bench.reply(request), AdapterDone)


def test_permanent_traffic_on_one_adapter_does_not_block_others() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    running = bench.generate("a")
    other = bench.send(ActivateAdapter, "b")
    bench.settle()
    # The traffic continues, but from now on it waits.
    later = bench.generate("a")
    assert bench.world.pending_requests[later].op == 0
    bench.end_generation(running)
    assert bench.reply(other).state == "gpu-slot"
    # It is served after the other one.
    assert bench.world.pending_requests[later].op
    assert bench.in_slots() == {"a"}


def test_the_oldest_request_enters_first() -> None:
    bench = CoreBench(slots=1)
    for name in ("a", "b", "c", "d"):
        bench.request(LoadAdapter, name)
    bench.activate("a")
    running = bench.generate("a")
    order = [bench.send(ActivateAdapter, name) for name in ("d", "b", "c")]
    bench.settle()
    assert [bench.adapter(n).id for n in ("d", "b", "c")] == [
        adapter_id for _, adapter_id in bench.world.queues.by_tier["device"]
    ]
    done: list[str] = []
    on_reply = bench.oracle.on_reply
    bench.oracle.on_reply = lambda reply: (done.append(reply.request_id), on_reply(reply))  # type: ignore[method-assign]
    bench.end_generation(running)
    assert done == [running, *order]


def test_a_small_adapter_does_not_overtake_a_large_one_in_the_queue() -> None:
    bench = CoreBench(slots=3, device_bytes_max=40)
    bench.files["c"] = Content("content of c", 30, 30)
    for name in ("a", "b", "c", "d"):
        bench.request(StageAdapter, name)
    bench.activate("a", "b")
    running = [bench.generate("a"), bench.generate("b")]
    large = bench.send(ActivateAdapter, "c")
    small = bench.send(ActivateAdapter, "d")
    bench.settle()
    assert bench.reply(large) is bench.reply(small) is None
    bench.end_generation(running[0])
    assert bench.reply(large).state == "gpu-slot"
    assert bench.reply(small) is None
    bench.end_generation(running[1])
    assert bench.reply(small).state == "gpu-slot"


def test_a_batch_and_a_single_request_that_need_each_others_room_are_both_served() -> None:
    """The single request is older, and its adapter does not fit next to the batch's first one.

    The batch's second adapter queues after it, and the first one waits for the second.
    """
    bench = CoreBench(slots=2, device_bytes_max=100)
    for name, size in (("a", 50), ("b", 50), ("c", 60)):
        bench.files[name] = Content(f"content of {name}", 10, size)
    bench.request(LoadAdapter, "b")
    bench.activate("a")
    single = bench.send(ActivateAdapter, "c")
    batch = bench.send(ActivateBatch, ("a", "b"))
    while bench.state("c") != "pinned":
        bench.finish("c")
    assert bench.world.queues.by_tier["device"]
    bench.settle()
    assert bench.reply(single).state == "gpu-slot"
    assert isinstance(bench.reply(batch), requests.BatchDone)
    assert bench.adapter("a").counters.evictions == 1


def test_batches_that_overlap_are_served_one_after_the_other() -> None:
    bench = CoreBench(slots=2)
    for name in ("a", "b", "c"):
        bench.request(LoadAdapter, name)
    batches = [bench.send(ActivateBatch, pair) for pair in (("a", "b"), ("b", "c"), ("c", "a"))]
    bench.settle()
    for batch in batches:
        assert isinstance(bench.reply(batch), requests.BatchDone)


def test_a_batch_whose_adapters_are_in_slots_does_not_wait_for_the_current_one() -> None:
    bench = CoreBench(slots=2)
    for name in ("a", "b", "c", "d"):
        bench.request(LoadAdapter, name)
    bench.activate("a", "b")
    running = bench.generate("a")
    slow = bench.send(ActivateBatch, ("b", "c"))
    bench.settle()
    quick = bench.request(ActivateBatch, ("b",))
    assert isinstance(quick, requests.BatchDone)
    assert bench.reply(slow) is None
    bench.end_generation(running)
    assert isinstance(bench.reply(slow), requests.BatchDone)


def test_many_waiters_of_one_adapter_are_served_by_one_step() -> None:
    bench = CoreBench()
    several = [bench.send(records.GenerationRequested, "a") for _ in range(3)]
    assert all(bench.reply(request).code is ErrorCode.UNKNOWN_ADAPTER for request in several)
    waiting = [bench.send(ActivateAdapter, "a")]
    waiting += [bench.send(kind, "a") for kind in (LoadAdapter, StageAdapter, HoldAdapter)]
    bench.settle()
    assert all(isinstance(bench.reply(request), AdapterDone) for request in waiting)
    assert bench.adapter("a").counters.loads == 1


def test_limits_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(LimitsError, match="at least max-loras, which is 3, got 2"):
        check_limits(Limits(max_loras=3, max_cpu_loras=2))


def test_a_held_adapter_that_backs_off_keeps_its_room_and_others_are_refused() -> None:
    bench = CoreBench(slots=2, host_bytes_max=80, pinned_bytes_max=80)
    bench.files["a"] = Content("content of a", 30, 60)
    bench.files["large"] = Content("content of large", 50, 40)
    bench.files["c"] = Content("content of c", 60, 60)
    bench.request(HoldAdapter, "a")
    bench.request(HoldAdapter, "b")
    bench.request(LoadAdapter, "b", "large", True)
    # It is held, but its new version does not fit next to the other adapter.
    assert (bench.state("b"), bench.adapter("b").backing_off) == ("cpu-cached", True)
    reply = bench.request(LoadAdapter, "c")
    assert reply.code is ErrorCode.NO_ROOM
    assert "60 bytes of host memory; held adapters keep 2 places and 50 bytes" in reply.message


def test_a_held_adapter_that_is_released_in_its_queue_gives_up_its_place() -> None:
    bench = CoreBench(slots=1, max_cpu_loras=2)
    for name in ("c", "d"):
        bench.request(requests.LoadAdapter, name)
    bench.request(requests.HoldAdapter, "a")
    bench.lose_engine()
    wanted = [bench.send(requests.LoadAdapter, name) for name in ("c", "d")]
    bench.start_engine()
    bench.transmit(len(bench.channel))
    bench.deliver(100)
    assert bench.adapter("a").id in bench.world.queues.members
    bench.request(requests.ReleaseAdapter, "a")
    assert all(isinstance(bench.reply(one), requests.AdapterDone) for one in wanted)
    assert bench.adapter("a").id not in bench.world.queues.members


def test_a_record_that_no_request_was_granted_is_removed_with_its_last_wait() -> None:
    bench = CoreBench(slots=1, max_cpu_loras=1)
    bench.request(requests.LoadAdapter, "b")
    bench.send(requests.ActivateAdapter, "a")
    while bench.state("a") != "cpu-cached":
        bench.transmit(len(bench.channel))
        bench.complete_moves()
        bench.deliver(1)
    bench.lose_engine()
    assert (bench.state("a"), bench.adapter("a").kept) == ("evicted", "unregistered")
    bench.send(requests.LoadAdapter, "b")
    waiting = bench.send(requests.LoadAdapter, "a", timeout_ms=5)
    bench.start_engine()
    bench.transmit(len(bench.channel))
    bench.deliver(100)
    assert bench.adapter("a").id in bench.world.queues.members
    bench.advance(5)
    assert bench.reply(waiting).code is ErrorCode.NO_ROOM
    assert "a" not in bench.world.names


def test_weights_that_no_longer_fit_into_pageable_memory_are_dropped() -> None:
    bench = CoreBench(slots=1, pinned_bytes_max=10, host_bytes_max=20)
    bench.activate("a")
    running = bench.generate("a")
    bench.request(requests.LoadAdapter, "b")
    staged = bench.send(requests.StageAdapter, "b")
    bench.settle()
    assert bench.adapter("a").goal == "cpu-cached"
    bench.request(requests.LoadAdapter, "c")
    bench.end_generation(running)
    assert isinstance(bench.reply(staged), requests.AdapterDone)
    assert (bench.state("a"), bench.state("b")) == ("evicted", "pinned")


def test_a_batch_that_waits_for_others_is_refused_with_its_adapters_record() -> None:
    bench = CoreBench()
    bench.send(requests.LoadAdapter, "a")
    load = bench.send(requests.LoadAdapter, "b", timeout_ms=5)
    first = bench.send(requests.ActivateBatch, ("a",))
    second = bench.send(requests.ActivateBatch, ("b",))
    bench.advance(5)
    assert bench.reply(load).code is ErrorCode.ENGINE_GONE
    bench.finish("b")
    assert "b" not in bench.world.names
    assert bench.reply(second).code is ErrorCode.UNKNOWN_ADAPTER
    bench.settle()
    assert isinstance(bench.reply(first), requests.BatchDone)
