"""Requests that wait, and what they use their adapters for once these are ready.

An accepted request is pending until it has ended, and a waiter of each adapter that is not ready
for it. A hold lasts from its answer until it is released. A lease lasts as long as the operation
that the engine runs for an inference. A generation can be suspended meanwhile: then it
has no lease, and waits for its adapter to be in a slot.

Nothing here moves an adapter: an adapter whose goal can have changed is added to `dirty_adapters`.
"""

from collections.abc import Callable
from operator import itemgetter

from loradock.controller.core.actions import SendCommand
from loradock.controller.core.context import NANOS_PER_MS, Context
from loradock.controller.core.world import (
    DOWNWARD,
    TARGET,
    USES,
    Adapter,
    PendingRequest,
    RequestKind,
)
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.messages import commands, events, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import (
    EVICTED,
    GPU_SLOT,
    UNREGISTERED,
    AdapterId,
    AdapterState,
    RequestId,
    Seq,
)
from loradock.messages.views import Warnings


def has_reached(adapter: Adapter, target: AdapterState) -> bool:
    """Return whether both state and goal of the adapter are `target` or above."""
    if adapter.state == adapter.goal == target:
        # The hot path.
        return True
    level = RESIDENCY_LEVEL[target]
    return RESIDENCY_LEVEL[adapter.state] >= level and RESIDENCY_LEVEL[adapter.goal] >= level


def is_satisfied(adapter: Adapter, pending: PendingRequest) -> bool:
    """Return whether the adapter is in a state that the request waits for, and will stay in it."""
    if pending.kind in DOWNWARD:
        level = RESIDENCY_LEVEL[pending.target]
        return RESIDENCY_LEVEL[adapter.state] <= level and not adapter.op
    return has_reached(adapter, pending.target)


def accept(
    context: Context,
    request_id: RequestId,
    kind: RequestKind,
    timeout_ms: int,
    adapters: tuple[AdapterId, ...],
) -> PendingRequest:
    """Add a request to the pending requests, with its deadline."""
    world = context.world
    now_ns = world.time_ns
    deadline_ns = now_ns + timeout_ms * NANOS_PER_MS
    pending = PendingRequest(
        kind, adapters, deadline_ns, world.seq, body=context.body, arrived_ns=now_ns
    )
    world.pending_requests[request_id] = pending
    world.add_deadline(deadline_ns, "request", request_id)
    return pending


def wait_for(context: Context, adapter: Adapter, request_id: RequestId, arrived_seq: int) -> None:
    """Add a request to the adapter's waiters; the oldest of them sets the adapter's priority."""
    waiters = adapter.waiters
    is_late = bool(waiters) and arrived_seq < next(reversed(waiters.values()))
    waiters[request_id] = arrived_seq
    if is_late:
        # The current batch, or requests that waited for another version.
        adapter.waiters = dict(sorted(waiters.items(), key=itemgetter(1)))
    queues = context.world.queues
    if adapter.id in queues.members:
        queues.reprioritize(adapter.id, adapter.priority)
    adapter.backing_off = False
    context.mark_changed(adapter)


def stop_waiting(context: Context, adapter: Adapter, request_id: RequestId) -> None:
    """Remove a request from the adapter's waiters."""
    del adapter.waiters[request_id]
    queues = context.world.queues
    if adapter.id in queues.members:
        queues.reprioritize(adapter.id, adapter.priority)
    context.mark_changed(adapter)


def end_waiting(
    context: Context, adapter: Adapter, request_id: RequestId, pending: PendingRequest
) -> None:
    """Remove a request that is served or ended from the waiters; count how long a use waited."""
    if pending.kind in USES:
        context.count(adapter, "wait_ns", context.world.time_ns - pending.arrived_ns)
    stop_waiting(context, adapter, request_id)
    if adapter.retired:
        _end_if_unused(context, adapter)


def longest_wait_ns(context: Context, adapter: Adapter) -> int:
    """Return how long the first of the uses that wait has waited; suspended ones have begun."""
    world = context.world
    for request_id in adapter.waiters:
        pending = world.pending_requests[request_id]
        if pending.kind in USES and not pending.op:
            return world.time_ns - pending.arrived_ns
    return 0


def end_suspension(context: Context, adapter: Adapter, request_id: RequestId) -> None:
    """Remove a suspended request from the waiters; the last of a retired version ends it."""
    stop_waiting(context, adapter, request_id)
    _end_if_unused(context, adapter)


def _end_if_unused(context: Context, adapter: Adapter) -> None:
    if adapter.retired and not adapter.waiters:
        context.set_goal(adapter, UNREGISTERED)
    context.dirty_adapters[adapter.id] = None


def remove(
    context: Context, request_id: RequestId, pending: PendingRequest, reply: requests.Reply | None
) -> None:
    """Answer and remove a request that waits for no adapter; `reply` as in `end_request`."""
    if reply is not None and not pending.answered:
        context.answer(reply)
    del context.world.pending_requests[request_id]


def end_request(context: Context, request_id: RequestId, reply: requests.Reply | None) -> None:
    """Remove a pending request and answer it; None as a reply: its client will send it again."""
    world = context.world
    pending = world.pending_requests[request_id]
    remove(context, request_id, pending, reply)
    if pending.kind == "batch":
        del world.batches[request_id]
        if world.current_batch == request_id:
            # The next one becomes the current one.
            world.current_batch = ""
    for adapter_id in pending.adapters:
        adapter = world.adapters.get(adapter_id)
        if adapter is not None and request_id in adapter.waiters:
            end_waiting(context, adapter, request_id, pending)
            if not adapter.waiters or pending.kind in DOWNWARD:
                context.dirty_adapters[adapter_id] = None


def refuse_request(context: Context, request_id: RequestId, code: ErrorCode, message: str) -> None:
    """Answer a pending request with a refusal.

    If the engine runs an operation for it, it stays pending until the report and its adapters stay
    leased.
    """
    pending = context.world.pending_requests[request_id]
    refused = requests.Refused(request_id, code, message)
    if not pending.op:
        end_request(context, request_id, refused)
        if pending.kind in DOWNWARD:
            _cancel_demotion(context, pending)
        return
    if not pending.answered:
        pending.answered = True
        context.answer(refused)


def _cancel_demotion(context: Context, pending: PendingRequest) -> None:
    """Keep the adapters of a refused downward request as they are, or at least their records."""
    for adapter_id in pending.adapters:
        adapter = context.world.adapters.get(adapter_id)
        if adapter is None or adapter.retired or context.world.is_wanted_down(adapter):
            continue
        if not adapter.op:
            context.set_goal(adapter, adapter.state)
            context.keep(adapter, adapter.state)
        elif adapter.goal == UNREGISTERED != adapter.state:
            # The operation in flight can't be recalled, but the record need not be removed.
            context.set_goal(adapter, EVICTED)
            context.keep(adapter, EVICTED)


def refuse_waiters(
    context: Context,
    adapter: Adapter,
    code: ErrorCode,
    message: str,
    *,
    downward: bool,
    spares: Callable[[PendingRequest], bool] = lambda _: False,
) -> None:
    """Refuse the downward or the other requests that wait for an adapter, but for some.

    The engine is ordered to end those that are suspended.
    """
    for request_id in tuple(adapter.waiters):
        pending = context.world.pending_requests.get(request_id)
        if pending is None or (pending.kind in DOWNWARD) != downward or spares(pending):
            continue
        if not pending.op:
            refuse_request(context, request_id, code, message)
        elif not pending.stopping:
            refuse_request(context, request_id, code, message)
            stop_inference(context, pending)


def stop_inference(context: Context, pending: PendingRequest) -> None:
    """Order the engine to end a request's inference; the report of its end ends its use."""
    pending.stopping = True
    if not context.world.operations[pending.op].deadline_ns:
        context.bound_operation(pending.op)
    context.actions.append(SendCommand(commands.StopGeneration(context.next_op(), pending.op)))


def answer_granted(
    context: Context, adapter: Adapter, request_id: RequestId, kind: RequestKind
) -> None:
    """Answer a request that the adapter satisfies; a hold begins with its answer."""
    if kind == "hold" and not adapter.held:
        hold(context, adapter)
    warnings: Warnings = ()
    if kind not in DOWNWARD:
        context.keep(adapter, TARGET[kind])
        warnings = context.world.warnings.get(adapter.id, ())
    context.answer(adapter_done(request_id, adapter, warnings))


def hold(context: Context, adapter: Adapter) -> None:
    """Exempt the adapter from every eviction."""
    adapter.held = True
    context.world.held[adapter.id] = None
    context.mark_changed(adapter)
    context.publish(events.AdapterHeld(adapter.name))


def release(context: Context, adapter: Adapter) -> None:
    """End a hold; a goal that only the hold wanted is dropped."""
    world = context.world
    adapter.held = False
    del world.held[adapter.id]
    if adapter.id in world.queues.members:
        world.queues.reprioritize(adapter.id, adapter.priority)
    context.mark_changed(adapter)
    context.publish(events.AdapterReleased(adapter.name))
    if world.queues.members or adapter.backing_off:
        context.dirty_adapters[adapter.id] = None


def lease(context: Context, adapter: Adapter) -> None:
    """Keep an adapter in its slot until the operation of the request that uses it ends."""
    adapter.leases += 1
    if adapter.kept != GPU_SLOT:
        context.keep(adapter, GPU_SLOT)
    context.world.adapters.mark_changed(adapter.id)


def end_use(context: Context, request_id: RequestId, pending: PendingRequest) -> None:
    """End the leases of a request, or its suspension; an idle adapter can leave its slot."""
    world = context.world
    adapters = world.adapters
    for adapter_id in pending.adapters:
        adapter = adapters[adapter_id]
        if request_id in adapter.waiters:
            end_suspension(context, adapter, request_id)
            continue
        adapter.leases -= 1
        adapters.mark_changed(adapter_id)
        # It was in use until now.
        context.touch_lru(adapter)
        if adapter_id in world.demoting or world.queues.members:
            context.dirty_adapters[adapter_id] = None


def suspend(context: Context, adapter: Adapter, since: Seq) -> bool:
    """Suspend the generations that lease an adapter; do nothing and return False for other leases.

    They wait as requests that arrived at `since`.
    """
    world = context.world
    running = []
    for operation in world.operations.values():
        pending = world.pending_requests.get(operation.request_id)
        if pending is not None and pending.adapters == (adapter.id,) and pending.kind == "generate":
            running.append(operation.request_id)
    if len(running) != adapter.leases:
        return False
    for request_id in running:
        suspend_one(context, adapter, request_id, since)
    return True


def suspend_one(context: Context, adapter: Adapter, request_id: RequestId, since: Seq) -> None:
    """Let a running generation wait for its adapter to be in a slot again."""
    adapter.leases -= 1
    wait_for(context, adapter, request_id, since)
    context.dirty_adapters[adapter.id] = None


def wait_since_now(context: Context, adapter: Adapter) -> None:
    """Let the suspended generations of an adapter wait since now, when their turn has ended."""
    world = context.world
    since = {
        request_id: world.seq if world.pending_requests[request_id].op else seq
        for request_id, seq in adapter.waiters.items()
    }
    adapter.waiters = dict(sorted(since.items(), key=itemgetter(1)))
    context.mark_changed(adapter)


def adapter_done(
    request_id: RequestId, adapter: Adapter, warnings: Warnings = ()
) -> requests.AdapterDone:
    """Return the answer that reports the adapter's state and slot."""
    return requests.AdapterDone(
        request_id, adapter.name, adapter.state, adapter.slot, adapter.generation, warnings
    )


def cancelled(
    context: Context, request_id: RequestId, pending: PendingRequest
) -> requests.GenerationDone:
    """Return the answer of a generation that ended before the engine received it."""
    adapters = [context.world.adapters[adapter_id].name for adapter_id in pending.adapters]
    name = adapters[0] if adapters else None
    return requests.GenerationDone(request_id, name, "cancelled", 0, 0)
