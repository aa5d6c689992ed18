"""What follows when a deadline passes.

What it is: one function a kind of deadline, and the next wish for a timer. What it is not: a clock;
time is a field of the input. One rule: a deadline ends a client's waiting and never an operation,
whose late report is still the truth.
"""

import heapq
from collections.abc import Callable
from typing import Any, Final

from controller.core import pending_requests
from controller.core.actions import SetTimer
from controller.core.context import Turn
from controller.core.world import Waiting
from messages import events, records
from messages.errors import ErrorCode
from messages.ids import AdapterId, OpId, RequestId

_TOO_SLOW: Final = {
    "generate": "the generation did not end in time and is stopped; ask for fewer tokens",
    "embed": "the embedding did not end in time and is stopped; send fewer inputs",
    "classify": "the classification did not end in time and is stopped; send fewer inputs",
}


def on_timer(turn: Turn, _message: records.TimerFired) -> None:
    """Look at everything whose time has come."""
    world = turn.world
    world.timer_ns = 0
    while world.deadlines and world.deadlines[0][0] <= world.time_ns:
        entry = heapq.heappop(world.deadlines)
        if world.is_live(entry):
            _, kind, key = entry
            _EXPIRE[kind](turn, key)


def set_timer(turn: Turn) -> None:
    """Ask for the next wake-up, unless nothing is left to wait for."""
    world = turn.world
    while world.deadlines and not world.is_live(world.deadlines[0]):
        heapq.heappop(world.deadlines)
    if world.deadlines:
        world.timer_ns = world.deadlines[0][0]
        turn.actions.append(SetTimer(world.timer_ns))


def _expire_operation(turn: Turn, op: OpId) -> None:
    """Its clients are told; the operation stays open."""
    world = turn.world
    operation = world.operations[op]
    operation.overdue = True
    adapter, kind = world.adapters[operation.adapter_id], type(operation.command).__name__
    turn.publish(events.OperationOverdue(op, kind, adapter.name))
    late = (
        f"the engine did not report on {kind} of adapter {adapter.name!r} within "
        f"{turn.limits.operation_timeout_ms} ms"
    )
    for downward in (False, True):
        pending_requests.refuse_waiters(
            turn, adapter, ErrorCode.ENGINE_GONE, late, downward=downward
        )


def _expire_request(turn: Turn, request_id: RequestId) -> None:
    waiting = turn.world.waiting[request_id]
    if waiting.kind in _TOO_SLOW and waiting.op:
        pending_requests.refuse_request(
            turn, request_id, ErrorCode.ENGINE_GONE, _TOO_SLOW[waiting.kind]
        )
        pending_requests.stop_inference(turn, waiting)
    else:
        pending_requests.refuse_request(turn, request_id, *_why_late(turn, waiting))


def _why_late(turn: Turn, waiting: Waiting) -> tuple[ErrorCode, str]:
    world = turn.world
    adapters = [world.adapters[adapter_id] for adapter_id in waiting.adapters]
    names = ", ".join(repr(adapter.name) for adapter in adapters) or "the base model"
    if not world.ready:
        return ErrorCode.ENGINE_GONE, f"no engine came in time for {names}"
    if waiting.op or any(adapter.op for adapter in adapters):
        return ErrorCode.ENGINE_GONE, f"the engine was not done in time with {names}"
    leased = sum(1 for a in world.recency["gpu-slot"] if world.adapters[a].leases)
    return (
        ErrorCode.NO_ROOM,
        f"no room came free in time for {names}: {leased} adapters in slots are leased and "
        f"{len(world.held)} are held; wait longer, or raise slots_max",
    )


def _expire_rest(turn: Turn, adapter_id: AdapterId) -> None:
    adapter = turn.world.adapters[adapter_id]
    adapter.resting = False
    turn.touch(adapter)
    turn.due[adapter_id] = None


_EXPIRE: Final[dict[str, Callable[[Turn, Any], None]]] = {
    "operation": _expire_operation,
    "request": _expire_request,
    "rest": _expire_rest,
}
