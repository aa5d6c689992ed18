"""Handlers of client requests: one function per request.

What `request_checks` returned for a request is its handler's last argument.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

from loradock.controller.core import leases, pending_requests
from loradock.controller.core.actions import SendReply
from loradock.controller.core.context import Context, Refusal
from loradock.controller.core.request_checks import StateRequest, check, is_replacement
from loradock.controller.core.tables.counters import Counters
from loradock.controller.core.world import Adapter, InferenceKind, PendingRequest, RequestKind
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.messages import events, records, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import (
    CPU_CACHED,
    EVICTED,
    GPU_SLOT,
    PINNED,
    UNREGISTERED,
    AdapterState,
    RequestId,
    unscoped,
)

Request = requests.LifecycleRequest | records.InferenceRequested


class Pending(Enum):
    """The answer to a request that waits already."""

    PENDING = auto()


def on_request(context: Context, message: Any) -> None:
    """Handle a request; a repeated one receives its first answer."""
    world, request_id = context.world, message.request_id
    if request_id in world.answers.by_id or request_id in world.pending_requests:
        known = _find_known(context, request_id, context.body)
        if not isinstance(known, Pending):
            context.actions.append(SendReply(known))
        return
    try:
        checked = check(context, message)
    except Refusal as refusal:
        context.answer(refusal.reply(request_id))
        return
    _HANDLERS[type(message)](context, message, checked)


def screen(context: Context, message: Request, body: int) -> requests.Reply | Pending | None:
    """Return the answer that needs no change of the world, None if there is none."""
    world, request_id = context.world, message.request_id
    if request_id in world.answers.by_id or request_id in world.pending_requests:
        return _find_known(context, request_id, body)
    try:
        check(context, message)
    except Refusal as refusal:
        return refusal.reply(request_id)
    return None


def _find_known(context: Context, request_id: RequestId, body: int) -> requests.Reply | Pending:
    """Return the answer to a repeated request; a refusal if its id was another request's."""
    world = context.world
    answer = world.answers.by_id.get(request_id)
    if answer is not None:
        return answer.reply if answer.body == body else id_conflict(request_id)
    is_same = world.pending_requests[request_id].body == body
    return Pending.PENDING if is_same else id_conflict(request_id)


def id_conflict(request_id: RequestId) -> requests.Refused:
    """Return the refusal of a request under the id of another one."""
    used = f"the id {unscoped(request_id)!r} belongs to another request; use a new one"
    return requests.Refused(request_id, ErrorCode.CONFLICT, used)


def _load(context: Context, message: requests.LoadAdapter, adapter: Adapter | None) -> None:
    if adapter is None:
        adapter = _register(context, message.adapter, message.path)
    elif is_replacement(message, adapter):
        adapter = _register_successor(context, adapter, message)
    _request_up(context, message, "load", CPU_CACHED, adapter)


def _stage(context: Context, message: requests.StageAdapter, adapter: Adapter | None) -> None:
    _request_state(context, message, "stage", PINNED, adapter)


def _activate(context: Context, message: requests.ActivateAdapter, adapter: Adapter | None) -> None:
    _request_state(context, message, "activate", GPU_SLOT, adapter)


def _hold(context: Context, message: requests.HoldAdapter, adapter: Adapter | None) -> None:
    _request_state(context, message, "hold", GPU_SLOT, adapter)


def _prefetch(context: Context, message: requests.PrefetchAdapter, adapter: Adapter | None) -> None:
    """Raise the goal without a waiter, unless the adapter is being demoted, and answer."""
    if adapter is None:
        adapter = _register(context, message.adapter, message.path)
    context.count(adapter, "prefetches")
    context.touch_lru(adapter)
    is_higher = RESIDENCY_LEVEL[message.target] > RESIDENCY_LEVEL[adapter.goal]
    if is_higher and adapter.id not in context.world.demoting:
        adapter.prefetched = True
        context.set_goal(adapter, message.target)
        context.dirty_adapters[adapter.id] = None
    answer = requests.PrefetchAccepted(
        message.request_id, adapter.name, adapter.state, adapter.goal
    )
    context.answer(answer)


def _request_state(
    context: Context,
    message: StateRequest,
    kind: RequestKind,
    target: AdapterState,
    adapter: Adapter | None,
) -> None:
    if adapter is None:
        adapter = _register(context, message.adapter, message.path)
    _request_up(context, message, kind, target, adapter)


def _request_up(
    context: Context,
    message: requests.LoadAdapter | StateRequest,
    kind: RequestKind,
    target: AdapterState,
    adapter: Adapter,
) -> None:
    """Answer at once where the adapter has reached `target`; otherwise raise its goal."""
    if kind in pending_requests.USES:
        _count_use(context, adapter)
    else:
        _touch(context, adapter)
    if pending_requests.has_reached(adapter, target):
        leases.answer_granted(context, adapter, message.request_id, kind)
        return
    pending = pending_requests.accept(
        context, message.request_id, kind, target, _timeout_ms(context, message), (adapter.id,)
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


def _release(context: Context, message: requests.ReleaseAdapter, adapter: Adapter) -> None:
    if adapter.held:
        leases.release(context, adapter)
    context.answer(pending_requests.adapter_done(message.request_id, adapter))


def _deactivate(context: Context, message: requests.DeactivateAdapter, adapter: Adapter) -> None:
    _request_down(context, message, "deactivate", PINNED, adapter)


def _evict(context: Context, message: requests.EvictAdapter, adapter: Adapter) -> None:
    _request_down(context, message, "evict", EVICTED, adapter)


def _remove(context: Context, message: requests.RemoveAdapter, adapter: Adapter) -> None:
    if message.force:
        if adapter.held:
            leases.release(context, adapter)
        _refuse_preparations(context, adapter)
        if context.rules > 2 and (adapter.leases or adapter.waiters):
            _retire(context, adapter)
    _request_down(context, message, "remove", UNREGISTERED, adapter)


def _refuse_preparations(context: Context, adapter: Adapter) -> None:
    """Refuse the requests that want a removed adapter to be there later.

    Inference that waits for it ends before it is removed, as running and suspended ones do.
    """
    being_removed = f"adapter {adapter.name!r} is being removed"
    pending_requests.refuse_waiters(
        context,
        adapter,
        ErrorCode.CONFLICT,
        being_removed,
        downward=False,
        spares=_is_suspended if context.rules == 2 else _is_inference,
    )
    if context.rules > 2:
        pending = context.world.pending_requests
        for request_id in [b for b in context.world.batches if adapter.id in pending[b].adapters]:
            pending_requests.refuse_request(context, request_id, ErrorCode.CONFLICT, being_removed)


def _is_suspended(pending: PendingRequest) -> bool:
    return bool(pending.op)


def _is_inference(pending: PendingRequest) -> bool:
    return pending.kind in pending_requests.INFERENCE


def _retire(context: Context, adapter: Adapter) -> None:
    """Free the name of an adapter that is removed while requests use it.

    They end with this version, as with one that was replaced.
    """
    world = context.world
    adapter.retired = True
    del world.names[adapter.name]
    # They are those of the name, which is free.
    world.past_counters.add(adapter.counters)
    adapter.counters = Counters()
    context.mark_changed(adapter)
    if adapter.announced:
        context.publish(events.AdapterRemoved(adapter.name))


def _request_down(
    context: Context,
    message: requests.DeactivateAdapter | requests.EvictAdapter | requests.RemoveAdapter,
    kind: RequestKind,
    target: AdapterState,
    adapter: Adapter,
) -> None:
    """Lower the goal; the request is answered once the adapter is there."""
    pending = pending_requests.accept(
        context, message.request_id, kind, target, _timeout_ms(context, message), (adapter.id,)
    )
    pending_requests.wait_for(context, adapter, message.request_id, pending.arrived_seq)
    is_lower = RESIDENCY_LEVEL[target] < RESIDENCY_LEVEL[adapter.goal]
    if is_lower and not pending_requests.awaits_first_slot(context, adapter):
        context.set_goal(adapter, target)
    context.dirty_adapters[adapter.id] = None


def _activate_batch(
    context: Context, message: requests.ActivateBatch, adapters: tuple[Adapter, ...]
) -> None:
    for adapter in adapters:
        _count_use(context, adapter)
    timeout_ms = _timeout_ms(context, message)
    pending = pending_requests.accept(
        context, message.request_id, "batch", GPU_SLOT, timeout_ms, tuple([a.id for a in adapters])
    )
    context.world.batches[message.request_id] = None
    leases.confirm_batch(context, message.request_id, pending)


def _generate(
    context: Context, message: records.GenerationRequested, adapter: Adapter | None
) -> None:
    _request_inference(context, message, "generate", adapter)


def _pool(context: Context, message: records.PoolingRequested, adapter: Adapter | None) -> None:
    _request_inference(context, message, message.task, adapter)


def _request_inference(
    context: Context,
    message: records.InferenceRequested,
    kind: InferenceKind,
    adapter: Adapter | None,
) -> None:
    timeout_ms = message.timeout_ms or context.limits.generation_timeout_ms
    request_id = message.request_id
    if adapter is None:
        pending = pending_requests.accept(context, request_id, kind, GPU_SLOT, timeout_ms, ())
        if context.world.engine_ready:
            leases.start_inference(context, request_id, pending, None)
        return
    is_hit = _count_use(context, adapter)
    ids = (adapter.id,)
    pending = pending_requests.accept(context, request_id, kind, GPU_SLOT, timeout_ms, ids)
    if not is_hit:
        pending.missed = True
    if context.world.engine_ready and pending_requests.has_reached(adapter, GPU_SLOT):
        leases.start_inference(context, request_id, pending, adapter)
    else:
        _add_waiter(context, adapter, request_id, GPU_SLOT)


def _cancel(context: Context, message: requests.CancelGeneration, _checked: None) -> None:
    target = context.world.pending_requests.get(message.target)
    found = target is not None and target.kind == "generate"
    context.answer(requests.CancelDone(message.request_id, message.target, found))
    if target is None or not found:
        return
    if target.op:
        pending_requests.stop_inference(context, target)
    else:
        cancelled = pending_requests.cancelled(context, message.target, target)
        pending_requests.end_request(context, message.target, cancelled)


_HANDLERS: Final[dict[type, Callable[[Context, Any, Any], None]]] = {
    requests.LoadAdapter: _load,
    requests.StageAdapter: _stage,
    requests.ActivateAdapter: _activate,
    requests.HoldAdapter: _hold,
    requests.PrefetchAdapter: _prefetch,
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


def _register(context: Context, name: str, path: str) -> Adapter:
    world = context.world
    adapter = Adapter(id=world.next_adapter_id, name=name, path=path or name)
    adapter.state_since_ns = world.time_ns
    world.next_adapter_id += 1
    world.adapters[adapter.id] = adapter
    world.names.setdefault(name, adapter.id)
    return adapter


def _register_successor(
    context: Context, current: Adapter, message: requests.LoadAdapter
) -> Adapter:
    # The content may be the same: that is known only when the engine has read it.
    successor = _register(context, current.name, message.path or current.path)
    successor.predecessor = current.id
    current.successor = successor.id
    context.mark_changed(current)
    return successor


def _count_use(context: Context, adapter: Adapter) -> bool:
    """Count a use; returns whether the adapter is in a slot."""
    counters, totals = adapter.counters, context.world.totals
    is_hit = adapter.state == GPU_SLOT
    if is_hit:
        counters.hits += 1
        totals.hits += 1
    else:
        counters.misses += 1
        totals.misses += 1
    _touch(context, adapter)
    return is_hit


def _touch(context: Context, adapter: Adapter) -> None:
    """Make an adapter the most recently used one."""
    world = context.world
    adapter.last_used_ns = world.time_ns + world.wall_offset_ns
    context.touch_lru(adapter)
    context.mark_changed(adapter)
