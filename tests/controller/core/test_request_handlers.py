"""Every refusal: its code, what its text names, and that nothing else is changed by it."""

import pytest

from loradock.controller.core.actions import PublishEvent
from loradock.messages import events, records, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import (
    ActivateAdapter,
    ActivateBatch,
    AdapterDone,
    DeactivateAdapter,
    EvictAdapter,
    HoldAdapter,
    LoadAdapter,
    Refused,
    ReleaseAdapter,
    RemoveAdapter,
    StageAdapter,
)
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.engine_records import Content

UNKNOWN = [
    (ReleaseAdapter, "x"),
    (DeactivateAdapter, "x"),
    (EvictAdapter, "x"),
    (RemoveAdapter, "x"),
    (ActivateBatch, ("a", "x")),
    (records.GenerationRequested, "x"),
]


@pytest.mark.parametrize(("kind", "what"), UNKNOWN)
def test_an_unknown_adapter_is_l006(kind: type, what: object) -> None:
    bench = CoreBench()
    bench.activate("a")
    bench.refused(ErrorCode.UNKNOWN_ADAPTER, ("'x'", "load it first"), kind, what)


def test_every_upward_request_promotes_the_adapter_to_its_target() -> None:
    for kind, state in (
        (LoadAdapter, "cpu-cached"),
        (StageAdapter, "pinned"),
        (ActivateAdapter, "gpu-slot"),
        (HoldAdapter, "gpu-slot"),
    ):
        bench = CoreBench()
        reply = bench.request(kind, "a")
        assert (reply.adapter, reply.state) == ("a", state)
        assert bench.state("a") == state
        # A second request is answered at once.
        assert bench.reply(bench.send(kind, "a")).state == state


def test_a_batch_of_more_adapters_than_slots_is_refused_before_anything_moves() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    bench.request(LoadAdapter, "c")
    parts = ("3 slots", "2 slots", "split the batch")
    bench.refused(ErrorCode.NO_ROOM, parts, ActivateBatch, ("a", "b", "c"))
    assert bench.in_slots() == {"a", "b"}


def test_a_batch_that_a_held_adapter_makes_impossible_is_refused_early() -> None:
    bench = CoreBench(slots=2)
    bench.request(HoldAdapter, "a")
    bench.request(LoadAdapter, "b")
    bench.request(LoadAdapter, "c")
    parts = ("2 slots", "keep 1 slots", "release one")
    bench.refused(ErrorCode.NO_ROOM, parts, ActivateBatch, ("b", "c"))
    assert isinstance(bench.request(ActivateBatch, ("a", "b")), requests.BatchDone)


def test_a_batch_too_large_in_bytes_is_refused_early_and_names_the_bytes() -> None:
    bench = CoreBench(slots=3, device_bytes_max=25)
    for name in ("a", "b", "c"):
        bench.request(LoadAdapter, name)
    bench.refused(ErrorCode.NO_ROOM, ("30 bytes", "25 bytes"), ActivateBatch, ("a", "b", "c"))


def test_a_batch_whose_sizes_are_known_late_is_refused_then() -> None:
    bench = CoreBench(slots=2, device_bytes_max=15, engine=False)
    bench.send(LoadAdapter, "a")
    bench.send(LoadAdapter, "b")
    batch = bench.send(ActivateBatch, ("a", "b"))
    bench.start_engine()
    bench.settle()
    reply = bench.reply(batch)
    assert (reply.code, "20 bytes" in reply.message) == (ErrorCode.NO_ROOM, True)


def test_a_batch_that_a_hold_made_impossible_while_it_waited_is_refused() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    for name in ("c", "d"):
        bench.request(StageAdapter, name)
    running = bench.generate("a")
    first = bench.send(ActivateBatch, ("c", "d"))
    hold = bench.send(HoldAdapter, "d")
    second = bench.send(ActivateBatch, ("a", "b"))
    bench.settle()
    assert [bench.reply(request) for request in (first, hold, second)] == [None] * 3
    bench.end_generation(running)
    assert isinstance(bench.reply(first), requests.BatchDone)
    assert bench.reply(hold).state == "gpu-slot"
    assert bench.reply(second).code is ErrorCode.NO_ROOM
    assert not bench.world.pending_requests


def test_everything_held_is_l001() -> None:
    bench = CoreBench(slots=2)
    bench.request(HoldAdapter, "a")
    bench.request(HoldAdapter, "b")
    reply = bench.request(ActivateAdapter, "c")
    assert reply.code is ErrorCode.NO_ROOM
    for part in ("'c'", "1 slots", "2 slots", "held", "release"):
        assert part in reply.message
    assert bench.in_slots() == {"a", "b"}


@pytest.mark.parametrize("kind", [DeactivateAdapter, EvictAdapter, RemoveAdapter])
def test_an_adapter_that_is_held_leased_or_waited_for_is_not_demoted(kind: type) -> None:
    bench = CoreBench()
    bench.request(HoldAdapter, "a")
    bench.refused(ErrorCode.CONFLICT, ("'a'", "held", "release it first"), kind, "a")
    bench.request(ReleaseAdapter, "a")
    bench.generate("a")
    bench.refused(ErrorCode.CONFLICT, ("'a'", "1 running requests"), kind, "a")
    bench.send(ActivateAdapter, "b")
    bench.refused(ErrorCode.CONFLICT, ("'b'", "waited for by 1"), kind, "b")


def test_every_downward_request_demotes_the_adapter_to_its_target() -> None:
    for kind, state in ((DeactivateAdapter, "pinned"), (EvictAdapter, "evicted")):
        bench = CoreBench()
        bench.activate("a")
        assert bench.request(kind, "a").state == state
        assert bench.reply(bench.send(kind, "a")).state == state
    bench = CoreBench()
    bench.activate("a")
    assert bench.request(RemoveAdapter, "a").state == "unregistered"
    assert "a" not in bench.world.names
    assert isinstance(bench.request(ActivateAdapter, "a"), AdapterDone)


def test_a_downward_request_waits_for_the_operation_in_flight() -> None:
    bench = CoreBench(request_timeout_ms=10)
    slow = bench.send(ActivateAdapter, "a")
    bench.transmit(1)
    bench.advance(11)
    assert bench.reply(slow).code is ErrorCode.ENGINE_GONE
    evict = bench.send(EvictAdapter, "a")
    assert bench.reply(evict) is None
    bench.settle()
    assert bench.reply(evict).state in ("evicted", "unregistered")
    assert not bench.engine.adapters  # type: ignore[union-attr]


def test_a_forced_removal_ends_the_hold_and_waits_for_leases() -> None:
    bench = CoreBench(slots=1)
    bench.request(HoldAdapter, "a")
    running = bench.generate("a")
    removal = bench.send(RemoveAdapter, "a", force=True)
    bench.settle()
    assert bench.reply(removal) is None
    assert (bench.in_slots(), bench.world.held) == ({"a"}, {})
    parts = ("'a'", "not known")
    for kind in (DeactivateAdapter, EvictAdapter, RemoveAdapter, records.GenerationRequested):
        bench.refused(ErrorCode.UNKNOWN_ADAPTER, parts, kind, "a")
    bench.refused(ErrorCode.UNKNOWN_ADAPTER, parts, ActivateBatch, ("a",))
    bench.end_generation(running)
    assert bench.reply(running).finish_reason == "stop"
    assert bench.reply(removal).state == "unregistered"
    assert not bench.world.adapters


def test_a_forced_removal_refuses_waiting_requests() -> None:
    bench = CoreBench()
    waiting = bench.send(ActivateAdapter, "a")
    removal = bench.send(RemoveAdapter, "a", force=True)
    assert bench.reply(waiting).code is ErrorCode.CONFLICT
    bench.settle()
    assert bench.reply(removal).state == "unregistered"


def test_a_forced_removal_without_an_engine_is_answered_at_once() -> None:
    bench = CoreBench(engine=False)
    waiting = bench.send(ActivateAdapter, "a")
    removal = bench.send(RemoveAdapter, "a", force=True)
    assert bench.reply(waiting).code is ErrorCode.CONFLICT
    assert bench.reply(removal).state == "unregistered"
    assert not bench.world.adapters


def test_an_adapter_whose_weights_are_being_dropped_is_unknown_to_inference() -> None:
    bench = CoreBench()
    bench.activate("a")
    removal = bench.send(RemoveAdapter, "a")
    parts = ("'a'", "not known")
    bench.refused(ErrorCode.UNKNOWN_ADAPTER, parts, records.GenerationRequested, "a")
    bench.refused(ErrorCode.CONFLICT, ("'a'", "being removed"), LoadAdapter, "a")
    bench.settle()
    assert bench.reply(removal).state == "unregistered"


def test_a_removal_that_fails_keeps_an_idle_adapter() -> None:
    bench = CoreBench()
    bench.activate("a")
    removal = bench.send(RemoveAdapter, "a", force=True)
    bench.fail("ResetSlot", ErrorCode.DEVICE_OUT_OF_MEMORY)
    assert isinstance(bench.reply(removal), Refused)
    bench.settle()
    assert bench.state("a") == "gpu-slot"
    assert isinstance(bench.request(ActivateAdapter, "a"), AdapterDone)


def test_another_path_under_a_known_name_is_a_conflict() -> None:
    bench = CoreBench()
    bench.activate("a")
    parts = ("'a'", "'b'", "load the new path with replace")
    for kind in (StageAdapter, ActivateAdapter, HoldAdapter):
        bench.refused(ErrorCode.CONFLICT, parts, kind, "a", "b")


def test_other_content_under_a_known_name_is_refused_and_the_same_is_accepted() -> None:
    bench = CoreBench()
    bench.activate("a")
    reply = bench.request(LoadAdapter, "a", "b")
    assert reply.code is ErrorCode.CONFLICT
    for part in ("'a'", "content of a", "content of b", "with replace"):
        assert part in reply.message
    assert bench.adapter("a").path == "a"
    bench.files["copy of a"] = Content("content of a", 10, 10)
    assert bench.request(LoadAdapter, "a", "copy of a").state == "gpu-slot"
    assert len(bench.world.adapters) == 1


def test_a_replacement_receives_hold_and_goal_and_the_old_version_ends_its_requests() -> None:
    bench = CoreBench(slots=2)
    bench.request(HoldAdapter, "a")
    old = bench.adapter("a").id
    running = bench.generate("a")
    assert bench.request(LoadAdapter, "a", "b", replace=True).state == "cpu-cached"
    new = bench.adapter("a")
    assert new.id != old
    assert (new.held, new.state, new.path) == (True, "gpu-slot", "b")
    assert (bench.world.adapters[old].retired, bench.world.adapters[old].held) == (True, False)
    assert bench.world.adapters[old].state == "gpu-slot"
    later = bench.generate("a")
    assert bench.world.pending_requests[later].adapters == (new.id,)
    bench.end_generation(running)
    assert bench.reply(running).finish_reason == "stop"
    assert set(bench.world.adapters) == {new.id}


def test_a_replacement_without_waiting_requests_does_not_happen() -> None:
    bench = CoreBench()
    bench.activate("a")
    late = bench.send(LoadAdapter, "a", "b", replace=True, timeout_ms=5)
    bench.transmit(1)
    bench.complete(0)
    bench.deliver(1)
    # It is valid and is being loaded.
    bench.transmit(1)
    bench.advance(6)
    assert isinstance(bench.reply(late), Refused)
    bench.settle()
    assert (bench.adapter("a").path, bench.state("a")) == ("a", "gpu-slot")
    assert len(bench.world.adapters) == 1


def test_a_second_replacement_waits_for_the_first() -> None:
    bench = CoreBench()
    bench.activate("a")
    bench.send(LoadAdapter, "a", "b", replace=True)
    parts = ("'a'", "being loaded", "wait for it")
    bench.refused(ErrorCode.CONFLICT, parts, LoadAdapter, "a", "c")
    bench.refused(ErrorCode.CONFLICT, parts, RemoveAdapter, "a")


def test_a_name_whose_first_version_is_invalid_goes_to_the_second() -> None:
    bench = CoreBench()
    first = bench.send(LoadAdapter, "a", "missing")
    second = bench.send(LoadAdapter, "a", "b", replace=True)
    bench.settle()
    assert bench.reply(first).code is ErrorCode.NOT_FOUND
    assert bench.reply(second).state == "cpu-cached"
    assert bench.adapter("a").path == "b"


def test_known_adapters_max_is_l001_and_requests_max_l015() -> None:
    bench = CoreBench(known_adapters_max=2, requests_max=3)
    bench.request(LoadAdapter, "a")
    bench.request(LoadAdapter, "b")
    bench.refused(ErrorCode.NO_ROOM, ("'c'", "2 adapters", "allows 2"), LoadAdapter, "c")
    running = [bench.generate("a") for _ in range(3)]
    bench.refused(ErrorCode.OVERLOADED, ("3 requests", "at most 3"), LoadAdapter, "a")
    # A request that ends another one is accepted.
    cancel = bench.send(requests.CancelGeneration, running[0])
    assert bench.reply(cancel).found


def test_a_repeated_request_receives_its_first_answer_while_it_is_stored() -> None:
    bench = CoreBench(answers_max=3)
    first = bench.send(LoadAdapter, "a")
    bench.settle()
    bench.handle(EvictAdapter("evict", "a"))
    bench.settle()
    # It is not loaded a second time: the first answer is repeated.
    bench.handle(LoadAdapter(first, "a"))
    bench.settle()
    assert bench.reply(first).state == "cpu-cached"
    assert bench.state("a") == "evicted"
    for _ in range(3):
        bench.send(ReleaseAdapter, "a")
    assert list(bench.world.answers) == [f"r{bench.request_count - n}" for n in (2, 1, 0)]


def test_a_cancelled_generation_is_answered_whether_it_runs_or_waits() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    running, base = bench.generate("a"), bench.generate(None)
    bench.request(LoadAdapter, "b")
    queued = bench.generate("b")
    for target in (running, queued, base):
        assert bench.request(requests.CancelGeneration, target).found
    assert bench.reply(queued).finish_reason == "cancelled"
    bench.end_generation(running)
    bench.end_generation(base)
    assert bench.reply(running).finish_reason == "cancelled"
    assert bench.reply(base).finish_reason == "cancelled"
    assert not bench.request(requests.CancelGeneration, running).found
    assert not bench.request(requests.CancelGeneration, "nothing").found


def test_holding_and_releasing_are_published_once() -> None:
    bench = CoreBench()
    published = bench.record_events()
    bench.request(HoldAdapter, "a")
    bench.request(HoldAdapter, "a")
    bench.request(ReleaseAdapter, "a")
    bench.request(ReleaseAdapter, "a")
    holds = [e for e in published if isinstance(e, events.AdapterHeld | events.AdapterReleased)]
    assert holds == [events.AdapterHeld("a"), events.AdapterReleased("a")]


def test_a_report_that_does_not_fit_the_state_of_its_adapter_changes_nothing() -> None:
    bench = CoreBench()
    bench.request(LoadAdapter, "a")
    bench.send(StageAdapter, "a")
    controller = bench.shadow
    (adapter,) = controller.world.adapters.values()
    adapter.state = "pinned"
    (action,) = controller.handle(reports.WeightsStaged(adapter.op), bench.now + 1)
    assert isinstance(action, PublishEvent)
    assert isinstance(action.message.event, events.ReportRefused)
    assert all(part in action.message.event.message for part in ("'a'", "pinned", "WeightsStaged"))
    assert (adapter.state, bool(adapter.op)) == ("pinned", True)
