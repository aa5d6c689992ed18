"""Client requests: everything that can be refused is refused by a check, then a handler acts.

A request changes wishes alone: goals, waiters and holds. A check raises `Refusal`, or returns what
the handler of the request needs; it changes nothing.
"""

from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple

from loradock.controller.core import capacity, versions, waiting
from loradock.controller.core.actions import SendReply
from loradock.controller.core.context import Checked, Context, Refusal, unknown_adapter
from loradock.controller.core.world import (
    DOWNWARD,
    INFERENCE,
    TARGET,
    USES,
    Adapter,
    PendingRequest,
    RequestKind,
)
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.messages import records, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import GPU_SLOT, UNREGISTERED, RequestId, unscoped

OVERLOAD_RETRY_MS: Final = 250
"""When a client can repeat a request that too many pending ones prevented."""

Request = requests.LifecycleRequest | records.InferenceRequested

StateRequest = requests.StageAdapter | requests.ActivateAdapter | requests.HoldAdapter


class Pending(Enum):
    """The answer to a request that waits already."""

    PENDING = auto()


def check(context: Context, message: Any, body: int) -> requests.Reply | Pending | Checked:
    """Return how a request is answered at once, else `Checked`; changes nothing.

    That is its answer if it is a repetition, `PENDING` if it is a repetition of a request that
    waits, and a refusal if handling it would refuse it.
    """
    world, request_id = context.world, message.request_id
    if request_id in world.answers.by_id or request_id in world.pending_requests:
        return _find_known(context, request_id, body)
    try:
        needed = _refuse_or_find(context, message)
    except Refusal as refusal:
        return refusal.reply(request_id)
    return Checked(context, world.seq, needed)


def on_request(context: Context, message: Any) -> None:
    """Handle a request; a repeated request receives its first answer.

    It is checked now, unless its check was of this very state of the world.
    """
    checked = context.checked
    if checked is None or checked.context is not context or checked.seq + 1 != context.world.seq:
        found = check(context, message, context.body)
        if isinstance(found, Pending):
            return
        if not isinstance(found, Checked):
            _answer(context, message.request_id, found)
            return
        checked = found
    _REQUESTS[type(message)].handle(context, message, checked.needed)


def _answer(context: Context, request_id: RequestId, reply: requests.Reply) -> None:
    """Send an answer; only answers to new requests are stored."""
    world = context.world
    if request_id in world.answers.by_id or request_id in world.pending_requests:
        context.actions.append(SendReply(reply))
    else:
        context.answer(reply)


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


def _refuse_or_find(context: Context, message: Any) -> Any:
    """Return what the handler of a request needs; raises `Refusal`."""
    pending = len(context.world.pending_requests)
    # Requests that end others and never wait are handled even then.
    if pending >= context.limits.requests_max and not isinstance(
        message, requests.CancelGeneration | requests.ReleaseAdapter
    ):
        raise Refusal(
            ErrorCode.OVERLOADED,
            f"{pending} requests wait, at most {context.limits.requests_max} may; try again later",
            OVERLOAD_RETRY_MS,
        )
    return _REQUESTS[type(message)].check(context, message)


def _check_load(context: Context, message: requests.LoadAdapter) -> Adapter | None:
    adapter = context.world.current(message.adapter)
    if adapter is not None:
        _refuse_if_removing(adapter)
        if not is_replacement(message, adapter):
            return adapter
        if adapter.successor:
            raise _replacement_conflict(adapter)
    _refuse_if_full(context, message.adapter)
    return adapter


def is_replacement(message: requests.LoadAdapter, adapter: Adapter) -> bool:
    """Return whether a load of a known name makes another version."""
    return message.replace or message.path not in ("", adapter.path)


def _check_state(
    context: Context, message: StateRequest | requests.PrefetchAdapter
) -> Adapter | None:
    adapter = context.world.current(message.adapter)
    if adapter is None:
        _refuse_if_full(context, message.adapter)
        return None
    if message.path not in ("", adapter.path):
        raise Refusal(
            ErrorCode.CONFLICT,
            f"adapter {adapter.name!r} was loaded from {adapter.path!r}, not {message.path!r}; "
            "load the new path with replace",
        )
    _refuse_if_removing(adapter)
    return adapter


def _check_known(context: Context, message: requests.ReleaseAdapter) -> Adapter:
    return _known_adapter(context, message.adapter)


def _check_unused(
    context: Context, message: requests.DeactivateAdapter | requests.EvictAdapter
) -> Adapter:
    adapter = _known_adapter(context, message.adapter)
    _refuse_if_in_use(context, adapter)
    return adapter


def _check_remove(context: Context, message: requests.RemoveAdapter) -> Adapter:
    adapter = _known_adapter(context, message.adapter)
    if adapter.successor:
        raise _replacement_conflict(adapter)
    if not message.force:
        _refuse_if_in_use(context, adapter)
    return adapter


def _check_batch(context: Context, message: requests.ActivateBatch) -> tuple[Adapter, ...]:
    adapters = tuple([_known_adapter(context, name) for name in dict.fromkeys(message.adapters)])
    for adapter in adapters:
        _refuse_if_removing(adapter)
    shortage = capacity.permanent_shortage_of_batch(context, adapters)
    if shortage is not None:
        raise Refusal(ErrorCode.NO_ROOM, shortage)
    return adapters


def _check_inference(context: Context, message: records.InferenceRequested) -> Adapter | None:
    if message.adapter is None:
        return None
    adapter = context.world.current(message.adapter)
    if adapter is None:
        raise unknown_adapter(message.adapter)
    if adapter.goal == UNREGISTERED:
        raise unknown_adapter(message.adapter)
    return adapter


def _known_adapter(context: Context, name: str) -> Adapter:
    adapter = context.world.current(name)
    if adapter is None:
        raise unknown_adapter(name)
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
    upward = sum(1 for kind in kinds if kind not in DOWNWARD)
    if upward:
        reasons.append(f"is waited for by {upward} requests")
    if reasons:
        raise Refusal(ErrorCode.CONFLICT, f"adapter {adapter.name!r} {' and '.join(reasons)}")


def _refuse_if_full(context: Context, name: str) -> None:
    world = context.world
    if len(world.adapters) >= context.limits.known_adapters_max:
        raise Refusal(
            ErrorCode.NO_ROOM,
            f"adapter {name!r} can't be added: {len(world.adapters)} adapters are known, "
            f"known_adapters_max allows {context.limits.known_adapters_max}; remove some",
        )


def _replacement_conflict(adapter: Adapter) -> Refusal:
    return Refusal(
        ErrorCode.CONFLICT,
        f"another version of adapter {adapter.name!r} is being loaded; wait for it",
    )


def _load(context: Context, message: requests.LoadAdapter, adapter: Adapter | None) -> None:
    if adapter is None:
        adapter = versions.register(context, message.adapter, message.path)
    elif is_replacement(message, adapter):
        adapter = versions.register_successor(context, adapter, message.path)
    _request_up("load", context, message, adapter)


def _prefetch(context: Context, message: requests.PrefetchAdapter, adapter: Adapter | None) -> None:
    """Raise the goal without a waiter, unless the adapter is being demoted, and answer."""
    if adapter is None:
        adapter = versions.register(context, message.adapter, message.path)
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
    kind: RequestKind, context: Context, message: StateRequest, adapter: Adapter | None
) -> None:
    if adapter is None:
        adapter = versions.register(context, message.adapter, message.path)
    _request_up(kind, context, message, adapter)


def _request_up(
    kind: RequestKind,
    context: Context,
    message: requests.LoadAdapter | StateRequest,
    adapter: Adapter,
) -> None:
    """Answer at once if the adapter has reached the kind's target; otherwise raise its goal."""
    if kind in USES:
        _count_use(context, adapter)
    else:
        _touch(context, adapter)
    if waiting.has_reached(adapter, TARGET[kind]):
        waiting.answer_granted(context, adapter, message.request_id, kind)
        return
    pending = waiting.accept(
        context, message.request_id, kind, _timeout_ms(context, message), (adapter.id,)
    )
    pending.replace = getattr(message, "replace", False)
    _add_waiter(context, adapter, message.request_id, pending)


def _add_waiter(
    context: Context, adapter: Adapter, request_id: RequestId, pending: PendingRequest
) -> None:
    """Add a request to the adapter's waiters, and raise its goal unless it is in motion."""
    world = context.world
    adapter_id = adapter.id
    waiting.wait_for(context, adapter, request_id, pending.arrived_seq)
    if adapter.op or adapter_id in world.demoting:
        # Its next report, or the end of its last lease, makes it dirty.
        return
    if RESIDENCY_LEVEL[pending.target] > RESIDENCY_LEVEL[adapter.goal]:
        context.set_goal(adapter, pending.target)
    if world.engine_ready and adapter_id not in world.queues.members:
        context.dirty_adapters[adapter_id] = None


def _release(context: Context, message: requests.ReleaseAdapter, adapter: Adapter) -> None:
    if adapter.held:
        waiting.release(context, adapter)
    context.answer(waiting.adapter_done(message.request_id, adapter))


def _remove(context: Context, message: requests.RemoveAdapter, adapter: Adapter) -> None:
    if message.force:
        if adapter.held:
            waiting.release(context, adapter)
        _refuse_preparations(context, adapter)
        if adapter.leases or adapter.waiters:
            versions.retire(context, adapter)
    _request_down("remove", context, message, adapter)


def _refuse_preparations(context: Context, adapter: Adapter) -> None:
    """Refuse the requests that want a removed adapter to be there later.

    Inference that waits for it ends before it is removed, as running and suspended inference does.
    """
    being_removed = f"adapter {adapter.name!r} is being removed"
    waiting.refuse_waiters(
        context,
        adapter,
        ErrorCode.CONFLICT,
        being_removed,
        downward=False,
        spares=_is_inference,
    )
    pending = context.world.pending_requests
    for request_id in [b for b in context.world.batches if adapter.id in pending[b].adapters]:
        waiting.refuse_request(context, request_id, ErrorCode.CONFLICT, being_removed)


def _is_inference(pending: PendingRequest) -> bool:
    return pending.kind in INFERENCE


def _request_down(
    kind: RequestKind,
    context: Context,
    message: requests.DeactivateAdapter | requests.EvictAdapter | requests.RemoveAdapter,
    adapter: Adapter,
) -> None:
    """Lower the goal; the request is answered once the adapter is there."""
    pending = waiting.accept(
        context, message.request_id, kind, _timeout_ms(context, message), (adapter.id,)
    )
    waiting.wait_for(context, adapter, message.request_id, pending.arrived_seq)
    is_lower = RESIDENCY_LEVEL[pending.target] < RESIDENCY_LEVEL[adapter.goal]
    if is_lower and not context.world.awaits_first_slot(adapter):
        context.set_goal(adapter, pending.target)
    context.dirty_adapters[adapter.id] = None


def _activate_batch(
    context: Context, message: requests.ActivateBatch, adapters: tuple[Adapter, ...]
) -> None:
    for adapter in adapters:
        _count_use(context, adapter)
    timeout_ms = _timeout_ms(context, message)
    pending = waiting.accept(
        context, message.request_id, "batch", timeout_ms, tuple([a.id for a in adapters])
    )
    context.world.batches[message.request_id] = None
    context.ready.append((message.request_id, pending))


def _request_inference(
    context: Context, message: records.InferenceRequested, adapter: Adapter | None
) -> None:
    kind = "generate" if isinstance(message, records.GenerationRequested) else message.task
    timeout_ms = message.timeout_ms or context.limits.generation_timeout_ms
    request_id = message.request_id
    if adapter is None:
        pending = waiting.accept(context, request_id, kind, timeout_ms, ())
        if context.world.engine_ready:
            context.ready.append((request_id, pending))
        return
    is_hit = _count_use(context, adapter)
    ids = (adapter.id,)
    pending = waiting.accept(context, request_id, kind, timeout_ms, ids)
    if not is_hit:
        pending.missed = True
    if context.world.engine_ready and waiting.has_reached(adapter, GPU_SLOT):
        context.ready.append((request_id, pending))
    else:
        _add_waiter(context, adapter, request_id, pending)


def _cancel(context: Context, message: requests.CancelGeneration, _checked: None) -> None:
    target = context.world.pending_requests.get(message.target)
    found = target is not None and target.kind == "generate"
    context.answer(requests.CancelDone(message.request_id, message.target, found))
    if target is None or not found:
        return
    if target.op:
        waiting.stop_inference(context, target)
    else:
        cancelled = waiting.cancelled(context, message.target, target)
        waiting.end_request(context, message.target, cancelled)


def _timeout_ms(context: Context, message: Any) -> int:
    return int(message.timeout_ms or context.limits.request_timeout_ms)


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
    if world.rankings:
        context.rank_use(adapter)
    context.mark_changed(adapter)


class _Request(NamedTuple):
    """The functions of a type of request: `handle` receives what `check` returned."""

    check: Callable[[Context, Any], Any]
    handle: Callable[[Context, Any, Any], None]


_REQUESTS: Final[dict[type, _Request]] = {
    requests.LoadAdapter: _Request(_check_load, _load),
    requests.StageAdapter: _Request(_check_state, partial(_request_state, "stage")),
    requests.ActivateAdapter: _Request(_check_state, partial(_request_state, "activate")),
    requests.HoldAdapter: _Request(_check_state, partial(_request_state, "hold")),
    requests.PrefetchAdapter: _Request(_check_state, _prefetch),
    requests.ReleaseAdapter: _Request(_check_known, _release),
    requests.DeactivateAdapter: _Request(_check_unused, partial(_request_down, "deactivate")),
    requests.EvictAdapter: _Request(_check_unused, partial(_request_down, "evict")),
    requests.RemoveAdapter: _Request(_check_remove, _remove),
    requests.ActivateBatch: _Request(_check_batch, _activate_batch),
    # A cancellation of an unknown request has an answer too.
    requests.CancelGeneration: _Request(lambda _context, _message: None, _cancel),
    records.GenerationRequested: _Request(_check_inference, _request_inference),
    records.PoolingRequested: _Request(_check_inference, _request_inference),
}

REQUESTS: Final = tuple(_REQUESTS)
"""The types of input that `on_request` handles."""
