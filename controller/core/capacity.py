"""Capacity of the memory tiers: usage, reservations, shortages and victims.

A tier is charged when an operation is sent, not when it is reported, so no bound is exceeded during
a change.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Final

from msgspec import Struct

from loradock.controller.core.context import Context
from loradock.controller.core.indexes import TIERS, TierName
from loradock.controller.core.world import PREFETCH_PRIORITY, STATES_HOLDING, Adapter
from loradock.messages.ids import (
    CPU_CACHED,
    EVICTED,
    NO_SLOT,
    PINNED,
    AdapterId,
    AdapterState,
    Seq,
)


class Amount(Struct, frozen=True, gc=False):
    """An amount of one tier's capacity; a place is an adapter on the host or a device slot."""

    places: int
    size_bytes: int


PLACES_PER_ADAPTER: Final[dict[TierName, int]] = {"host": 1, "pinned": 0, "device": 1}
"""Quantities that count against a tier's bound: pinned memory is bounded by bytes alone."""


def needed_bytes(adapter: Adapter, tier: TierName) -> int:
    """Return the bytes that the adapter is charged when it enters a tier.

    Pageable memory holds it as it was read or as it was packed, so the larger size counts.
    """
    if tier == "host":
        return max(adapter.load_bytes, adapter.blob_bytes)
    return adapter.blob_bytes


def usage_of(adapter: Adapter, tier: TierName) -> Amount:
    """Return what the adapter is charged for in a tier now."""
    if tier == "host":
        return Amount(int(adapter.on_host), adapter.host_bytes)
    if tier == "pinned":
        return Amount(0, adapter.pinned_bytes)
    return Amount(int(adapter.slot != NO_SLOT), adapter.device_bytes)


def fits(context: Context, adapter: Adapter, tier: TierName) -> bool:
    """Return whether the adapter can enter the tier as it is now."""
    usage, places = context.world.tiers[tier], PLACES_PER_ADAPTER[tier]
    return (
        not places or usage.count + places <= usage.count_max
    ) and usage.size_bytes + needed_bytes(adapter, tier) <= usage.size_bytes_max


def charge(context: Context, adapter: Adapter, tier: TierName) -> None:
    """Charge the adapter for the bytes that it needs in a tier."""
    _add_bytes(context, adapter, tier, needed_bytes(adapter, tier))


def refund(context: Context, adapter: Adapter, tier: TierName) -> None:
    """Free all bytes that the adapter is charged for in a tier."""
    context.departed = adapter.id
    _add_bytes(context, adapter, tier, -usage_of(adapter, tier).size_bytes)


def _add_bytes(context: Context, adapter: Adapter, tier: TierName, change: int) -> None:
    if tier == "host":
        adapter.host_bytes += change
    elif tier == "pinned":
        adapter.pinned_bytes += change
    else:
        adapter.device_bytes += change
    context.world.tiers[tier].size_bytes += change
    context.world.adapters.mark_changed(adapter.id)


def enter(context: Context, adapter: Adapter, tier: TierName) -> None:
    """Reserve room in a tier that the adapter `fits`; on the device, assign it a slot."""
    charge(context, adapter, tier)
    context.world.tiers[tier].count += 1
    if tier == "host":
        adapter.on_host = True
    elif tier == "pinned":
        adapter.is_staged = True
    else:
        adapter.slot = heapq.heappop(context.world.free_slots)
        adapter.generation = context.world.next_generation
        context.world.next_generation += 1


def leave(context: Context, adapter: Adapter, tier: TierName) -> None:
    """Free everything that the adapter uses in a tier."""
    context.world.tiers[tier].count -= _is_in(adapter, tier)
    refund(context, adapter, tier)
    if tier == "host":
        adapter.on_host = False
    elif tier == "pinned":
        adapter.is_staged = False
    elif tier == "device" and adapter.slot != NO_SLOT:
        _free_slot(context, adapter)


def _is_in(adapter: Adapter, tier: TierName) -> bool:
    if tier == "host":
        return adapter.on_host
    return adapter.is_staged if tier == "pinned" else adapter.slot != NO_SLOT


def _free_slot(context: Context, adapter: Adapter) -> None:
    # An engine can have more slots than the limits allow; those beyond are not assigned.
    if adapter.slot < context.limits.max_loras:
        heapq.heappush(context.world.free_slots, adapter.slot)
    adapter.slot, adapter.generation = NO_SLOT, 0


def shortage(context: Context, tier: TierName) -> Amount:
    """Return by how much the tier will exceed its bounds; negative if room will be left.

    What demoting adapters use counts as free.
    """
    usage = context.world.tiers[tier]
    places = PLACES_PER_ADAPTER[tier] * (usage.count - usage.count_max)
    size_bytes = usage.size_bytes - usage.size_bytes_max
    for adapter_id in context.world.demoting:
        adapter = context.world.adapters[adapter_id]
        if adapter.goal not in STATES_HOLDING[tier] and not adapter.backing_off:
            freed = usage_of(adapter, tier)
            places, size_bytes = places - freed.places, size_bytes - freed.size_bytes
    return Amount(places, size_bytes)


def find_victim(
    context: Context, requester: Adapter, tier: TierName, missing: Amount
) -> Adapter | None:
    """Choose an adapter that leaves the tier for `requester` and frees a part of `missing`.

    An idle one is preferred. Next is a leased one, which then accepts no new requests and leaves
    after its last one or, if slots have turns, when its turn is over; the one whose turn began
    first is chosen there. Next is one whose requests are newer, so that the oldest request is
    always served. Held adapters, those in motion and those with suspended generations are never
    chosen. For a prefetch, only idle adapters are chosen that are outside the slots and at their
    goal.

    A ranking chooses among idle adapters; whose turn ends is no choice of a policy. A policy that
    raises or chooses an adapter that it must not is replaced by `lru`.
    """
    try:
        return _find_by_policy(context, requester, tier, missing)
    except PolicyFailure as failure:
        context.replace_policy(str(failure))
    return _find_by_policy(context, requester, tier, missing)


def _find_by_policy(
    context: Context, requester: Adapter, tier: TierName, missing: Amount
) -> Adapter | None:
    states, can_move = STATES_HOLDING[tier], partial(_can_move, context, tier, missing)
    if requester.priority == PREFETCH_PRIORITY:
        is_idle = partial(_is_idle_at_goal, context)
        return _choose_idle(context, states[:-1], tier, _both(is_idle, can_move))
    victim = _choose_idle(context, states, tier, _both(_is_idle, can_move))
    if victim is not None:
        return victim
    # Listed once: where no adapter is idle, most inputs get here.
    movable = list(_in_lru_order(context, can_move, states))
    for accepts in (_is_only_leased, partial(_is_newer, context, requester.priority)):
        candidates = list(filter(accepts, movable))
        if accepts is _is_only_leased and context.limits.turn_tokens:
            candidates.sort(key=attrgetter("state_since_ns"))
        victim = _choose_by_policy(
            context, states, partial(_in_states, candidates), _both(accepts, can_move)
        )
        if victim is not None:
            return victim
    return None


def _choose_idle(
    context: Context,
    states: tuple[AdapterState, ...],
    tier: TierName,
    can_leave: Callable[[Adapter], bool],
) -> Adapter | None:
    if context.world.rankings:
        choose = partial(_choose_by_ranking, context, states, tier, can_leave)
        return _checked_choice(context, choose, states, can_leave)
    return _choose_by_policy(context, states, partial(_in_lru_order, context, can_leave), can_leave)


def _choose_by_policy(
    context: Context,
    states: tuple[AdapterState, ...],
    candidates_in: Callable[[tuple[AdapterState, ...]], Iterator[Adapter]],
    can_leave: Callable[[Adapter], bool],
) -> Adapter | None:
    """Return what the policy chooses from all states at once, or from one after the other."""
    for group in [(state,) for state in states] if context.is_state_by_state else [states]:
        choose = partial(context.current_policy, candidates_in(group))
        victim = _checked_choice(context, choose, group, can_leave)
        if victim is not None:
            return victim
    return None


class PolicyFailure(Exception):  # noqa: N818 - named after the event
    """A policy raised an exception or chose what it must not."""


def _choose_by_ranking(
    context: Context,
    states: tuple[AdapterState, ...],
    tier: TierName,
    can_leave: Callable[[Adapter], bool],
) -> Adapter | None:
    """Return the idle adapter that leaves the tier by its ranking."""
    adapters = context.world.adapters

    def accepts(adapter_id: AdapterId) -> bool:
        adapter = adapters[adapter_id]
        return adapter.state in states and can_leave(adapter)

    chosen = context.world.rankings[tier].choose(accepts)
    return None if chosen is None else adapters[chosen]


def _checked_choice(
    context: Context,
    choose: Callable[[], Adapter | None],
    states: tuple[AdapterState, ...],
    can_leave: Callable[[Adapter], bool],
) -> Adapter | None:
    """Return what a policy chooses; raises `PolicyFailure` if it raises or must not choose it."""
    try:
        victim = choose()
    # Any exception: nothing is known about a policy of another package.
    except Exception as error:
        # Without its text, which can differ in a replay.
        raise PolicyFailure(f"raised {type(error).__name__}") from error
    if victim is None:
        return None
    is_known = type(victim) is Adapter and context.world.adapters.get(victim.id) is victim
    if not is_known or victim.state not in states or not can_leave(victim):
        raise PolicyFailure("chose an adapter that it must not evict")
    return victim


def _is_idle(adapter: Adapter) -> bool:
    return not adapter.waiters and not adapter.leases


def _is_idle_at_goal(context: Context, adapter: Adapter) -> bool:
    return _is_idle(adapter) and adapter.id not in context.world.promoting


def _is_only_leased(adapter: Adapter) -> bool:
    return not adapter.waiters and adapter.leases > 0


def _is_newer(context: Context, priority: Seq, adapter: Adapter) -> bool:
    # A turn that begins with reading files again would cost more than it is worth.
    return adapter.priority > priority and not context.world.has_suspended(adapter)


def _in_states(
    candidates: Iterable[Adapter], states: tuple[AdapterState, ...]
) -> Iterator[Adapter]:
    return (one for one in candidates if one.state in states)


def _in_lru_order(
    context: Context, accepts: Callable[[Adapter], bool], states: tuple[AdapterState, ...]
) -> Iterator[Adapter]:
    """Return the accepted adapters of these states, least recently used first."""
    world = context.world
    orders = [
        filter(accepts, map(world.adapters.__getitem__, world.lru_order[state])) for state in states
    ]
    return heapq.merge(*orders, key=attrgetter("lru_stamp"))


def _both(
    first: Callable[[Adapter], bool], second: Callable[[Adapter], bool]
) -> Callable[[Adapter], bool]:
    return lambda adapter: first(adapter) and second(adapter)


def _can_move(context: Context, tier: TierName, missing: Amount, adapter: Adapter) -> bool:
    """Return whether leaving the tier is open to the adapter and frees a part of `missing`."""
    if adapter.held or adapter.op or adapter.backing_off or adapter.id in context.world.demoting:
        return False
    return _frees_some(adapter, tier, missing)


def _frees_some(adapter: Adapter, tier: TierName, missing: Amount) -> bool:
    usage = usage_of(adapter, tier)
    return (missing.places > 0 and usage.places > 0) or (
        missing.size_bytes > 0 and usage.size_bytes > 0
    )


def demotion_goal(context: Context, victim: Adapter, tier: TierName) -> AdapterState:
    """Return the highest state in which the victim no longer uses a tier."""
    if tier == "device":
        return PINNED
    if tier == "pinned" and has_pageable_room(context, victim):
        return CPU_CACHED
    return EVICTED


def has_pageable_room(context: Context, adapter: Adapter) -> bool:
    """Return whether the adapter's blob fits into pageable memory."""
    host = context.world.tiers["host"]
    return host.size_bytes + needed_bytes(adapter, "host") <= host.size_bytes_max


def permanent_shortage(context: Context, adapter: Adapter, tier: TierName) -> str | None:
    """Return why waiting can't make room for the adapter in a tier; None if it can."""
    needed, bound = _needs(adapter, tier), _bound(context, tier)
    held = held_by_others(context, (adapter,), tier)
    if _fit_together(needed, held, bound):
        return None
    if needed.size_bytes > bound.size_bytes:
        return (
            f"adapter {adapter.name!r} needs {needed.size_bytes} bytes of {tier} memory, the "
            f"budget is {bound.size_bytes}; raise {tier}_bytes_max or serve a smaller adapter"
        )
    return (
        f"adapter {adapter.name!r} needs {_text(needed, tier)} of {tier} memory; held adapters "
        f"keep {_text(held, tier)} of {_text(bound, tier)}; release one"
    )


def permanent_shortage_of_batch(context: Context, adapters: tuple[Adapter, ...]) -> str | None:
    """Return why these adapters can't all be in slots at once; None if they can.

    Sizes that are not known yet count as 0. Without an engine only the limits bound them.
    """
    for tier in TIERS[1:]:
        bound = _bound(context, tier)
        if tier == "device" and context.world.engine is None:
            bound = Amount(context.limits.max_loras, context.limits.device_bytes_max)
        held = held_by_others(context, adapters, tier)
        needed = _total(_needs(adapter, tier) for adapter in adapters)
        if not _fit_together(needed, held, bound):
            return (
                f"the batch needs {_text(needed, tier)} of {tier} memory; other adapters that are "
                f"held keep {_text(held, tier)} of {_text(bound, tier)}; split the batch or "
                "release one"
            )
    return None


def held_by_others(context: Context, adapters: tuple[Adapter, ...], tier: TierName) -> Amount:
    """Return what held adapters, without `adapters`, will always use of a tier."""
    world = context.world
    if not world.held:
        return Amount(0, 0)
    excepted = {adapter.id for adapter in adapters}
    held = [world.adapters[a] for a in world.held if a not in excepted]
    if tier == "host":
        # They use pageable memory only until they are page-locked, unless their staging failed.
        return Amount(len(held), sum(a.host_bytes for a in held if a.backing_off))
    return _total(_needs(adapter, tier) for adapter in held)


def _needs(adapter: Adapter, tier: TierName) -> Amount:
    return Amount(PLACES_PER_ADAPTER[tier], needed_bytes(adapter, tier))


def _bound(context: Context, tier: TierName) -> Amount:
    usage = context.world.tiers[tier]
    return Amount(usage.count_max, usage.size_bytes_max)


def _fit_together(needed: Amount, held: Amount, bound: Amount) -> bool:
    return (
        needed.places + held.places <= bound.places
        and needed.size_bytes + held.size_bytes <= bound.size_bytes
    )


def _total(amounts: Iterable[Amount]) -> Amount:
    places = size_bytes = 0
    for amount in amounts:
        places, size_bytes = places + amount.places, size_bytes + amount.size_bytes
    return Amount(places, size_bytes)


def _text(amount: Amount, tier: TierName) -> str:
    size = f"{amount.size_bytes} bytes"
    if tier == "pinned":
        return size
    return f"{amount.places} {'slots' if tier == 'device' else 'places'} and {size}"
