"""Driving adapters from fact towards goal, and answering whoever waited for the fact.

What it is: the steps taken, the queues for room served, the waiting settled. What it is not: what a
client may ask (`asks`) or what a report tells (`facts`). One rule: an adapter has at most one
operation of its own in flight, and nothing moves it but that operation's report.
"""

from collections.abc import Callable
from typing import Final

from controller import room
from controller.actions import Command
from controller.states.table import HEIGHT
from controller.steps import NEXT_STEP, Step
from controller.turn import Turn
from controller.world import Adapter, TierName, Waiting
from messages import commands, events, requests
from messages.errors import ErrorCode
from messages.ids import (
    BASE_MODEL,
    EVICTED,
    NO_SLOT,
    UNREGISTERED,
    RequestId,
)

DOWNWARD: Final = ("deactivate", "evict", "remove")


def pursue(turn: Turn, adapter: Adapter) -> None:
    """Take the adapter's next step, if it has one and nothing is in flight."""
    if adapter.op:
        return
    step = NEXT_STEP[adapter.state][adapter.goal]
    if step is Step.FORGET:
        forget(turn, adapter)
    elif step is not Step.STAY and turn.world.engine is not None:
        _TAKE[step](turn, adapter)


def _load(turn: Turn, adapter: Adapter) -> None:
    if adapter.fingerprint:
        _ask_for_room(turn, adapter, "host")
        return
    turn.issue(
        commands.CheckAdapter(turn.next_op(), adapter.id, adapter.name, adapter.path),
        adapter,
        None,
    )


def _stage(turn: Turn, adapter: Adapter) -> None:
    _ask_for_room(turn, adapter, "pinned")


def _write(turn: Turn, adapter: Adapter) -> None:
    _ask_for_room(turn, adapter, "device")


def _reset(turn: Turn, adapter: Adapter) -> None:
    # The last lease to end comes back here.
    if not adapter.leases:
        op = turn.next_op()
        turn.issue(commands.ResetSlot(op, adapter.slot, adapter.generation), adapter, None)


def _unstage(turn: Turn, adapter: Adapter) -> None:
    if not room.has_pageable_room(turn, adapter):
        turn.aim(adapter, EVICTED)
        _drop(turn, adapter)
        return
    room.pay(turn, adapter, "host", adapter.blob_bytes)
    turn.issue(commands.UnstageWeights(turn.next_op(), adapter.id), adapter, None)


def _drop(turn: Turn, adapter: Adapter) -> None:
    turn.issue(commands.DropWeights(turn.next_op(), adapter.id), adapter, None)


_TAKE: Final[dict[Step, Callable[[Turn, Adapter], None]]] = {
    Step.LOAD: _load,
    Step.STAGE: _stage,
    Step.WRITE: _write,
    Step.RESET: _reset,
    Step.UNSTAGE: _unstage,
    Step.DROP: _drop,
}


def _ask_for_room(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    queue = turn.world.queues[tier]
    if not queue and room.fits(turn, adapter, tier):
        _enter(turn, adapter, tier)
        return
    never = room.why_never(turn, adapter, tier)
    if never is not None:
        give_up(turn, adapter, ErrorCode.NO_ROOM, never)
    elif adapter.waiters or adapter.held:
        queue[adapter.id] = None
        turn.world.queued[adapter.id] = tier
    else:
        # A wish that nobody waits for does not push anybody out.
        turn.aim(adapter, adapter.state)
        pursue(turn, adapter)


def _enter(turn: Turn, adapter: Adapter, tier: TierName) -> None:
    room.enter(turn, adapter, tier)
    op = turn.next_op()
    command: commands.Operation
    if tier == "host":
        command = commands.LoadWeights(
            op, adapter.id, adapter.name, adapter.path, adapter.fingerprint
        )
    elif tier == "pinned":
        command = commands.StageWeights(op, adapter.id)
    else:
        command = commands.WriteSlot(op, adapter.id, adapter.slot, adapter.generation)
    turn.issue(command, adapter, None)


def serve_queues(turn: Turn) -> None:
    """Let in whoever waited for room and now has it; make room for those who come next."""
    if turn.world.engine is None:
        return
    for tier, queue in turn.world.queues.items():
        while queue:
            adapter = turn.world.adapters[next(iter(queue))]
            if not room.fits(turn, adapter, tier):
                break
            del queue[adapter.id], turn.world.queued[adapter.id]
            _enter(turn, adapter, tier)
        if queue:
            _make_room(turn, tier)


def _make_room(turn: Turn, tier: TierName) -> None:
    # In the queue's order: whoever is behind gets nobody sent away before those ahead are served.
    places, size_bytes = room.shortage(turn, tier)
    for adapter_id in list(turn.world.queues[tier]):
        places += room.PLACES[tier]
        size_bytes += room.need_bytes(turn.world.adapters[adapter_id], tier)
        while places > 0 or size_bytes > 0:
            victim = room.find_victim(turn, tier, places, size_bytes)
            if victim is None:
                return
            gives = room.charge(victim, tier)
            places, size_bytes = places - gives[0], size_bytes - gives[1]
            demote(turn, victim, tier)


def demote(turn: Turn, victim: Adapter, tier: TierName) -> None:
    """Send an adapter down by policy, as far as leaving the tier takes."""
    victim.evictions += 1
    turn.aim(victim, room.lowered_goal(turn, victim, tier))
    pursue(turn, victim)


def settle(turn: Turn, adapter: Adapter) -> None:
    """After a fact: answer whom it satisfies, then go on for those who still wait."""
    for request_id in adapter.waiters:
        waiting = turn.world.waiting.get(request_id)
        if waiting is not None and is_met(adapter, waiting):
            fulfil(turn, adapter, request_id, waiting)
    reconsider(turn, adapter)


def reconsider(turn: Turn, adapter: Adapter) -> None:
    """Aim at what the remaining waiters want, and take the next step."""
    if adapter.waiters and not adapter.op:
        _aim_for_waiters(turn, adapter)
    pursue(turn, adapter)


def _aim_for_waiters(turn: Turn, adapter: Adapter) -> None:
    highest, lowest = adapter.goal, None
    for request_id in adapter.waiters:
        wish = turn.world.waiting[request_id]
        if wish.kind not in DOWNWARD:
            highest = max(highest, wish.target, key=HEIGHT.__getitem__)
        elif lowest is None or HEIGHT[wish.target] < HEIGHT[lowest]:
            lowest = wish.target
    if lowest is not None:
        turn.aim(adapter, lowest)
    elif highest != adapter.goal and adapter.id not in turn.world.leaving:
        # One that is on its way down goes there first, and comes back for these.
        turn.aim(adapter, highest)


def is_met(adapter: Adapter, waiting: Waiting) -> bool:
    """Whether the fact that a request asked for is there, and not about to go."""
    height, target = HEIGHT[adapter.state], HEIGHT[waiting.target]
    if waiting.kind in DOWNWARD:
        return height <= target
    return height >= target and HEIGHT[adapter.goal] >= target


def fulfil(turn: Turn, adapter: Adapter, request_id: RequestId, waiting: Waiting) -> None:
    """The fact is there: answer, or begin what it was wanted for."""
    if waiting.kind == "batch":
        confirm_batch(turn, request_id, waiting)
        return
    stop_waiting(turn, adapter, request_id)
    if waiting.kind != "generate":
        del turn.world.waiting[request_id]
    grant(turn, adapter, request_id, waiting)


def grant(turn: Turn, adapter: Adapter, request_id: RequestId, waiting: Waiting) -> None:
    """The fact is there: a generation starts; a hold begins with its answer."""
    if waiting.kind == "generate":
        start_generation(turn, request_id, waiting, adapter)
        return
    if waiting.kind == "hold":
        hold(turn, adapter)
    turn.answer(done(request_id, adapter))


def hold(turn: Turn, adapter: Adapter) -> None:
    """Exempt it from every eviction from now on."""
    if not adapter.held:
        adapter.held = True
        turn.world.held[adapter.id] = None
        turn.touch(adapter)
        turn.publish(events.AdapterHeld(adapter.name))


def release_hold(turn: Turn, adapter: Adapter) -> None:
    """Policies may take it again; a wish that only the hold had is given up."""
    if not adapter.held:
        return
    adapter.held = False
    turn.world.held.pop(adapter.id, None)
    turn.touch(adapter)
    turn.publish(events.AdapterReleased(adapter.name))
    if not adapter.waiters and not adapter.op and adapter.id in turn.world.striving:
        turn.aim(adapter, adapter.state)


def done(request_id: RequestId, adapter: Adapter) -> requests.AdapterDone:
    """The answer that tells where the adapter is."""
    return requests.AdapterDone(
        request_id, adapter.name, adapter.state, adapter.slot, adapter.generation
    )


def start_generation(
    turn: Turn, request_id: RequestId, waiting: Waiting, adapter: Adapter | None
) -> None:
    """Send a generation to the engine; its adapter is leased until it ends."""
    waiting.op = turn.next_op()
    turn.world.waiting.touch(request_id)
    place = (BASE_MODEL, NO_SLOT, 0)
    if adapter is not None:
        adapter.leases += 1
        turn.touch(adapter)
        place = (adapter.id, adapter.slot, adapter.generation)
    turn.issue(commands.StartGeneration(waiting.op, request_id, *place), adapter, request_id)


def stop_generation(turn: Turn, waiting: Waiting) -> None:
    """Ask the engine to end a running generation; its report then answers and ends the lease."""
    turn.actions.append(Command(commands.StopGeneration(turn.next_op(), waiting.op)))


def confirm_batch(turn: Turn, request_id: RequestId, waiting: Waiting) -> None:
    """Once every adapter of the batch is in a slot, have the engine confirm them all at once."""
    adapters = [turn.world.adapters[adapter_id] for adapter_id in waiting.adapters]
    if waiting.op or not all(is_met(adapter, waiting) for adapter in adapters):
        return
    waiting.op = turn.next_op()
    turn.world.waiting.touch(request_id)
    refs = tuple(commands.SlotRef(adapter.slot, adapter.generation) for adapter in adapters)
    turn.issue(commands.SetMapping(waiting.op, refs), None, request_id)


def start_next_batch(turn: Turn) -> None:
    """Drive the oldest batch: one at a time, for two that each have half would wait for ever."""
    request_id = next(iter(turn.world.batches), None)
    if request_id is None:
        return
    waiting = turn.world.waiting[request_id]
    adapters = [turn.world.adapters[adapter_id] for adapter_id in waiting.adapters]
    for adapter in adapters:
        adapter.waiters += (request_id,)
        turn.touch(adapter)
    for adapter in adapters:
        if request_id in turn.world.waiting:
            settle(turn, adapter)


def stop_waiting(turn: Turn, adapter: Adapter, request_id: RequestId) -> None:
    """The adapter no longer owes this request anything."""
    adapter.waiters = tuple(other for other in adapter.waiters if other != request_id)
    turn.touch(adapter)


def end_request(turn: Turn, request_id: RequestId, reply: requests.Reply | None) -> None:
    """Answer an accepted request (None: its client will send it again) and free its adapters."""
    world = turn.world
    waiting = world.waiting.pop_key(request_id)
    adapters = [
        adapter
        for adapter_id in waiting.adapters
        if (adapter := world.adapters.get(adapter_id)) and request_id in adapter.waiters
    ]
    for adapter in adapters:
        stop_waiting(turn, adapter, request_id)
    if reply is not None and not waiting.told:
        turn.answer(reply)
    if request_id in world.batches:
        _end_batch(turn, request_id)
    for adapter in adapters:
        _drop_idle_wish(turn, adapter)


def _end_batch(turn: Turn, request_id: RequestId) -> None:
    batches = turn.world.batches
    was_driven = request_id == next(iter(batches))
    del batches[request_id]
    if was_driven:
        start_next_batch(turn)


def _drop_idle_wish(turn: Turn, adapter: Adapter) -> None:
    if adapter.id in turn.world.queued and not adapter.waiters and not adapter.held:
        turn.aim(adapter, adapter.state)
    if adapter.id in turn.world.adapters:
        reconsider(turn, adapter)


def refuse_request(turn: Turn, request_id: RequestId, code: ErrorCode, message: str) -> None:
    """Answer an accepted request that it was not done."""
    end_request(turn, request_id, requests.Refused(request_id, code, message))


def refuse_waiters(turn: Turn, adapter: Adapter, code: ErrorCode, message: str) -> None:
    """Tell all who wait for this adapter that it won't be."""
    for request_id in adapter.waiters:
        if request_id in turn.world.waiting:
            refuse_request(turn, request_id, code, message)


def give_up(turn: Turn, adapter: Adapter, code: ErrorCode, message: str) -> None:
    """The goal can't be reached: the adapter stays as it is, and those who waited are told."""
    goal = UNREGISTERED if adapter.retired else adapter.state
    turn.aim(adapter, goal)
    refuse_waiters(turn, adapter, code, message)
    if adapter.state == UNREGISTERED:
        forget(turn, adapter)


def forget(turn: Turn, adapter: Adapter) -> None:
    """Delete the record of an adapter that holds nothing any more."""
    world = turn.world
    if adapter.id not in world.adapters:
        return
    was_known = bool(adapter.loads) and not adapter.retired and not adapter.predecessor
    _unlink(turn, adapter)
    for request_id in [b for b in world.batches if adapter.id in world.waiting[b].adapters]:
        gone = f"adapter {adapter.name!r} of the batch was removed; load it again"
        refuse_request(turn, request_id, ErrorCode.UNKNOWN_ADAPTER, gone)
    if was_known:
        turn.publish(events.AdapterRemoved(adapter.name))
    adapter.state = UNREGISTERED
    for request_id in adapter.waiters:
        if request_id not in world.waiting:
            continue
        if world.waiting[request_id].kind == "remove":
            end_request(turn, request_id, done(request_id, adapter))
        else:
            gone = f"adapter {adapter.name!r} was removed; load it again"
            refuse_request(turn, request_id, ErrorCode.UNKNOWN_ADAPTER, gone)


def _unlink(turn: Turn, adapter: Adapter) -> None:
    world = turn.world
    del world.adapters[adapter.id]
    if world.names.get(adapter.name) == adapter.id:
        del world.names[adapter.name]
    if adapter.predecessor in world.adapters:
        world.adapters[adapter.predecessor].successor = 0
        world.adapters.touch(adapter.predecessor)
    for index in (world.leaving, world.striving, world.held):
        index.pop(adapter.id, None)
    if adapter.id in world.queued:
        del world.queues[world.queued.pop(adapter.id)][adapter.id]
