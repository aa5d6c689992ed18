"""The engine's attachment, its loss, and the correction of the records by its inventory.

An adapter that agrees with the inventory is not touched. An adapter id means the content that the
engine has under it. A record that used the id for other content receives another id.
"""

import heapq
from collections.abc import Iterator
from typing import Final, cast

from loradock.controller.core import capacity, versions, waiting
from loradock.controller.core.actions import RestartEngine, SendCommand
from loradock.controller.core.context import NANOS_PER_MS, Context
from loradock.controller.core.limits import Limits
from loradock.controller.core.reports import discard_operation, mark_lost
from loradock.controller.core.world import (
    DOWNWARD,
    INFERENCE,
    RESIDENT,
    Adapter,
    AttachedEngine,
    Operation,
    World,
)
from loradock.controller.states.table import (
    RESIDENCY_LEVEL,
    SLOT_WRITTEN,
    WEIGHTS_LOADED,
    WEIGHTS_STAGED,
)
from loradock.messages import commands, events, records
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import (
    CPU_CACHED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    UNREGISTERED,
    AdapterId,
    OpId,
    RequestId,
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
"""Bound on how far an engine's numbers can be ahead of the log, whose tail can be lost."""


def on_started(context: Context, message: records.ControllerStarted) -> None:
    """Handle a start of the controller: an engine is sent nothing before its inventory."""
    world = context.world
    world.epoch, world.wall_offset_ns = message.epoch, message.wall_offset_ns
    _mark_unready(context)
    context.publish(events.ControllerResumed(message.epoch))


def _mark_unready(context: Context) -> None:
    context.world.engine_ready = False
    context.world.unknown_operations.clear()
    context.clear_queues()


def on_lost(context: Context, message: records.EngineLost) -> None:
    """Handle the loss of the attached engine; the loss of another engine changes nothing."""
    engine = context.world.engine
    if engine is not None and engine.engine_id == message.engine_id:
        lose(context, message.reason)


def lose(context: Context, reason: str) -> None:
    """Detach the engine: its adapters are evicted, and pending upward requests are refused."""
    world = context.world
    if world.engine is None:
        return
    context.publish(events.EngineDetached(world.engine.engine_id, reason))
    _mark_unready(context)
    world.engine = None
    world.set_bounds(context.limits)
    operations = list(world.operations.items())
    for op, operation in operations:
        del world.operations[op]
        discard_operation(context, operation)
    for order in world.lru_order.values():
        for adapter_id in tuple(order):
            mark_lost(context, world.adapters[adapter_id])
    why = f"the engine is gone ({reason}); try again when it is back"
    for request_id, pending in tuple(world.pending_requests.items()):
        # The loss satisfies downward requests.
        if pending.kind not in DOWNWARD:
            waiting.refuse_request(context, request_id, ErrorCode.ENGINE_GONE, why)


def abandon(context: Context, reason: str) -> None:
    """Lose an engine that does not do its work, and have its process ended."""
    # Only an attached engine has operations.
    engine = cast(AttachedEngine, context.world.engine)
    lose(context, reason)
    context.actions.append(RestartEngine(engine.engine_id, engine.pid, reason))


def on_inventory(context: Context, inventory: EngineInventory) -> None:
    """Handle an inventory: attach a new engine, then correct the records that differ from it."""
    world = context.world
    if world.engine is not None and world.engine.engine_id != inventory.engine_id:
        lose(context, f"engine {inventory.engine_id} took its place")
    problem = contradiction(context, inventory)
    if problem is not None:
        context.publish(events.ReportRefused(inventory.last_op, problem))
        lose(context, problem)
        return
    if world.engine is None:
        _attach(context, inventory)
    _advance_numbers(context, inventory)
    unknown = [op for op in inventory.running if op not in world.operations]
    if unknown:
        _stop_unknown(context, unknown)
        return
    world.unknown_operations.clear()
    world.engine_ready = True
    # Which adapters wait for room follows from the corrected states; all are reconciled below.
    context.clear_queues()
    _discard_lost(context, inventory)
    correct(context, inventory)
    _resend_stops(context)
    _reconcile_all(context)


def _attach(context: Context, inventory: EngineInventory) -> None:
    context.world.engine = AttachedEngine(
        inventory.engine_id,
        inventory.pid,
        inventory.model,
        inventory.max_loras,
        inventory.device_bytes_max,
    )
    context.world.set_bounds(context.limits)
    context.publish(events.EngineAttached(inventory.engine_id, inventory.model))


def _advance_numbers(context: Context, inventory: EngineInventory) -> None:
    """Advance all counters beyond the engine's, because the log's tail can be lost."""
    world = context.world
    if inventory.last_op >= world.next_op:
        # Every write of a slot is an operation, so no generation exceeds the last operation's id.
        world.next_generation = max(world.next_generation, inventory.last_op + 1)
        world.next_op = inventory.last_op + 1
    for entry in inventory.adapters:
        world.next_adapter_id = max(world.next_adapter_id, entry.adapter_id + 1)
        world.next_generation = max(world.next_generation, entry.generation + 1)


def _stop_unknown(context: Context, unknown: list[OpId]) -> None:
    """Stop operations that are not in the log; the inventory is requested again after them."""
    world = context.world
    deadline_ns = world.time_ns + context.limits.operation_timeout_ms * NANOS_PER_MS
    # Further inventories do not extend the time.
    deadlines = {op: world.unknown_operations.get(op, deadline_ns) for op in unknown}
    _mark_unready(context)
    for op in unknown:
        world.unknown_operations[op] = deadlines[op]
        world.add_deadline(deadlines[op], "unknown", op)
        context.actions.append(SendCommand(commands.StopGeneration(context.next_op(), op)))


def _discard_lost(context: Context, inventory: EngineInventory) -> None:
    # Unacknowledged reports arrived before the inventory, and no command was sent after its
    # request. So an operation that is open and does not run was lost. A new one replaces it.
    running = set(inventory.running)
    for op, operation in tuple(context.world.operations.items()):
        if op not in running:
            del context.world.operations[op]
            discard_operation(context, operation)
            if operation.request_id:
                _restart_request(context, operation.request_id)


def _restart_request(context: Context, request_id: RequestId) -> None:
    """Let a request whose operation was lost wait for its adapters again, unless it has ended."""
    world = context.world
    pending = world.pending_requests[request_id]
    if pending.answered or pending.stopping:
        cancelled = waiting.cancelled(context, request_id, pending)
        waiting.end_request(context, request_id, cancelled)
    elif any(_is_replaced(context, world.adapters[adapter_id]) for adapter_id in pending.adapters):
        gone = "the adapter's version that it had begun with was replaced; ask again"
        waiting.refuse_request(context, request_id, ErrorCode.ENGINE_GONE, gone)
    else:
        for adapter_id in pending.adapters:
            adapter = world.adapters[adapter_id]
            waiting.wait_for(context, adapter, request_id, pending.arrived_seq)


def _is_replaced(context: Context, adapter: Adapter) -> bool:
    """Return whether a request for the adapter would be served by another version if it was
    repeated.
    """
    return adapter.retired and adapter.name in context.world.names


def _resend_stops(context: Context) -> None:
    for pending in context.world.pending_requests.values():
        if pending.stopping and pending.op:
            stop = commands.StopGeneration(context.next_op(), pending.op)
            context.actions.append(SendCommand(stop))


def _reconcile_all(context: Context) -> None:
    world = context.world
    for request_id, pending in tuple(world.pending_requests.items()):
        if pending.kind in INFERENCE and not pending.adapters and not pending.op:
            context.ready.append((request_id, pending))
        context.dirty_adapters.update(dict.fromkeys(pending.adapters))
    adapters = [world.adapters[a] for a in {**world.promoting, **world.demoting}]
    # After the requested adapters: held adapters, then the most recently used.
    for adapter in sorted(adapters, key=lambda a: (not a.held, -a.lru_stamp, a.id)):
        context.dirty_adapters[adapter.id] = None


def on_payload_lost(context: Context, message: records.PayloadLost) -> None:
    """Drop a request whose prompt was lost with the last controller; its client sends it again."""
    pending = context.world.pending_requests.get(message.request_id)
    if pending is None or pending.kind not in INFERENCE or not pending.op:
        return
    discard_operation(context, context.world.operations.pop(pending.op))
    for adapter_id in pending.adapters:
        # The repetition counts as the use.
        adapter = context.world.adapters[adapter_id]
        context.count(adapter, "misses" if pending.missed else "hits", -1)
    waiting.end_request(context, message.request_id, None)


def contradiction(context: Context, inventory: EngineInventory) -> str | None:
    """Return what contradicts the log or itself in an inventory; None if nothing does.

    Refusals quote the text, so another wording needs another `RULES` number.
    """
    world = context.world
    return (
        _unbounded(context, inventory)
        or _contradicts_itself(inventory)
        or _taken_slot(world, inventory)
        or _missing_lease(world, context.limits, inventory)
    )


def _unbounded(context: Context, inventory: EngineInventory) -> str | None:
    """Return the first number or string that is out of its bounds."""
    world = context.world
    numbers = [
        ("pid", inventory.pid, 0, PID_MAX),
        ("max_loras", inventory.max_loras, 1, SLOTS_MAX),
        ("last_op", inventory.last_op, 0, world.next_op + NUMBERS_LOST_MAX),
        ("operations", len(inventory.running), 0, RUNNING_MAX),
        ("suspended operations", len(inventory.suspended), 0, len(inventory.running)),
        ("adapters", len(inventory.adapters), 0, context.limits.known_adapters_max),
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
        if entry.slot >= inventory.max_loras:
            return f"slot {entry.slot} is reported of {inventory.max_loras} slots"
        known.add(entry.adapter_id)
        if in_slot:
            slots.add(entry.slot)
    return None


def _running(world: World, inventory: EngineInventory) -> Iterator[tuple[OpId, Operation]]:
    """Yield the open operations that the engine runs."""
    running = set(inventory.running)
    for op, operation in world.operations.items():
        if op in running:
            yield op, operation


def _taken_slot(world: World, inventory: EngineInventory) -> str | None:
    """Return the slot of one adapter that an operation has reserved for another, if there is one.

    An adapter in motion keeps its slot even if the inventory does not report it there.
    """
    moving = {operation.adapter_id for _, operation in _running(world, inventory)} - {0}
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
    for op, operation in _running(world, inventory):
        if not operation.request_id:
            continue
        for adapter_id in world.pending_requests[operation.request_id].adapters:
            adapter, entry = world.adapters[adapter_id], entries.get(adapter_id)
            if not _differs(adapter, entry):
                continue
            is_suspended = operation.request_id in adapter.waiters
            follows = limits.turn_tokens and (
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
    """Return whether a record and an entry of one id mean the same content; true if no entry."""
    if entry is None:
        return True
    if adapter.fingerprint:
        return (adapter.name, adapter.fingerprint) == (entry.adapter, entry.fingerprint)
    return (adapter.name, adapter.path) == (entry.adapter, entry.path)


def correct(context: Context, inventory: EngineInventory) -> None:
    """Change the records to the states that the inventory reports."""
    world = context.world
    entries = {entry.adapter_id: entry for entry in inventory.adapters}
    _suspend_moved(context, entries)
    resident = [adapter_id for order in world.lru_order.values() for adapter_id in order]
    differing = []
    for adapter_id in dict.fromkeys((*resident, *entries)):
        adapter, entry = world.adapters.get(adapter_id), entries.get(adapter_id)
        # The report of an operation in flight states where its adapter is.
        if (adapter is None or not adapter.op) and _differs(adapter, entry):
            differing.append(adapter_id)
    # All leave their state before one enters another, because slots and bytes can be exchanged.
    for adapter_id in differing:
        adapter = world.adapters.get(adapter_id)
        if adapter is not None and adapter.state in RESIDENT:
            mark_lost(context, adapter)
    for adapter_id in differing:
        entry = entries.get(adapter_id)
        if entry is not None:
            _replay_transitions(context, _record_of(context, entry), entry)


def _suspend_moved(context: Context, entries: dict[AdapterId, InventoryAdapter]) -> None:
    """Suspend the generations of leased adapters that are elsewhere: the log's tail is lost."""
    world = context.world
    # Those that the engine does not run are discarded already.
    for operation in world.operations.values():
        pending = world.pending_requests.get(operation.request_id)
        for adapter_id in () if pending is None else pending.adapters:
            adapter = world.adapters[adapter_id]
            if adapter.leases and _differs(adapter, entries.get(adapter_id)):
                waiting.suspend_one(context, adapter, operation.request_id, world.seq)


def _record_of(context: Context, entry: InventoryAdapter) -> Adapter:
    """Return the entry's record. An unknown adapter's is new and retired, so it is removed next."""
    world = context.world
    adapter = world.adapters.get(entry.adapter_id)
    if adapter is not None and not _is_same_content(adapter, entry):
        versions.renumber(context, adapter)
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
    if not adapter.retired and not context.world.is_wanted_down(adapter):
        # The state is assumed to be wanted, by inputs that were lost with the log's tail.
        goal = max(goal, adapter.state, key=RESIDENCY_LEVEL.__getitem__)
    context.set_goal(adapter, goal)
    context.keep(adapter, min(goal, adapter.state, key=RESIDENCY_LEVEL.__getitem__))
    context.dirty_adapters[adapter.id] = None
    versions.promote_version(context, adapter)
    _publish_state(context, adapter)


def _occupy_slot(context: Context, adapter: Adapter, entry: InventoryAdapter) -> None:
    world = context.world
    if entry.slot < context.limits.max_loras:
        world.free_slots.remove(entry.slot)
        heapq.heapify(world.free_slots)
    capacity.charge(context, adapter, "device")
    world.tiers["device"].count += 1
    adapter.slot, adapter.generation = entry.slot, entry.generation


def _publish_state(context: Context, adapter: Adapter) -> None:
    context.publish_if_current(adapter, events.AdapterCached(adapter.name))
    if adapter.state != CPU_CACHED:
        context.publish_if_current(adapter, events.AdapterPinned(adapter.name))
    if adapter.state == GPU_SLOT:
        activated = events.AdapterActivated(adapter.name, adapter.slot, adapter.generation)
        context.publish_if_current(adapter, activated)
