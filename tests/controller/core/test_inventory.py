"""Corrections by the inventory: after a restart, lost messages, or the loss of the log's tail."""

from typing import Any

import msgspec
import pytest

from loradock.controller.core.controller import Controller
from loradock.controller.core.invariants import InvariantError, check, excess
from loradock.controller.core.limits import Limits
from loradock.messages import commands, records, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import ActivateAdapter, AdapterDone, LoadAdapter
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.engine_records import EngineAdapter


def test_a_restarted_controller_touches_nothing_that_agrees() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    running = bench.generate("a")
    before = bench.snapshot()
    bench.restart_controller()
    bench.settle()
    assert bench.snapshot() == before
    assert not bench.channel
    bench.end_generation(running)
    assert bench.reply(running).finish_reason == "stop"


def test_no_operation_is_sent_before_the_inventory() -> None:
    bench = CoreBench()
    bench.restart_controller()
    bench.send(ActivateAdapter, "a")
    assert not bench.world.operations
    bench.settle()
    assert bench.state("a") == "gpu-slot"
    bench.restart_controller()
    batch = bench.send(requests.ActivateBatch, ("a",))
    running = [bench.send(records.GenerationRequested, name) for name in ("a", None)]
    assert not bench.world.operations
    bench.settle()
    assert isinstance(bench.reply(batch), requests.BatchDone)
    assert all(bench.world.pending_requests[request].op for request in running)


def test_operations_lost_in_transit_are_replaced_by_new_ones() -> None:
    bench = CoreBench()
    request = bench.send(ActivateAdapter, "a")
    (lost,) = bench.channel
    bench.cut_link(1)
    bench.transmit(1)
    bench.deliver(1)
    assert bench.channel == [msgspec.structs.replace(lost, op=lost.op + 1)]
    bench.settle()
    assert isinstance(bench.reply(request), AdapterDone)


def test_a_restarted_controller_corrects_what_its_log_lost() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a")
    inputs = len(bench.inputs)
    bench.activate("b")
    bench.generate("b")
    bench.restart_controller(lost_inputs=len(bench.inputs) - inputs)
    # The generation that is not in the log is stopped first, then its adapter is removed.
    assert "b" not in bench.world.names
    bench.settle()
    assert [type(c).__name__ for c in bench.channel] == []
    (op,) = bench.engine.running  # type: ignore[union-attr]
    assert bench.engine.running[op].stopped  # type: ignore[union-attr]
    assert not bench.world.engine_ready
    bench.complete(0)
    bench.settle()
    assert {a.name for a in bench.engine.adapters.values()} == {"a"}  # type: ignore[union-attr]
    assert bench.in_slots() == {"a"}
    bench.activate("b")


def test_a_record_yields_an_id_that_the_engine_uses_for_other_content() -> None:
    bench = CoreBench(slots=2, engine=False)
    bench.send(ActivateAdapter, "a")
    assert bench.adapter("a").id == 1
    unknown = EngineAdapter(1, "b", "b", bench.files["b"], "gpu-slot", True, 0, 7)
    bench.start_engine(adapters={1: unknown}, seen={20}, generations_seen={7})
    bench.settle()
    assert bench.adapter("a").id != 1
    assert bench.state("a") == "gpu-slot"
    assert [a.content.fingerprint for a in bench.engine.adapters.values()] == ["content of a"]  # type: ignore[union-attr]


def test_an_inventory_that_contradicts_itself_is_refused() -> None:
    good = reports.InventoryAdapter(1, "a", "a", "f", 8, "gpu-slot", 0, 1, 10, 10)
    contradictions = {
        "twice": (good, good),
        "of 2 slots": (reports.InventoryAdapter(1, "a", "a", "f", 8, "gpu-slot", 5, 1, 10, 10),),
        "is reported to be": (
            reports.InventoryAdapter(1, "a", "a", "f", 8, "evicted", -1, 0, 10, 10),
        ),
        "in slot -1": (reports.InventoryAdapter(1, "a", "a", "f", 8, "gpu-slot", -1, 0, 10, 10),),
    }
    for text, adapters in contradictions.items():
        controller = Controller(Limits(max_loras=2), checked=True)
        controller.handle(records.ControllerStarted(1), 1)
        inventory = reports.EngineInventory("e", 1, "m", 2, 100, 0, (), adapters)
        actions = controller.handle(inventory, 2)
        assert text in str(actions)
        assert controller.world.engine is None


def inventory_of(*adapters: reports.InventoryAdapter, **fields: Any) -> reports.EngineInventory:
    given = {"pid": 1, "model": "m", "max_loras": 3, "device_bytes_max": 100, **fields}
    return reports.EngineInventory("e", adapters=adapters, **given)


def entry(**fields: Any) -> reports.InventoryAdapter:
    given = {"adapter_id": 1, "state": "gpu-slot", "slot": 0, "generation": 1, "rank": 8}
    given |= {"host_bytes": 10, "blob_bytes": 10, "fingerprint": "f", "adapter": "a", **fields}
    return reports.InventoryAdapter(path=given["adapter"], **given)


OUT_OF_BOUNDS = {
    "pid 1099511627776": inventory_of(pid=2**40),
    "pid -1": inventory_of(pid=-1),
    "max_loras 0": inventory_of(max_loras=0),
    "max_loras 65537": inventory_of(max_loras=65_537),
    "last_op": inventory_of(last_op=2**53),
    "operation 0": inventory_of(last_op=5, running=(0,)),
    "operation 6": inventory_of(last_op=5, running=(6,)),
    "operations 65537": inventory_of(last_op=1, running=(1,) * 65_537),
    "adapters 3": inventory_of(entry(), entry(adapter_id=2, slot=1), entry(adapter_id=3, slot=2)),
    "length of a name": inventory_of(model="m" * 257),
    "length": inventory_of(entry(fingerprint="f" * 257)),
    "bytes": inventory_of(entry(host_bytes=2**53)),
    "adapter id 0": inventory_of(entry(adapter_id=0)),
    "adapter id 9007199254740992": inventory_of(entry(adapter_id=2**53)),
    "generation 0": inventory_of(entry(generation=0)),
    "generation 9007199254740992": inventory_of(entry(generation=2**53)),
    "rank -1": inventory_of(entry(rank=-1)),
}


@pytest.mark.parametrize("text", OUT_OF_BOUNDS)
def test_an_inventory_out_of_bounds_is_refused_and_changes_nothing(text: str) -> None:
    controller = Controller(Limits(max_loras=2, known_adapters_max=2), checked=True)
    controller.handle(records.ControllerStarted(1), 1)
    before = (controller.world.next_op, controller.world.next_adapter_id)
    actions = controller.handle(OUT_OF_BOUNDS[text], 2)
    assert text in str(actions)
    assert controller.world.engine is None
    assert not controller.world.adapters
    assert (controller.world.next_op, controller.world.next_adapter_id) == before


def test_a_slot_that_an_operation_has_reserved_is_not_reported_of_another_adapter() -> None:
    bench = CoreBench(slots=1)
    bench.send(ActivateAdapter, "a")
    while not any(isinstance(command, commands.WriteSlot) for command in bench.channel):
        bench.transmit(9)
        bench.complete(0)
        bench.deliver(9)
    (write,) = [command for command in bench.channel if isinstance(command, commands.WriteSlot)]
    bench.transmit(9)
    assert bench.engine is not None
    reported = bench.engine.inventory(0)
    other = msgspec.structs.replace(
        reported.adapters[0], adapter_id=9, state="gpu-slot", slot=write.slot, generation=99
    )
    actions = bench.controller.handle(
        msgspec.structs.replace(reported, adapters=(*reported.adapters, other)), bench.now + 1
    )
    assert "which 1 uses" in str(actions)
    assert bench.world.engine is None


def test_a_generation_whose_prompt_is_lost_is_dropped_and_may_be_sent_again() -> None:
    bench = CoreBench()
    bench.activate("a")
    request = bench.send(records.GenerationRequested, "a")
    bench.restart_controller()
    bench.settle()
    assert request not in bench.world.pending_requests
    assert bench.reply(request) is None
    assert (bench.adapter("a").leases, bench.adapter("a").counters.uses) == (0, 1)
    bench.handle(records.GenerationRequested(request, "a"))
    bench.settle()
    bench.end_generation(request)
    assert bench.reply(request).finish_reason == "stop"


def test_a_stop_that_was_lost_is_repeated() -> None:
    bench = CoreBench()
    bench.activate("a")
    running = bench.generate("a")
    bench.send(requests.CancelGeneration, running)
    bench.restart_controller()
    bench.settle()
    bench.end_generation(running)
    assert bench.reply(running).finish_reason == "cancelled"


def test_a_cancelled_generation_that_never_arrived_is_not_started_again() -> None:
    bench = CoreBench()
    bench.activate("a")
    lost = bench.send(records.GenerationRequested, "a")
    bench.channel.clear()
    bench.send(requests.CancelGeneration, lost)
    bench.cut_link(0)
    bench.settle()
    assert bench.reply(lost).finish_reason == "cancelled"
    assert not bench.engine.running  # type: ignore[union-attr]


def test_a_generation_that_was_lost_with_a_replaced_version_is_refused() -> None:
    bench = CoreBench()
    bench.activate("a")
    lost = bench.send(records.GenerationRequested, "a")
    del bench.channel[-1]
    bench.request(LoadAdapter, "a", "b", replace=True)
    bench.cut_link(0)
    bench.settle()
    reply = bench.reply(lost)
    assert (reply.code, "replaced" in reply.message) == (ErrorCode.ENGINE_GONE, True)
    assert [a.path for a in bench.world.adapters.values()] == ["b"]


def test_a_generation_that_was_lost_is_started_again() -> None:
    bench = CoreBench()
    bench.activate("a")
    lost = bench.send(records.GenerationRequested, "a")
    del bench.channel[-1]
    bench.request(LoadAdapter, "b")
    bench.cut_link(0)
    bench.settle()
    bench.end_generation(lost)
    assert bench.reply(lost).finish_reason == "stop"


def test_a_replacement_whose_report_was_lost_with_the_logs_tail_happens() -> None:
    bench = CoreBench()
    bench.activate("a")
    request = bench.send(LoadAdapter, "a", "b", replace=True)
    for _ in range(2):
        bench.transmit(1)
        bench.complete(0)
        bench.deliver(1)
    bench.unacknowledged.clear()
    bench.restart_controller(lost_inputs=1)
    assert bench.adapter("a").path == "a"
    bench.settle()
    assert bench.reply(request).state == "cpu-cached"
    assert (bench.adapter("a").path, bench.state("a")) == ("b", "gpu-slot")
    assert len(bench.world.adapters) == 1


LOWER = [
    {"max_loras": 1},
    {"max_cpu_loras": 3},
    {"device_bytes_max": 15},
    {"pinned_bytes_max": 0},
]


@pytest.mark.parametrize("lower", LOWER)
def test_what_an_engine_has_beyond_lower_limits_only_decreases(lower: dict[str, int]) -> None:
    ample = {"max_loras": 3, "max_cpu_loras": 4}
    controller = Controller(Limits(**ample), checked=True)
    names = ("a", "b", "c")
    for number, name in enumerate(names, 1):
        controller.handle(LoadAdapter(f"r{number}", name), 1)
    held = [
        entry(adapter_id=n, adapter=name, slot=n - 1, generation=n)
        for n, name in enumerate(names, 1)
    ]
    inventory = inventory_of(*held, last_op=9)
    controller.handle(inventory, 2)
    limits = Limits(**{**ample, "max_loras": 1, **lower})
    controller.reconfigure(limits, "lru")
    controller.handle(inventory, 3)
    world = controller.world
    assert [world.adapters[n].state for n in (1, 2, 3)] == ["gpu-slot"] * 3
    before = excess(world, limits)
    with pytest.raises(InvariantError):
        check(world, limits)
    [reset] = controller.handle(requests.DeactivateAdapter("r9", "a"), 4)
    controller.handle(reports.SlotReset(reset.message.op), 5)
    after = excess(world, limits)
    assert after < before
    assert all(less <= more for less, more in zip(after, before, strict=True))


def test_a_running_operation_whose_adapter_is_elsewhere_contradicts_the_log() -> None:
    bench = CoreBench()
    bench.activate("a")
    bench.generate("a")
    assert bench.engine is not None
    inventory = msgspec.structs.replace(bench.engine.inventory(), adapters=())
    actions = bench.controller.handle(inventory, bench.now + 1)
    assert "which is not where it was" in str(actions)
    assert bench.world.engine is None


def test_versions_of_a_name_that_yield_their_ids_stay_versions_of_it() -> None:
    bench = CoreBench(slots=2, engine=False)
    first = bench.send(LoadAdapter, "a")
    second = bench.send(LoadAdapter, "a", "other", True)
    assert bench.adapter("a").successor == 2
    bench.files["other"] = bench.files["e"]
    others = {
        number: EngineAdapter(number, name, name, bench.files[name], "cpu-cached", False, -1, 0)
        for number, name in ((1, "b"), (2, "c"))
    }
    bench.start_engine(adapters=others, seen={20})
    bench.settle()
    assert isinstance(bench.reply(first), AdapterDone)
    assert isinstance(bench.reply(second), AdapterDone)
    assert set(bench.world.names) == {"a"}
    assert bench.adapter("a").fingerprint == bench.files["e"].fingerprint
