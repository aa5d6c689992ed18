"""Attachment and loss of the engine, expired deadlines, and failures."""

from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.messages import commands, events, records, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import (
    ActivateAdapter,
    AdapterDone,
    HoldAdapter,
    LoadAdapter,
    Refused,
)
from tests.support.simulation.core_bench import CoreBench


def test_losing_the_engine_evicts_all_and_refuses_pending_requests() -> None:
    bench = CoreBench(slots=2)
    bench.request(LoadAdapter, "d")
    bench.activate("a", "b")
    running, base = bench.generate("a"), bench.generate(None)
    waiting = [
        bench.send(ActivateAdapter, "c"),
        bench.send(requests.ActivateBatch, ("a", "d")),
        bench.send(records.GenerationRequested, "b"),
    ]
    removal = bench.send(requests.RemoveAdapter, "c", force=True)
    bench.lose_engine()
    for request in (running, base, *waiting[1:]):
        reply = bench.reply(request)
        assert (reply.code, "engine is gone" in reply.message) == (ErrorCode.ENGINE_GONE, True)
    assert bench.reply(waiting[0]).code is ErrorCode.CONFLICT
    assert bench.reply(removal).state == "unregistered"
    assert not bench.world.pending_requests
    assert not bench.world.operations
    assert {bench.state("a"), bench.state("b")} == {"evicted"}
    assert all((t.count, t.size_bytes) == (0, 0) for t in bench.world.tiers.values())


def test_goals_are_reconciled_again_with_held_ones_first() -> None:
    bench = CoreBench(slots=2)
    bench.request(HoldAdapter, "a")
    bench.activate("b")
    bench.request(LoadAdapter, "c")
    bench.request(requests.EvictAdapter, "c")
    bench.lose_engine()
    bench.start_engine()
    bench.transmit(1)
    bench.deliver(1)
    assert [command.adapter for command in bench.channel] == ["a", "b"]
    bench.settle()
    assert bench.in_slots() == {"a", "b"}
    assert bench.state("c") == "evicted"


def test_a_goal_without_waiters_evicts_no_other_adapter() -> None:
    bench = CoreBench(slots=2, max_cpu_loras=2)
    bench.activate("a", "b")
    bench.lose_engine()
    request = bench.send(ActivateAdapter, "c")
    other = bench.send(ActivateAdapter, "d")
    bench.start_engine()
    bench.settle()
    assert isinstance(bench.reply(request), AdapterDone)
    assert isinstance(bench.reply(other), AdapterDone)
    assert bench.in_slots() == {"c", "d"}


def test_requests_without_an_engine_wait_until_one_attaches() -> None:
    bench = CoreBench(engine=False)
    waiting = [bench.send(LoadAdapter, "a"), bench.send(records.GenerationRequested, None)]
    waiting.append(bench.send(ActivateAdapter, "b"))
    assert all(bench.reply(request) is None for request in waiting)
    bench.start_engine()
    bench.settle()
    assert bench.reply(waiting[0]).state == "cpu-cached"
    assert bench.reply(waiting[2]).state == "gpu-slot"
    bench.end_generation(waiting[1])
    assert bench.reply(waiting[1]).finish_reason == "stop"


def test_a_request_without_an_engine_is_refused_in_time_and_leaves_no_name() -> None:
    bench = CoreBench(engine=False, request_timeout_ms=20)
    late = bench.send(ActivateAdapter, "a")
    bench.advance(19)
    assert bench.reply(late) is None
    bench.advance(2)
    assert bench.reply(late).code is ErrorCode.ENGINE_GONE
    assert "no engine" in bench.reply(late).message
    assert not bench.world.adapters


def test_a_request_for_room_that_stays_taken_is_refused_in_time() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    running = bench.generate("a")
    late = bench.send(ActivateAdapter, "b", timeout_ms=50)
    bench.settle()
    bench.advance(51)
    reply = bench.reply(late)
    assert reply.code is ErrorCode.NO_ROOM
    for part in ("'b'", "1 adapters in slots are leased", "0 are held"):
        assert part in reply.message
    bench.end_generation(running)
    assert bench.in_slots() == set() or bench.in_slots() == {"a"}


def test_a_late_generation_is_refused_and_stopped_and_leased_until_its_end() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    request = bench.send(records.GenerationRequested, "a", 30)
    bench.settle()
    bench.advance(31)
    assert bench.reply(request).code is ErrorCode.ENGINE_GONE
    assert isinstance(bench.channel[-1], commands.StopGeneration)
    assert bench.adapter("a").leases == 1
    bench.end_generation(request)
    assert bench.adapter("a").leases == 0
    assert not bench.world.pending_requests


def test_an_overdue_operation_refuses_its_clients_and_its_late_report_still_counts() -> None:
    bench = CoreBench(operation_timeout_ms=100, request_timeout_ms=10_000)
    published = bench.record_events()
    request = bench.send(ActivateAdapter, "a")
    bench.transmit(1)
    bench.advance(101)
    reply = bench.reply(request)
    assert reply.code is ErrorCode.ENGINE_GONE
    for part in ("CheckAdapter", "'a'", "100 ms"):
        assert part in reply.message
    assert events.OperationOverdue(1, "CheckAdapter", "a") in published
    again = bench.send(ActivateAdapter, "a")
    bench.settle()
    assert bench.reply(again).state == "gpu-slot"


def test_a_report_that_does_not_fit_changes_nothing() -> None:
    bench = CoreBench()
    bench.send(ActivateAdapter, "a")
    before, published = bench.snapshot(), bench.record_events()
    bench.handle(reports.SlotWritten(1))
    assert bench.snapshot() == before
    (event,) = published
    assert isinstance(event, events.ReportRefused)
    assert "CheckAdapter is not ended by SlotWritten" in event.message
    # One without an open operation is ignored.
    bench.handle(reports.SlotWritten(77))
    assert len(published) == 1


def test_an_adapter_that_can_not_be_demoted_backs_off_and_another_one_is_the_victim() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    request = bench.send(ActivateAdapter, "c")
    for _ in range(3):
        bench.transmit(5)
        bench.complete(0)
        bench.deliver(5)
    bench.fail("ResetSlot", ErrorCode.CONFLICT)
    bench.settle()
    assert isinstance(bench.reply(request), AdapterDone)
    assert bench.in_slots() == {"a", "c"}
    assert bench.adapter("a").backing_off
    bench.advance(bench.limits.retry_backoff_ms + 1)
    assert not bench.adapter("a").backing_off


def test_a_held_adapter_that_fails_to_load_is_tried_again_after_its_backoff() -> None:
    bench = CoreBench(slots=2, retry_backoff_ms=100)
    bench.request(HoldAdapter, "a")
    content = bench.files.pop("a")
    bench.lose_engine()
    bench.start_engine()
    bench.settle()
    assert (bench.state("a"), bench.adapter("a").backing_off) == ("evicted", True)
    bench.activate("b")
    bench.files["a"] = content
    bench.advance(101)
    bench.settle()
    assert bench.in_slots() == {"a", "b"}


def test_other_limits_lose_the_engine_and_keep_the_newest_answers() -> None:
    controller = Controller(Limits(max_loras=4, answers_max=10), checked=True)
    controller.handle(records.ControllerStarted(1), 1)
    for number in range(6):
        controller.handle(LoadAdapter(f"r{number}", f"a{number}"), 2)
    for number in range(6):
        controller.handle(requests.ReleaseAdapter(f"q{number}", f"a{number}"), 2)
    inventory = reports.EngineInventory("e", 1, "m", 4, 100)
    controller.handle(inventory, 3)
    actions = controller.reconfigure(Limits(max_loras=2, requests_max=4, answers_max=2), "lru")
    assert "the limits were changed" in str(actions)
    assert controller.world.engine is None
    assert not controller.world.pending_requests
    assert len(controller.world.answers) == 2
    assert controller.world.free_slots == [0, 1]
    controller.handle(inventory, 4)
    assert controller.world.tiers["device"].count_max == 2


def test_a_clock_that_is_set_back_does_not_decrease_the_time() -> None:
    controller = Controller(Limits(), checked=True)
    controller.handle(records.ControllerStarted(1), 100)
    controller.handle(LoadAdapter("r", "a"), 50)
    assert controller.world.time_ns == 100
    assert not any(
        isinstance(answer.reply, Refused) for answer in controller.world.answers.by_id.values()
    )


def test_held_adapters_that_keep_failing_do_not_block_others() -> None:
    bench = CoreBench(slots=3, host_bytes_max=15, retry_backoff_ms=10)
    for name in ("a", "b"):
        bench.request(HoldAdapter, name)
        del bench.files[name]
    bench.lose_engine()
    bench.start_engine()
    request = bench.send(ActivateAdapter, "c")
    for _ in range(12):
        bench.transmit(9)
        bench.complete(0)
        # Both backoffs have ended when the one that was tried has failed.
        bench.advance(11)
        bench.deliver(9)
    assert bench.reply(request).state == "gpu-slot"


def test_a_batch_uses_the_version_that_is_current_when_it_becomes_current() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    running = bench.generate("a")
    for name in ("c", "d"):
        bench.request(requests.StageAdapter, name)
    first = bench.send(requests.ActivateBatch, ("c", "d"))
    second = bench.send(requests.ActivateBatch, ("b", "a"))
    assert bench.request(LoadAdapter, "b", "e", replace=True).state == "cpu-cached"
    bench.end_generation(running)
    assert isinstance(bench.reply(first), requests.BatchDone)
    assert isinstance(bench.reply(second), requests.BatchDone)
    assert bench.adapter("b").path == "e"


def test_the_timer_is_not_set_for_ended_operations() -> None:
    bench = CoreBench(operation_timeout_ms=100)
    bench.activate("a")
    assert bench.world.timer_ns
    bench.advance(200)
    assert not bench.world.timer_ns


def test_a_replaced_version_whose_last_step_fails_is_removed() -> None:
    bench = CoreBench()
    bench.request(LoadAdapter, "a")
    bench.send(ActivateAdapter, "a")
    replaced = bench.send(LoadAdapter, "a", "b", replace=True)
    bench.transmit(9)
    for _ in range(2):
        bench.complete(1)
        bench.deliver(1)
        bench.transmit(9)
    assert bench.reply(replaced).state == "cpu-cached"
    (old,) = [a for a in bench.world.adapters.values() if a.retired]
    assert bench.engine is not None
    bench.engine.complete(old.op, ErrorCode.DEVICE_OUT_OF_MEMORY)
    bench.settle()
    assert [a.path for a in bench.world.adapters.values()] == ["b"]
    assert bench.state("a") == "gpu-slot"
