"""Views of the world for clients: pure functions that change nothing and are not logged.

A view is a copy, so that it stays true to its moment.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Set
from itertools import islice
from typing import Literal

import msgspec

from loradock.controller.core.context import Refusal, unknown_adapter
from loradock.controller.core.controller import Controller
from loradock.controller.core.counters import TIME_IN
from loradock.controller.core.world import INFERENCE, Adapter, World
from loradock.messages import requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import GPU_SLOT, NO_SLOT, AdapterId, OpId
from loradock.messages.views import AdapterCounters, AdapterUse, AdapterView, TierView

Sees = Callable[[str], bool]
"""True if a client can see the adapters of a name."""

Phase = Literal["running", "queued", "waiting"]
"""True if an inference takes part in the engine's next step, waits there, or waits for a slot."""


def adapter_view(world: World, adapter: Adapter) -> AdapterView:
    """Return one record as clients see it."""
    counters = adapter.counters
    return AdapterView(
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
        uses=counters.uses,
        loads=counters.loads,
        hits=counters.hits,
        evictions=counters.evictions,
        failures=counters.failures,
        last_used_ns=adapter.last_used_ns,
        counters=_counters_until(adapter, world.time_ns),
        warnings=world.warnings.get(adapter.id, ()),
    )


def _counters_until(adapter: Adapter, now_ns: int) -> AdapterCounters:
    """Return the counters with the time in the present state."""
    shown = msgspec.structs.asdict(adapter.counters)
    shown[TIME_IN[adapter.state]] += now_ns - adapter.state_since_ns
    return AdapterCounters(**shown)


def list_adapters(world: World, message: requests.ListAdapters) -> requests.AdaptersListed:
    """Return every record by name, replaced versions after the current one."""
    return _listed(world, message, world.adapters.values())


def _listed(
    world: World, message: requests.ListAdapters, adapters: Iterable[Adapter]
) -> requests.AdaptersListed:
    ordered = sorted(adapters, key=lambda a: (a.name, a.retired, a.id))
    views = tuple(adapter_view(world, adapter) for adapter in ordered)
    return requests.AdaptersListed(message.request_id, views, world.events_seq)


class AdapterPages:
    """The pages of a world's list: an adapter that is known throughout is on exactly one of them.

    The sorted keys are kept until an adapter is added or removed.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: list[tuple[str, AdapterId]] = []
        self._membership = -1

    def answer(self, message: requests.ListAdapters, sees: Sees | None = None) -> requests.Reply:
        """Return the requested page, or the whole list for a request without a limit.

        `sees`: which names the client can see; None: all. Raises `Refusal` if the whole list
        exceeds a page.
        """
        world, limit = self._world, message.limit
        if limit:
            return self._page(message, limit, sees)
        known = [a for a in world.adapters.values() if sees is None or sees(a.name)]
        if len(known) > requests.LIST_PAGE_ADAPTERS_MAX:
            raise Refusal(
                ErrorCode.MALFORMED,
                f"{len(known)} adapters are known, and one reply lists at most "
                f"{requests.LIST_PAGE_ADAPTERS_MAX}; request pages by `limit`, as current clients "
                "do",
            )
        return _listed(world, message, known)

    def snapshot(
        self, message: requests.FetchEvents, sees: Sees | None = None
    ) -> requests.SnapshotFetched:
        """Return the first page, for a subscriber whose events are not kept."""
        request = requests.ListAdapters(message.request_id, limit=requests.LIST_PAGE_ADAPTERS_MAX)
        page = self._page(request, request.limit, sees)
        return requests.SnapshotFetched(
            message.request_id, page.adapters, page.events_seq, page.more
        )

    def _page(
        self, message: requests.ListAdapters, limit: int, sees: Sees | None
    ) -> requests.AdaptersPage:
        world, keys = self._world, self._sorted_keys()
        first = bisect_right(keys, (message.after, message.after_id))
        places = range(first, len(keys))
        visible = places if sees is None else (i for i in places if sees(keys[i][0]))
        # One more than the page has, to know whether any follow.
        chosen = [keys[place] for place in islice(visible, limit + 1)]
        shown = [world.adapters[adapter_id] for _, adapter_id in chosen[:limit]]
        views = tuple(adapter_view(world, adapter) for adapter in shown)
        more = len(chosen) > limit
        return requests.AdaptersPage(message.request_id, views, world.events_seq, more)

    def _sorted_keys(self) -> list[tuple[str, AdapterId]]:
        adapters = self._world.adapters
        if adapters.membership != self._membership:
            self._keys = sorted((adapter.name, key) for key, adapter in adapters.items())
            self._membership = adapters.membership
        return self._keys


def show_adapter(world: World, message: requests.ShowAdapter) -> requests.AdapterShown:
    """Return a name's current and replaced versions; raises `Refusal` for an unknown name."""
    current = world.current(message.adapter)
    if current is None:
        raise unknown_adapter(message.adapter)
    moving = (world.adapters[a] for a in {**world.promoting, **world.demoting})
    versions = [current, *(a for a in moving if a.retired and a.name == current.name)]
    views = [adapter_view(world, adapter) for adapter in versions]
    return requests.AdapterShown(message.request_id, views[0], tuple(views[1:]))


def show_status(
    controller: Controller,
    message: requests.ShowStatus,
    running: Set[OpId] = frozenset(),
    sees: Sees | None = None,
) -> requests.StatusShown:
    """Return the controller's and the tiers' totals.

    `running`: the operations that take part in the engine's next step. `sees`: which names the
    client can see in the uses of adapters; None: all.
    """
    world, engine = controller.world, controller.world.engine
    inference = _inference_by_adapter(world, running)
    totals = sum(inference.values(), Counter())
    status = requests.StatusShown(
        message.request_id,
        epoch=world.epoch,
        seq=world.seq,
        digest=world.digest(),
        policy="lru" if world.policy_failure else controller.policy_name,
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
        counters=AdapterCounters(*msgspec.structs.astuple(world.totals)),
        running=totals["running"],
        queued=totals["queued"],
        waiting=totals["waiting"],
    )
    return _with_uses(status, world, inference, sees) if message.uses else status


def _inference_by_adapter(world: World, running: Set[OpId]) -> dict[str, Counter[Phase]]:
    """Return name -> phase -> generations and poolings; the base model's name is empty."""
    found: defaultdict[str, Counter[Phase]] = defaultdict(Counter)
    for request_id, pending in world.pending_requests.items():
        if pending.kind in INFERENCE:
            adapter = world.adapters[pending.adapters[0]] if pending.adapters else None
            is_running = pending.op in running
            # The engine's last word of a suspended request may be older than the end of its turn.
            is_suspended = (
                adapter is not None
                and request_id in adapter.waiters
                and not (is_running and _is_ready(world, adapter))
            )
            phase: Phase = "running" if is_running else "queued"
            if not pending.op or is_suspended:
                phase = "waiting"
            found["" if adapter is None else adapter.name][phase] += 1
    return found


def _with_uses(
    status: requests.StatusShown,
    world: World,
    inference: dict[str, Counter[Phase]],
    sees: Sees | None,
) -> requests.StatusShown:
    """Return a status with the counts of adapters, and those in a slot or with requests."""
    states = Counter(adapter.state for adapter in world.adapters.values())
    names = {world.adapters[adapter_id].name for adapter_id in world.lru_order[GPU_SLOT]}
    names |= inference.keys() - {""}
    shown = sorted(name for name in names if sees is None or sees(name))
    uses = tuple(_use_of(world, name, inference[name]) for name in shown)
    counted = tuple(sorted(states.items()))
    return msgspec.structs.replace(status, states=counted, held=len(world.held), uses=uses)


def _use_of(world: World, name: str, phases: Counter[Phase]) -> AdapterUse:
    current = world.current(name)
    return AdapterUse(
        name,
        slot=current.slot if current is not None and _is_ready(world, current) else NO_SLOT,
        leases=0 if current is None else current.leases,
        waiters=0 if current is None else len(current.waiters),
        running=phases["running"],
        queued=phases["queued"],
        waiting=phases["waiting"],
    )


def _is_ready(world: World, adapter: Adapter) -> bool:
    """Return whether an adapter serves from its slot.

    It does not during a write or a reset. An ordered preemption waits for the end of the turn.
    """
    kind = world.operations[adapter.op].kind if adapter.op else "PreemptSlot"
    return adapter.state == GPU_SLOT and kind == "PreemptSlot"


def _tiers(world: World) -> tuple[TierView, ...]:
    return tuple(
        TierView(name, tier.count, tier.count_max, tier.size_bytes, tier.size_bytes_max)
        for name, tier in world.tiers.items()
    )
