"""Comparison of the engine's inventory with the records, and their correction.

An adapter id means the content that the engine has under it. A record that used the id for other
content receives another id.
"""

import heapq
from collections.abc import Iterator
from typing import Final

from loradock.controller.core import capacity, leases, pending_requests
from loradock.controller.core.context import Context
from loradock.controller.core.limits import Limits
from loradock.controller.core.report_handlers import mark_lost, promote_version, publish_if_current
from loradock.controller.core.world import RESIDENT, Adapter, Operation, Slot, World
from loradock.controller.states.table import (
    RESIDENCY_LEVEL,
    SLOT_WRITTEN,
    WEIGHTS_LOADED,
    WEIGHTS_STAGED,
)
from loradock.messages import events
from loradock.messages.ids import (
    CPU_CACHED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    UNREGISTERED,
    AdapterId,
    OpId,
)
from loradock.messages.reports import EngineInventory, InventoryAdapter

_TRANSITIONS_TO: Final = {
    CPU_CACHED: (WEIGHTS_LOADED,),
    PINNED: (WEIGHTS_LOADED, WEIGHTS_STAGED),
    GPU_SLOT: (WEIGHTS_LOADED, WEIGHTS_STAGED, SLOT_WRITTEN),
}
"""The inputs that lead from an adapter without weights to each resident state."""


PID_MAX: Final = 1 << 22
"""Bound of Linux; 0 is an engine in the same process."""

SLOTS_MAX: Final = 65_536
RUNNING_MAX: Final = 65_536
TEXT_LENGTH_MAX: Final = 256
SIZE_BYTES_MAX: Final = 1 << 53
"""Bound on the bytes of all adapters together, as read and as packed."""

NUMBERS_LOST_MAX: Final = 1 << 40
"""Bound on how far an engine's numbers may be ahead of the log, whose tail may be lost."""


def contradiction(world: World, limits: Limits, inventory: EngineInventory) -> str | None:
    """Return what contradicts the log or itself in an inventory; None where nothing does.

    Refusals quote the text, so another wording needs another `RULES` number.
    """
    return (
        _unbounded(world, limits, inventory)
        or _contradicts_itself(inventory)
        or _taken_slot(world, inventory)
        or _missing_lease(world, limits, inventory)
    )


def _unbounded(world: World, limits: Limits, inventory: EngineInventory) -> str | None:
    """Return the first number or text that is out of its bounds."""
    numbers = [
        ("pid", inventory.pid, 0, PID_MAX),
        ("slots_max", inventory.slots_max, 1, SLOTS_MAX),
        ("last_op", inventory.last_op, 0, world.next_op + NUMBERS_LOST_MAX),
        ("operations", len(inventory.running), 0, RUNNING_MAX),
        ("suspended operations", len(inventory.suspended), 0, len(inventory.running)),
        ("adapters", len(inventory.adapters), 0, limits.known_adapters_max),
        ("length of a name", max(map(len, _texts(inventory))), 0, TEXT_LENGTH_MAX),
        ("bytes", sum(a.host_bytes + a.blob_bytes for a in inventory.adapters), 0, SIZE_BYTES_MAX),
        *(("operation", op, 1, inventory.last_op) for op in inventory.running),
    ]
    for entry in inventory.adapters:
        newest_id = world.next_adapter_id + NUMBERS_LOST_MAX
        newest_generation = world.next_generation + NUMBERS_LOST_MAX
        in_slot = entry.slot != NO_SLOT
        numbers.append(("adapter id", entry.adapter_id, 1, newest_id))
        numbers.append(("generation", entry.generation, int(in_slot), newest_generation))
        numbers.append(("rank", entry.rank, 0, SIZE_BYTES_MAX))
    for name, number, least, most in numbers:
        if not least <= number <= most:
            return f"{name} {number} is reported, {least} to {most} are allowed"
    return None


def _texts(inventory: EngineInventory) -> Iterator[str]:
    yield from (inventory.engine_id, inventory.model)
    yield from (entry.fingerprint for entry in inventory.adapters)


def _contradicts_itself(inventory: EngineInventory) -> str | None:
    slots: set[int] = set()
    known: set[AdapterId] = set()
    for entry in inventory.adapters:
        in_slot = entry.slot != NO_SLOT
        if entry.state not in RESIDENT or in_slot != (entry.state == GPU_SLOT):
            return (
                f"adapter {entry.adapter_id} is reported to be {entry.state} in slot {entry.slot}"
            )
        if entry.adapter_id in known or (in_slot and entry.slot in slots):
            return f"adapter {entry.adapter_id} or slot {entry.slot} is reported twice"
        if entry.slot >= inventory.slots_max:
            return f"slot {entry.slot} is reported of {inventory.slots_max} slots"
        known.add(entry.adapter_id)
        if in_slot:
            slots.add(entry.slot)
    return None


def surviving(world: World, inventory: EngineInventory) -> Iterator[tuple[OpId, Operation]]:
    """Yield the operations that the engine runs, or has not received yet."""
    running = set(inventory.running)
    for op, operation in world.operations.items():
        if op in running or op > inventory.last_op:
            yield op, operation


def _taken_slot(world: World, inventory: EngineInventory) -> str | None:
    """Return the slot of one adapter that an operation has reserved for another, if there is one.

    An adapter in motion keeps its slot also where the inventory does not report it there.
    """
    moving = {operation.adapter_id for _, operation in surviving(world, inventory)} - {0}
    reserved = {world.adapters[a].slot: a for a in moving if world.adapters[a].slot != NO_SLOT}
    for entry in inventory.adapters:
        if reserved.get(entry.slot, entry.adapter_id) != entry.adapter_id:
            owner = reserved[entry.slot]
            return (
                f"adapter {entry.adapter_id} is reported in slot {entry.slot}, which {owner} uses"
            )
    return None


def _missing_lease(world: World, limits: Limits, inventory: EngineInventory) -> str | None:
    entries = {entry.adapter_id: entry for entry in inventory.adapters}
    for op, operation in surviving(world, inventory):
        if not operation.request_id:
            continue
        for adapter_id in world.pending_requests[operation.request_id].adapters:
            adapter, entry = world.adapters[adapter_id], entries.get(adapter_id)
            if not _differs(adapter, entry):
                continue
            is_suspended = operation.request_id in adapter.waiters
            follows = limits.slot_quantum_ms > 0 and (
                op in inventory.suspended or (entry is not None and entry.state == GPU_SLOT)
            )
            if not (_is_same_content(adapter, entry) and (is_suspended or follows)):
                return f"operation {op} needs adapter {adapter_id}, which is not where it was"
    return None


def _differs(adapter: Adapter | None, entry: InventoryAdapter | None) -> bool:
    if adapter is None or not _is_same_content(adapter, entry):
        return True
    if entry is None:
        return adapter.state in RESIDENT
    reported = (entry.state, entry.slot, entry.generation)
    return reported != (adapter.state, adapter.slot, adapter.generation)


def _is_same_content(adapter: Adapter, entry: InventoryAdapter | None) -> bool:
    """Whether a record and an entry of one id mean the same content; true without an entry."""
    if entry is None:
        return True
    if adapter.fingerprint:
        return (adapter.name, adapter.fingerprint) == (entry.adapter, entry.fingerprint)
    return (adapter.name, adapter.path) == (entry.adapter, entry.path)


def correct(context: Context, inventory: EngineInventory) -> None:
    """Change the records to the states that the inventory reports."""
    world = context.world
    entries = {entry.adapter_id: entry for entry in inventory.adapters}
    _suspend_moved(context, inventory, entries)
    resident = [adapter_id for order in world.lru_order.values() for adapter_id in order]
    differing = []
    for adapter_id in dict.fromkeys((*resident, *entries)):
        adapter, entry = world.adapters.get(adapter_id), entries.get(adapter_id)
        # The report of an operation in flight states where its adapter is.
        if (adapter is None or not adapter.op) and _differs(adapter, entry):
            differing.append(adapter_id)
    # All leave their state before one enters another, because slots and bytes may be exchanged.
    for adapter_id in differing:
        adapter = world.adapters.get(adapter_id)
        if adapter is not None and adapter.state in RESIDENT:
            mark_lost(context, adapter)
    for adapter_id in differing:
        entry = entries.get(adapter_id)
        if entry is not None:
            _replay_transitions(context, _record_of(context, entry), entry)


def _suspend_moved(
    context: Context, inventory: EngineInventory, entries: dict[AdapterId, InventoryAdapter]
) -> None:
    """Suspend the generations of leased adapters that are elsewhere: the log's tail is lost."""
    world = context.world
    for _, operation in surviving(world, inventory):
        pending = world.pending_requests.get(operation.request_id)
        for adapter_id in () if pending is None else pending.adapters:
            adapter = world.adapters[adapter_id]
            if adapter.leases and _differs(adapter, entries.get(adapter_id)):
                leases.suspend_one(context, adapter, operation.request_id, world.seq)


def _record_of(context: Context, entry: InventoryAdapter) -> Adapter:
    """Return the entry's record. An unknown adapter's is new and retired, so it is removed next."""
    world = context.world
    adapter = world.adapters.get(entry.adapter_id)
    if adapter is not None and not _is_same_content(adapter, entry):
        _renumber(context, adapter)
        adapter = None
    if adapter is None:
        adapter = Adapter(entry.adapter_id, entry.adapter, entry.path, retired=True)
        adapter.state_since_ns = world.time_ns
        world.adapters[adapter.id] = adapter
    if not adapter.fingerprint:
        adapter.fingerprint, adapter.rank = entry.fingerprint, entry.rank
        adapter.load_bytes, adapter.blob_bytes = entry.host_bytes, entry.blob_bytes
        if entry.warnings:
            world.warnings[adapter.id] = entry.warnings
    return adapter


def _renumber(context: Context, adapter: Adapter) -> None:
    """Give a record without weights another id, because the engine uses this one."""
    world = context.world
    old, new = adapter.id, world.next_adapter_id
    world.next_adapter_id += 1
    if old in world.queues.members:
        context.leave_queue(adapter)
    del world.adapters[old]
    adapter.id = new
    world.adapters[new] = adapter
    if old in world.warnings:
        world.warnings[new] = world.warnings[old]
        del world.warnings[old]
    if world.names.get(adapter.name) == old:
        world.names[adapter.name] = new
    for index in (world.demoting, world.promoting, world.held):
        if old in index:
            del index[old]
            index[new] = None
    for request_id in (*adapter.waiters, *world.batches):
        pending = world.pending_requests[request_id]
        pending.adapters = tuple([new if a == old else a for a in pending.adapters])
    for other in (adapter.predecessor, adapter.successor):
        if other in world.adapters:
            _relink(context, world.adapters[other], old, new)
    context.dirty_adapters[new] = None


def _relink(context: Context, other: Adapter, old: AdapterId, new: AdapterId) -> None:
    if other.predecessor == old:
        other.predecessor = new
    if other.successor == old:
        other.successor = new
    context.mark_changed(other)


def _replay_transitions(context: Context, adapter: Adapter, entry: InventoryAdapter) -> None:
    """Move the record up to the state that the inventory reports."""
    for trigger in _TRANSITIONS_TO[entry.state]:
        context.apply_transition(adapter, trigger)
    capacity.enter(context, adapter, "host")
    if entry.state != CPU_CACHED:
        capacity.refund(context, adapter, "host")
        capacity.enter(context, adapter, "pinned")
    if entry.state == GPU_SLOT:
        _occupy_slot(context, adapter, entry)
    adapter.announced = adapter.announced or not adapter.retired
    goal = UNREGISTERED if adapter.retired else adapter.goal
    if not adapter.retired and not pending_requests.is_wanted_down(context, adapter):
        # The state is assumed to be wanted, by inputs that were lost with the log's tail.
        goal = max(goal, adapter.state, key=RESIDENCY_LEVEL.__getitem__)
    context.set_goal(adapter, goal)
    context.keep(adapter, min(goal, adapter.state, key=RESIDENCY_LEVEL.__getitem__))
    context.dirty_adapters[adapter.id] = None
    promote_version(context, adapter)
    _publish_state(context, adapter)


def _occupy_slot(context: Context, adapter: Adapter, entry: InventoryAdapter) -> None:
    world = context.world
    for index in range(len(world.slots), entry.slot + 1):
        world.slots[index] = Slot()
        heapq.heappush(world.free_slots, index)
    world.free_slots.remove(entry.slot)
    heapq.heapify(world.free_slots)
    capacity.charge(context, adapter, "device")
    world.tiers["device"].count += 1
    capacity.assign_slot(context, adapter, entry.slot, entry.generation)


def _publish_state(context: Context, adapter: Adapter) -> None:
    publish_if_current(context, adapter, events.AdapterCached(adapter.name))
    if adapter.state != CPU_CACHED:
        publish_if_current(context, adapter, events.AdapterPinned(adapter.name))
    if adapter.state == GPU_SLOT:
        activated = events.AdapterActivated(adapter.name, adapter.slot, adapter.generation)
        publish_if_current(context, adapter, activated)
