"""Checks of client requests: everything that can be refused is refused here.

A check raises `Refusal`, or returns what the handler of the request needs. It changes nothing.
"""

from collections.abc import Callable
from typing import Any, Final

from loradock.controller.core import capacity, pending_requests
from loradock.controller.core.context import Context, Refusal, unknown_adapter
from loradock.controller.core.world import Adapter
from loradock.messages import records, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import UNREGISTERED

OVERLOAD_RETRY_MS: Final = 250
"""When a client may repeat a request that too many pending ones prevented."""

StateRequest = requests.StageAdapter | requests.ActivateAdapter | requests.HoldAdapter


def check(context: Context, message: Any) -> Any:
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
    return _CHECKS[type(message)](context, message)


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
    """Whether a load of a known name makes another version."""
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


def _check_release(context: Context, message: requests.ReleaseAdapter) -> Adapter:
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
        if context.rules > 2:
            raise unknown_adapter(message.adapter)
        _refuse_if_removing(adapter)
    return adapter


def _check_cancel(context: Context, message: requests.CancelGeneration) -> None:
    """Refuse nothing: a cancellation of an unknown request has an answer of its own."""
    del context, message


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
    upward = sum(1 for kind in kinds if kind not in pending_requests.DOWNWARD)
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


_CHECKS: Final[dict[type, Callable[[Context, Any], Any]]] = {
    requests.LoadAdapter: _check_load,
    requests.StageAdapter: _check_state,
    requests.ActivateAdapter: _check_state,
    requests.HoldAdapter: _check_state,
    requests.PrefetchAdapter: _check_state,
    requests.ReleaseAdapter: _check_release,
    requests.DeactivateAdapter: _check_unused,
    requests.EvictAdapter: _check_unused,
    requests.RemoveAdapter: _check_remove,
    requests.ActivateBatch: _check_batch,
    requests.CancelGeneration: _check_cancel,
    records.GenerationRequested: _check_inference,
    records.PoolingRequested: _check_inference,
}
