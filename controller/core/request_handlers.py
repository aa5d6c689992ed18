"""What a client may ask: one function a request.

What it is: the checks of a request against what is known, and the wish that follows. What it is
not: how a wish is fulfilled (`drive`). One rule: whatever can be refused is refused before anything
is changed, by raising `Refusal`.
"""

from collections.abc import Callable
from typing import Any, Final

from controller.core import capacity, pending_requests
from controller.core.actions import Reply
from controller.core.context import Refusal, Turn
from controller.core.world import Adapter, InferenceKind, RequestKind
from controller.states.table import HEIGHT
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


def on_request(turn: Turn, message: Any) -> None:
    """Any request: a repeated one gets its first answer, a new one is checked and taken up."""
    world, request_id = turn.world, message.request_id
    answer = world.answers.get(request_id)
    if answer is not None:
        turn.actions.append(Reply(answer))
        return
    if request_id in world.waiting:
        return
    try:
        if len(world.waiting) >= turn.limits.requests_max:
            _refuse_overload(turn, message)
        _ASK[type(message)](turn, message)
    except Refusal as refusal:
        turn.refuse(request_id, refusal.code, refusal.message)


def _refuse_overload(turn: Turn, message: Any) -> None:
    # What makes others end, and never waits itself, is let through.
    if not isinstance(message, requests.CancelGeneration | requests.ReleaseAdapter):
        raise Refusal(
            ErrorCode.OVERLOADED,
            f"{len(turn.world.waiting)} requests wait, at most {turn.limits.requests_max} may; "
            "try again later",
        )


def _load(turn: Turn, message: requests.LoadAdapter) -> None:
    adapter = turn.world.current(message.adapter)
    if adapter is None:
        adapter = _register(turn, message.adapter, message.path)
    else:
        _refuse_if_going(adapter)
        if message.replace or message.path not in ("", adapter.path):
            adapter = _register_successor(turn, adapter, message)
    _want(turn, message, "load", CPU_CACHED, adapter)


def _stage(turn: Turn, message: requests.StageAdapter) -> None:
    _raise_to(turn, message, "stage", PINNED)


def _activate(turn: Turn, message: requests.ActivateAdapter) -> None:
    _raise_to(turn, message, "activate", GPU_SLOT)


def _hold(turn: Turn, message: requests.HoldAdapter) -> None:
    _raise_to(turn, message, "hold", GPU_SLOT)


def _raise_to(
    turn: Turn,
    message: requests.StageAdapter | requests.ActivateAdapter | requests.HoldAdapter,
    kind: RequestKind,
    target: AdapterState,
) -> None:
    adapter = turn.world.current(message.adapter)
    if adapter is None:
        adapter = _register(turn, message.adapter, message.path)
    elif message.path not in ("", adapter.path):
        raise Refusal(
            ErrorCode.CONFLICT,
            f"adapter {adapter.name!r} was loaded from {adapter.path!r}, not {message.path!r}; "
            "load the new path with replace",
        )
    else:
        _refuse_if_going(adapter)
    _want(turn, message, kind, target, adapter)


def _want(
    turn: Turn,
    message: requests.LoadAdapter
    | requests.StageAdapter
    | requests.ActivateAdapter
    | requests.HoldAdapter,
    kind: RequestKind,
    target: AdapterState,
    adapter: Adapter,
) -> None:
    """Upwards: answered at once where the fact is there, else the goal rises."""
    _count_use(turn, adapter)
    if pending_requests.is_there(adapter, target):
        pending_requests.grant(turn, adapter, message.request_id, kind)
        return
    waiting = pending_requests.accept(
        turn, message.request_id, kind, target, _timeout_ms(turn, message), (adapter,)
    )
    waiting.replace = getattr(message, "replace", False)
    _owe(turn, adapter, message.request_id, target)


def _owe(turn: Turn, adapter: Adapter, request_id: RequestId, target: AdapterState) -> None:
    """The adapter strives for `target` now; what is under way already is left to go on."""
    world = turn.world
    adapter_id = adapter.id
    pending_requests.wait_for(turn, adapter, request_id, world.seq)
    if adapter.op or adapter_id in world.leaving:
        # Its next report, or the end of its last lease, makes it due.
        return
    if HEIGHT[target] > HEIGHT[adapter.goal]:
        turn.aim(adapter, target)
    if world.ready and adapter_id not in world.queues.members:
        turn.due[adapter_id] = None


def _release(turn: Turn, message: requests.ReleaseAdapter) -> None:
    adapter = _known(turn, message.adapter)
    if adapter.held:
        pending_requests.release(turn, adapter)
    turn.answer(pending_requests.done(message.request_id, adapter))


def _deactivate(turn: Turn, message: requests.DeactivateAdapter) -> None:
    adapter = _known(turn, message.adapter)
    _refuse_if_needed(turn, adapter)
    _lower(turn, message, "deactivate", PINNED, adapter)


def _evict(turn: Turn, message: requests.EvictAdapter) -> None:
    adapter = _known(turn, message.adapter)
    _refuse_if_needed(turn, adapter)
    _lower(turn, message, "evict", EVICTED, adapter)


def _remove(turn: Turn, message: requests.RemoveAdapter) -> None:
    adapter = _known(turn, message.adapter)
    if adapter.successor:
        raise _is_being_replaced(adapter)
    if message.force:
        if adapter.held:
            pending_requests.release(turn, adapter)
        being_removed = f"adapter {adapter.name!r} is being removed"
        pending_requests.refuse_waiters(
            turn, adapter, ErrorCode.CONFLICT, being_removed, downward=False
        )
    else:
        _refuse_if_needed(turn, adapter)
    _lower(turn, message, "remove", UNREGISTERED, adapter)


def _lower(
    turn: Turn,
    message: requests.DeactivateAdapter | requests.EvictAdapter | requests.RemoveAdapter,
    kind: RequestKind,
    target: AdapterState,
    adapter: Adapter,
) -> None:
    """Downwards: the goal sinks, and who asked is told when the fact is there."""
    waiting = pending_requests.accept(
        turn, message.request_id, kind, target, _timeout_ms(turn, message), (adapter,)
    )
    pending_requests.wait_for(turn, adapter, message.request_id, waiting.since)
    if HEIGHT[target] < HEIGHT[adapter.goal]:
        turn.aim(adapter, target)
    turn.due[adapter.id] = None


def _activate_batch(turn: Turn, message: requests.ActivateBatch) -> None:
    adapters = tuple([_known(turn, name) for name in dict.fromkeys(message.adapters)])
    for adapter in adapters:
        _refuse_if_going(adapter)
    never = capacity.why_never_together(turn, adapters)
    if never is not None:
        raise Refusal(ErrorCode.NO_ROOM, never)
    for adapter in adapters:
        _count_use(turn, adapter)
    timeout_ms = _timeout_ms(turn, message)
    waiting = pending_requests.accept(
        turn, message.request_id, "batch", GPU_SLOT, timeout_ms, adapters
    )
    turn.world.batches[message.request_id] = None
    pending_requests.confirm_batch(turn, message.request_id, waiting)


def _generate(turn: Turn, message: records.GenerationRequested) -> None:
    _infer(turn, message, "generate")


def _pool(turn: Turn, message: records.PoolingRequested) -> None:
    _infer(turn, message, message.task)


def _infer(turn: Turn, message: records.InferenceRequested, kind: InferenceKind) -> None:
    timeout_ms = message.timeout_ms or turn.limits.generation_timeout_ms
    request_id = message.request_id
    if message.adapter is None:
        waiting = pending_requests.accept(turn, request_id, kind, GPU_SLOT, timeout_ms, ())
        if turn.world.ready:
            pending_requests.start_inference(turn, request_id, waiting)
        return
    adapter = _known(turn, message.adapter)
    _refuse_if_going(adapter)
    _count_use(turn, adapter)
    waiting = pending_requests.accept(turn, request_id, kind, GPU_SLOT, timeout_ms, (adapter,))
    if turn.world.ready and pending_requests.is_there(adapter, GPU_SLOT):
        pending_requests.start_inference(turn, request_id, waiting)
    else:
        _owe(turn, adapter, request_id, GPU_SLOT)


def _cancel(turn: Turn, message: requests.CancelGeneration) -> None:
    target = turn.world.waiting.get(message.target)
    found = target is not None and target.kind == "generate"
    turn.answer(requests.CancelDone(message.request_id, message.target, found))
    if target is None or not found:
        return
    if target.op:
        pending_requests.stop_inference(turn, target)
    else:
        cancelled = pending_requests.cancelled(turn, message.target, target)
        pending_requests.end_request(turn, message.target, cancelled)


_ASK: Final[dict[type, Callable[[Turn, Any], None]]] = {
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

REQUESTS: Final = tuple(_ASK)


def _timeout_ms(turn: Turn, message: Any) -> int:
    return int(message.timeout_ms or turn.limits.request_timeout_ms)


def _known(turn: Turn, name: str) -> Adapter:
    adapter = turn.world.current(name)
    if adapter is None:
        raise Refusal(ErrorCode.UNKNOWN_ADAPTER, f"adapter {name!r} is not known; load it first")
    return adapter


def _refuse_if_going(adapter: Adapter) -> None:
    if adapter.goal == UNREGISTERED:
        raise Refusal(
            ErrorCode.CONFLICT, f"adapter {adapter.name!r} is being removed; load it afterwards"
        )


def _refuse_if_needed(turn: Turn, adapter: Adapter) -> None:
    reasons = []
    if adapter.held:
        reasons.append("is held (release it first)")
    if adapter.leases:
        reasons.append(f"serves {adapter.leases} running requests (wait for them)")
    kinds = [turn.world.waiting[request_id].kind for request_id in adapter.waiters]
    wanted = sum(1 for kind in kinds if kind not in pending_requests.DOWNWARD)
    if wanted:
        reasons.append(f"is waited for by {wanted} requests")
    if reasons:
        raise Refusal(ErrorCode.CONFLICT, f"adapter {adapter.name!r} {' and '.join(reasons)}")


def _register(turn: Turn, name: str, path: str) -> Adapter:
    world = turn.world
    if len(world.adapters) >= turn.limits.known_adapters_max:
        raise Refusal(
            ErrorCode.NO_ROOM,
            f"adapter {name!r} can't be added: {len(world.adapters)} adapters are known, "
            f"known_adapters_max allows {turn.limits.known_adapters_max}; remove some",
        )
    adapter = Adapter(id=world.next_adapter_id, name=name, path=path or name)
    world.next_adapter_id += 1
    world.adapters[adapter.id] = adapter
    world.names.setdefault(name, adapter.id)
    return adapter


def _register_successor(turn: Turn, current: Adapter, message: requests.LoadAdapter) -> Adapter:
    # Whether the bytes differ at all is known only when the engine has read them.
    if current.successor:
        raise _is_being_replaced(current)
    successor = _register(turn, current.name, message.path or current.path)
    successor.predecessor = current.id
    current.successor = successor.id
    turn.touch(current)
    return successor


def _is_being_replaced(adapter: Adapter) -> Refusal:
    return Refusal(
        ErrorCode.CONFLICT,
        f"another version of adapter {adapter.name!r} is being loaded; wait for it",
    )


def _count_use(turn: Turn, adapter: Adapter) -> None:
    adapter.uses += 1
    adapter.last_used_ns = turn.world.time_ns
    if adapter.state == GPU_SLOT:
        adapter.hits += 1
    if adapter.state in turn.world.recency:
        turn.mark_recent(adapter)
    else:
        turn.touch(adapter)
