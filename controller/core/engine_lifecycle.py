"""The engine's coming, staying and going.

What it is: what its loss takes away, what its inventory corrects, and the goals driven again when
one is back. What it is not: how its death is seen (the shell does that). One rule: an adapter that
the inventory agrees with is not touched.
"""

from controller.core import pending_requests, report_handlers
from controller.core.actions import Command
from controller.core.context import Turn
from controller.core.inventory import contradiction, correct
from controller.core.world import Engine, Operation
from messages import commands, events, records, reports
from messages.errors import ErrorCode
from messages.ids import OpId, RequestId


def on_started(turn: Turn, message: records.ControllerStarted) -> None:
    """A new life of the controller: its engine, if it is still there, says first what it holds."""
    world = turn.world
    world.epoch = message.epoch
    world.timer_ns = 0
    _be_unready(turn)
    turn.publish(events.ControllerResumed(message.epoch))


def _be_unready(turn: Turn) -> None:
    turn.world.ready = False
    turn.world.foreign.clear()
    turn.world.queues.clear()


def on_lost(turn: Turn, message: records.EngineLost) -> None:
    """The engine is gone: its adapters are evicted, and everybody who waited for it is told."""
    engine = turn.world.engine
    if engine is not None and engine.engine_id == message.engine_id:
        lose(turn, message.reason)


def lose(turn: Turn, reason: str) -> None:
    """Go on without the attached engine."""
    world = turn.world
    if world.engine is None:
        return
    turn.publish(events.EngineDetached(world.engine.engine_id, reason))
    _be_unready(turn)
    world.engine = None
    world.set_bounds(turn.limits)
    operations = list(world.operations.items())
    for op, operation in operations:
        del world.operations[op]
        report_handlers.abandon(turn, operation)
    for order in world.recency.values():
        for adapter_id in tuple(order):
            report_handlers.vanish(turn, world.adapters[adapter_id])
    why = f"the engine is gone ({reason}); try again when it is back"
    for request_id, waiting in tuple(world.waiting.items()):
        # Whoever wanted an adapter down has what he wanted.
        if waiting.kind not in pending_requests.DOWNWARD:
            pending_requests.refuse_request(turn, request_id, ErrorCode.ENGINE_GONE, why)


def on_inventory(turn: Turn, inventory: reports.EngineInventory) -> None:
    """An engine says who it is and what it holds: attach a new one, or correct the differences."""
    world = turn.world
    if world.engine is not None and world.engine.engine_id != inventory.engine_id:
        lose(turn, f"engine {inventory.engine_id} took its place")
    wrong = contradiction(world, inventory)
    if wrong is not None:
        turn.publish(events.ReportRefused(inventory.last_op, wrong))
        lose(turn, wrong)
        return
    if world.engine is None:
        _attach(turn, inventory)
    _number_on(turn, inventory)
    unknown = [op for op in inventory.running if op not in world.operations]
    if unknown:
        _end_unknown(turn, unknown)
        return
    world.ready = True
    open_operations = list(world.operations.items())
    _abandon_lost(turn, inventory, open_operations)
    correct(turn, inventory)
    for op, operation in open_operations:
        if op > inventory.last_op:
            # It never got there; the engine takes each number once, should it still arrive.
            turn.actions.append(Command(operation.command))
    _repeat_stops(turn)
    _drive_all_goals(turn)


def _attach(turn: Turn, inventory: reports.EngineInventory) -> None:
    turn.world.engine = Engine(
        inventory.engine_id,
        inventory.pid,
        inventory.model,
        inventory.slots_max,
        inventory.device_bytes_max,
    )
    turn.world.set_bounds(turn.limits)
    turn.publish(events.EngineAttached(inventory.engine_id, inventory.model))


def _number_on(turn: Turn, inventory: reports.EngineInventory) -> None:
    """Give no number a second time that an engine saw, though the log's tail may be lost."""
    world = turn.world
    if inventory.last_op >= world.next_op:
        # Every write of a slot is an operation, so no generation is beyond the last of them.
        world.next_generation = max(world.next_generation, inventory.last_op + 1)
        world.next_op = inventory.last_op + 1
    for entry in inventory.adapters:
        world.next_adapter_id = max(world.next_adapter_id, entry.adapter_id + 1)
        world.next_generation = max(world.next_generation, entry.generation + 1)


def _end_unknown(turn: Turn, unknown: list[OpId]) -> None:
    """What the engine will hold is known when these have ended; it is asked again then."""
    _be_unready(turn)
    for op in unknown:
        turn.world.foreign[op] = None
        turn.actions.append(Command(commands.StopGeneration(turn.next_op(), op)))


def _abandon_lost(
    turn: Turn,
    inventory: reports.EngineInventory,
    operations: list[tuple[OpId, Operation]],
) -> None:
    # Reports that were not acknowledged came before the inventory. What the engine has seen past,
    # does not run and has not reported was lost on its way; it is begun anew under a new number.
    running = set(inventory.running)
    for op, operation in operations:
        if op <= inventory.last_op and op not in running:
            del turn.world.operations[op]
            report_handlers.abandon(turn, operation)
            if operation.request_id:
                _serve_anew(turn, operation.request_id)


def _serve_anew(turn: Turn, request_id: RequestId) -> None:
    """A request whose operation was lost waits for its adapters once more, unless it is over."""
    world = turn.world
    waiting = world.waiting[request_id]
    if waiting.told or waiting.stopping:
        pending_requests.end_request(
            turn, request_id, pending_requests.cancelled(turn, request_id, waiting)
        )
    elif any(world.adapters[adapter_id].retired for adapter_id in waiting.adapters):
        gone = "the adapter's version that it had begun with was replaced; ask again"
        pending_requests.refuse_request(turn, request_id, ErrorCode.ENGINE_GONE, gone)
    elif waiting.kind == "batch":
        world.batches[request_id] = None
        world.batches.move_to_end(request_id, last=False)
    else:
        for adapter_id in waiting.adapters:
            pending_requests.wait_for(turn, world.adapters[adapter_id], request_id, waiting.since)


def _repeat_stops(turn: Turn) -> None:
    for waiting in turn.world.waiting.values():
        if waiting.stopping and waiting.op:
            stop = commands.StopGeneration(turn.next_op(), waiting.op)
            turn.actions.append(Command(stop))


def _drive_all_goals(turn: Turn) -> None:
    world = turn.world
    for request_id, waiting in tuple(world.waiting.items()):
        if waiting.kind in pending_requests.INFERENCE and not waiting.adapters and not waiting.op:
            pending_requests.start_inference(turn, request_id, waiting)
        turn.due.update(dict.fromkeys(waiting.adapters))
    adapters = [world.adapters[a] for a in {**world.striving, **world.leaving}]
    # Those that somebody holds first, then the most recently used.
    for adapter in sorted(adapters, key=lambda a: (not a.held, -a.touched)):
        turn.due[adapter.id] = None


def on_payload_lost(turn: Turn, message: records.PayloadLost) -> None:
    """What a request brought died with the last controller: forget it, it comes again."""
    waiting = turn.world.waiting.get(message.request_id)
    if waiting is None or waiting.kind not in pending_requests.INFERENCE or not waiting.op:
        return
    report_handlers.abandon(turn, turn.world.operations.pop(waiting.op))
    for adapter_id in waiting.adapters:
        # It will be counted when it comes again.
        turn.world.adapters[adapter_id].uses -= 1
    pending_requests.end_request(turn, message.request_id, None)
