"""What a client may ask: one function a request.

What it is: the checks of a request against what is known, and the wish that follows. What it is
not: how a wish is fulfilled (`drive`). One rule: whatever can be refused is refused before anything
is changed, by raising `Refusal`.
"""

from collections.abc import Callable
from typing import Any, Final

from controller import drive
from controller.actions import Reply
from controller.states.table import HEIGHT
from controller.turn import NANOS_PER_MS, Refusal, Turn
from controller.world import Adapter, RequestKind, Waiting
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
            raise Refusal(
                ErrorCode.OVERLOADED,
                f"{len(world.waiting)} requests wait, at most {turn.limits.requests_max} may; "
                "try again later",
            )
        _ASK[type(message)](turn, message)
    except Refusal as refusal:
        turn.refuse(request_id, refusal.code, refusal.message)


def _load(turn: Turn, message: requests.LoadAdapter) -> None:
    current = turn.world.current(message.adapter)
    if current is None:
        current = _register(turn, message.adapter, message.path)
    elif message.replace or message.path not in ("", current.path):
        current = _register_successor(turn, current, message)
    _refuse_if_going(turn, current)
    wish = _wish(turn, "load", CPU_CACHED, message.timeout_ms, (current,))
    wish.replace = message.replace
    _want(turn, message.request_id, wish, current)


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
    _refuse_if_going(turn, adapter)
    wish = _wish(turn, kind, target, message.timeout_ms, (adapter,))
    _want(turn, message.request_id, wish, adapter)


def _release(turn: Turn, message: requests.ReleaseAdapter) -> None:
    adapter = _known(turn, message.adapter)
    drive.release_hold(turn, adapter)
    turn.answer(drive.done(message.request_id, adapter))


def _deactivate(turn: Turn, message: requests.DeactivateAdapter) -> None:
    adapter = _known(turn, message.adapter)
    _refuse_if_needed(turn, adapter)
    wish = _wish(turn, "deactivate", PINNED, message.timeout_ms, (adapter,))
    _lower(turn, message.request_id, wish, adapter)


def _evict(turn: Turn, message: requests.EvictAdapter) -> None:
    adapter = _known(turn, message.adapter)
    _refuse_if_needed(turn, adapter)
    wish = _wish(turn, "evict", EVICTED, message.timeout_ms, (adapter,))
    _lower(turn, message.request_id, wish, adapter)


def _remove(turn: Turn, message: requests.RemoveAdapter) -> None:
    adapter = _known(turn, message.adapter)
    if adapter.successor:
        raise Refusal(
            ErrorCode.CONFLICT,
            f"another version of adapter {adapter.name!r} is being loaded; wait for it",
        )
    if message.force:
        being_removed = f"adapter {adapter.name!r} is being removed"
        drive.release_hold(turn, adapter)
        turn.aim(adapter, adapter.state)
        drive.refuse_waiters(turn, adapter, ErrorCode.CONFLICT, being_removed)
    else:
        _refuse_if_needed(turn, adapter)
    wish = _wish(turn, "remove", UNREGISTERED, message.timeout_ms, (adapter,))
    _lower(turn, message.request_id, wish, adapter)


def _activate_batch(turn: Turn, message: requests.ActivateBatch) -> None:
    adapters = [_known(turn, name) for name in dict.fromkeys(message.adapters)]
    for adapter in adapters:
        _refuse_if_going(turn, adapter)
    _refuse_too_many(turn, adapters)
    for adapter in adapters:
        _count_use(turn, adapter)
    wish = _wish(turn, "batch", GPU_SLOT, message.timeout_ms, tuple(adapters))
    _remember(turn, message.request_id, wish)
    turn.world.batches[message.request_id] = None
    if len(turn.world.batches) == 1:
        drive.start_next_batch(turn)


def _refuse_too_many(turn: Turn, adapters: list[Adapter]) -> None:
    slots = turn.limits.slots_max
    asked = {adapter.id for adapter in adapters}
    held = sum(1 for adapter_id in turn.world.held if adapter_id not in asked)
    if len(asked) + held > slots:
        raise Refusal(
            ErrorCode.NO_ROOM,
            f"the batch names {len(asked)} adapters and {held} others are held; there are {slots} "
            "slots; split the batch or release an adapter",
        )


def _generate(turn: Turn, message: records.GenerationRequested) -> None:
    adapters: tuple[Adapter, ...] = ()
    if message.adapter is not None:
        adapters = (_known(turn, message.adapter),)
        _refuse_if_going(turn, adapters[0])
    timeout_ms = message.timeout_ms or turn.limits.generation_timeout_ms
    wish = _wish(turn, "generate", GPU_SLOT, timeout_ms, adapters)
    if adapters:
        _want(turn, message.request_id, wish, adapters[0])
        return
    _remember(turn, message.request_id, wish)
    if turn.world.engine is not None:
        drive.start_generation(turn, message.request_id, wish, None)


def _cancel(turn: Turn, message: requests.CancelGeneration) -> None:
    target = turn.world.waiting.get(message.target)
    found = target is not None and target.kind == "generate"
    turn.answer(requests.CancelDone(message.request_id, message.target, found))
    if target is None or not found:
        return
    if target.op:
        drive.stop_generation(turn, target)
    else:
        name = turn.world.adapters[target.adapters[0]].name if target.adapters else None
        cancelled = requests.GenerationDone(message.target, name, "cancelled", 0, 0)
        drive.end_request(turn, message.target, cancelled)


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
}

REQUESTS: Final = tuple(_ASK)


def _known(turn: Turn, name: str) -> Adapter:
    adapter = turn.world.current(name)
    if adapter is None:
        raise Refusal(ErrorCode.UNKNOWN_ADAPTER, f"adapter {name!r} is not known; load it first")
    return adapter


def _refuse_if_going(turn: Turn, adapter: Adapter) -> None:
    kinds = [turn.world.waiting[request_id].kind for request_id in adapter.waiters]
    if "remove" in kinds:
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
    wanted = sum(1 for kind in kinds if kind not in drive.DOWNWARD)
    if wanted:
        reasons.append(f"is waited for by {wanted} requests")
    if reasons:
        raise Refusal(ErrorCode.CONFLICT, f"adapter {adapter.name!r} {' and '.join(reasons)}")


def _register(turn: Turn, name: str, path: str) -> Adapter:
    world = turn.world
    if len(world.adapters) >= turn.limits.known_adapters_max:
        raise Refusal(
            ErrorCode.NO_ROOM,
            f"{len(world.adapters)} adapters are known, the most that known_adapters_max allows; "
            "remove some",
        )
    adapter = Adapter(id=world.next_adapter_id, name=name, path=path or name)
    world.next_adapter_id += 1
    world.adapters[adapter.id] = adapter
    world.names.setdefault(name, adapter.id)
    return adapter


def _register_successor(turn: Turn, current: Adapter, message: requests.LoadAdapter) -> Adapter:
    # Whether the bytes differ at all is known only when the engine has read them.
    if current.successor:
        raise Refusal(
            ErrorCode.CONFLICT,
            f"another version of adapter {current.name!r} is being loaded; wait for it",
        )
    _refuse_if_going(turn, current)
    successor = _register(turn, current.name, message.path or current.path)
    successor.predecessor = current.id
    current.successor = successor.id
    turn.touch(current)
    return successor


def _wish(
    turn: Turn,
    kind: RequestKind,
    target: AdapterState,
    timeout_ms: int,
    adapters: tuple[Adapter, ...],
) -> Waiting:
    wait_ns = (timeout_ms or turn.limits.request_timeout_ms) * NANOS_PER_MS
    ids = tuple(adapter.id for adapter in adapters)
    return Waiting(kind, ids, target, turn.world.time_ns + wait_ns)


def _remember(turn: Turn, request_id: RequestId, wish: Waiting) -> None:
    turn.world.waiting[request_id] = wish
    turn.world.add_deadline(wish.deadline_ns, "request", request_id)


def _count_use(turn: Turn, adapter: Adapter) -> None:
    adapter.uses += 1
    adapter.last_used_ns = turn.world.time_ns
    if adapter.state == GPU_SLOT:
        adapter.hits += 1
    if adapter.state in turn.world.recency:
        turn.mark_recent(adapter)
    turn.touch(adapter)


def _want(turn: Turn, request_id: RequestId, wish: Waiting, adapter: Adapter) -> None:
    """Upwards: answered at once where the fact is there, else the goal rises."""
    _count_use(turn, adapter)
    _remember_or_fulfil(turn, request_id, wish, adapter)


def _lower(turn: Turn, request_id: RequestId, wish: Waiting, adapter: Adapter) -> None:
    """Downwards: answered at once where nothing is to be done, else the goal sinks."""
    if HEIGHT[wish.target] < HEIGHT[adapter.goal]:
        turn.aim(adapter, wish.target)
    _remember_or_fulfil(turn, request_id, wish, adapter)


def _remember_or_fulfil(turn: Turn, request_id: RequestId, wish: Waiting, adapter: Adapter) -> None:
    # A removal is answered where the record goes, a generation when it ends.
    at_once = drive.is_met(adapter, wish) and wish.kind != "remove"
    if not at_once or wish.kind == "generate":
        _remember(turn, request_id, wish)
    if at_once:
        drive.grant(turn, adapter, request_id, wish)
        return
    adapter.waiters += (request_id,)
    turn.touch(adapter)
    drive.settle(turn, adapter)
