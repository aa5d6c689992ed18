"""Budgets and victims: whether a step has room, and who could make some.

What it is: accounts of the three tiers, and the search for somebody to leave. What it is not: the
leaving (`drive`). One rule: a tier is charged when a step is sent and not when it is reported, so
no bound is passed during a change.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from controller.core.context import Turn
from controller.core.tier_queues import TIERS, TierName
from controller.core.world import Adapter
from messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, NO_SLOT, PINNED, AdapterState

Room = tuple[int, int]
"""Places and bytes of one tier."""

PLACES: Final[dict[TierName, int]] = {"host": 1, "pinned": 0, "device": 1}
"""The places that one adapter takes in a tier; pinned memory is bounded by bytes alone."""

FLOOR: Final[dict[TierName, tuple[AdapterState, ...]]] = {
    "host": (CPU_CACHED, PINNED, GPU_SLOT),
    "pinned": (PINNED, GPU_SLOT),
    "device": (GPU_SLOT,),
}
"""The states that take room in a tier, those that are cheapest to come back from first."""


def need_bytes(adapter: Adapter, tier: TierName) -> int:
    """What the adapter takes in a tier when it enters it.

    Pageable memory holds it as it was read, or as it was packed: the larger counts.
    """
    if tier == "host":
        return max(adapter.load_bytes, adapter.blob_bytes)
    return adapter.blob_bytes


def charge(adapter: Adapter, tier: TierName) -> Room:
    """What the adapter takes in a tier now."""
    if tier == "host":
        return int(adapter.on_host), adapter.host_bytes
    if tier == "pinned":
        return 0, adapter.pinned_bytes
    return int(adapter.slot != NO_SLOT), adapter.device_bytes


def fits(turn: Turn, adapter: Adapter, tier: TierName) -> bool:
    """Whether the adapter can enter the tier as it is now."""
    account = turn.world.tiers[tier]
    return (
        account.count + PLACES[tier] <= account.count_max
        and account.size_bytes + need_bytes(adapter, tier) <= account.size_bytes_max
    )


def pay(turn: Turn, adapter: Adapter, tier: TierName, size_bytes: int) -> None:
    """Charge the adapter with `size_bytes` (negative: give back) of a tier."""
    if tier == "host":
        adapter.host_bytes += size_bytes
    elif tier == "pinned":
        adapter.pinned_bytes += size_bytes
    else:
        adapter.device_bytes += size_bytes
    turn.world.tiers[tier].size_bytes += size_bytes
    turn.world.adapters.touch(adapter.id)


def enter(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    """Reserve the room that `fits` saw; on the device, this begins a slot's next generation."""
    pay(turn, adapter, tier, need_bytes(adapter, tier))
    turn.world.tiers[tier].count += PLACES[tier]
    if tier == "host":
        adapter.on_host = True
    elif tier == "device":
        generation = turn.world.next_generation
        turn.world.next_generation += 1
        take_slot(turn, adapter, heapq.heappop(turn.world.free_slots), generation)


def leave(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    """Give back all that the adapter takes in a tier."""
    places, size_bytes = charge(adapter, tier)
    pay(turn, adapter, tier, -size_bytes)
    turn.world.tiers[tier].count -= places
    if tier == "host":
        adapter.on_host = False
    elif tier == "device" and adapter.slot != NO_SLOT:
        _free_slot(turn, adapter)


def take_slot(turn: Turn, adapter: Adapter, index: int, generation: int) -> None:
    """Enter the adapter in a slot that is not among the free ones any more."""
    slot = turn.world.slots[index]
    slot.adapter_id, slot.generation = adapter.id, generation
    turn.world.slots.touch(index)
    adapter.slot, adapter.generation = index, generation
    turn.touch(adapter)


def _free_slot(turn: Turn, adapter: Adapter) -> None:
    turn.world.slots[adapter.slot].adapter_id = 0
    turn.world.slots.touch(adapter.slot)
    heapq.heappush(turn.world.free_slots, adapter.slot)
    adapter.slot, adapter.generation = NO_SLOT, 0


def shortage(turn: Turn, tier: TierName) -> Room:
    """By how much the tier will be over its bound; negative where it will be under.

    What adapters on their way out take counts as free already.
    """
    account = turn.world.tiers[tier]
    places = account.count - account.count_max
    size_bytes = account.size_bytes - account.size_bytes_max
    for adapter_id in turn.world.leaving:
        adapter = turn.world.adapters[adapter_id]
        if adapter.goal not in FLOOR[tier] and not adapter.resting:
            gives = charge(adapter, tier)
            places, size_bytes = places - gives[0], size_bytes - gives[1]
    return places, size_bytes


def find_victim(turn: Turn, claimant: Adapter, tier: TierName, short: Room) -> Adapter | None:
    """Who leaves the tier for `claimant`, by giving something of what is `short`.

    Somebody idle; else somebody leased, who then takes no new requests and goes after the last one;
    else somebody whose own waiters came later, so that the oldest request always gets on. Never one
    that is held or in motion already.
    """
    claim = claimant.claim
    for kind in (_is_idle, _is_only_leased, lambda adapter: adapter.claim > claim):
        for state in FLOOR[tier]:
            victim = turn.policy(_candidates(turn, state, tier, short, kind))
            if victim is not None:
                return victim
    return None


def _is_idle(adapter: Adapter) -> bool:
    return not adapter.waiters and not adapter.leases


def _is_only_leased(adapter: Adapter) -> bool:
    return not adapter.waiters and adapter.leases > 0


def _candidates(
    turn: Turn,
    state: AdapterState,
    tier: TierName,
    short: Room,
    accepts: Callable[[Adapter], bool],
) -> Iterator[Adapter]:
    world = turn.world
    for adapter_id in world.recency[state]:
        adapter = world.adapters[adapter_id]
        if adapter.held or adapter.op or adapter.resting or adapter_id in world.leaving:
            continue
        gives = charge(adapter, tier)
        helps = (short[0] > 0 < gives[0]) or (short[1] > 0 < gives[1])
        if helps and accepts(adapter):
            yield adapter


def lowered_goal(turn: Turn, victim: Adapter, tier: TierName) -> AdapterState:
    """How far a victim has to go down to leave a tier."""
    if tier == "device":
        return PINNED
    if tier == "pinned" and has_pageable_room(turn, victim):
        return CPU_CACHED
    return EVICTED


def has_pageable_room(turn: Turn, adapter: Adapter) -> bool:
    """Whether the adapter's blob could lie in pageable memory."""
    host = turn.world.tiers["host"]
    return host.size_bytes + need_bytes(adapter, "host") <= host.size_bytes_max


def why_never(turn: Turn, adapter: Adapter, tier: TierName) -> str | None:
    """Why no waiting can give the adapter room in a tier; None where it can."""
    wanted, bound = (PLACES[tier], need_bytes(adapter, tier)), _bound(turn, tier)
    held = held_by_others(turn, (adapter,), tier)
    if _fits_beside(wanted, held, bound):
        return None
    if wanted[1] > bound[1]:
        return (
            f"adapter {adapter.name!r} needs {wanted[1]} bytes of {tier} memory, the budget is "
            f"{bound[1]}; raise {tier}_bytes_max or serve a smaller adapter"
        )
    return (
        f"adapter {adapter.name!r} needs {_told(wanted, tier)} of {tier} memory; held adapters "
        f"keep {_told(held, tier)} of {_told(bound, tier)}; release one"
    )


def why_never_together(turn: Turn, adapters: tuple[Adapter, ...]) -> str | None:
    """Why these can't all be in slots at once, as far as their sizes are known; None if they can.

    Without an engine nobody knows its bounds, and the limits alone count.
    """
    for tier in TIERS[1:]:
        bound = _bound(turn, tier)
        if tier == "device" and turn.world.engine is None:
            bound = (turn.limits.slots_max, turn.limits.device_bytes_max)
        held = held_by_others(turn, adapters, tier)
        wanted = _sum((PLACES[tier], need_bytes(adapter, tier)) for adapter in adapters)
        if not _fits_beside(wanted, held, bound):
            return (
                f"the batch needs {_told(wanted, tier)} of {tier} memory; other adapters that are "
                f"held keep {_told(held, tier)} of {_told(bound, tier)}; split the batch or "
                "release one"
            )
    return None


def held_by_others(turn: Turn, adapters: tuple[Adapter, ...], tier: TierName) -> Room:
    """What held adapters will always take of a tier, without `adapters`."""
    world = turn.world
    if not world.held:
        return 0, 0
    excepted = {adapter.id for adapter in adapters}
    held = [world.adapters[a] for a in world.held if a not in excepted]
    if tier == "host":
        # They pass through pageable memory and lie page-locked then, but for those that get stuck.
        return len(held), sum(adapter.host_bytes for adapter in held if adapter.resting)
    return _sum((PLACES[tier], need_bytes(adapter, tier)) for adapter in held)


def _bound(turn: Turn, tier: TierName) -> Room:
    account = turn.world.tiers[tier]
    return account.count_max, account.size_bytes_max


def _fits_beside(wanted: Room, held: Room, bound: Room) -> bool:
    return wanted[0] + held[0] <= bound[0] and wanted[1] + held[1] <= bound[1]


def _sum(parts: Iterable[Room]) -> Room:
    places = size_bytes = 0
    for part in parts:
        places, size_bytes = places + part[0], size_bytes + part[1]
    return places, size_bytes


def _told(room: Room, tier: TierName) -> str:
    size = f"{room[1]} bytes"
    if tier == "pinned":
        return size
    return f"{room[0]} {'slots' if tier == 'device' else 'places'} and {size}"
