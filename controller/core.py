"""The controller's core: one pure function from an input to actions.

What it is: the dispatch of an input, and what follows every input (queues served, deadlines). What
it is not: a process; it knows no socket, file, clock or chance. One rule: clients, replays and
tests all drive this same `handle`, which is the only writer of its `World`.
"""

import heapq
from collections.abc import Callable
from typing import Any, Final

from controller import asks, drive, engines, facts, room
from controller.actions import Action, SetTimer
from controller.invariants import check
from controller.limits import Limits, check_limits
from controller.policies import POLICIES
from controller.turn import Turn
from controller.world import Waiting, World
from messages import events, records, reports
from messages.errors import ErrorCode


class Controller:
    """The adapters' residency, decided."""

    def __init__(self, limits: Limits, policy: str = "lru", *, checked: bool = False) -> None:
        """`checked` verifies every invariant after every input; for tests, and when in doubt."""
        self.limits = check_limits(limits)
        self.policy_name = policy
        self.world = World(limits)
        room.set_bounds(self.world, limits)
        self.policy = POLICIES[policy]
        self._checked = checked

    def handle(self, message: records.Input, time_ns: int) -> list[Action]:
        """Take one input at one time (nanoseconds, never going back); say what is to be done."""
        world = self.world
        world.seq += 1
        world.time_ns = time_ns
        turn = Turn(world, self.limits, self.policy, [])
        _HANDLERS[type(message)](turn, message)
        if world.queued:
            drive.serve_queues(turn)
        if world.deadlines and world.deadlines[0][0] != world.timer_ns:
            world.timer_ns = world.deadlines[0][0]
            turn.actions.append(SetTimer(world.timer_ns))
        if self._checked:
            check(world, self.limits)
        return turn.actions

    def reconfigure(self, limits: Limits, policy: str) -> list[Action]:
        """Go on under other limits; the engine that the old ones bounded counts as lost."""
        self.limits = check_limits(limits)
        self.policy_name, self.policy = policy, POLICIES[policy]
        turn = Turn(self.world, self.limits, self.policy, [])
        if self.world.engine is not None:
            gone = records.EngineLost(self.world.engine.engine_id, "the limits were changed")
            engines.on_lost(turn, gone)
        self.world.resize(limits.slots_max)
        room.set_bounds(self.world, limits)
        return turn.actions

    def digest(self) -> str:
        """The world's digest."""
        return self.world.digest()


def _on_timer(turn: Turn, _message: records.TimerFired) -> None:
    world = turn.world
    world.timer_ns = 0
    while world.deadlines and world.deadlines[0][0] <= world.time_ns:
        entry = heapq.heappop(world.deadlines)
        if world.is_live(entry):
            _, kind, key = entry
            _EXPIRE[kind](turn, key)


def _expire_operation(turn: Turn, op: int) -> None:
    """Its clients are told; the operation stays open, for a late report is still the truth."""
    operation = turn.world.operations[op]
    operation.overdue = True
    turn.world.operations.touch(op)
    adapter = turn.world.adapters[operation.adapter_id]
    turn.publish(events.OperationOverdue(op, operation.kind, adapter.name))
    late = (
        f"the engine did not report on {operation.kind} of adapter {adapter.name!r} within "
        f"{turn.limits.operation_timeout_ms} ms"
    )
    drive.refuse_waiters(turn, adapter, ErrorCode.ENGINE_GONE, late)


def _expire_request(turn: Turn, request_id: str) -> None:
    waiting = turn.world.waiting[request_id]
    if waiting.kind == "generate" and waiting.op:
        waiting.told = True
        turn.world.waiting.touch(request_id)
        late = "the generation did not end in time and was stopped; ask for fewer tokens"
        turn.refuse(request_id, ErrorCode.ENGINE_GONE, late)
        drive.stop_generation(turn, waiting)
        return
    code, message = _why_late(turn, waiting)
    drive.refuse_request(turn, request_id, code, message)


def _why_late(turn: Turn, waiting: Waiting) -> tuple[ErrorCode, str]:
    world = turn.world
    adapters = [world.adapters[a] for a in waiting.adapters if a in world.adapters]
    names = ", ".join(repr(adapter.name) for adapter in adapters) or "the base model"
    if world.engine is None:
        return ErrorCode.ENGINE_GONE, f"no engine came in time for {names}"
    if any(adapter.op for adapter in adapters):
        return ErrorCode.ENGINE_GONE, f"the engine did not bring {names} there in time"
    leased = sum(1 for a in world.recency["gpu-slot"] if world.adapters[a].leases)
    return (
        ErrorCode.NO_ROOM,
        f"no room came free in time for {names}: {leased} adapters in slots are leased and "
        f"{len(world.held)} are held; wait longer, or raise slots_max",
    )


_EXPIRE: Final[dict[str, Callable[[Turn, Any], None]]] = {
    "op": _expire_operation,
    "request": _expire_request,
}

_HANDLERS: Final[dict[type, Callable[[Turn, Any], None]]] = {
    **dict.fromkeys(asks.REQUESTS, asks.on_request),
    **dict.fromkeys(facts.REPORTS, facts.on_report),
    reports.EngineInventory: engines.on_inventory,
    records.EngineLost: engines.on_lost,
    records.PayloadLost: engines.on_payload_lost,
    records.ControllerStarted: engines.on_started,
    records.TimerFired: _on_timer,
}
