"""What an engine holds, against what the log says that it holds.

What it is: the check that an inventory makes sense, and the correction of records that differ. What
it is not: the operations in flight (`engines`). One rule: a number means the content that the
engine has under it; a record of ours that meant something else takes another number.
"""

import heapq
from typing import Final

from controller.core import capacity, pending_requests, report_handlers
from controller.core.context import Turn
from controller.core.world import RESIDENT, Adapter, Slot, World
from controller.states import spec
from controller.states.table import HEIGHT
from messages import events
from messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED, UNREGISTERED, AdapterId
from messages.reports import EngineInventory, InventoryAdapter

_CLIMB: Final = {
    CPU_CACHED: (spec.WEIGHTS_LOADED,),
    PINNED: (spec.WEIGHTS_LOADED, spec.WEIGHTS_STAGED),
    GPU_SLOT: (spec.WEIGHTS_LOADED, spec.WEIGHTS_STAGED, spec.SLOT_WRITTEN),
}
"""The table's way up to each resident state."""


def contradiction(world: World, inventory: EngineInventory) -> str | None:
    """What can't be true in an inventory; None where it makes sense."""
    slots: dict[int, AdapterId] = {}
    entries: dict[AdapterId, InventoryAdapter] = {}
    for entry in inventory.adapters:
        in_slot = entry.slot != NO_SLOT
        if entry.state not in RESIDENT or in_slot != (entry.state == GPU_SLOT):
            return f"adapter {entry.adapter_id} is told to be {entry.state} in slot {entry.slot}"
        if entry.adapter_id in entries or (in_slot and entry.slot in slots):
            return f"adapter {entry.adapter_id} or slot {entry.slot} is told twice"
        if entry.slot >= inventory.slots_max:
            return f"slot {entry.slot} is told of {inventory.slots_max} slots"
        entries[entry.adapter_id] = entry
        if in_slot:
            slots[entry.slot] = entry.adapter_id
    return _missing_lease(world, inventory, entries)


def _missing_lease(
    world: World, inventory: EngineInventory, entries: dict[AdapterId, InventoryAdapter]
) -> str | None:
    running = set(inventory.running)
    for op, operation in world.operations.items():
        if not operation.request_id or (op not in running and op <= inventory.last_op):
            continue
        for adapter_id in world.waiting[operation.request_id].adapters:
            if _differs(world.adapters[adapter_id], entries.get(adapter_id)):
                return f"operation {op} needs adapter {adapter_id}, which is not where it was"
    return None


def _differs(adapter: Adapter | None, entry: InventoryAdapter | None) -> bool:
    if adapter is None or not _means(adapter, entry):
        return True
    if entry is None:
        return adapter.state in RESIDENT
    told = (entry.state, entry.slot, entry.generation)
    return told != (adapter.state, adapter.slot, adapter.generation)


def _means(adapter: Adapter, entry: InventoryAdapter | None) -> bool:
    """Whether a record and an entry of the same number speak of the same content."""
    if entry is None:
        return True
    if adapter.fingerprint:
        return (adapter.name, adapter.fingerprint) == (entry.adapter, entry.fingerprint)
    return (adapter.name, adapter.path) == (entry.adapter, entry.path)


def correct(turn: Turn, inventory: EngineInventory) -> None:
    """Make the records agree with what the engine holds."""
    world = turn.world
    entries = {entry.adapter_id: entry for entry in inventory.adapters}
    resident = [adapter_id for order in world.recency.values() for adapter_id in order]
    differing = []
    for adapter_id in dict.fromkeys((*resident, *entries)):
        adapter, entry = world.adapters.get(adapter_id), entries.get(adapter_id)
        # What is being moved is told by that operation's report.
        if (adapter is None or not adapter.op) and _differs(adapter, entry):
            differing.append(adapter_id)
    # All leave before one climbs: the slots and bytes that they take may be each other's.
    for adapter_id in differing:
        adapter = world.adapters.get(adapter_id)
        if adapter is not None and adapter.state in RESIDENT:
            report_handlers.vanish(turn, adapter)
    for adapter_id in differing:
        if adapter_id in entries:
            _climb(turn, _record_of(turn, entries[adapter_id]), entries[adapter_id])


def _record_of(turn: Turn, entry: InventoryAdapter) -> Adapter:
    """The record, or one for a stranger, which is then driven out like any old version."""
    world = turn.world
    adapter = world.adapters.get(entry.adapter_id)
    if adapter is not None and not _means(adapter, entry):
        _renumber(turn, adapter)
        adapter = None
    if adapter is None:
        adapter = Adapter(entry.adapter_id, entry.adapter, entry.path, retired=True)
        world.adapters[adapter.id] = adapter
    if not adapter.fingerprint:
        adapter.fingerprint, adapter.rank = entry.fingerprint, entry.rank
        adapter.load_bytes, adapter.blob_bytes = entry.host_bytes, entry.blob_bytes
    return adapter


def _renumber(turn: Turn, adapter: Adapter) -> None:
    """Give a record that holds nothing another number: the engine has its own for other content."""
    world = turn.world
    old, new = adapter.id, world.next_adapter_id
    world.next_adapter_id += 1
    del world.adapters[old]
    adapter.id = new
    world.adapters[new] = adapter
    if world.names.get(adapter.name) == old:
        world.names[adapter.name] = new
    for index in (world.leaving, world.striving, world.held):
        if old in index:
            del index[old]
            index[new] = None
    for request_id in (*adapter.waiters, *world.batches):
        waiting = world.waiting[request_id]
        waiting.adapters = tuple([new if a == old else a for a in waiting.adapters])
    for other in (adapter.predecessor, adapter.successor):
        if other in world.adapters:
            _relink(turn, world.adapters[other], old, new)
    if old in world.queues.members:
        world.queues.leave(old)
    turn.due[new] = None


def _relink(turn: Turn, other: Adapter, old: AdapterId, new: AdapterId) -> None:
    if other.predecessor == old:
        other.predecessor = new
    if other.successor == old:
        other.successor = new
    turn.touch(other)


def _climb(turn: Turn, adapter: Adapter, entry: InventoryAdapter) -> None:
    for trigger in _CLIMB[entry.state]:
        turn.move(adapter, trigger)
    capacity.enter(turn, adapter, "host")
    if entry.state != CPU_CACHED:
        capacity.pay(turn, adapter, "host", -adapter.host_bytes)
        capacity.enter(turn, adapter, "pinned")
    if entry.state == GPU_SLOT:
        _occupy(turn, adapter, entry)
    adapter.loads = max(adapter.loads, int(not adapter.retired))
    goal = UNREGISTERED if adapter.retired else adapter.goal
    if not adapter.retired and not pending_requests.is_wanted_down(turn, adapter):
        # It is there: that it should be is the better guess than that it should not.
        goal = max(goal, adapter.state, key=HEIGHT.__getitem__)
    turn.aim(adapter, goal)
    turn.due[adapter.id] = None
    report_handlers.succeed(turn, adapter)
    _tell(turn, adapter)


def _occupy(turn: Turn, adapter: Adapter, entry: InventoryAdapter) -> None:
    world = turn.world
    for index in range(len(world.slots), entry.slot + 1):
        world.slots[index] = Slot()
        heapq.heappush(world.free_slots, index)
    world.free_slots.remove(entry.slot)
    heapq.heapify(world.free_slots)
    capacity.pay(turn, adapter, "device", adapter.blob_bytes)
    world.tiers["device"].count += 1
    capacity.take_slot(turn, adapter, entry.slot, entry.generation)


def _tell(turn: Turn, adapter: Adapter) -> None:
    report_handlers.tell(turn, adapter, events.AdapterCached(adapter.name))
    if adapter.state != CPU_CACHED:
        report_handlers.tell(turn, adapter, events.AdapterPinned(adapter.name))
    if adapter.state == GPU_SLOT:
        place = (adapter.slot, adapter.generation)
        report_handlers.tell(turn, adapter, events.AdapterActivated(adapter.name, *place))
