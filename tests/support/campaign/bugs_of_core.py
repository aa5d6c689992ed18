"""Planted bugs of the core."""

import heapq
from functools import partial
from typing import Any

from loradock.controller.core import capacity, deadlines, engine, requests, versions, waiting
from loradock.controller.core.answers import AnswerWindows
from loradock.controller.core.context import Context
from loradock.controller.core.world import PREFETCH_PRIORITY
from loradock.messages.ids import GPU_SLOT
from tests.support.campaign.bug_registry import Replacement, bug, nothing


@bug
def slot_granted_twice() -> Replacement:
    original = capacity.enter

    def enter(context: Any, adapter: Any, tier: Any) -> None:
        original(context, adapter, tier)
        if tier == "device":
            heapq.heappush(context.world.free_slots, adapter.slot)

    return capacity, "enter", enter


@bug
def generation_used_twice() -> Replacement:
    original = capacity.enter

    def enter(context: Any, adapter: Any, tier: Any) -> None:
        original(context, adapter, tier)
        context.world.next_generation = max(2, context.world.next_generation - 1)

    return capacity, "enter", enter


@bug
def lease_forgotten() -> Replacement:
    return waiting, "lease", nothing


@bug
def hold_ignored() -> Replacement:
    original = capacity._can_move

    def can_move(*arguments: Any) -> bool:
        adapter = arguments[-1]
        held, adapter.held = adapter.held, False
        found = original(*arguments)
        adapter.held = held
        return found

    return capacity, "_can_move", can_move


@bug
def device_bytes_not_charged() -> Replacement:
    original = capacity.charge

    def charge(context: Any, adapter: Any, tier: Any) -> None:
        if tier != "device":
            original(context, adapter, tier)

    return capacity, "charge", charge


@bug
def answers_not_kept() -> Replacement:
    return AnswerWindows, "add", nothing


@bug
def timer_not_set() -> Replacement:
    return deadlines, "set_timer", nothing


@bug
def lost_adapters_kept() -> Replacement:
    return engine, "mark_lost", nothing


@bug
def contradictory_inventory_accepted() -> Replacement:
    return engine, "contradiction", nothing


@bug
def changed_entry_not_hashed() -> Replacement:
    return Context, "mark_changed", nothing


@bug
def suspension_forgotten() -> Replacement:
    """A suspended generation does not wait for its adapter, so nothing resumes it."""

    def suspend_one(context: Any, adapter: Any, request_id: Any, since: Any) -> None:
        adapter.leases -= 1
        context.dirty_adapters[adapter.id] = None

    return waiting, "suspend_one", suspend_one


@bug
def prefetch_takes_slots() -> Replacement:
    """A prefetch for which nothing else can leave moves an idle adapter out of its slot."""
    original = capacity.find_victim

    def find_victim(context: Any, requester: Any, tier: Any, missing: Any) -> Any:
        victim = original(context, requester, tier, missing)
        if victim is None and requester.priority == PREFETCH_PRIORITY:
            can_move = partial(capacity._can_move, context, tier, missing)
            return capacity._choose_idle(
                context, (GPU_SLOT,), tier, capacity._both(capacity._is_idle, can_move)
            )
        return victim

    return capacity, "find_victim", find_victim


@bug
def waiting_inference_refused_for_removal() -> Replacement:
    return requests, "_is_inference", lambda pending: bool(pending.op)


@bug
def removed_before_its_requests() -> Replacement:
    """A removed adapter keeps its name and does not serve what waits for it."""
    return versions, "retire", nothing
