"""Driving adapters from fact towards goal.

What it is: what follows an input: waiting requests served, next steps taken, room made. What it is
not: what a client may ask (`asks`) or what a report tells (`facts`). One rule: an adapter has at
most one operation of its own in flight, and nothing moves it but that operation's report.
"""

from collections.abc import Callable
from typing import Final

from controller.core import capacity, pending_requests
from controller.core.context import NANOS_PER_MS, Turn
from controller.core.next_step import NEXT_STEP, Step
from controller.core.tier_queues import TierName
from controller.core.world import NO_CLAIM, Adapter
from controller.states import spec
from controller.states.table import HEIGHT, move
from messages import commands, events
from messages.errors import ErrorCode
from messages.ids import EVICTED, UNREGISTERED, AdapterState


def follow_up(turn: Turn) -> None:
    """Do all that an input's changes make possible, until nothing is due any more."""
    world, adapters = turn.world, turn.world.adapters
    while turn.due or (world.batches and not world.driven):
        if world.batches:
            pending_requests.start_next_batch(turn)
        due = tuple(turn.due)
        turn.due.clear()
        for adapter_id in due:
            adapter = adapters.get(adapter_id)
            if adapter is not None:
                settle(turn, adapter)
        if world.queues.members and world.ready and not turn.due:
            _serve_queues(turn)


def settle(turn: Turn, adapter: Adapter) -> None:
    """Serve whom the facts satisfy, aim at what the others want, and take the next step."""
    waiting = turn.world.waiting
    for request_id in tuple(adapter.waiters):
        wish = waiting[request_id]
        if pending_requests.is_met(adapter, wish):
            pending_requests.fulfil(turn, adapter, request_id, wish)
    if adapter.op:
        return
    if adapter.waiters:
        _aim_for_waiters(turn, adapter)
    elif adapter.goal != adapter.state:
        _drop_idle_wish(turn, adapter)
    if adapter.goal != adapter.state or adapter.state == UNREGISTERED:
        pursue(turn, adapter)


def _aim_for_waiters(turn: Turn, adapter: Adapter) -> None:
    goal: AdapterState = adapter.goal
    lowest: AdapterState | None = None
    for request_id in adapter.waiters:
        waiting = turn.world.waiting[request_id]
        target = waiting.target
        if waiting.kind in pending_requests.DOWNWARD:
            if lowest is None or HEIGHT[target] < HEIGHT[lowest]:
                lowest = target
        elif HEIGHT[target] > HEIGHT[goal]:
            goal = target
    if lowest is not None:
        goal = lowest
    elif adapter.id in turn.world.leaving:
        # It goes where it is sent first, and comes back for these.
        return
    if goal != adapter.goal:
        turn.aim(adapter, goal)


def _drop_idle_wish(turn: Turn, adapter: Adapter) -> None:
    """A wish that nobody has any more pushes nobody out, and a name never loaded is forgotten."""
    world = turn.world
    if adapter.state == UNREGISTERED:
        turn.aim(adapter, UNREGISTERED)
    elif adapter.id in world.queues.members and adapter.claim == NO_CLAIM:
        _want_no_more(turn, adapter)
    elif adapter.resting and not adapter.held and adapter.id in world.striving:
        turn.aim(adapter, adapter.state)


def _want_no_more(turn: Turn, adapter: Adapter) -> None:
    """Where there is no room, give up what nobody claims; a hold that failed is tried later."""
    if adapter.held:
        rest(turn, adapter)
    else:
        turn.aim(adapter, adapter.state)


def pursue(turn: Turn, adapter: Adapter) -> None:
    """Take the next step of an adapter that is not in motion, if it has one."""
    step = NEXT_STEP[adapter.state][adapter.goal]
    if step is Step.FORGET:
        forget(turn, adapter)
    elif step is not Step.STAY and turn.world.ready and not adapter.resting:
        _TAKE[step](turn, adapter)


def _load(turn: Turn, adapter: Adapter) -> None:
    if adapter.fingerprint:
        _ask_for_room(turn, adapter, "host")
    else:
        op = turn.next_op()
        turn.issue(commands.CheckAdapter(op, adapter.id, adapter.name, adapter.path), adapter)


def _stage(turn: Turn, adapter: Adapter) -> None:
    _ask_for_room(turn, adapter, "pinned")


def _write(turn: Turn, adapter: Adapter) -> None:
    _ask_for_room(turn, adapter, "device")


def _reset(turn: Turn, adapter: Adapter) -> None:
    # The last lease to end comes back here.
    if not adapter.leases:
        op = turn.next_op()
        turn.issue(commands.ResetSlot(op, adapter.slot, adapter.generation), adapter)


def _unstage(turn: Turn, adapter: Adapter) -> None:
    if not capacity.has_pageable_room(turn, adapter):
        turn.aim(adapter, EVICTED)
        _drop(turn, adapter)
        return
    capacity.pay(turn, adapter, "host", capacity.need_bytes(adapter, "host"))
    turn.issue(commands.UnstageWeights(turn.next_op(), adapter.id), adapter)


def _drop(turn: Turn, adapter: Adapter) -> None:
    turn.issue(commands.DropWeights(turn.next_op(), adapter.id), adapter)


_TAKE: Final[dict[Step, Callable[[Turn, Adapter], None]]] = {
    Step.LOAD: _load,
    Step.STAGE: _stage,
    Step.WRITE: _write,
    Step.RESET: _reset,
    Step.UNSTAGE: _unstage,
    Step.DROP: _drop,
}


def _ask_for_room(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    queues = turn.world.queues
    if adapter.id in queues.members:
        return
    if not queues.lines[tier] and capacity.fits(turn, adapter, tier):
        _enter(turn, adapter, tier)
    elif adapter.claim != NO_CLAIM:
        queues.join(tier, adapter.id, adapter.claim)
        _refuse_hopeless(turn, adapter, tier)
    else:
        _want_no_more(turn, adapter)


def _refuse_hopeless(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    """Tell those for whom an adapter waits in a queue, if it waits for nothing."""
    never = capacity.why_never(turn, adapter, tier)
    if never is not None:
        give_up(turn, adapter, ErrorCode.NO_ROOM, never)
    elif turn.world.driven in adapter.waiters:
        pending_requests.refuse_hopeless_batch(turn)


def _enter(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    capacity.enter(turn, adapter, tier)
    turn.issue(_entry_command(turn, adapter, tier), adapter)


def _entry_command(turn: Turn, adapter: Adapter, tier: TierName) -> commands.Operation:
    op = turn.next_op()
    if tier == "host":
        return commands.LoadWeights(op, adapter.id, adapter.name, adapter.path, adapter.fingerprint)
    if tier == "pinned":
        return commands.StageWeights(op, adapter.id)
    return commands.WriteSlot(op, adapter.id, adapter.slot, adapter.generation)


def _serve_queues(turn: Turn) -> None:
    """Let in whoever waited for room and now has it; make room for those who come next."""
    world = turn.world
    for tier, line in world.queues.lines.items():
        while line:
            adapter = world.adapters[line[0][1]]
            if not capacity.fits(turn, adapter, tier):
                _make_room(turn, tier)
                break
            world.queues.leave(adapter.id)
            _enter(turn, adapter, tier)


def _make_room(turn: Turn, tier: TierName) -> None:
    # In the queue's order: whoever is behind gets nobody sent away before those ahead are served.
    world = turn.world
    places, size_bytes = capacity.shortage(turn, tier)
    for place, (_, adapter_id) in enumerate(world.queues.lines[tier]):
        claimant = world.adapters[adapter_id]
        places += capacity.PLACES[tier]
        size_bytes += capacity.need_bytes(claimant, tier)
        while places > 0 or size_bytes > 0:
            victim = capacity.find_victim(turn, claimant, tier, (places, size_bytes))
            if victim is None:
                if place == 0:
                    # What was held since it came may have made it hopeless.
                    _refuse_hopeless(turn, claimant, tier)
                return
            gives = capacity.charge(victim, tier)
            places, size_bytes = places - gives[0], size_bytes - gives[1]
            _demote(turn, victim, tier)


def _demote(turn: Turn, victim: Adapter, tier: TierName) -> None:
    """Send an adapter down by policy, as far as leaving the tier takes."""
    victim.evictions += 1
    turn.aim(victim, capacity.lowered_goal(turn, victim, tier))
    pursue(turn, victim)


def give_up(turn: Turn, adapter: Adapter, code: ErrorCode, message: str) -> None:
    """The goal can't be reached: the adapter stays as it is, and those who waited are told.

    A hold stands: after a rest, one that should be in a slot is driven there again.
    """
    if adapter.held and HEIGHT[adapter.goal] > HEIGHT[adapter.state]:
        rest(turn, adapter)
    else:
        turn.aim(adapter, UNREGISTERED if adapter.retired else adapter.state)
    pending_requests.refuse_waiters(turn, adapter, code, message, downward=False)
    turn.due[adapter.id] = None


def rest(turn: Turn, adapter: Adapter) -> None:
    """Leave the adapter alone for a while: what just failed would fail again at once."""
    world = turn.world
    adapter.resting = adapter.failed = True
    if adapter.id in world.queues.members:
        world.queues.leave(adapter.id)
    world.add_deadline(world.time_ns + turn.limits.rest_ms * NANOS_PER_MS, "rest", adapter.id)
    turn.touch(adapter)


def forget(turn: Turn, adapter: Adapter) -> None:
    """Delete the record of an adapter that holds nothing any more."""
    world = turn.world
    adapter.state = move(adapter.name, adapter.state, spec.ADAPTER_REMOVED)
    heir = _unlink(turn, adapter)
    if adapter.loads and adapter.retired:
        turn.publish(events.AdapterRetired(adapter.name, adapter.fingerprint))
    elif adapter.loads and not adapter.predecessor and not heir:
        turn.publish(events.AdapterRemoved(adapter.name))
    naming = [b for b in world.batches if adapter.id in world.waiting[b].adapters]
    for request_id in (*adapter.waiters, *naming):
        if request_id not in world.waiting:
            continue
        if world.waiting[request_id].kind in pending_requests.DOWNWARD:
            pending_requests.end_request(
                turn, request_id, pending_requests.done(request_id, adapter)
            )
        else:
            gone = f"adapter {adapter.name!r} was removed; load it again"
            pending_requests.refuse_request(turn, request_id, ErrorCode.UNKNOWN_ADAPTER, gone)


def _unlink(turn: Turn, adapter: Adapter) -> bool:
    """Take the record out of every index; whether another version inherits its name."""
    world = turn.world
    del world.adapters[adapter.id]
    if adapter.id in world.queues.members:
        world.queues.leave(adapter.id)
    for index in (world.leaving, world.striving, world.held):
        index.pop(adapter.id, None)
    predecessor = world.adapters.get(adapter.predecessor)
    if predecessor is not None:
        predecessor.successor = 0
        turn.touch(predecessor)
    heir = world.adapters.get(adapter.successor)
    if world.names.get(adapter.name) == adapter.id:
        del world.names[adapter.name]
        if heir is not None:
            world.names[adapter.name] = heir.id
    if heir is not None:
        heir.predecessor = 0
        turn.touch(heir)
    return heir is not None
