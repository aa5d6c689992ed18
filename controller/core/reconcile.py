"""The reconcile loop: moves adapters from their state towards their goal.

An adapter has at most one operation of its own in flight, and only that operation's report changes
its state.
"""

from collections.abc import Callable
from typing import Final

from loradock.controller.core import capacity, leases, pending_requests
from loradock.controller.core.context import NANOS_PER_MS, Context
from loradock.controller.core.tables.tier_queues import TierName
from loradock.controller.core.world import NO_PRIORITY, PREFETCH_PRIORITY, Adapter
from loradock.controller.states.machine import next_state
from loradock.controller.states.table import ADAPTER_REMOVED, RESIDENCY_LEVEL
from loradock.messages import commands, events
from loradock.messages.errors import MEANINGS, ErrorCode
from loradock.messages.ids import (
    CPU_CACHED,
    EVICTED,
    GPU_SLOT,
    PINNED,
    UNREGISTERED,
    AdapterState,
)


def reconcile(context: Context) -> None:
    """Reconcile dirty adapters, batches and queues until nothing more can be done."""
    world, adapters = context.world, context.world.adapters
    while context.dirty_adapters or (world.batches and not world.current_batch):
        if world.batches:
            leases.start_next_batch(context)
        dirty_adapters = tuple(context.dirty_adapters)
        context.dirty_adapters.clear()
        for adapter_id in dirty_adapters:
            adapter = adapters.get(adapter_id)
            if adapter is not None:
                reconcile_adapter(context, adapter)
        if world.queues.members and world.engine_ready and not context.dirty_adapters:
            _admit_queued(context)


def reconcile_adapter(context: Context, adapter: Adapter) -> None:
    """Serve the requests that the adapter satisfies, set its goal for the others, and move it."""
    leases.serve_waiters(context, adapter)
    if adapter.op:
        return
    if adapter.waiters and _owes_slot(context, adapter):
        # A lower goal is pursued when these requests have ended, as running ones.
        if adapter.state != GPU_SLOT:
            context.set_goal(adapter, GPU_SLOT)
    elif adapter.waiters:
        _set_goal_for_waiters(context, adapter)
    elif adapter.goal != adapter.state:
        _drop_unwanted_goal(context, adapter)
    if adapter.goal != adapter.state or adapter.state == UNREGISTERED:
        take_next_step(context, adapter)


def _set_goal_for_waiters(context: Context, adapter: Adapter) -> None:
    goal: AdapterState = adapter.goal
    lowest: AdapterState | None = None
    for request_id in adapter.waiters:
        pending = context.world.pending_requests[request_id]
        target = pending.target
        if pending.stopping:
            # Suspended and ordered to end, for which it needs no slot.
            continue
        if pending.kind in pending_requests.DOWNWARD:
            if lowest is None or RESIDENCY_LEVEL[target] < RESIDENCY_LEVEL[lowest]:
                lowest = target
        elif RESIDENCY_LEVEL[target] > RESIDENCY_LEVEL[goal]:
            goal = target
    if lowest is not None:
        goal = lowest
    elif adapter.id in context.world.demoting:
        # It reaches its lower goal first and is promoted for these requests afterwards.
        return
    if goal != adapter.goal:
        context.set_goal(adapter, goal)


def _owes_slot(context: Context, adapter: Adapter) -> bool:
    """Whether requests that came before a lower goal need the adapter in a slot."""
    is_suspended = adapter.state != GPU_SLOT and pending_requests.will_resume(context, adapter)
    return is_suspended or pending_requests.awaits_first_slot(context, adapter)


def _drop_unwanted_goal(context: Context, adapter: Adapter) -> None:
    """Drop a goal that no request waits for where it would evict others.

    An adapter that was never loaded is removed.
    """
    world = context.world
    if adapter.state == UNREGISTERED:
        if not adapter.prefetched:
            context.set_goal(adapter, UNREGISTERED)
    elif adapter.id in world.queues.members and adapter.priority == NO_PRIORITY:
        _release_goal(context, adapter)
    elif adapter.backing_off and not adapter.held and adapter.id in world.promoting:
        context.set_goal(adapter, adapter.state)


def _release_goal(context: Context, adapter: Adapter) -> None:
    """Drop the goal of an adapter without room or priority; a held one is tried again later."""
    if adapter.held:
        start_backoff(context, adapter)
    else:
        context.set_goal(adapter, _goal_without_requests(adapter))
        context.dirty_adapters[adapter.id] = None


def _goal_without_requests(adapter: Adapter) -> AdapterState:
    """Return where an adapter stays when a request for more is refused: nothing is loaded for it.

    That is the state that requests were granted, or its own if that is lower.
    """
    state: AdapterState = min(adapter.state, adapter.kept, key=RESIDENCY_LEVEL.__getitem__)
    # Its name must not pass to a version that is not loaded yet.
    return EVICTED if adapter.successor and state != adapter.state else state


def take_next_step(context: Context, adapter: Adapter) -> None:
    """Take the step towards the goal of an adapter that has no operation in flight."""
    step = NEXT_STEP[adapter.state, adapter.goal]
    if step is forget or (context.world.engine_ready and not adapter.backing_off):
        step(context, adapter)


def stay(_context: Context, _adapter: Adapter) -> None:
    """Do nothing: the adapter is in its goal state."""


def load(context: Context, adapter: Adapter) -> None:
    """Load the weights; an adapter without a fingerprint is checked first.

    Its sizes are then known before room is made, and no adapter is evicted for an invalid one.
    """
    if adapter.fingerprint:
        if not _refuse_unreachable(context, adapter):
            _request_room(context, adapter, "host")
    else:
        op = context.next_op()
        context.issue(commands.CheckAdapter(op, adapter.id, adapter.name, adapter.path), adapter)


def stage(context: Context, adapter: Adapter) -> None:
    """Stage the weights into pinned memory."""
    _request_room(context, adapter, "pinned")


def write(context: Context, adapter: Adapter) -> None:
    """Write the staged weights into a slot."""
    _request_room(context, adapter, "device")


def reset(context: Context, adapter: Adapter) -> None:
    """Reset the adapter's slot, unless it is leased: the end of its last lease resets it then."""
    if not adapter.leases:
        is_suspended = pending_requests.has_suspended(context, adapter)
        command = commands.PreemptSlot if is_suspended else commands.ResetSlot
        context.issue(command(context.next_op(), adapter.slot, adapter.generation), adapter)


def unstage(context: Context, adapter: Adapter) -> None:
    """Return the weights to pageable memory, or drop them where they don't fit there."""
    if not capacity.has_pageable_room(context, adapter):
        context.set_goal(adapter, EVICTED)
        drop(context, adapter)
        return
    capacity.charge(context, adapter, "host")
    context.issue(commands.UnstageWeights(context.next_op(), adapter.id), adapter)


def drop(context: Context, adapter: Adapter) -> None:
    """Drop the weights from host memory."""
    context.issue(commands.DropWeights(context.next_op(), adapter.id), adapter)


def forget(context: Context, adapter: Adapter) -> None:
    """Delete the record of an adapter that has no weights anywhere.

    While the engine ends a suspended generation of it, the record stays.
    """
    if pending_requests.has_suspended(context, adapter):
        return
    world = context.world
    context.count_time_in_state(adapter)
    adapter.state = next_state(adapter.name, adapter.state, ADAPTER_REMOVED)
    has_successor = _unlink(context, adapter)
    _pass_on_counters(context, adapter)
    if adapter.announced and adapter.retired:
        context.publish(events.AdapterRetired(adapter.name, adapter.fingerprint))
    elif adapter.announced and not adapter.predecessor and not has_successor:
        context.publish(events.AdapterRemoved(adapter.name))
    batches = [b for b in world.batches if adapter.id in world.pending_requests[b].adapters]
    for request_id in (*adapter.waiters, *batches):
        if request_id not in world.pending_requests:
            continue
        if world.pending_requests[request_id].kind in pending_requests.DOWNWARD:
            done = pending_requests.adapter_done(request_id, adapter)
            pending_requests.end_request(context, request_id, done)
        else:
            gone = f"adapter {adapter.name!r} was removed; load it again"
            pending_requests.refuse_request(context, request_id, ErrorCode.UNKNOWN_ADAPTER, gone)


def _unlink(context: Context, adapter: Adapter) -> bool:
    """Remove the record from every index; returns whether a successor receives its name."""
    world = context.world
    if adapter.id in world.queues.members:
        context.leave_queue(adapter)
    del world.adapters[adapter.id]
    if adapter.id in world.warnings:
        del world.warnings[adapter.id]
    for index in (world.demoting, world.promoting, world.held):
        index.pop(adapter.id, None)
    predecessor = world.adapters.get(adapter.predecessor)
    if predecessor is not None:
        predecessor.successor = 0
        context.mark_changed(predecessor)
    successor = world.adapters.get(adapter.successor)
    if world.names.get(adapter.name) == adapter.id:
        del world.names[adapter.name]
        if successor is not None:
            world.names[adapter.name] = successor.id
    if successor is not None:
        successor.predecessor = 0
        context.mark_changed(successor)
    return successor is not None


def _pass_on_counters(context: Context, adapter: Adapter) -> None:
    """Add a removed version's counters to those of its name, or of all removed adapters."""
    successor = context.world.current(adapter.name)
    if successor is None:
        context.world.past_counters.add(adapter.counters)
    else:
        successor.counters.add(adapter.counters)
        context.mark_changed(successor)


NEXT_STEP: Final[dict[tuple[AdapterState, AdapterState], Callable[[Context, Adapter], None]]] = {
    (UNREGISTERED, UNREGISTERED): forget,
    (UNREGISTERED, EVICTED): forget,
    (UNREGISTERED, CPU_CACHED): load,
    (UNREGISTERED, PINNED): load,
    (UNREGISTERED, GPU_SLOT): load,
    (EVICTED, UNREGISTERED): forget,
    (EVICTED, EVICTED): stay,
    (EVICTED, CPU_CACHED): load,
    (EVICTED, PINNED): load,
    (EVICTED, GPU_SLOT): load,
    (CPU_CACHED, UNREGISTERED): drop,
    (CPU_CACHED, EVICTED): drop,
    (CPU_CACHED, CPU_CACHED): stay,
    (CPU_CACHED, PINNED): stage,
    (CPU_CACHED, GPU_SLOT): stage,
    (PINNED, UNREGISTERED): drop,
    (PINNED, EVICTED): drop,
    (PINNED, CPU_CACHED): unstage,
    (PINNED, PINNED): stay,
    (PINNED, GPU_SLOT): write,
    (GPU_SLOT, UNREGISTERED): reset,
    (GPU_SLOT, EVICTED): reset,
    (GPU_SLOT, CPU_CACHED): reset,
    (GPU_SLOT, PINNED): reset,
    (GPU_SLOT, GPU_SLOT): stay,
}
"""The step from each state towards each goal."""


def _request_room(context: Context, adapter: Adapter, tier: TierName) -> None:
    """Enter the tier if it has room; otherwise queue for it, or drop a goal without priority."""
    queues = context.world.queues
    if adapter.id in queues.members:
        return
    may_wait = adapter.priority < (PREFETCH_PRIORITY if tier == "device" else NO_PRIORITY)
    if not queues.by_tier[tier] and capacity.fits(context, adapter, tier):
        _enter(context, adapter, tier)
    elif may_wait:
        adapter.step_since_ns = context.world.time_ns
        context.mark_changed(adapter)
        queues.join(tier, adapter.id, adapter.priority)
        _refuse_impossible(context, adapter, tier)
    else:
        _release_goal(context, adapter)


def _refuse_impossible(context: Context, adapter: Adapter, tier: TierName) -> None:
    """Refuse the requests of a queued adapter where no waiting can make room for it."""
    shortage = capacity.permanent_shortage(context, adapter, tier)
    if shortage is not None:
        abandon_goal(context, adapter, ErrorCode.NO_ROOM, shortage)
    elif context.world.current_batch in adapter.waiters:
        leases.refuse_impossible_batch(context)


def _refuse_unreachable(context: Context, adapter: Adapter) -> bool:
    """Refuse the requests of an adapter before it is loaded if none of them can be granted."""
    pending = [context.world.pending_requests[request_id] for request_id in adapter.waiters]
    targets = [p.target for p in pending if p.kind not in pending_requests.DOWNWARD]
    if not targets:
        return False
    lowest = min(targets, key=RESIDENCY_LEVEL.__getitem__)
    for tier, states in capacity.STATES_HOLDING.items():
        shortage = capacity.permanent_shortage(context, adapter, tier) if lowest in states else None
        if shortage is not None:
            abandon_goal(context, adapter, ErrorCode.NO_ROOM, shortage)
            return True
    return False


def _enter(context: Context, adapter: Adapter, tier: TierName) -> None:
    capacity.enter(context, adapter, tier)
    context.issue(_entry_command(context, adapter, tier), adapter)


def _entry_command(context: Context, adapter: Adapter, tier: TierName) -> commands.Operation:
    op = context.next_op()
    if tier == "host":
        return commands.LoadWeights(op, adapter.id, adapter.name, adapter.path, adapter.fingerprint)
    if tier == "pinned":
        return commands.StageWeights(op, adapter.id)
    return commands.WriteSlot(op, adapter.id, adapter.slot, adapter.generation)


def _admit_queued(context: Context) -> None:
    """Admit the first of each queue while they fit, then make room for the next ones."""
    world = context.world
    for tier, queue in world.queues.by_tier.items():
        while queue:
            adapter = world.adapters[queue[0][1]]
            if not capacity.fits(context, adapter, tier):
                _make_room(context, tier)
                if tier == "device" and context.limits.slot_quantum_ms:
                    leases.end_turns(context)
                break
            context.leave_queue(adapter, world.adapters.get(context.departed))
            _enter(context, adapter, tier)


def _make_room(context: Context, tier: TierName) -> None:
    """Demote victims for the queued adapters, in the queue's order."""
    world = context.world
    shortage = capacity.shortage(context, tier)
    places, size_bytes = shortage.places, shortage.size_bytes
    for position, (_, adapter_id) in enumerate(world.queues.by_tier[tier]):
        requester = world.adapters[adapter_id]
        places += capacity.PLACES_PER_ADAPTER[tier]
        size_bytes += capacity.needed_bytes(requester, tier)
        while places > 0 or size_bytes > 0:
            missing = capacity.Amount(places, size_bytes)
            victim = capacity.find_victim(context, requester, tier, missing)
            if victim is None:
                if requester.priority == PREFETCH_PRIORITY:
                    _release_goal(context, requester)
                elif position == 0:
                    # Holds that began after it queued may have made it impossible.
                    _refuse_impossible(context, requester, tier)
                return
            freed = capacity.usage_of(victim, tier)
            places, size_bytes = places - freed.places, size_bytes - freed.size_bytes
            context.count(requester, "evictions_caused")
            _demote(context, victim, tier)


def _demote(context: Context, victim: Adapter, tier: TierName) -> None:
    """Demote an adapter by policy, as far as leaving the tier requires."""
    context.count(victim, "evictions")
    context.set_goal(victim, capacity.demotion_goal(context, victim, tier))
    take_next_step(context, victim)


def abandon_goal(context: Context, adapter: Adapter, code: ErrorCode, message: str) -> None:
    """Refuse the requests that wanted the adapter higher, and undo what was done for them alone.

    A held adapter keeps its goal and is tried again after a backoff, and so is one with suspended
    generations for which there may be room later.
    """
    resumes = MEANINGS[code].retryable and pending_requests.will_resume(context, adapter)
    is_above = RESIDENCY_LEVEL[adapter.goal] > RESIDENCY_LEVEL[adapter.state]
    if is_above and (adapter.held or resumes):
        start_backoff(context, adapter)
    else:
        context.set_goal(adapter, _goal_without_requests(adapter))
    pending_requests.refuse_waiters(
        context, adapter, code, message, downward=False, spares=lambda one: resumes and bool(one.op)
    )
    context.dirty_adapters[adapter.id] = None


def start_backoff(context: Context, adapter: Adapter) -> None:
    """Leave the adapter unmoved for `rest_ms`: the step that failed would fail again now."""
    world = context.world
    adapter.backing_off = adapter.failed = True
    adapter.retry_ns = world.time_ns + context.limits.rest_ms * NANOS_PER_MS
    if adapter.id in world.queues.members:
        context.leave_queue(adapter)
    world.add_deadline(adapter.retry_ns, "retry", adapter.id)
    context.mark_changed(adapter)
