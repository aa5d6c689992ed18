"""Handlers of client requests: one function per request.

Everything that can be refused is refused by raising `Refusal`, before anything is changed.
"""

from collections.abc import Callable
from typing import Any, Final

from controller.core import capacity, leases, pending_requests
from controller.core.actions import SendReply
from controller.core.context import Context, Refusal
from controller.core.world import Adapter, InferenceKind, RequestKind
from controller.states.table import RESIDENCY_LEVEL
from messages import records, requests
from messages.errors import ErrorCode
from messages.ids import (
    CPU_CACHED,
    EVICTED,
    GPU_SLOT,
    PINNED,
    UNREGISTERED,
    AdapterState,
    RequestId,
)


def on_request(context: Context, message: Any) -> None:
    """Handle a request; a repeated one receives its first answer."""
    world, request_id = context.world, message.request_id
    answer = world.answers.get(request_id)
    if answer is not None:
        context.actions.append(SendReply(answer))
        return
    if request_id in world.pending_requests:
        return
    try:
        if len(world.pending_requests) >= context.limits.requests_max:
            _refuse_overload(context, message)
        _HANDLERS[type(message)](context, message)
    except Refusal as refusal:
        context.refuse(request_id, refusal.code, refusal.message)


def _refuse_overload(context: Context, message: Any) -> None:
    # Requests that end others and never wait are handled even then.
    if not isinstance(message, requests.CancelGeneration | requests.ReleaseAdapter):
        raise Refusal(
            ErrorCode.OVERLOADED,
            f"{len(context.world.pending_requests)} requests wait, at most "
            f"{context.limits.requests_max} may; try again later",
        )


def _load(context: Context, message: requests.LoadAdapter) -> None:
    adapter = context.world.current(message.adapter)
    if adapter is None:
        adapter = _register(context, message.adapter, message.path)
    else:
        _refuse_if_removing(adapter)
        if message.replace or message.path not in ("", adapter.path):
            adapter = _register_successor(context, adapter, message)
    _request_up(context, message, "load", CPU_CACHED, adapter)


def _stage(context: Context, message: requests.StageAdapter) -> None:
    _request_state(context, message, "stage", PINNED)


def _activate(context: Context, message: requests.ActivateAdapter) -> None:
    _request_state(context, message, "activate", GPU_SLOT)


def _hold(context: Context, message: requests.HoldAdapter) -> None:
    _request_state(context, message, "hold", GPU_SLOT)


def _request_state(
    context: Context,
    message: requests.StageAdapter | requests.ActivateAdapter | requests.HoldAdapter,
    kind: RequestKind,
    target: AdapterState,
) -> None:
    adapter = context.world.current(message.adapter)
    if adapter is None:
        adapter = _register(context, message.adapter, message.path)
    elif message.path not in ("", adapter.path):
        raise Refusal(
            ErrorCode.CONFLICT,
            f"adapter {adapter.name!r} was loaded from {adapter.path!r}, not {message.path!r}; "
            "load the new path with replace",
        )
    else:
        _refuse_if_removing(adapter)
    _request_up(context, message, kind, target, adapter)


def _request_up(
    context: Context,
    message: requests.LoadAdapter
    | requests.StageAdapter
    | requests.ActivateAdapter
    | requests.HoldAdapter,
    kind: RequestKind,
    target: AdapterState,
    adapter: Adapter,
) -> None:
    """Answer at once where the adapter has reached `target`; otherwise raise its goal."""
    _count_use(context, adapter)
    if pending_requests.has_reached(adapter, target):
        leases.answer_granted(context, adapter, message.request_id, kind)
        return
    pending = pending_requests.accept(
        context, message.request_id, kind, target, _timeout_ms(context, message), (adapter,)
    )
    pending.replace = getattr(message, "replace", False)
    _add_waiter(context, adapter, message.request_id, target)


def _add_waiter(
    context: Context, adapter: Adapter, request_id: RequestId, target: AdapterState
) -> None:
    """Add a request to the adapter's waiters, and raise the goal of one that is not in motion."""
    world = context.world
    adapter_id = adapter.id
    pending_requests.wait_for(context, adapter, request_id, world.seq)
    if adapter.op or adapter_id in world.demoting:
        # Its next report, or the end of its last lease, makes it dirty.
        return
    if RESIDENCY_LEVEL[target] > RESIDENCY_LEVEL[adapter.goal]:
        context.set_goal(adapter, target)
    if world.engine_ready and adapter_id not in world.queues.members:
        context.dirty_adapters[adapter_id] = None


def _release(context: Context, message: requests.ReleaseAdapter) -> None:
    adapter = _known_adapter(context, message.adapter)
    if adapter.held:
        leases.release(context, adapter)
    context.answer(pending_requests.adapter_done(message.request_id, adapter))


def _deactivate(context: Context, message: requests.DeactivateAdapter) -> None:
    adapter = _known_adapter(context, message.adapter)
    _refuse_if_in_use(context, adapter)
    _request_down(context, message, "deactivate", PINNED, adapter)


def _evict(context: Context, message: requests.EvictAdapter) -> None:
    adapter = _known_adapter(context, message.adapter)
    _refuse_if_in_use(context, adapter)
    _request_down(context, message, "evict", EVICTED, adapter)


def _remove(context: Context, message: requests.RemoveAdapter) -> None:
    adapter = _known_adapter(context, message.adapter)
    if adapter.successor:
        raise _replacement_conflict(adapter)
    if message.force:
        if adapter.held:
            leases.release(context, adapter)
        being_removed = f"adapter {adapter.name!r} is being removed"
        pending_requests.refuse_waiters(
            context, adapter, ErrorCode.CONFLICT, being_removed, downward=False
        )
    else:
        _refuse_if_in_use(context, adapter)
    _request_down(context, message, "remove", UNREGISTERED, adapter)


def _request_down(
    context: Context,
    message: requests.DeactivateAdapter | requests.EvictAdapter | requests.RemoveAdapter,
    kind: RequestKind,
    target: AdapterState,
    adapter: Adapter,
) -> None:
    """Lower the goal; the request is answered once the adapter is there."""
    pending = pending_requests.accept(
        context, message.request_id, kind, target, _timeout_ms(context, message), (adapter,)
    )
    pending_requests.wait_for(context, adapter, message.request_id, pending.arrived_seq)
    if RESIDENCY_LEVEL[target] < RESIDENCY_LEVEL[adapter.goal]:
        context.set_goal(adapter, target)
    context.dirty_adapters[adapter.id] = None


def _activate_batch(context: Context, message: requests.ActivateBatch) -> None:
    adapters = tuple([_known_adapter(context, name) for name in dict.fromkeys(message.adapters)])
    for adapter in adapters:
        _refuse_if_removing(adapter)
    shortage = capacity.permanent_shortage_of_batch(context, adapters)
    if shortage is not None:
        raise Refusal(ErrorCode.NO_ROOM, shortage)
    for adapter in adapters:
        _count_use(context, adapter)
    timeout_ms = _timeout_ms(context, message)
    pending = pending_requests.accept(
        context, message.request_id, "batch", GPU_SLOT, timeout_ms, adapters
    )
    context.world.batches[message.request_id] = None
    leases.confirm_batch(context, message.request_id, pending)


def _generate(context: Context, message: records.GenerationRequested) -> None:
    _request_inference(context, message, "generate")


def _pool(context: Context, message: records.PoolingRequested) -> None:
    _request_inference(context, message, message.task)


def _request_inference(
    context: Context, message: records.InferenceRequested, kind: InferenceKind
) -> None:
    timeout_ms = message.timeout_ms or context.limits.generation_timeout_ms
    request_id = message.request_id
    if message.adapter is None:
        pending = pending_requests.accept(context, request_id, kind, GPU_SLOT, timeout_ms, ())
        if context.world.engine_ready:
            leases.start_inference(context, request_id, pending)
        return
    adapter = _known_adapter(context, message.adapter)
    _refuse_if_removing(adapter)
    _count_use(context, adapter)
    pending = pending_requests.accept(context, request_id, kind, GPU_SLOT, timeout_ms, (adapter,))
    if context.world.engine_ready and pending_requests.has_reached(adapter, GPU_SLOT):
        leases.start_inference(context, request_id, pending)
    else:
        _add_waiter(context, adapter, request_id, GPU_SLOT)


def _cancel(context: Context, message: requests.CancelGeneration) -> None:
    target = context.world.pending_requests.get(message.target)
    found = target is not None and target.kind == "generate"
    context.answer(requests.CancelDone(message.request_id, message.target, found))
    if target is None or not found:
        return
    if target.op:
        leases.stop_inference(context, target)
    else:
        cancelled = pending_requests.cancelled(context, message.target, target)
        pending_requests.end_request(context, message.target, cancelled)


_HANDLERS: Final[dict[type, Callable[[Context, Any], None]]] = {
    requests.LoadAdapter: _load,
    requests.StageAdapter: _stage,
    requests.ActivateAdapter: _activate,
    requests.HoldAdapter: _hold,
    requests.ReleaseAdapter: _release,
    requests.DeactivateAdapter: _deactivate,
    requests.EvictAdapter: _evict,
    requests.RemoveAdapter: _remove,
    requests.ActivateBatch: _activate_batch,
    requests.CancelGeneration: _cancel,
    records.GenerationRequested: _generate,
    records.PoolingRequested: _pool,
}

REQUESTS: Final = tuple(_HANDLERS)
"""The types of input that `on_request` handles."""


def _timeout_ms(context: Context, message: Any) -> int:
    return int(message.timeout_ms or context.limits.request_timeout_ms)


def _known_adapter(context: Context, name: str) -> Adapter:
    adapter = context.world.current(name)
    if adapter is None:
        raise Refusal(ErrorCode.UNKNOWN_ADAPTER, f"adapter {name!r} is not known; load it first")
    return adapter


def _refuse_if_removing(adapter: Adapter) -> None:
    if adapter.goal == UNREGISTERED:
        raise Refusal(
            ErrorCode.CONFLICT, f"adapter {adapter.name!r} is being removed; load it afterwards"
        )


def _refuse_if_in_use(context: Context, adapter: Adapter) -> None:
    reasons = []
    if adapter.held:
        reasons.append("is held (release it first)")
    if adapter.leases:
        reasons.append(f"serves {adapter.leases} running requests (wait for them)")
    kinds = [context.world.pending_requests[request_id].kind for request_id in adapter.waiters]
    upward = sum(1 for kind in kinds if kind not in pending_requests.DOWNWARD)
    if upward:
        reasons.append(f"is waited for by {upward} requests")
    if reasons:
        raise Refusal(ErrorCode.CONFLICT, f"adapter {adapter.name!r} {' and '.join(reasons)}")


def _register(context: Context, name: str, path: str) -> Adapter:
    world = context.world
    if len(world.adapters) >= context.limits.known_adapters_max:
        raise Refusal(
            ErrorCode.NO_ROOM,
            f"adapter {name!r} can't be added: {len(world.adapters)} adapters are known, "
            f"known_adapters_max allows {context.limits.known_adapters_max}; remove some",
        )
    adapter = Adapter(id=world.next_adapter_id, name=name, path=path or name)
    world.next_adapter_id += 1
    world.adapters[adapter.id] = adapter
    world.names.setdefault(name, adapter.id)
    return adapter


def _register_successor(
    context: Context, current: Adapter, message: requests.LoadAdapter
) -> Adapter:
    # The content may be the same: that is known only when the engine has read it.
    if current.successor:
        raise _replacement_conflict(current)
    successor = _register(context, current.name, message.path or current.path)
    successor.predecessor = current.id
    current.successor = successor.id
    context.mark_changed(current)
    return successor


def _replacement_conflict(adapter: Adapter) -> Refusal:
    return Refusal(
        ErrorCode.CONFLICT,
        f"another version of adapter {adapter.name!r} is being loaded; wait for it",
    )


def _count_use(context: Context, adapter: Adapter) -> None:
    adapter.uses += 1
    adapter.last_used_ns = context.world.wall_ns
    if adapter.state == GPU_SLOT:
        adapter.hits += 1
    if adapter.state in context.world.lru_order:
        context.touch_lru(adapter)
    else:
        context.mark_changed(adapter)
