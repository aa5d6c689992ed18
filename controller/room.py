"""Budgets and victims: whether a step has room, and who could make some.

What it is: accounts of the three tiers, and the search for somebody to leave. What it is not: the
leaving (`drive`). One rule: a tier is charged when a step is sent and not when it is reported, so
no bound is passed during a change.
"""

import heapq
from collections.abc import Iterator
from typing import Final, NamedTuple

from controller.steps import Step
from controller.turn import Turn
from controller.world import Adapter, TierName
from messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, NO_SLOT, PINNED, AdapterState

UNBOUNDED: Final = 1 << 62

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


class Amount(NamedTuple):
    """Places and bytes of one tier."""

    places: int
    size_bytes: int

    def plus(self, other: "Amount") -> "Amount":
        """Both together."""
        return Amount(self.places + other.places, self.size_bytes + other.size_bytes)

    def minus(self, other: "Amount") -> "Amount":
        """What is left without the other."""
        return Amount(self.places - other.places, self.size_bytes - other.size_bytes)

    def within(self, other: "Amount") -> bool:
        """Whether it fits into `other`, by places and by bytes."""
        return self.places <= other.places and self.size_bytes <= other.size_bytes


def need(adapter: Adapter, tier: TierName) -> Amount:
    """What the adapter will take in a tier that it is about to enter."""
    if tier == "host":
        return Amount(1, adapter.load_bytes)
    return Amount(1 if tier == "device" else 0, adapter.blob_bytes)


def charge(adapter: Adapter, tier: TierName) -> Amount:
    """What the adapter takes in a tier now."""
    if tier == "host":
        return Amount(int(adapter.on_host), adapter.host_bytes)
    if tier == "pinned":
        return Amount(0, adapter.pinned_bytes)
    return Amount(int(adapter.slot != NO_SLOT), adapter.device_bytes)


def capacity(turn: Turn, tier: TierName) -> Amount:
    """A tier's bounds: the limits, and the engine's where that is smaller."""
    limits = turn.limits
    if tier == "host":
        return Amount(limits.host_adapters_max, limits.host_bytes_max)
    if tier == "pinned":
        return Amount(UNBOUNDED, limits.pinned_bytes_max)
    engine = turn.world.engine
    if engine is None:
        return Amount(0, 0)
    return Amount(
        min(limits.slots_max, engine.slots_max),
        min(limits.device_bytes_max, engine.device_bytes_max),
    )


def used(turn: Turn, tier: TierName) -> Amount:
    """What a tier's adapters take now, reservations included."""
    account = turn.world.tiers[tier]
    return Amount(account.count, account.size_bytes)


def fits(turn: Turn, adapter: Adapter, tier: TierName) -> bool:
    """Whether the adapter can enter the tier as it is now."""
    return used(turn, tier).plus(need(adapter, tier)).within(capacity(turn, tier))


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
    amount = need(adapter, tier)
    pay(turn, adapter, tier, amount.size_bytes)
    turn.world.tiers[tier].count += amount.places
    if tier == "host":
        adapter.on_host = True
    elif tier == "device":
        take_slot(turn, adapter, heapq.heappop(turn.world.free_slots))


def leave(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    """Give back all that the adapter takes in a tier."""
    amount = charge(adapter, tier)
    pay(turn, adapter, tier, -amount.size_bytes)
    turn.world.tiers[tier].count -= amount.places
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


def coming_free(turn: Turn, tier: TierName) -> Amount:
    """What adapters on their way out of a tier will give back."""
    amount = Amount(0, 0)
    for adapter_id in turn.world.leaving:
        adapter = turn.world.adapters[adapter_id]
        if adapter.goal not in FLOOR[tier]:
            amount = amount.plus(charge(adapter, tier))
    return amount


def find_victim(turn: Turn, tier: TierName, short: Amount) -> Adapter | None:
    """Who leaves the tier: somebody idle, else somebody leased, who then takes no new requests.

    Never one that is held, waited for, or in motion already, nor one whose going would give nothing
    of what is `short`.
    """
    for state in FLOOR[tier]:
        victim = turn.policy(_candidates(turn, state, tier, short, leased=False))
        if victim is not None:
            return victim
    return turn.policy(_candidates(turn, GPU_SLOT, tier, short, leased=True))


def _candidates(
    turn: Turn, state: AdapterState, tier: TierName, short: Amount, *, leased: bool
) -> Iterator[Adapter]:
    world = turn.world
    for adapter_id in world.recency[state]:
        adapter = world.adapters[adapter_id]
        if adapter.held or adapter.op or adapter.waiters or adapter_id in world.leaving:
            continue
        gives = charge(adapter, tier)
        helps = (short.places > 0 and gives.places > 0) or (short.size_bytes > 0 < gives.size_bytes)
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
    wanted, bound = need(adapter, tier), capacity(turn, tier)
    if wanted.size_bytes > bound.size_bytes:
        return (
            f"adapter {adapter.name!r} needs {wanted.size_bytes} bytes of {tier} memory, the "
            f"budget is {bound.size_bytes}; raise {tier}_bytes_max or serve a smaller adapter"
        )
    held = Amount(0, 0)
    for adapter_id in turn.world.held:
        if adapter_id != adapter.id:
            held = held.plus(charge(turn.world.adapters[adapter_id], tier))
    if held.plus(wanted).within(bound):
        return None
    return (
        f"adapter {adapter.name!r} finds no room in {tier} memory: {held.places} of {bound.places} "
        f"places and {held.size_bytes} of {bound.size_bytes} bytes are held; release an adapter"
    )
