"""The engine's attachment and loss.

An adapter that agrees with the engine's inventory is not touched.
"""

from loradock.controller.core import leases, pending_requests
from loradock.controller.core.actions import RestartEngine, SendCommand
from loradock.controller.core.context import NANOS_PER_MS, Context
from loradock.controller.core.inventory import contradiction, correct, surviving
from loradock.controller.core.report_handlers import discard_operation, mark_lost
from loradock.controller.core.world import Adapter, AttachedEngine, Operation
from loradock.messages import commands, events, records, reports
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import OpId, RequestId


def on_started(context: Context, message: records.ControllerStarted) -> None:
    """Handle a start of the controller: an engine is sent nothing before its inventory."""
    world = context.world
    world.epoch, world.wall_offset_ns = message.epoch, message.wall_offset_ns
    world.timer_ns = 0
    _mark_unready(context)
    context.publish(events.ControllerResumed(message.epoch))


def _mark_unready(context: Context) -> None:
    context.world.engine_ready = False
    context.world.unknown_operations.clear()
    context.clear_queues()


def on_lost(context: Context, message: records.EngineLost) -> None:
    """Handle the loss of the attached engine; that of another engine changes nothing."""
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
        if pending.kind not in pending_requests.DOWNWARD:
            pending_requests.refuse_request(context, request_id, ErrorCode.ENGINE_GONE, why)


def abandon(context: Context, reason: str) -> None:
    """Lose an engine that does not do its work, and have its process ended."""
    engine = context.world.engine
    if engine is not None:
        lose(context, reason)
        context.actions.append(RestartEngine(engine.engine_id, engine.pid, reason))


def on_inventory(context: Context, inventory: reports.EngineInventory) -> None:
    """Handle an inventory: attach a new engine, then correct the records that differ from it."""
    world = context.world
    if world.engine is not None and world.engine.engine_id != inventory.engine_id:
        lose(context, f"engine {inventory.engine_id} took its place")
    problem = contradiction(world, context.limits, inventory)
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
    world.engine_ready = True
    # Which adapters wait for room follows from the corrected states; all are reconciled below.
    context.clear_queues()
    open_operations = list(world.operations.items())
    _discard_lost(context, inventory, open_operations)
    correct(context, inventory)
    for op, operation in open_operations:
        if op > inventory.last_op:
            # The engine has not received it; if both copies arrive, it ignores the second.
            context.actions.append(SendCommand(operation.command))
    _resend_stops(context)
    _resend_resumptions(context, inventory)
    _reconcile_all(context)


def _attach(context: Context, inventory: reports.EngineInventory) -> None:
    context.world.engine = AttachedEngine(
        inventory.engine_id,
        inventory.pid,
        inventory.model,
        inventory.slots_max,
        inventory.device_bytes_max,
    )
    context.world.set_bounds(context.limits)
    context.publish(events.EngineAttached(inventory.engine_id, inventory.model))


def _advance_numbers(context: Context, inventory: reports.EngineInventory) -> None:
    """Advance all counters beyond the engine's, because the log's tail may be lost."""
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


def _discard_lost(
    context: Context,
    inventory: reports.EngineInventory,
    operations: list[tuple[OpId, Operation]],
) -> None:
    # Unacknowledged reports arrived before the inventory. So an operation that is not after the
    # engine's last one, does not run and is still open was lost in transit. A new one replaces it.
    kept = {op for op, _ in surviving(context.world, inventory)}
    for op, operation in operations:
        if op not in kept:
            del context.world.operations[op]
            discard_operation(context, operation)
            if operation.request_id:
                _restart_request(context, operation.request_id)


def _restart_request(context: Context, request_id: RequestId) -> None:
    """Let a request whose operation was lost wait for its adapters again, unless it has ended."""
    world = context.world
    pending = world.pending_requests[request_id]
    if pending.answered or pending.stopping:
        cancelled = pending_requests.cancelled(context, request_id, pending)
        pending_requests.end_request(context, request_id, cancelled)
    elif any(_is_replaced(context, world.adapters[adapter_id]) for adapter_id in pending.adapters):
        gone = "the adapter's version that it had begun with was replaced; ask again"
        pending_requests.refuse_request(context, request_id, ErrorCode.ENGINE_GONE, gone)
    elif pending.kind == "batch":
        world.batches[request_id] = None
        world.batches.move_to_end(request_id, last=False)
    else:
        for adapter_id in pending.adapters:
            adapter = world.adapters[adapter_id]
            pending_requests.wait_for(context, adapter, request_id, pending.arrived_seq)


def _is_replaced(context: Context, adapter: Adapter) -> bool:
    """Whether a request for the adapter would be served by another version if it was repeated."""
    is_known = adapter.name in context.world.names
    return adapter.retired and (is_known or context.rules == 2)


def _resend_stops(context: Context) -> None:
    for pending in context.world.pending_requests.values():
        if pending.stopping and pending.op:
            stop = commands.StopGeneration(context.next_op(), pending.op)
            context.actions.append(SendCommand(stop))


def _resend_resumptions(context: Context, inventory: reports.EngineInventory) -> None:
    world = context.world
    for op in inventory.suspended:
        operation = world.operations.get(op)
        request_id = "" if operation is None else operation.request_id
        pending = world.pending_requests.get(request_id)
        for adapter_id in () if pending is None else pending.adapters:
            adapter = world.adapters[adapter_id]
            if pending is not None and request_id not in adapter.waiters:
                leases.order_resumption(context, adapter, pending)


def _reconcile_all(context: Context) -> None:
    world = context.world
    for request_id, pending in tuple(world.pending_requests.items()):
        if pending.kind in pending_requests.INFERENCE and not pending.adapters and not pending.op:
            leases.start_inference(context, request_id, pending, None)
        context.dirty_adapters.update(dict.fromkeys(pending.adapters))
    adapters = [world.adapters[a] for a in {**world.promoting, **world.demoting}]
    # After the requested ones: held ones, then the most recently used.
    for adapter in sorted(adapters, key=lambda a: (not a.held, -a.lru_stamp, a.id)):
        context.dirty_adapters[adapter.id] = None


def on_payload_lost(context: Context, message: records.PayloadLost) -> None:
    """Drop a request whose prompt was lost with the last controller; its client sends it again."""
    pending = context.world.pending_requests.get(message.request_id)
    if pending is None or pending.kind not in pending_requests.INFERENCE or not pending.op:
        return
    discard_operation(context, context.world.operations.pop(pending.op))
    for adapter_id in pending.adapters:
        # The repetition counts as the use.
        adapter = context.world.adapters[adapter_id]
        context.count(adapter, "misses" if pending.missed else "hits", -1)
    pending_requests.end_request(context, message.request_id, None)
