"""A prefetch: answered at once, as far as room is free, and at no other adapter's cost."""

import pytest

from loradock.messages import commands, records, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import (
    ActivateAdapter,
    EvictAdapter,
    HoldAdapter,
    LoadAdapter,
    PrefetchAccepted,
    PrefetchAdapter,
    StageAdapter,
)
from tests.support.simulation.core_bench import CoreBench


@pytest.mark.parametrize("target", ["cpu-cached", "pinned", "gpu-slot"])
def test_it_is_answered_before_the_adapter_moves_to_its_target(target: str) -> None:
    bench = CoreBench()
    request = bench.send(PrefetchAdapter, "a", "", target)
    assert bench.reply(request) == PrefetchAccepted(request, "a", "unregistered", target)
    bench.settle()
    assert (bench.state("a"), bench.adapter("a").goal) == (target, target)
    assert bench.adapter("a").counters.prefetches == 1
    assert bench.adapter("a").counters.uses == 0


def test_a_request_that_arrives_meanwhile_finds_the_adapter_on_its_way() -> None:
    bench = CoreBench()
    bench.send(PrefetchAdapter, "a")
    bench.finish("a")
    bench.finish("a")
    request = bench.send(ActivateAdapter, "a")
    bench.settle()
    assert bench.reply(request).state == "gpu-slot"
    assert bench.adapter("a").counters.loads == 1


def test_a_slot_is_taken_only_if_it_is_free() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    bench.request(PrefetchAdapter, "b")
    assert bench.in_slots() == {"a"}
    assert (bench.state("b"), bench.adapter("b").goal) == ("pinned", "pinned")
    assert bench.adapter("a").counters.evictions == 0


def test_on_the_host_the_least_recently_used_idle_adapter_outside_the_slots_makes_room() -> None:
    bench = CoreBench(slots=1, max_cpu_loras=3)
    bench.activate("a")
    bench.request(StageAdapter, "b")
    bench.request(LoadAdapter, "c")
    bench.request(PrefetchAdapter, "d", "", "pinned")
    assert [bench.state(name) for name in "abcd"] == ["gpu-slot", "evicted", "cpu-cached", "pinned"]
    assert bench.adapter("d").counters.evictions_caused == 1


def test_adapters_that_are_held_leased_waited_for_or_in_slots_stay() -> None:
    bench = CoreBench(slots=3, max_cpu_loras=4)
    bench.request(HoldAdapter, "a")
    bench.activate("b", "c")
    running = bench.generate("b")
    waiting = bench.send(ActivateAdapter, "d")
    while bench.state("d") != "cpu-cached":
        bench.finish("d")
    bench.request(PrefetchAdapter, "e")
    assert "e" not in bench.world.names, "an adapter that was never loaded is forgotten"
    assert bench.in_slots() >= {"a", "b"}
    assert bench.reply(waiting).state == "gpu-slot"
    bench.end_generation(running)
    counters = bench.world.totals
    assert (counters.evictions, counters.loads) == (1, 4)


def test_a_request_takes_the_room_before_a_prefetch() -> None:
    bench = CoreBench(slots=1, max_cpu_loras=2, pinned_bytes_max=20)
    bench.activate("a")
    bench.request(LoadAdapter, "b")
    bench.send(PrefetchAdapter, "c", "", "pinned")
    bench.finish("c")
    assert bench.world.queues.by_tier["host"], "it waits until the other adapter has left"
    request = bench.send(ActivateAdapter, "d")
    bench.settle()
    assert bench.reply(request).state == "gpu-slot"


def test_two_prefetches_do_not_undo_each_other() -> None:
    bench = CoreBench(slots=1, max_cpu_loras=1)
    bench.send(PrefetchAdapter, "a", "", "pinned")
    bench.send(PrefetchAdapter, "b", "", "pinned")
    bench.settle()
    assert len({a.name for a in bench.world.adapters.values() if a.state == "pinned"}) == 1
    assert bench.world.totals.evictions <= 1


def test_a_failure_ends_it_where_it_is() -> None:
    bench = CoreBench()
    bench.send(PrefetchAdapter, "a")
    bench.finish("a")
    bench.finish("a")
    bench.fail("StageWeights", ErrorCode.DEVICE_OUT_OF_MEMORY)
    bench.settle()
    assert (bench.state("a"), bench.adapter("a").goal) == ("cpu-cached", "cpu-cached")
    assert bench.world.totals.failures == 1


def test_an_unsound_adapter_is_forgotten() -> None:
    bench = CoreBench()
    bench.send(PrefetchAdapter, "a")
    bench.fail("CheckAdapter", ErrorCode.DOES_NOT_FIT)
    bench.settle()
    assert "a" not in bench.world.names


def test_it_goes_on_with_the_next_engine() -> None:
    bench = CoreBench()
    bench.request(PrefetchAdapter, "a", "", "pinned")
    bench.send(PrefetchAdapter, "b")
    bench.lose_engine()
    bench.start_engine()
    bench.settle()
    assert [bench.state(name) for name in "ab"] == ["pinned", "gpu-slot"]


def test_an_adapter_on_its_way_down_is_left_alone() -> None:
    bench = CoreBench()
    bench.activate("a")
    evicting = bench.send(EvictAdapter, "a")
    request = bench.send(PrefetchAdapter, "a")
    assert bench.reply(request) == PrefetchAccepted(request, "a", "gpu-slot", "evicted")
    bench.settle()
    assert bench.reply(evicting).state == bench.state("a") == "evicted"


def test_another_path_under_a_known_name_is_refused() -> None:
    bench = CoreBench()
    bench.activate("a")
    bench.refused(ErrorCode.CONFLICT, ("'a'", "load the new path"), PrefetchAdapter, "a", "other")
    assert isinstance(bench.request(requests.PrefetchAdapter, "a"), PrefetchAccepted)


def test_adapters_of_queued_requests_are_staged_ahead_in_the_order_of_their_requests() -> None:
    bench = CoreBench(slots=1)
    for name in ("b", "c", "d"):
        bench.request(LoadAdapter, name)
        bench.request(EvictAdapter, name)
    bench.activate("a")
    running = bench.generate("a")
    issued = record_commands(bench)
    waiting = [bench.send(records.GenerationRequested, name) for name in ("c", "d", "b")]
    bench.settle()
    # While the slot is leased: read and staged, so that only a copy is left.
    order = [bench.adapter(name).id for name in ("c", "d", "b")]
    for kind in (commands.LoadWeights, commands.StageWeights):
        assert [c.adapter_id for c in issued if isinstance(c, kind)] == order
    assert {bench.state(name) for name in "bcd"} == {"pinned"}
    for request in (running, *waiting):
        assert bench.world.pending_requests[request].op, "it runs as soon as its slot is written"
        bench.end_generation(request)
    assert [c.adapter_id for c in issued if isinstance(c, commands.WriteSlot)] == order


def test_adapters_of_queued_requests_are_staged_ahead_within_the_budgets() -> None:
    bench = CoreBench(slots=1, pinned_bytes_max=20)
    for name in ("b", "c"):
        bench.request(LoadAdapter, name)
        bench.request(EvictAdapter, name)
    bench.activate("a")
    running = bench.generate("a")
    for name in ("b", "c"):
        bench.send(records.GenerationRequested, name)
    bench.settle()
    assert [bench.state(name) for name in "abc"] == ["gpu-slot", "pinned", "cpu-cached"]
    bench.end_generation(running)
    assert bench.in_slots() == {"b"}


def record_commands(bench: CoreBench) -> list[commands.Command]:
    """Return a list to which every command from now on is appended."""
    recorded: list[commands.Command] = []
    on_command = bench.oracle.on_command

    def record(command: commands.Command) -> None:
        recorded.append(command)
        on_command(command)

    bench.oracle.on_command = record  # type: ignore[method-assign]
    return recorded
