"""The engine's coming, staying and going.

What it is: what its loss takes away, what its inventory corrects, and the goals driven again when
one is back. What it is not: how its death is seen (the shell does that). One rule: an adapter that
the inventory agrees with is not touched.
"""

import heapq
from typing import Final

from controller import drive, facts, room
from controller.actions import Command
from controller.states import spec
from controller.turn import Turn
from controller.world import RESIDENT, Adapter, Engine, Operation
from messages import commands, events, records, reports, requests
from messages.errors import ErrorCode
from messages.ids import CPU_CACHED, GPU_SLOT, PINNED, UNREGISTERED

_CLIMB: Final = {
    CPU_CACHED: (spec.WEIGHTS_LOADED,),
    PINNED: (spec.WEIGHTS_LOADED, spec.WEIGHTS_STAGED),
    GPU_SLOT: (spec.WEIGHTS_LOADED, spec.WEIGHTS_STAGED, spec.SLOT_WRITTEN),
}
"""The table's way up to each resident state."""


def on_lost(turn: Turn, message: records.EngineLost) -> None:
    """The engine is gone: its adapters are evicted, and everybody who waited for it is told."""
    engine = turn.world.engine
    if engine is None or engine.engine_id != message.engine_id:
        return
    turn.world.engine = None
    room.set_bounds(turn.world, turn.limits)
    turn.publish(events.EngineDetached(engine.engine_id, message.reason))
    why = f"the engine is gone ({message.reason}); try again when it is back"
    concerned = _concerned(turn)
    _end_requests_in_flight(turn, why)
    for adapter in concerned:
        _lose(turn, adapter)
    for adapter in concerned:
        _tell_waiters(turn, adapter, why)


def _concerned(turn: Turn) -> list[Adapter]:
    # Not all known adapters: those that hold something, wait for room or have an operation.
    world = turn.world
    ids = dict.fromkeys(operation.adapter_id for operation in world.operations.values())
    for index in (*world.recency.values(), *world.queues.values()):
        ids |= index
    for queue in world.queues.values():
        queue.clear()
    world.queued.clear()
    return [world.adapters[adapter_id] for adapter_id in ids if adapter_id in world.adapters]


def _end_requests_in_flight(turn: Turn, why: str) -> None:
    world = turn.world
    operations = list(world.operations.items())
    for op, _ in operations:
        del world.operations[op]
    for _, operation in operations:
        request_id = operation.request_id
        if request_id is not None and request_id in world.waiting:
            reply = requests.Refused(request_id, ErrorCode.ENGINE_GONE, why)
            if operation.kind == "StartGeneration":
                facts.end_generation(turn, operation, reply)
            else:
                drive.end_request(turn, request_id, reply)


def _lose(turn: Turn, adapter: Adapter) -> None:
    adapter.op = 0
    for tier in room.FLOOR:
        room.leave(turn, adapter, tier)
    if adapter.state in RESIDENT:
        turn.move(adapter, spec.ENGINE_LOST)
        turn.publish(events.AdapterEvicted(adapter.name, "engine-lost"))


def _tell_waiters(turn: Turn, adapter: Adapter, why: str) -> None:
    if adapter.id not in turn.world.adapters:
        return
    upward = [
        request_id
        for request_id in adapter.waiters
        if turn.world.waiting[request_id].kind not in drive.DOWNWARD
    ]
    for request_id in upward:
        if request_id in turn.world.waiting:
            drive.refuse_request(turn, request_id, ErrorCode.ENGINE_GONE, why)
    if adapter.state == UNREGISTERED:
        turn.aim(adapter, UNREGISTERED)
    drive.settle(turn, adapter)


def on_inventory(turn: Turn, inventory: reports.EngineInventory) -> None:
    """An engine says who it is and what it holds: attach a new one, or correct the differences."""
    world = turn.world
    engine = world.engine
    if engine is not None and engine.engine_id != inventory.engine_id:
        replaced = f"engine {inventory.engine_id} took its place"
        on_lost(turn, records.EngineLost(engine.engine_id, replaced))
        engine = None
    world.next_op = max(world.next_op, inventory.last_op + 1)
    if engine is None:
        _attach(turn, inventory)
    lost = _operations_never_received(turn, inventory)
    _correct_facts(turn, inventory)
    _stop_unknown_operations(turn, inventory)
    for operation in lost:
        _send_again(turn, operation)
    _drive_all_goals(turn)


def _attach(turn: Turn, inventory: reports.EngineInventory) -> None:
    turn.world.engine = Engine(
        inventory.engine_id,
        inventory.pid,
        inventory.model,
        inventory.slots_max,
        inventory.device_bytes_max,
    )
    room.set_bounds(turn.world, turn.limits)
    turn.publish(events.EngineAttached(inventory.engine_id, inventory.model))


def _operations_never_received(turn: Turn, inventory: reports.EngineInventory) -> list[Operation]:
    # Reports not acknowledged came before the inventory: what is open and not running was lost
    # on its way to the engine.
    world = turn.world
    running = set(inventory.running)
    lost = [op for op in world.operations if op not in running]
    operations = [world.operations.pop_key(op) for op in lost]
    for operation in operations:
        if operation.request_id is None:
            adapter = world.adapters[operation.adapter_id]
            adapter.op = 0
            facts.give_back(turn, adapter, operation)
            turn.touch(adapter)
    return operations


def _send_again(turn: Turn, operation: Operation) -> None:
    """A new operation takes the lost one's place; the engine takes each id only once."""
    world, request_id = turn.world, operation.request_id
    if request_id is None:
        adapter = world.adapters.get(operation.adapter_id)
        if adapter is not None:
            drive.reconsider(turn, adapter)
        return
    waiting = world.waiting[request_id]
    waiting.op = 0
    if operation.kind == "SetMapping":
        drive.confirm_batch(turn, request_id, waiting)
        return
    leased = world.adapters.get(operation.adapter_id)
    if leased is not None:
        leased.leases -= 1
    if leased is None or leased.state == GPU_SLOT:
        drive.start_generation(turn, request_id, waiting, leased)
    else:
        leased.waiters += (request_id,)
        drive.reconsider(turn, leased)


def _correct_facts(turn: Turn, inventory: reports.EngineInventory) -> None:
    world = turn.world
    entries = {entry.adapter_id: entry for entry in inventory.adapters}
    resident = [a for index in world.recency.values() for a in index]
    differing = [a for a in {**dict.fromkeys(resident), **entries} if _differs(turn, a, entries)]
    # All leave before one climbs: the slots and bytes that they take may be each other's.
    for adapter_id in differing:
        if adapter_id in world.adapters:
            _lose(turn, world.adapters[adapter_id])
    for adapter_id in differing:
        if adapter_id in entries:
            _climb(turn, _record_of(turn, entries[adapter_id]), entries[adapter_id])


def _differs(turn: Turn, adapter_id: int, entries: dict[int, reports.InventoryAdapter]) -> bool:
    adapter, entry = turn.world.adapters.get(adapter_id), entries.get(adapter_id)
    if adapter is None or entry is None:
        return True
    if adapter.op:
        return False
    told = (entry.state, entry.slot, entry.generation)
    return told != (adapter.state, adapter.slot, adapter.generation)


def _record_of(turn: Turn, entry: reports.InventoryAdapter) -> Adapter:
    """The record, or one for a stranger, which is then driven out like any old version."""
    world = turn.world
    adapter = world.adapters.get(entry.adapter_id)
    if adapter is None:
        world.next_adapter_id = max(world.next_adapter_id, entry.adapter_id + 1)
        adapter = Adapter(entry.adapter_id, entry.adapter, entry.path, retired=True)
        world.adapters[adapter.id] = adapter
    adapter.fingerprint, adapter.rank = entry.fingerprint, entry.rank
    adapter.load_bytes, adapter.blob_bytes = entry.host_bytes, entry.blob_bytes
    return adapter


def _climb(turn: Turn, adapter: Adapter, entry: reports.InventoryAdapter) -> None:
    room.enter(turn, adapter, "host")
    for trigger in _CLIMB[entry.state]:
        turn.move(adapter, trigger)
    if entry.state != CPU_CACHED:
        room.pay(turn, adapter, "host", -adapter.host_bytes)
        room.enter(turn, adapter, "pinned")
    if entry.state == GPU_SLOT:
        _occupy(turn, adapter, entry)
    turn.aim(adapter, UNREGISTERED if adapter.retired else adapter.goal)


def _occupy(turn: Turn, adapter: Adapter, entry: reports.InventoryAdapter) -> None:
    world = turn.world
    world.free_slots.remove(entry.slot)
    heapq.heapify(world.free_slots)
    room.pay(turn, adapter, "device", adapter.blob_bytes)
    world.tiers["device"].count += 1
    slot = world.slots[entry.slot]
    slot.adapter_id, slot.generation = adapter.id, max(slot.generation, entry.generation)
    world.slots.touch(entry.slot)
    adapter.slot, adapter.generation = entry.slot, entry.generation


def _stop_unknown_operations(turn: Turn, inventory: reports.EngineInventory) -> None:
    for op in inventory.running:
        if op not in turn.world.operations:
            stop = commands.StopGeneration(turn.next_op(), op)
            turn.actions.append(Command(stop))


def _drive_all_goals(turn: Turn) -> None:
    world = turn.world
    adapters = [world.adapters[a] for a in {**world.striving, **world.leaving}]
    # Those that somebody holds or waits for first, then the most recently used.
    for adapter in sorted(adapters, key=lambda a: (not a.held, not a.waiters, -a.touched)):
        drive.reconsider(turn, adapter)
    for request_id, waiting in list(world.waiting.items()):
        if waiting.kind == "generate" and not waiting.adapters and not waiting.op:
            drive.start_generation(turn, request_id, waiting, None)


def on_payload_lost(turn: Turn, message: records.PayloadLost) -> None:
    """A generation's prompt died with the last controller: forget the request, it comes again."""
    waiting = turn.world.waiting.get(message.request_id)
    if waiting is None or waiting.kind != "generate" or not waiting.op:
        return
    operation = turn.world.operations.pop_key(waiting.op)
    for adapter_id in waiting.adapters:
        # It will be counted when it comes again.
        turn.world.adapters[adapter_id].uses -= 1
    facts.end_generation(turn, operation, None)


def on_started(turn: Turn, message: records.ControllerStarted) -> None:
    """A new life of the controller."""
    turn.world.epoch = message.epoch
    turn.publish(events.ControllerResumed(message.epoch))
