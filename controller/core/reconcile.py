"""The reconcile loop: serves requests, moves adapters towards their goals, and makes room.

It alone sends operations to the engine. An adapter has at most one operation in flight, and only
that operation's report changes its state.

Adapters that want a slot take turns. An adapter that loses its slot waits since then, an adapter
that never had it since its oldest request, and the longest wait is next. While a request waits,
every other adapter has at most one turn before it, because an adapter that gets a slot serves all
its requests. With W adapters before it and S slots, neither held, it waits for at most ceil(W / S)
turns. A turn is one of tokens, which the engine counts: an adapter is ordered to leave its slot as
soon as another waits, and the order says after how many tokens.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Final

from loradock.controller.core import capacity, versions, waiting
from loradock.controller.core.actions import SendCommand
from loradock.controller.core.context import NANOS_PER_MS, Context
from loradock.controller.core.indexes import TierName
from loradock.controller.core.world import (
    DOWNWARD,
    INFERENCE,
    NO_PRIORITY,
    PREFETCH_PRIORITY,
    STATES_HOLDING,
    Adapter,
    Operation,
    PendingRequest,
)
from loradock.controller.states.machine import NEXT_STEP, next_state
from loradock.controller.states.table import ADAPTER_REMOVED, RESIDENCY_LEVEL, Step
from loradock.messages import commands, events
from loradock.messages.errors import MEANINGS, ErrorCode
from loradock.messages.ids import (
    BASE_MODEL,
    EVICTED,
    GPU_SLOT,
    NO_SLOT,
    UNREGISTERED,
    AdapterState,
    RequestId,
)
from loradock.messages.requests import BatchDone
from loradock.messages.views import Placement

FIRST_TOKEN_SHARE: Final = 4
"""A turn has one of this many parts of its tokens while a request without a token waits."""


def reconcile(context: Context) -> None:
    """Reconcile new requests, dirty adapters, batches and queues until nothing more can be done."""
    world, adapters = context.world, context.world.adapters
    if context.ready:
        _start_ready(context)
    while context.dirty_adapters or (world.batches and not world.current_batch):
        if world.batches:
            _start_next_batch(context)
        dirty_adapters = tuple(context.dirty_adapters)
        context.dirty_adapters.clear()
        for adapter_id in dirty_adapters:
            adapter = adapters.get(adapter_id)
            if adapter is not None:
                _reconcile_adapter(context, adapter)
        if world.queues.members and world.engine_ready and not context.dirty_adapters:
            _admit_queued(context)


def _start_ready(context: Context) -> None:
    """Start the new inference of the base model or of ready adapters; answer ready batches."""
    world = context.world
    for request_id, pending in context.ready:
        if pending.kind == "batch":
            _confirm_batch(context, request_id, pending)
        else:
            adapter = world.adapters[pending.adapters[0]] if pending.adapters else None
            _start_inference(context, request_id, pending, adapter)
    context.ready.clear()


def _reconcile_adapter(context: Context, adapter: Adapter) -> None:
    """Serve the requests that the adapter satisfies, set its goal for the others, and move it."""
    _serve_waiters(context, adapter)
    if adapter.op:
        return
    if adapter.waiters and _owes_slot(context, adapter):
        # A lower goal is pursued when these requests have ended, as running requests do.
        if adapter.state != GPU_SLOT:
            context.set_goal(adapter, GPU_SLOT)
    elif adapter.waiters:
        _set_goal_for_waiters(context, adapter)
    elif adapter.goal != adapter.state:
        _drop_unwanted_goal(context, adapter)
    if adapter.goal != adapter.state or adapter.state == UNREGISTERED:
        _take_next_step(context, adapter)


def _set_goal_for_waiters(context: Context, adapter: Adapter) -> None:
    goal: AdapterState = adapter.goal
    lowest: AdapterState | None = None
    for request_id in adapter.waiters:
        pending = context.world.pending_requests[request_id]
        target = pending.target
        if pending.stopping:
            # Suspended and ordered to end, for which it needs no slot.
            continue
        if pending.kind in DOWNWARD:
            if lowest is None or RESIDENCY_LEVEL[target] < RESIDENCY_LEVEL[lowest]:
                lowest = target
        elif RESIDENCY_LEVEL[target] > RESIDENCY_LEVEL[goal]:
            goal = target
    if lowest is not None:
        # A removed version stays for nobody: its name can become another version's.
        goal = UNREGISTERED if adapter.retired else lowest
    elif adapter.id in context.world.demoting:
        # It reaches its lower goal first and is promoted for these requests afterwards.
        return
    if goal != adapter.goal:
        context.set_goal(adapter, goal)


def _owes_slot(context: Context, adapter: Adapter) -> bool:
    """Return whether requests that came before a lower goal need the adapter in a slot."""
    is_suspended = adapter.state != GPU_SLOT and context.world.will_resume(adapter)
    return is_suspended or context.world.awaits_first_slot(adapter)


def _drop_unwanted_goal(context: Context, adapter: Adapter) -> None:
    """Drop a goal that no request waits for if it would evict others.

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
    """Drop the goal of an adapter without room or priority; a held adapter is tried again later."""
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


def _serve_waiters(context: Context, adapter: Adapter) -> None:
    """Serve what the adapter satisfies; before it is demoted by request, suspended ones alone.

    A retired version serves its inference; what demotes it is answered when it is forgotten.
    """
    resumes_only = context.world.has_suspended(adapter) and context.world.is_wanted_down(adapter)
    for request_id in tuple(adapter.waiters):
        pending = context.world.pending_requests[request_id]
        if adapter.retired:
            is_next = pending.kind in INFERENCE
        else:
            is_next = bool(pending.op) or not resumes_only
        if is_next and waiting.is_satisfied(adapter, pending):
            _serve(context, adapter, request_id, pending)


def _serve(
    context: Context, adapter: Adapter, request_id: RequestId, pending: PendingRequest
) -> None:
    """Answer a request that the adapter satisfies, or start its inference."""
    if pending.kind == "batch":
        _confirm_batch(context, request_id, pending)
    elif pending.kind in INFERENCE:
        if context.world.engine_ready and pending.op:
            # The engine has continued it since the slot was written.
            waiting.lease(context, adapter)
            waiting.end_suspension(context, adapter, request_id)
        elif context.world.engine_ready:
            _start_inference(context, request_id, pending, adapter)
            # Afterwards: the last request of a removed version lowers its goal.
            waiting.end_waiting(context, adapter, request_id, pending)
    else:
        waiting.end_waiting(context, adapter, request_id, pending)
        waiting.answer_granted(context, adapter, request_id, pending.kind)
        del context.world.pending_requests[request_id]


def _start_inference(
    context: Context, request_id: RequestId, pending: PendingRequest, adapter: Adapter | None
) -> None:
    """Lease a request's adapter and send the engine its generation, embedding or classifying.

    `adapter` is None for the base model.
    """
    adapter_id, slot, generation = BASE_MODEL, NO_SLOT, 0
    if adapter is not None:
        waiting.lease(context, adapter)
        adapter_id, slot, generation = adapter.id, adapter.slot, adapter.generation
    op = context.next_op()
    command: commands.StartInference
    match pending.kind:
        case "embed" | "classify" as task:
            command = commands.StartPooling(op, request_id, adapter_id, slot, generation, task)
        case _:
            command = commands.StartGeneration(op, request_id, adapter_id, slot, generation)
    _issue_for(context, request_id, pending, command)


def _start_next_batch(context: Context) -> None:
    """Move adapters for the oldest batch, unless another batch is current.

    Two batches at a time could each keep a part of the slots and wait for the other's forever.
    """
    world = context.world
    if world.current_batch or not world.batches:
        return
    request_id = world.current_batch = next(iter(world.batches))
    pending = world.pending_requests[request_id]
    for adapter_id in pending.adapters:
        waiting.wait_for(context, world.adapters[adapter_id], request_id, pending.arrived_seq)
        context.dirty_adapters[adapter_id] = None


def _confirm_batch(context: Context, request_id: RequestId, pending: PendingRequest) -> None:
    """Answer a batch if all its adapters are in slots."""
    world = context.world
    adapters = [world.adapters[adapter_id] for adapter_id in pending.adapters]
    if not world.engine_ready or not all(
        waiting.has_reached(adapter, pending.target) for adapter in adapters
    ):
        return
    for adapter in adapters:
        context.keep(adapter, GPU_SLOT)
    placements = tuple([Placement(a.name, a.slot, a.generation) for a in adapters])
    waiting.end_request(context, request_id, BatchDone(request_id, placements))


def _refuse_impossible_batch(context: Context) -> None:
    """Refuse the current batch if its adapters can never be in slots at the same time."""
    world = context.world
    pending = world.pending_requests[world.current_batch]
    adapters = tuple([world.adapters[adapter_id] for adapter_id in pending.adapters])
    shortage = capacity.permanent_shortage_of_batch(context, adapters)
    if shortage is not None:
        waiting.refuse_request(context, world.current_batch, ErrorCode.NO_ROOM, shortage)


def _end_turns(context: Context) -> None:
    """Preempt leased adapters that leave their slots for others, at the end of their turns.

    A turn begins when the slot is written, and the engine ends it.
    """
    world = context.world
    tokens, since = _turn_tokens(context), world.seq
    leaving = [world.adapters[adapter_id] for adapter_id in world.demoting]
    for adapter in sorted(leaving, key=attrgetter("state_since_ns", "generation")):
        if not adapter.leases or adapter.op or adapter.backing_off:
            continue
        if waiting.suspend(context, adapter, since):
            # Adapters that are suspended by one input have an order too: their turns'.
            since += 1
            place = (adapter.slot, adapter.generation)
            order = commands.PreemptSlot(context.next_op(), *place, tokens)
            _issue(context, order, adapter)


def _turn_tokens(context: Context) -> int:
    """Return the tokens of a turn: fewer if an adapter waits whose requests have no token yet."""
    world, tokens = context.world, context.limits.turn_tokens
    queue = world.queues.by_tier["device"]
    has_new = any(not world.has_suspended(world.adapters[adapter_id]) for _, adapter_id in queue)
    return -(-tokens // FIRST_TOKEN_SHARE) if has_new else tokens


def _take_next_step(context: Context, adapter: Adapter) -> None:
    """Take the step towards the goal of an adapter that has no operation in flight."""
    step = NEXT_STEP[adapter.state, adapter.goal]
    if step == "forget" or (context.world.engine_ready and not adapter.backing_off):
        _STEPS[step](context, adapter)


def _stay(_context: Context, _adapter: Adapter) -> None:
    """Do nothing: the adapter is in its goal state."""


def _load(context: Context, adapter: Adapter) -> None:
    """Load the weights; an adapter without a fingerprint is checked first.

    Its sizes are then known before room is made, and no adapter is evicted for an invalid one.
    """
    if adapter.fingerprint:
        if not _refuse_unreachable(context, adapter):
            _request_room(context, adapter, "host")
    else:
        op = context.next_op()
        _issue(context, commands.CheckAdapter(op, adapter.id, adapter.name, adapter.path), adapter)


def _stage(context: Context, adapter: Adapter) -> None:
    """Stage the weights into pinned memory."""
    _request_room(context, adapter, "pinned")


def _write(context: Context, adapter: Adapter) -> None:
    """Write the staged weights into a slot."""
    _request_room(context, adapter, "device")


def _reset(context: Context, adapter: Adapter) -> None:
    """Reset the adapter's slot, unless it is leased: the end of its last lease resets it then."""
    if not adapter.leases:
        is_suspended = context.world.has_suspended(adapter)
        command = commands.PreemptSlot if is_suspended else commands.ResetSlot
        _issue(context, command(context.next_op(), adapter.slot, adapter.generation), adapter)


def _unstage(context: Context, adapter: Adapter) -> None:
    """Return the weights to pageable memory, or drop them if they don't fit there."""
    if not capacity.has_pageable_room(context, adapter):
        context.set_goal(adapter, EVICTED)
        _drop(context, adapter)
        return
    capacity.charge(context, adapter, "host")
    _issue(context, commands.UnstageWeights(context.next_op(), adapter.id), adapter)


def _drop(context: Context, adapter: Adapter) -> None:
    """Drop the weights from host memory."""
    _issue(context, commands.DropWeights(context.next_op(), adapter.id), adapter)


def _forget(context: Context, adapter: Adapter) -> None:
    """Delete the record of an adapter that has no weights anywhere.

    While the engine ends a suspended generation of it, the record stays.
    """
    if context.world.has_suspended(adapter):
        return
    world = context.world
    if adapter.id in world.queues.members:
        # Its prefetch waited for room when it was evicted.
        context.leave_queue(adapter)
    context.count_time_in_state(adapter)
    adapter.state = next_state(adapter.name, adapter.state, ADAPTER_REMOVED)
    has_successor = versions.unlink(context, adapter)
    versions.pass_on_counters(context, adapter)
    if adapter.announced and adapter.retired:
        context.publish(events.AdapterRetired(adapter.name, adapter.fingerprint))
    elif adapter.announced and not adapter.predecessor and not has_successor:
        context.publish(events.AdapterRemoved(adapter.name))
    batches = [b for b in world.batches if adapter.id in world.pending_requests[b].adapters]
    # The current batch is a waiter too.
    for request_id in dict.fromkeys((*adapter.waiters, *batches)):
        if world.pending_requests[request_id].kind in DOWNWARD:
            done = waiting.adapter_done(request_id, adapter)
            waiting.end_request(context, request_id, done)
        else:
            gone = f"adapter {adapter.name!r} was removed; load it again"
            waiting.refuse_request(context, request_id, ErrorCode.UNKNOWN_ADAPTER, gone)


_STEPS: Final[dict[Step, Callable[[Context, Adapter], None]]] = {
    "stay": _stay,
    "load": _load,
    "stage": _stage,
    "write": _write,
    "reset": _reset,
    "unstage": _unstage,
    "drop": _drop,
    "forget": _forget,
}


def _issue(context: Context, command: commands.Operation, adapter: Adapter) -> None:
    """Send the operation that moves an adapter, and store it until its report."""
    world, op = context.world, command.op
    world.operations[op] = Operation(type(command).__name__, adapter.id, 0)
    context.bound_operation(op)
    adapter.op = op
    adapter.step_since_ns = world.time_ns
    world.adapters.mark_changed(adapter.id)
    context.actions.append(SendCommand(command))


def _issue_for(
    context: Context, request_id: RequestId, pending: PendingRequest, command: commands.Operation
) -> None:
    """Send the operation that a request waits for; the request's deadline bounds it."""
    op = command.op
    context.world.operations[op] = Operation(type(command).__name__, 0, 0, request_id)
    pending.op = op
    context.actions.append(SendCommand(command))


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
    """Refuse the requests of a queued adapter if no waiting can make room for it."""
    shortage = capacity.permanent_shortage(context, adapter, tier)
    if shortage is not None:
        abandon_goal(context, adapter, ErrorCode.NO_ROOM, shortage)
    elif context.world.current_batch in adapter.waiters:
        _refuse_impossible_batch(context)


def _refuse_unreachable(context: Context, adapter: Adapter) -> bool:
    """Refuse the requests of an adapter before it is loaded if none of them can be granted."""
    pending = [context.world.pending_requests[request_id] for request_id in adapter.waiters]
    targets = [p.target for p in pending if p.kind not in DOWNWARD]
    if not targets:
        return False
    lowest = min(targets, key=RESIDENCY_LEVEL.__getitem__)
    for tier, states in STATES_HOLDING.items():
        shortage = capacity.permanent_shortage(context, adapter, tier) if lowest in states else None
        if shortage is not None:
            abandon_goal(context, adapter, ErrorCode.NO_ROOM, shortage)
            return True
    return False


def _enter(context: Context, adapter: Adapter, tier: TierName) -> None:
    capacity.enter(context, adapter, tier)
    _issue(context, _entry_command(context, adapter, tier), adapter)


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
            if tier == "device" and context.limits.turn_tokens:
                adapter = _next_for_slot(context, adapter)
            if not capacity.fits(context, adapter, tier):
                _make_room(context, tier)
                if tier == "device" and context.limits.turn_tokens:
                    _end_turns(context)
                break
            context.leave_queue(adapter, world.adapters.get(context.departed))
            _enter(context, adapter, tier)


def _next_for_slot(context: Context, first: Adapter) -> Adapter:
    """Return the adapter that has the next slot: `first` in the queue, or the first new one.

    Every other slot is for an adapter with a request that no token was generated of, if one waits:
    first tokens don't wait for a turn of each suspended adapter.
    """
    world = context.world
    if world.next_generation % 2 and not first.held:
        for _, adapter_id in world.queues.by_tier["device"]:
            adapter = world.adapters[adapter_id]
            if not world.has_suspended(adapter) and capacity.fits(context, adapter, "device"):
                return adapter
    return first


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
                    # Holds that began after it queued can have made it impossible.
                    _refuse_impossible(context, requester, tier)
                return
            freed = capacity.usage_of(victim, tier)
            places, size_bytes = places - freed.places, size_bytes - freed.size_bytes
            context.count(requester, "evictions_caused")
            _demote(context, victim, tier)


def _demote(context: Context, victim: Adapter, tier: TierName) -> None:
    """Demote an adapter by policy, by as much as leaving the tier requires."""
    context.count(victim, "evictions")
    context.set_goal(victim, capacity.demotion_goal(context, victim, tier))
    _take_next_step(context, victim)


def abandon_goal(context: Context, adapter: Adapter, code: ErrorCode, message: str) -> None:
    """Refuse the requests that wanted the adapter higher, and undo what was done for them alone.

    A held adapter keeps its goal and is tried again after a backoff, and so is an adapter with
    suspended generations for which there can be room later.
    """
    resumes = MEANINGS[code].retryable and context.world.will_resume(adapter)
    is_above = RESIDENCY_LEVEL[adapter.goal] > RESIDENCY_LEVEL[adapter.state]
    if is_above and (adapter.held or resumes):
        start_backoff(context, adapter)
    else:
        context.set_goal(adapter, _goal_without_requests(adapter))
    waiting.refuse_waiters(
        context, adapter, code, message, downward=False, spares=lambda one: resumes and bool(one.op)
    )
    context.dirty_adapters[adapter.id] = None


def start_backoff(context: Context, adapter: Adapter) -> None:
    """Leave the adapter unmoved for `retry_backoff_ms`: the failed step would fail again now."""
    world = context.world
    adapter.backing_off = adapter.failed = True
    adapter.retry_ns = world.time_ns + context.limits.retry_backoff_ms * NANOS_PER_MS
    if adapter.id in world.queues.members:
        context.leave_queue(adapter)
    world.add_deadline(adapter.retry_ns, "retry", adapter.id)
    context.mark_changed(adapter)
