"""A removed adapter gives up its name at once, and serves what came before.

The oracle of every test here checks that no inference is refused because of a removal, and that
each one runs on the content that its name stood for.
"""

import pytest

from loradock.controller.core.views import show_adapter
from loradock.controller.core.world import Adapter
from loradock.messages import events, records
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.engine_records import Content

UNTIL_SLOT = ("CheckAdapter", "LoadWeights", "StageWeights", "WriteSlot")


def removed_while_waiting(bench: CoreBench, count: int = 1) -> tuple[list[str], str, Adapter]:
    """Return requests that wait for adapter b when it is removed, the removal, and the record."""
    waiting = [bench.send(records.GenerationRequested, "b") for _ in range(count)]
    removed = bench.adapter("b")
    removal = bench.send(rq.RemoveAdapter, "b", True)
    assert "b" not in bench.world.names
    bench.refused(ErrorCode.UNKNOWN_ADAPTER, ("'b'",), records.GenerationRequested, "b")
    return waiting, removal, removed


def busy(**limits: int) -> tuple[CoreBench, str]:
    """Return a deployment whose only slot is leased, with b on the host; and the generation."""
    bench = CoreBench(slots=1, **limits)
    bench.request(rq.LoadAdapter, "b")
    bench.activate("a")
    return bench, bench.generate("a")


def end_all(bench: CoreBench, waiting: list[str], removal: str) -> None:
    """Let the requests of a removed adapter end, and check what its removal is answered."""
    for request in waiting:
        assert bench.reply(removal) is None
        bench.end_generation(request)
        assert bench.reply(request).finish_reason == "stop"
    assert bench.reply(removal).state == "unregistered"
    assert "b" not in {adapter.name for adapter in bench.world.adapters.values()}


@pytest.mark.parametrize("count", [1, 3])
def test_requests_that_wait_for_a_slot_are_served(count: int) -> None:
    bench, running = busy()
    published = bench.record_events()
    waiting, removal, _ = removed_while_waiting(bench, count)
    bench.settle()
    assert published == [events.AdapterRemoved("b")]
    bench.end_generation(running)
    assert bench.in_slots() == {"b"}
    end_all(bench, waiting, removal)
    assert [e for e in published if isinstance(e, events.AdapterRetired)] == [
        events.AdapterRetired("b", "content of b")
    ]


@pytest.mark.parametrize("steps", range(len(UNTIL_SLOT) + 1))
def test_a_removal_at_each_step_of_a_load_lets_it_go_on(steps: int) -> None:
    bench = CoreBench()
    loading = bench.send(rq.LoadAdapter, "b")
    first = bench.send(records.GenerationRequested, "b")
    for _ in range(steps):
        bench.finish("b")
    waiting, removal, _ = removed_while_waiting(bench)
    bench.settle()
    is_loaded = steps >= UNTIL_SLOT.index("StageWeights")
    kind = rq.AdapterDone if is_loaded else rq.Refused
    assert isinstance(bench.reply(loading), kind)
    end_all(bench, [first, *waiting], removal)


def test_the_name_may_be_loaded_again_at_once_and_both_versions_serve() -> None:
    bench, running = busy()
    waiting, removal, removed = removed_while_waiting(bench)
    bench.files["new"] = Content("new content of b", 10, 10)
    assert bench.request(rq.LoadAdapter, "b", "new").state == "cpu-cached"
    later = bench.send(records.GenerationRequested, "b")
    shown = show_adapter(bench.world, rq.ShowAdapter("s", "b"))
    prints = [view.fingerprint for view in (shown.adapter, *shown.retired)]
    assert prints == ["new content of b", "content of b"]
    bench.end_generation(running)
    (on_new,) = [a for a in bench.world.adapters.values() if a.name == "b" and not a.retired]
    assert removed.slot != on_new.slot
    bench.end_generation(waiting[0])
    bench.end_generation(later)
    assert bench.reply(removal).state == "unregistered"
    assert bench.adapter("b") is on_new


@pytest.mark.parametrize(
    "kind", [rq.LoadAdapter, rq.StageAdapter, rq.ActivateAdapter, rq.HoldAdapter]
)
def test_requests_that_only_prepare_it_are_refused(kind: type) -> None:
    bench = CoreBench()
    preparing = bench.send(kind, "b")
    waiting, removal, _ = removed_while_waiting(bench)
    assert bench.reply(preparing).code is ErrorCode.CONFLICT
    assert "being removed" in bench.reply(preparing).message
    bench.settle()
    end_all(bench, waiting, removal)
    assert not bench.world.held


def test_batches_are_refused_also_those_that_wait_for_another() -> None:
    bench, running = busy()
    batches = [bench.send(rq.ActivateBatch, ("b",)) for _ in range(2)]
    assert bench.world.current_batch == batches[0]
    waiting, removal, _ = removed_while_waiting(bench)
    assert {bench.reply(batch).code for batch in batches} == {ErrorCode.CONFLICT}
    bench.end_generation(running)
    end_all(bench, waiting, removal)


def test_a_held_adapter_is_released_and_serves_what_waits() -> None:
    bench = CoreBench(slots=1, engine=False)
    bench.start_engine()
    bench.settle()
    bench.request(rq.HoldAdapter, "b")
    bench.restart_controller()
    waiting, removal, removed = removed_while_waiting(bench)
    assert not removed.held
    bench.settle()
    end_all(bench, waiting, removal)


def test_without_an_engine_they_wait_for_one_and_its_loss_refuses_them() -> None:
    bench = CoreBench(engine=False)
    bench.send(rq.LoadAdapter, "b")
    waiting, removal, _ = removed_while_waiting(bench)
    assert bench.reply(removal) is None
    bench.start_engine()
    bench.settle()
    bench.lose_engine()
    assert bench.reply(waiting[0]).code is ErrorCode.ENGINE_GONE
    assert bench.reply(removal).state == "unregistered"
    assert not bench.world.adapters


def test_a_deadline_of_the_last_waiting_request_ends_it() -> None:
    bench, running = busy()
    waiting, removal, removed = removed_while_waiting(bench)
    assert bench.request(rq.CancelGeneration, waiting[0]).found
    assert bench.reply(waiting[0]).finish_reason == "cancelled"
    assert bench.reply(removal).state == "unregistered"
    assert removed.id not in bench.world.adapters
    bench.end_generation(running)


@pytest.mark.parametrize("removal_ends_first", [False, True])
def test_deadlines_of_removal_and_requests_are_their_own(removal_ends_first: bool) -> None:
    bench, running = busy()
    limits_ms = (50, 10) if removal_ends_first else (10, 50)
    waiting = bench.send(records.GenerationRequested, "b", limits_ms[0])
    removed = bench.adapter("b")
    removal = bench.send(rq.RemoveAdapter, "b", True, limits_ms[1])
    bench.settle()
    bench.advance(11)
    bench.settle()
    if removal_ends_first:
        refused = bench.reply(removal)
        assert (refused.code, bench.reply(waiting)) == (ErrorCode.CONFLICT, None)
        assert "its name is free" in refused.message
        bench.end_generation(running)
        bench.end_generation(waiting)
    else:
        assert bench.reply(waiting).code is ErrorCode.NO_ROOM
        assert bench.reply(removal).state == "unregistered"
    assert removed.id not in bench.world.adapters


def test_an_adapter_that_fails_to_load_refuses_them_with_the_reason() -> None:
    bench = CoreBench()
    bench.send(rq.LoadAdapter, "b")
    waiting, removal, _ = removed_while_waiting(bench)
    bench.fail("CheckAdapter", ErrorCode.DOES_NOT_FIT)
    bench.settle()
    assert bench.reply(waiting[0]).code is ErrorCode.DOES_NOT_FIT
    assert bench.reply(removal).state == "unregistered"
    assert not bench.world.adapters


def test_a_failed_write_refuses_them_and_ends_the_adapter() -> None:
    bench, running = busy()
    waiting, removal, _ = removed_while_waiting(bench)
    bench.engine.complete(bench.world.pending_requests[running].op)  # type: ignore[union-attr]
    while not any(one.kind == "WriteSlot" for one in bench.world.operations.values()):
        bench.transmit(10)
        bench.complete_moves()
        bench.deliver(1)
    bench.fail("WriteSlot", ErrorCode.NOT_FINITE)
    bench.settle()
    assert bench.reply(waiting[0]).code is ErrorCode.NOT_FINITE
    assert bench.reply(removal).state == "unregistered"


def test_a_victim_that_waits_returns_to_a_slot_for_them() -> None:
    """It leaves its slot for an older request, which the removal does not change."""
    bench = CoreBench(slots=1)
    bench.request(rq.LoadAdapter, "c")
    bench.activate("b")
    running = bench.generate("b")
    other = bench.send(records.GenerationRequested, "c")
    bench.settle()
    waiting, removal, removed = removed_while_waiting(bench)
    bench.settle()
    assert (removed.state, removed.goal) == ("gpu-slot", "pinned")
    bench.end_generation(running)
    assert bench.in_slots() == {"c"}
    bench.end_generation(other)
    end_all(bench, waiting, removal)


def test_an_eviction_that_came_first_is_answered_with_the_removal() -> None:
    bench = CoreBench()
    bench.activate("b")
    evicting = bench.send(rq.EvictAdapter, "b")
    waiting, removal, _ = removed_while_waiting(bench)
    bench.settle()
    assert bench.reply(evicting) is None
    end_all(bench, waiting, removal)
    assert bench.reply(evicting).state == "unregistered"


def test_a_second_removal_finds_nothing_and_a_repetition_waits() -> None:
    bench, running = busy()
    waiting, removal, _ = removed_while_waiting(bench)
    bench.refused(ErrorCode.UNKNOWN_ADAPTER, ("'b'",), rq.RemoveAdapter, "b", True)
    bench.handle(rq.RemoveAdapter(removal, "b", True))
    assert bench.reply(removal) is None
    bench.end_generation(running)
    end_all(bench, waiting, removal)


def test_a_restart_continues_a_removal() -> None:
    bench, running = busy()
    waiting, removal, removed = removed_while_waiting(bench)
    bench.restart_controller()
    bench.settle()
    # Its prompt is lost, so its client sends it again under the same id.
    bench.handle(records.GenerationRequested(waiting[0], "b"))
    bench.settle()
    bench.end_generation(running)
    if waiting[0] in bench.world.pending_requests:
        bench.end_generation(waiting[0])
    assert bench.reply(removal).state == "unregistered"
    assert removed.id not in bench.world.adapters


def test_a_generation_that_the_engine_did_not_receive_waits_again_for_the_removed_version() -> None:
    bench = CoreBench()
    bench.activate("b")
    bench.send(records.GenerationRequested, "b")
    waiting, removal, _ = removed_while_waiting(bench)
    (first,) = set(bench.world.pending_requests) - {*waiting, removal}
    # Both commands are lost, and the engine's last operation is a later one.
    bench.channel.clear()
    bench.engine.seen.add(bench.world.next_op - 1)  # type: ignore[union-attr]
    bench.cut_link(0)
    bench.settle()
    end_all(bench, [first, *waiting], removal)


def test_counters_of_a_removed_name_are_not_those_of_the_next_adapter() -> None:
    bench, running = busy()
    waiting, removal, _ = removed_while_waiting(bench)
    uses = bench.world.totals.misses
    bench.request(rq.LoadAdapter, "b")
    assert bench.adapter("b").counters.uses == 0
    assert bench.world.totals.misses == uses
    bench.end_generation(running)
    bench.end_generation(waiting[0])
    assert bench.reply(removal).state == "unregistered"


def test_embeddings_and_classifications_are_served_too() -> None:
    bench, running = busy()
    pooled = [bench.send(records.PoolingRequested, "b", task) for task in ("embed", "classify")]
    removal = bench.send(rq.RemoveAdapter, "b", True)
    bench.end_generation(running)
    for request in pooled:
        bench.end_generation(request)
        assert isinstance(bench.reply(request), rq.PoolingDone)
    assert bench.reply(removal).state == "unregistered"


@pytest.mark.parametrize(
    ("slots", "tokens", "count"), [(1, 0, 5), (1, 8, 1), (1, 8, 5), (2, 0, 2), (2, 8, 2)]
)
def test_every_request_before_a_removal_ends_in_every_deployment(
    slots: int, tokens: int, count: int
) -> None:
    bench = CoreBench(slots=slots, turn_tokens=tokens)
    for name in ("a", "b", "c"):
        bench.request(rq.LoadAdapter, name)
    sent = [bench.send(records.GenerationRequested, name) for name in ("a", "b", "c") * count]
    bench.settle()
    removals = [bench.send(rq.RemoveAdapter, name, True) for name in ("c", "b")]
    for _ in range(200):
        bench.settle(5)
        bench.end_turns()
        bench.complete(0)
    bench.settle()
    assert {bench.reply(request).finish_reason for request in sent} == {"stop"}
    assert {bench.reply(removal).state for removal in removals} == {"unregistered"}
    assert set(bench.world.names) == {"a"}


@pytest.mark.parametrize("kind", [rq.DeactivateAdapter, rq.EvictAdapter])
def test_what_demotes_a_removed_version_is_answered_without_its_removal(kind: type) -> None:
    """The removal's time ends while the slot is reset; the version is forgotten all the same."""
    bench = CoreBench()
    bench.activate("b")
    lowering, removal = bench.send(kind, "b"), bench.send(rq.RemoveAdapter, "b", True, 5)
    bench.advance(5)
    assert bench.reply(removal).code is ErrorCode.CONFLICT
    assert bench.reply(lowering) is None
    bench.settle()
    assert bench.reply(lowering).state == "unregistered"
    assert not bench.world.adapters


@pytest.mark.parametrize("kind", [rq.EvictAdapter, rq.RemoveAdapter])
def test_a_prefetched_adapter_that_is_forgotten_waits_for_no_room(kind: type) -> None:
    bench = CoreBench(slots=1, max_cpu_loras=1)
    loading = [bench.send(rq.LoadAdapter, name) for name in "ab"]
    bench.send(rq.PrefetchAdapter, "c", "", "cpu-cached")
    for name in "abc":
        bench.finish(name)
    prefetched = bench.adapter("c").id
    assert prefetched in bench.world.queues.members
    assert bench.reply(bench.send(kind, "c")).state == "unregistered"
    assert prefetched not in bench.world.queues.members
    bench.settle()
    assert [bench.reply(request).state for request in loading] == ["cpu-cached"] * 2
