"""Views of the world for clients: pure functions that change nothing and are not logged.

A view is a copy, so that it stays true to its moment.
"""

from controller.core.context import Refusal
from controller.core.controller import Controller
from controller.core.world import Adapter, World
from messages import requests
from messages.errors import ErrorCode


def adapter_view(adapter: Adapter) -> requests.AdapterView:
    """Return one record as clients see it."""
    return requests.AdapterView(
        adapter=adapter.name,
        adapter_id=adapter.id,
        state=adapter.state,
        goal=adapter.goal,
        path=adapter.path,
        fingerprint=adapter.fingerprint,
        rank=adapter.rank,
        slot=adapter.slot,
        generation=adapter.generation,
        held=adapter.held,
        retired=adapter.retired,
        leases=adapter.leases,
        waiting=len(adapter.waiters),
        host_bytes=adapter.host_bytes,
        pinned_bytes=adapter.pinned_bytes,
        device_bytes=adapter.device_bytes,
        uses=adapter.uses,
        loads=adapter.loads,
        hits=adapter.hits,
        evictions=adapter.evictions,
        failures=adapter.failures,
        last_used_ns=adapter.last_used_ns,
    )


def list_adapters(world: World, message: requests.ListAdapters) -> requests.AdaptersListed:
    """Return every record by name, replaced versions after the current one."""
    ordered = sorted(world.adapters.values(), key=lambda a: (a.name, a.retired, a.id))
    views = tuple(adapter_view(adapter) for adapter in ordered)
    return requests.AdaptersListed(message.request_id, views, world.events_seq)


def show_adapter(world: World, message: requests.ShowAdapter) -> requests.AdapterShown:
    """Return a name's current and replaced versions; raises `Refusal` for an unknown name."""
    current = world.current(message.adapter)
    if current is None:
        raise Refusal(
            ErrorCode.UNKNOWN_ADAPTER, f"adapter {message.adapter!r} is not known; load it first"
        )
    demoting = (world.adapters[adapter_id] for adapter_id in world.demoting)
    retired = tuple(adapter_view(a) for a in demoting if a.retired and a.name == current.name)
    return requests.AdapterShown(message.request_id, adapter_view(current), retired)


def show_status(controller: Controller, message: requests.ShowStatus) -> requests.StatusShown:
    """Return the controller's and the tiers' totals."""
    world, engine = controller.world, controller.world.engine
    return requests.StatusShown(
        message.request_id,
        epoch=world.epoch,
        seq=world.seq,
        digest=world.digest(),
        policy=controller.policy_name,
        engine_id="" if engine is None else engine.engine_id,
        engine_pid=0 if engine is None else engine.pid,
        model="" if engine is None else engine.model,
        adapters=len(world.adapters),
        requests=len(world.pending_requests),
        operations=len(world.operations),
        answered=world.answered,
        refused=world.refused,
        tiers=_tiers(world),
        events_seq=world.events_seq,
    )


def _tiers(world: World) -> tuple[requests.TierView, ...]:
    return tuple(
        requests.TierView(name, tier.count, tier.count_max, tier.size_bytes, tier.size_bytes_max)
        for name, tier in world.tiers.items()
    )
