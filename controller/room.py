"""Budgets and victims: whether a step has room, and who could make some.

What it is: accounts of the three tiers, and the search for somebody to leave. What it is not: the
leaving (`drive`). One rule: a tier is charged when a step is sent and not when it is reported, so
no bound is passed during a change.
"""

import heapq
from collections.abc import Iterator
from typing import Final

from controller.limits import Limits
from controller.steps import Step
from controller.turn import Turn
from controller.world import Adapter, TierName, World
from messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, NO_SLOT, PINNED, AdapterState

TIER_OF: Final[dict[Step, TierName]] = {
    Step.LOAD: "host",
    Step.STAGE: "pinned",
    Step.WRITE: "device",
}

FLOOR: Final[dict[TierName, tuple[AdapterState, ...]]] = {
    "host": (CPU_CACHED, PINNED, GPU_SLOT),
    "pinned": (PINNED, GPU_SLOT),
    "device": (GPU_SLOT,),
}
"""The states that take room in a tier, those that are cheapest to come back from first."""


PLACES: Final[dict[TierName, int]] = {"host": 1, "pinned": 0, "device": 1}
"""The places that one adapter takes in a tier; pinned memory is bounded by bytes alone."""


def need_bytes(adapter: Adapter, tier: TierName) -> int:
    """What the adapter will take in a tier that it is about to enter."""
    return adapter.load_bytes if tier == "host" else adapter.blob_bytes


def charge(adapter: Adapter, tier: TierName) -> tuple[int, int]:
    """The places and bytes that the adapter takes in a tier now."""
    if tier == "host":
        return int(adapter.on_host), adapter.host_bytes
    if tier == "pinned":
        return 0, adapter.pinned_bytes
    return int(adapter.slot != NO_SLOT), adapter.device_bytes


def set_bounds(world: World, limits: Limits) -> None:
    """Bound the tiers: by the limits, and by the engine where that is smaller."""
    host, pinned, device = (world.tiers[tier] for tier in ("host", "pinned", "device"))
    host.count_max, host.size_bytes_max = limits.host_adapters_max, limits.host_bytes_max
    pinned.count_max, pinned.size_bytes_max = limits.host_adapters_max, limits.pinned_bytes_max
    device.count_max = device.size_bytes_max = 0
    if world.engine is not None:
        device.count_max = min(limits.slots_max, world.engine.slots_max)
        device.size_bytes_max = min(limits.device_bytes_max, world.engine.device_bytes_max)


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
    turn.touch(adapter)


def enter(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    """Reserve the room that `fits` saw."""
    pay(turn, adapter, tier, need_bytes(adapter, tier))
    turn.world.tiers[tier].count += PLACES[tier]
    if tier == "host":
        adapter.on_host = True
    elif tier == "device":
        take_slot(turn, adapter, heapq.heappop(turn.world.free_slots))


def leave(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    """Give back all that the adapter takes in a tier."""
    places, size_bytes = charge(adapter, tier)
    pay(turn, adapter, tier, -size_bytes)
    turn.world.tiers[tier].count -= places
    if tier == "host":
        adapter.on_host = False
    elif tier == "device" and adapter.slot != NO_SLOT:
        free_slot(turn, adapter)


def take_slot(turn: Turn, adapter: Adapter, index: int) -> None:
    """Reserve a slot, and begin its next generation."""
    slot = turn.world.slots[index]
    slot.adapter_id = adapter.id
    slot.generation += 1
    turn.world.slots.touch(index)
    adapter.slot, adapter.generation = index, slot.generation


def free_slot(turn: Turn, adapter: Adapter) -> None:
    """Give a slot back; its generation stays, so the next one is larger."""
    turn.world.slots[adapter.slot].adapter_id = 0
    turn.world.slots.touch(adapter.slot)
    heapq.heappush(turn.world.free_slots, adapter.slot)
    adapter.slot, adapter.generation = NO_SLOT, 0


def shortage(turn: Turn, tier: TierName) -> tuple[int, int]:
    """By how many places and bytes the tier will be over its bound; negative where it is under.

    What adapters on their way out take counts as free already.
    """
    account = turn.world.tiers[tier]
    places = account.count - account.count_max
    size_bytes = account.size_bytes - account.size_bytes_max
    for adapter_id in turn.world.leaving:
        adapter = turn.world.adapters[adapter_id]
        if adapter.goal not in FLOOR[tier]:
            gives = charge(adapter, tier)
            places, size_bytes = places - gives[0], size_bytes - gives[1]
    return places, size_bytes


def find_victim(turn: Turn, tier: TierName, places: int, size_bytes: int) -> Adapter | None:
    """Who leaves the tier: somebody idle, else somebody leased, who then takes no new requests.

    Never one that is held, waited for, or in motion already, nor one whose going would give
    nothing of the `places` and `size_bytes` that lack.
    """
    for state in FLOOR[tier]:
        victim = turn.policy(_candidates(turn, state, tier, (places, size_bytes), leased=False))
        if victim is not None:
            return victim
    return turn.policy(_candidates(turn, GPU_SLOT, tier, (places, size_bytes), leased=True))


def _candidates(
    turn: Turn, state: AdapterState, tier: TierName, short: tuple[int, int], *, leased: bool
) -> Iterator[Adapter]:
    world = turn.world
    for adapter_id in world.recency[state]:
        adapter = world.adapters[adapter_id]
        if adapter.held or adapter.op or adapter.waiters or adapter_id in world.leaving:
            continue
        gives = charge(adapter, tier)
        helps = (short[0] > 0 and gives[0] > 0) or (short[1] > 0 and gives[1] > 0)
        if helps and bool(adapter.leases) == leased:
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
    return host.size_bytes + adapter.blob_bytes <= turn.limits.host_bytes_max


def why_never(turn: Turn, adapter: Adapter, tier: TierName) -> str | None:
    """Why no waiting can give the adapter room in a tier; None where it can."""
    wanted, bound = need_bytes(adapter, tier), turn.world.tiers[tier]
    if wanted > bound.size_bytes_max:
        return (
            f"adapter {adapter.name!r} needs {wanted} bytes of {tier} memory, the budget is "
            f"{bound.size_bytes_max}; raise {tier}_bytes_max or serve a smaller adapter"
        )
    places = size_bytes = 0
    for adapter_id in turn.world.held:
        if adapter_id != adapter.id:
            held = charge(turn.world.adapters[adapter_id], tier)
            places, size_bytes = places + held[0], size_bytes + held[1]
    fits_beside = size_bytes + wanted <= bound.size_bytes_max
    if places + PLACES[tier] <= bound.count_max and fits_beside:
        return None
    return (
        f"adapter {adapter.name!r} finds no room in {tier} memory: {places} of {bound.count_max} "
        f"places and {size_bytes} of {bound.size_bytes_max} bytes are held; release an adapter"
    )
