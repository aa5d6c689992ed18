"""The world's derived fields, computed from the others.

A world that is read from a snapshot has only what can't be computed. With these fields it decides
as the one that it was made of: every order that a decision depends on follows from an adapter's
record or a deadline that a record has.
"""

import heapq
from operator import attrgetter

from loradock.controller.core.indexes import LruOrder, TierName, TierQueues
from loradock.controller.core.limits import Limits
from loradock.controller.core.world import (
    DEADLINES_MIN,
    NO_PRIORITY,
    RESIDENT,
    Adapter,
    Deadline,
    World,
)
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.messages.ids import CPU_CACHED, EVICTED, PINNED, UNREGISTERED, AdapterState

_NEXT_TIER: dict[AdapterState, TierName] = {
    UNREGISTERED: "host",
    EVICTED: "host",
    CPU_CACHED: "pinned",
    PINNED: "device",
}
"""The tier that an adapter of each state enters next."""


def derive(world: World, limits: Limits) -> None:
    """Compute every derived field of a world anew; `limits` are those that it has decided by."""
    adapters = sorted(world.adapters.values(), key=attrgetter("id"))
    world.names = {a.name: a.id for a in adapters if not (a.retired or a.predecessor)}
    world.free_slots = sorted({*range(limits.max_loras)} - {a.slot for a in adapters})
    world.lru_order = {state: LruOrder() for state in RESIDENT}
    resident = [adapter for adapter in adapters if adapter.state in world.lru_order]
    for adapter in sorted(resident, key=attrgetter("lru_stamp")):
        world.lru_order[adapter.state].add(adapter.lru_stamp, adapter.id)
    moving = [adapter for adapter in adapters if adapter.goal != adapter.state]
    rises = [(a.id, RESIDENCY_LEVEL[a.goal] - RESIDENCY_LEVEL[a.state]) for a in moving]
    world.demoting = {adapter_id: None for adapter_id, rise in rises if rise < 0}
    world.promoting = {adapter_id: None for adapter_id, rise in rises if rise > 0}
    world.held = {adapter.id: None for adapter in adapters if adapter.held}
    pending = world.pending_requests.items()
    world.batches = {request_id: None for request_id, one in pending if one.kind == "batch"}
    world.current_batch = next(iter(world.batches), "")
    world.queues = _queues(world)
    world.deadlines = _deadlines(world)
    world.deadlines_max = 2 * len(world.deadlines) + DEADLINES_MIN
    world.timer_ns = world.deadlines[0][0] if world.deadlines else 0


def _queues(world: World) -> TierQueues:
    """Return the queues: every promoted adapter that is not in motion waits for room."""
    queues = TierQueues()
    for adapter_id in world.promoting if world.engine_ready else ():
        adapter = world.adapters[adapter_id]
        if not adapter.op and not adapter.backing_off and adapter.priority != NO_PRIORITY:
            queues.join(_NEXT_TIER[adapter.state], adapter.id, adapter.priority)
    return queues


def _deadlines(world: World) -> list[Deadline]:
    """Return the heap of the deadlines that are still live."""
    found: list[Deadline] = [
        (operation.deadline_ns, "operation", op)
        for op, operation in world.operations.items()
        if operation.deadline_ns
    ]
    found += world.request_deadlines()
    found += [(at_ns, "unknown", op) for op, at_ns in world.unknown_operations.items()]
    adapters: list[Adapter] = [a for a in world.adapters.values() if a.backing_off]
    found += [(adapter.retry_ns, "retry", adapter.id) for adapter in adapters]
    found = [entry for entry in found if world.is_live(entry)]
    heapq.heapify(found)
    return found
