"""Holds, leases and batches: what a request uses its adapters for once they are ready.

A hold lasts from its answer until it is released. A lease lasts as long as the operation that the
engine runs for an inference or a batch.
"""

from typing import Final

from controller.core import capacity
from controller.core.actions import SendCommand
from controller.core.context import Context
from controller.core.pending_requests import (
    INFERENCE,
    adapter_done,
    dequeue_batch,
    end_waiting,
    has_reached,
    refuse_request,
    wait_for,
)
from controller.core.world import Adapter, PendingRequest, RequestKind
from messages import commands, events
from messages.errors import ErrorCode
from messages.ids import (
    BASE_MODEL,
    CPU_CACHED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    AdapterState,
    RequestId,
)

GRANTED: Final[dict[RequestKind, AdapterState]] = {
    "load": CPU_CACHED,
    "stage": PINNED,
    "activate": GPU_SLOT,
    "hold": GPU_SLOT,
}
"""The state that an adapter is in when a request of each kind is granted."""


def serve(
    context: Context, adapter: Adapter, request_id: RequestId, pending: PendingRequest
) -> None:
    """Answer a request that the adapter satisfies, or start its inference or batch."""
    if pending.kind == "batch":
        confirm_batch(context, request_id, pending)
    elif pending.kind in INFERENCE:
        if context.world.engine_ready:
            end_waiting(context, adapter, request_id, pending)
            start_inference(context, request_id, pending)
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
    if kind in GRANTED:
        context.keep(adapter, GRANTED[kind])
    context.answer(adapter_done(request_id, adapter))


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


def lease(context: Context, pending: PendingRequest) -> tuple[Adapter, ...]:
    """Keep a request's adapters in their slots until its operation ends; returns them."""
    known = context.world.adapters
    adapters = tuple([known[adapter_id] for adapter_id in pending.adapters])
    for adapter in adapters:
        adapter.leases += 1
        if adapter.kept != GPU_SLOT:
            context.keep(adapter, GPU_SLOT)
        known.mark_changed(adapter.id)
    return adapters


def end_lease(context: Context, pending: PendingRequest) -> None:
    """End the leases of a request; an adapter without leases may leave its slot."""
    world = context.world
    adapters = world.adapters
    for adapter_id in pending.adapters:
        adapters[adapter_id].leases -= 1
        adapters.mark_changed(adapter_id)
        if adapter_id in world.demoting or world.queues.members:
            context.dirty_adapters[adapter_id] = None


def start_inference(context: Context, request_id: RequestId, pending: PendingRequest) -> None:
    """Lease the request's adapter and send the engine its generation, embedding or classifying."""
    adapter_in_slot = (BASE_MODEL, NO_SLOT, 0)
    for adapter in lease(context, pending):
        adapter_in_slot = (adapter.id, adapter.slot, adapter.generation)
    op = context.next_op()
    command: commands.StartInference
    match pending.kind:
        case "embed" | "classify" as task:
            command = commands.StartPooling(op, request_id, *adapter_in_slot, task)
        case _:
            command = commands.StartGeneration(op, request_id, *adapter_in_slot)
    context.issue_for(request_id, pending, command)


def stop_inference(context: Context, pending: PendingRequest) -> None:
    """Order the engine to end a request's inference; the report of its end ends the lease."""
    pending.stopping = True
    if not context.world.operations[pending.op].deadline_ns:
        context.bound_operation(pending.op)
    context.actions.append(SendCommand(commands.StopGeneration(context.next_op(), pending.op)))


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
    for adapter in lease(context, pending):
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
