"""Expired deadlines, and the timer for the next one.

A deadline ends the waiting of clients, and not an operation, whose late report still counts. An
operation that is not ended by its second deadline either keeps its room for ever, so the engine
counts as lost then.
"""

import heapq
from collections.abc import Callable
from typing import Any, Final

from loradock.controller.core import engine, waiting
from loradock.controller.core.actions import SendCommand
from loradock.controller.core.context import Context
from loradock.controller.core.world import Operation, PendingRequest
from loradock.messages import commands, events, records
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import AdapterId, OpId, RequestId

# Refusals are part of the digest: another wording needs another `RULES` number.
_TOO_SLOW: Final = {
    "generate": "the generation did not end in time and is stopped; ask for fewer tokens",
    "embed": "the embedding did not end in time and is stopped; send fewer inputs",
    "classify": "the classification did not end in time and is stopped; send fewer inputs",
}


def on_timer(context: Context, _message: records.TimerFired) -> None:
    """Expire every deadline that has passed."""
    world = context.world
    world.timer_ns = 0
    while world.deadlines and world.deadlines[0][0] <= world.time_ns:
        deadline = heapq.heappop(world.deadlines)
        if world.is_live(deadline):
            _, kind, key = deadline
            _EXPIRE[kind](context, key)


def set_timer(context: Context) -> None:
    """Set the timer to the next live deadline, if there is one."""
    world = context.world
    while world.deadlines and not world.is_live(world.deadlines[0]):
        heapq.heappop(world.deadlines)
    if world.deadlines:
        world.timer_ns = world.deadlines[0][0]


def _expire_operation(context: Context, op: OpId) -> None:
    """Refuse the requests that wait for an operation, which stays open until the next deadline.

    The inventory shows whether the engine still runs it.
    """
    operation = context.world.operations[op]
    if operation.overdue:
        engine.abandon(context, _overdue_reason(context, op, operation))
        return
    operation.overdue = True
    name = _adapter_name(context, operation)
    context.publish(events.OperationOverdue(op, operation.kind, name))
    if operation.adapter_id:
        _refuse_waiters(context, operation)
    context.bound_operation(op)
    context.actions.append(SendCommand(commands.RequestInventory(0)))


def _adapter_name(context: Context, operation: Operation) -> str:
    """Return the name of the adapter that an operation is of; empty for the base model."""
    world = context.world
    adapters: tuple[AdapterId, ...] = (operation.adapter_id,)
    if operation.request_id:
        adapters = world.pending_requests[operation.request_id].adapters
    return world.adapters[adapters[0]].name if adapters else ""


def _overdue_reason(context: Context, op: OpId, operation: Operation) -> str:
    name, kind = _adapter_name(context, operation), operation.kind
    return (
        f"operation {op} ({kind}{f' of adapter {name!r}' if name else ''}) did not end within "
        f"twice {context.limits.operation_timeout_ms} ms"
    )


def _refuse_waiters(context: Context, operation: Operation) -> None:
    adapter = context.world.adapters[operation.adapter_id]
    late = (
        f"the engine did not report on {operation.kind} of adapter {adapter.name!r} within "
        f"{context.limits.operation_timeout_ms} ms"
    )
    for downward in (False, True):
        waiting.refuse_waiters(context, adapter, ErrorCode.ENGINE_GONE, late, downward=downward)


def _expire_request(context: Context, request_id: RequestId) -> None:
    pending = context.world.pending_requests[request_id]
    if pending.op:
        too_slow = _TOO_SLOW[pending.kind]
        waiting.refuse_request(context, request_id, ErrorCode.ENGINE_GONE, too_slow)
        waiting.stop_inference(context, pending)
        return
    waiting.refuse_request(context, request_id, *_timeout_reason(context, pending))


def _timeout_reason(context: Context, pending: PendingRequest) -> tuple[ErrorCode, str]:
    world = context.world
    adapters = [world.adapters[adapter_id] for adapter_id in pending.adapters]
    names = ", ".join(repr(adapter.name) for adapter in adapters) or "the base model"
    if pending.kind == "remove" and adapters[0].retired:
        return (
            ErrorCode.CONFLICT,
            f"adapter {names} is removed and its name is free, but requests that came before still "
            "use it; its memory is freed after them",
        )
    if not world.engine_ready:
        return ErrorCode.ENGINE_GONE, f"no engine came in time for {names}"
    if any(adapter.op for adapter in adapters):
        return ErrorCode.ENGINE_GONE, f"the engine was not done in time with {names}"
    leased = sum(1 for a in world.lru_order["gpu-slot"] if world.adapters[a].leases)
    return (
        ErrorCode.NO_ROOM,
        f"no room came free in time for {names}: {leased} adapters in slots are leased and "
        f"{len(world.held)} are held; wait longer, or raise max_loras",
    )


def _end_backoff(context: Context, adapter_id: AdapterId) -> None:
    adapter = context.world.adapters[adapter_id]
    adapter.backing_off = False
    context.mark_changed(adapter)
    context.dirty_adapters[adapter_id] = None


def _expire_unknown(context: Context, op: OpId) -> None:
    """Abandon an engine that does not end an operation which is not in the log."""
    engine.abandon(
        context,
        f"operation {op}, which is not in the log, did not end within "
        f"{context.limits.operation_timeout_ms} ms of the order to",
    )


_EXPIRE: Final[dict[str, Callable[[Context, Any], None]]] = {
    "operation": _expire_operation,
    "request": _expire_request,
    "retry": _end_backoff,
    "unknown": _expire_unknown,
}
