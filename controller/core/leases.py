"""Holds, leases and batches: what a request uses its adapters for once they are ready.

A hold lasts from its answer until it is released. A lease lasts as long as the operation that the
engine runs for an inference or a batch. A generation may be suspended meanwhile: then it has no
lease, and waits for its adapter to be in a slot.

Adapters that want a slot take turns. One that loses its slot waits since then, and one that never
had it since its oldest request; the one that waits longest is next. While a request waits, every
other adapter has at most one turn before it, because an adapter that gets a slot serves all its
requests. With W adapters before it and S slots, neither held, it waits for at most ceil(W / S)
turns.
"""

from operator import attrgetter
from typing import Final

from loradock.controller.core import capacity
from loradock.controller.core.actions import SendCommand
from loradock.controller.core.context import NANOS_PER_MS, Context
from loradock.controller.core.pending_requests import (
    INFERENCE,
    adapter_done,
    dequeue_batch,
    end_suspension,
    end_waiting,
    has_reached,
    has_suspended,
    is_satisfied,
    is_wanted_down,
    refuse_request,
    wait_for,
)
from loradock.controller.core.world import Adapter, PendingRequest, RequestKind
from loradock.messages import commands, events
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import (
    BASE_MODEL,
    CPU_CACHED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    AdapterState,
    RequestId,
    Seq,
)
from loradock.messages.views import Warnings

GRANTED: Final[dict[RequestKind, AdapterState]] = {
    "load": CPU_CACHED,
    "stage": PINNED,
    "activate": GPU_SLOT,
    "hold": GPU_SLOT,
}
"""The state that an adapter is in when a request of each kind is granted."""


def serve_waiters(context: Context, adapter: Adapter) -> None:
    """Serve what the adapter satisfies; before it is demoted by request, suspended ones alone.

    A retired version serves its inference; what demotes it is answered when it is forgotten.
    """
    resumes_only = has_suspended(context, adapter) and is_wanted_down(context, adapter)
    for request_id in tuple(adapter.waiters):
        pending = context.world.pending_requests[request_id]
        if adapter.retired:
            is_next = pending.kind in INFERENCE
        else:
            is_next = bool(pending.op) or not resumes_only
        if is_next and is_satisfied(adapter, pending):
            _serve(context, adapter, request_id, pending)


def _serve(
    context: Context, adapter: Adapter, request_id: RequestId, pending: PendingRequest
) -> None:
    """Answer a request that the adapter satisfies, or start its inference or batch."""
    if pending.kind == "batch":
        confirm_batch(context, request_id, pending)
    elif pending.kind in INFERENCE:
        if context.world.engine_ready and pending.op:
            _resume(context, adapter, request_id, pending)
        elif context.world.engine_ready:
            start_inference(context, request_id, pending, adapter)
            # Afterwards: the last request of a removed version lowers its goal.
            end_waiting(context, adapter, request_id, pending)
    else:
        end_waiting(context, adapter, request_id, pending)
        answer_granted(context, adapter, request_id, pending.kind)
        del context.world.pending_requests[request_id]


def answer_granted(
    context: Context, adapter: Adapter, request_id: RequestId, kind: RequestKind
) -> None:
    """Answer a request that the adapter satisfies; a hold begins with its answer."""
    if kind == "hold" and not adapter.held:
        hold(context, adapter)
    warnings: Warnings = ()
    if kind in GRANTED:
        context.keep(adapter, GRANTED[kind])
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
    """End the leases of a request, or its suspension; an idle adapter may leave its slot."""
    world = context.world
    adapters = world.adapters
    for adapter_id in pending.adapters:
        adapter = adapters[adapter_id]
        if request_id in adapter.waiters:
            end_suspension(context, adapter, request_id)
            continue
        adapter.leases -= 1
        adapters.mark_changed(adapter_id)
        if context.rules > 2:
            # It was in use until now.
            context.touch_lru(adapter)
        if adapter_id in world.demoting or world.queues.members:
            context.dirty_adapters[adapter_id] = None


def end_turns(context: Context) -> None:
    """Preempt leased adapters that leave their slots for others and whose turns are over.

    A turn begins when the slot is written. The timer is set to the end of the next turn.
    """
    world = context.world
    quantum_ns = context.limits.slot_quantum_ms * NANOS_PER_MS
    ends, since = [], world.seq
    leaving = [world.adapters[adapter_id] for adapter_id in world.demoting]
    for adapter in sorted(leaving, key=attrgetter("state_since_ns", "generation")):
        if not adapter.leases or adapter.op or adapter.backing_off:
            continue
        turn_end_ns = adapter.state_since_ns + quantum_ns
        if turn_end_ns > world.time_ns:
            ends.append(turn_end_ns)
        elif suspend(context, adapter, since):
            # Those that are suspended by one input have an order too: that of their turns.
            since += 1
            op = context.next_op()
            context.issue(commands.PreemptSlot(op, adapter.slot, adapter.generation), adapter)
    if ends and not world.time_ns < world.turn_end_ns <= min(ends):
        world.turn_end_ns = min(ends)
        world.add_deadline(world.turn_end_ns, "turn", 0)


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


def _resume(
    context: Context, adapter: Adapter, request_id: RequestId, pending: PendingRequest
) -> None:
    lease(context, adapter)
    end_suspension(context, adapter, request_id)
    order_resumption(context, adapter, pending)


def order_resumption(context: Context, adapter: Adapter, pending: PendingRequest) -> None:
    """Order the engine to continue a generation in the adapter's slot; harmless if it does."""
    command = commands.ResumeGeneration(
        context.next_op(), pending.op, adapter.slot, adapter.generation
    )
    context.actions.append(SendCommand(command))


def start_inference(
    context: Context, request_id: RequestId, pending: PendingRequest, adapter: Adapter | None
) -> None:
    """Lease a request's adapter and send the engine its generation, embedding or classifying.

    `adapter` is None for the base model.
    """
    adapter_id, slot, generation = BASE_MODEL, NO_SLOT, 0
    if adapter is not None:
        lease(context, adapter)
        adapter_id, slot, generation = adapter.id, adapter.slot, adapter.generation
    op = context.next_op()
    command: commands.StartInference
    match pending.kind:
        case "embed" | "classify" as task:
            command = commands.StartPooling(op, request_id, adapter_id, slot, generation, task)
        case _:
            command = commands.StartGeneration(op, request_id, adapter_id, slot, generation)
    context.issue_for(request_id, pending, command)


def start_next_batch(context: Context) -> None:
    """Move adapters for the oldest batch, unless another one is current.

    Two batches at a time could each keep a part of the slots and wait for the other's forever.
    """
    world = context.world
    if world.current_batch or not world.batches:
        return
    request_id = world.current_batch = next(iter(world.batches))
    pending = world.pending_requests[request_id]
    for adapter_id in pending.adapters:
        wait_for(context, world.adapters[adapter_id], request_id, pending.arrived_seq)
        context.dirty_adapters[adapter_id] = None


def confirm_batch(context: Context, request_id: RequestId, pending: PendingRequest) -> None:
    """If all adapters of a batch are in slots, lease them and send the engine their mapping."""
    world = context.world
    adapters = [world.adapters[adapter_id] for adapter_id in pending.adapters]
    if not world.engine_ready or not all(
        has_reached(adapter, pending.target) for adapter in adapters
    ):
        return
    for adapter in adapters:
        lease(context, adapter)
        if request_id in adapter.waiters:
            end_waiting(context, adapter, request_id, pending)
    dequeue_batch(context, request_id)
    refs = tuple([commands.SlotRef(adapter.slot, adapter.generation) for adapter in adapters])
    context.issue_for(request_id, pending, commands.SetMapping(context.next_op(), refs))


def refuse_impossible_batch(context: Context) -> None:
    """Refuse the current batch if its adapters can never be in slots at the same time."""
    world = context.world
    if world.current_batch:
        pending = world.pending_requests[world.current_batch]
        adapters = tuple([world.adapters[adapter_id] for adapter_id in pending.adapters])
        shortage = capacity.permanent_shortage_of_batch(context, adapters)
        if shortage is not None:
            refuse_request(context, world.current_batch, ErrorCode.NO_ROOM, shortage)
