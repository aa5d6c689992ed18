"""Requests that wait: how they are kept, served, answered and ended.

What it is: the bookkeeping between requests and adapters, and what a request gets when its fact is
there. What it is not: the steps that bring the fact about (`drive`), or what may be asked (`asks`).
One rule: nothing here moves an adapter; one that should be looked at is marked due.
"""

from operator import itemgetter
from typing import Final

from controller.core import capacity
from controller.core.actions import Command
from controller.core.context import NANOS_PER_MS, Turn
from controller.core.world import Adapter, RequestKind, Waiting
from controller.states.table import HEIGHT
from messages import commands, events, requests
from messages.errors import ErrorCode
from messages.ids import BASE_MODEL, EVICTED, NO_SLOT, UNREGISTERED, AdapterState, RequestId

DOWNWARD: Final = ("deactivate", "evict", "remove")
INFERENCE: Final = ("generate", "embed", "classify")


def is_there(adapter: Adapter, target: AdapterState) -> bool:
    """Whether the adapter holds at least `target`, and is not on its way below."""
    height = HEIGHT[target]
    return HEIGHT[adapter.state] >= height and HEIGHT[adapter.goal] >= height


def is_met(adapter: Adapter, waiting: Waiting) -> bool:
    """Whether the fact that a request asked for is there, and not about to change."""
    if waiting.kind in DOWNWARD:
        return HEIGHT[adapter.state] <= HEIGHT[waiting.target] and not adapter.op
    return is_there(adapter, waiting.target)


def accept(
    turn: Turn,
    request_id: RequestId,
    kind: RequestKind,
    target: AdapterState,
    timeout_ms: int,
    adapters: tuple[Adapter, ...],
) -> Waiting:
    """Keep a request until its answer."""
    world = turn.world
    deadline_ns = world.time_ns + timeout_ms * NANOS_PER_MS
    ids = tuple([adapter.id for adapter in adapters])
    waiting = Waiting(kind, ids, target, deadline_ns, world.seq)
    world.waiting[request_id] = waiting
    world.add_deadline(deadline_ns, "request", request_id)
    return waiting


def wait_for(turn: Turn, adapter: Adapter, request_id: RequestId, since: int) -> None:
    """The adapter owes this request a fact; the oldest of its requests gives it its place."""
    waiters = adapter.waiters
    is_late = bool(waiters) and since < next(reversed(waiters.values()))
    waiters[request_id] = since
    if is_late:
        # A batch whose turn has come, or requests that were bound to another version.
        adapter.waiters = dict(sorted(waiters.items(), key=itemgetter(1)))
    queues = turn.world.queues
    if adapter.id in queues.members:
        queues.renew(adapter.id, adapter.claim)
    adapter.resting = False
    turn.touch(adapter)


def stop_waiting(turn: Turn, adapter: Adapter, request_id: RequestId) -> None:
    """The adapter no longer owes this request anything."""
    del adapter.waiters[request_id]
    queues = turn.world.queues
    if adapter.id in queues.members:
        queues.renew(adapter.id, adapter.claim)
    turn.touch(adapter)


def fulfil(turn: Turn, adapter: Adapter, request_id: RequestId, waiting: Waiting) -> None:
    """The fact is there: answer, or begin what it was wanted for."""
    if waiting.kind == "batch":
        confirm_batch(turn, request_id, waiting)
    elif waiting.kind in INFERENCE:
        if turn.world.ready:
            stop_waiting(turn, adapter, request_id)
            start_inference(turn, request_id, waiting)
    else:
        stop_waiting(turn, adapter, request_id)
        del turn.world.waiting[request_id]
        grant(turn, adapter, request_id, waiting.kind)


def grant(turn: Turn, adapter: Adapter, request_id: RequestId, kind: RequestKind) -> None:
    """Answer that the fact is there; a hold begins with its answer."""
    if kind == "hold" and not adapter.held:
        hold(turn, adapter)
    turn.answer(done(request_id, adapter))


def hold(turn: Turn, adapter: Adapter) -> None:
    """Exempt it from every eviction from now on."""
    adapter.held = True
    turn.world.held[adapter.id] = None
    turn.touch(adapter)
    turn.publish(events.AdapterHeld(adapter.name))


def release(turn: Turn, adapter: Adapter) -> None:
    """End a hold: policies may take the adapter, and what only the hold wanted is given up."""
    world = turn.world
    adapter.held = False
    del world.held[adapter.id]
    if adapter.id in world.queues.members:
        world.queues.renew(adapter.id, adapter.claim)
    turn.touch(adapter)
    turn.publish(events.AdapterReleased(adapter.name))
    if world.queues.members or adapter.resting:
        turn.due[adapter.id] = None


def done(request_id: RequestId, adapter: Adapter) -> requests.AdapterDone:
    """The answer that tells where the adapter is."""
    return requests.AdapterDone(
        request_id, adapter.name, adapter.state, adapter.slot, adapter.generation
    )


def lease(turn: Turn, waiting: Waiting) -> tuple[Adapter, ...]:
    """Keep a request's adapters in their slots until its operation ends."""
    adapters = tuple([turn.world.adapters[adapter_id] for adapter_id in waiting.adapters])
    for adapter in adapters:
        adapter.leases += 1
        turn.touch(adapter)
    return adapters


def end_lease(turn: Turn, waiting: Waiting) -> None:
    """The operation ended; the last lease lets an adapter go, and others in."""
    world = turn.world
    for adapter_id in waiting.adapters:
        world.adapters[adapter_id].leases -= 1
        world.adapters.touch(adapter_id)
        if adapter_id in world.leaving or world.queues.members:
            turn.due[adapter_id] = None


def start_inference(turn: Turn, request_id: RequestId, waiting: Waiting) -> None:
    """Have the engine do what the adapter was wanted for; it is leased until that ends."""
    place = (BASE_MODEL, NO_SLOT, 0)
    for adapter in lease(turn, waiting):
        place = (adapter.id, adapter.slot, adapter.generation)
    op = turn.next_op()
    command: commands.StartInference = commands.StartGeneration(op, request_id, *place)
    match waiting.kind:
        case "embed" | "classify" as task:
            command = commands.StartPooling(op, request_id, *place, task)
    turn.issue_for(request_id, command)


def stop_inference(turn: Turn, waiting: Waiting) -> None:
    """Ask the engine to end what it runs for a request; its report then ends the lease."""
    waiting.stopping = True
    turn.actions.append(Command(commands.StopGeneration(turn.next_op(), waiting.op)))


def cancelled(turn: Turn, request_id: RequestId, waiting: Waiting) -> requests.GenerationDone:
    """The answer of a generation that ended before the engine had it."""
    adapters = [turn.world.adapters[adapter_id].name for adapter_id in waiting.adapters]
    name = adapters[0] if adapters else None
    return requests.GenerationDone(request_id, name, "cancelled", 0, 0)


def start_next_batch(turn: Turn) -> None:
    """Drive the oldest batch: one at a time, for two that each have half would wait for ever."""
    world = turn.world
    if world.driven or not world.batches:
        return
    request_id = world.driven = next(iter(world.batches))
    waiting = world.waiting[request_id]
    for adapter_id in waiting.adapters:
        wait_for(turn, world.adapters[adapter_id], request_id, waiting.since)
        turn.due[adapter_id] = None


def confirm_batch(turn: Turn, request_id: RequestId, waiting: Waiting) -> None:
    """Once every adapter of the batch is in a slot, have the engine confirm them all at once."""
    world = turn.world
    adapters = [world.adapters[adapter_id] for adapter_id in waiting.adapters]
    if not world.ready or not all(is_there(adapter, waiting.target) for adapter in adapters):
        return
    for adapter in lease(turn, waiting):
        if request_id in adapter.waiters:
            stop_waiting(turn, adapter, request_id)
    leave_batches(turn, request_id)
    refs = tuple([commands.SlotRef(adapter.slot, adapter.generation) for adapter in adapters])
    turn.issue_for(request_id, commands.SetMapping(turn.next_op(), refs))


def leave_batches(turn: Turn, request_id: RequestId) -> None:
    """The batch needs no driving any more: the next one's turn has come."""
    world = turn.world
    world.batches.pop(request_id, None)
    if world.driven == request_id:
        world.driven = ""


def refuse_hopeless_batch(turn: Turn) -> None:
    """Refuse the driven batch where its adapters can't be in slots together, whoever waits."""
    world = turn.world
    if world.driven:
        waiting = world.waiting[world.driven]
        adapters = tuple([world.adapters[adapter_id] for adapter_id in waiting.adapters])
        never = capacity.why_never_together(turn, adapters)
        if never is not None:
            refuse_request(turn, world.driven, ErrorCode.NO_ROOM, never)


def end_request(turn: Turn, request_id: RequestId, reply: requests.Reply | None) -> None:
    """Answer an accepted request (None: its client will send it again) and free its adapters."""
    world = turn.world
    waiting = world.waiting.pop(request_id)
    if reply is not None and not waiting.told:
        turn.answer(reply)
    if waiting.kind == "batch":
        leave_batches(turn, request_id)
    for adapter_id in waiting.adapters:
        adapter = world.adapters.get(adapter_id)
        if adapter is not None and request_id in adapter.waiters:
            stop_waiting(turn, adapter, request_id)
            if not adapter.waiters or waiting.kind in DOWNWARD:
                turn.due[adapter_id] = None


def refuse_request(turn: Turn, request_id: RequestId, code: ErrorCode, message: str) -> None:
    """Answer an accepted request that it was not done.

    What the engine is working on stays until its report, and its adapters leased.
    """
    waiting = turn.world.waiting[request_id]
    refused = requests.Refused(request_id, code, message)
    if not waiting.op:
        end_request(turn, request_id, refused)
        if waiting.kind in DOWNWARD:
            _stay(turn, waiting)
        return
    if not waiting.told:
        waiting.told = True
        turn.answer(refused)


def is_wanted_down(turn: Turn, adapter: Adapter) -> bool:
    """Whether somebody waits for the adapter to go down; whoever wants it up comes after."""
    waiting = turn.world.waiting
    return any(waiting[request_id].kind in DOWNWARD for request_id in adapter.waiters)


def _stay(turn: Turn, waiting: Waiting) -> None:
    """A refused wish downwards ends with the step that is under way; its name is kept."""
    for adapter_id in waiting.adapters:
        adapter = turn.world.adapters.get(adapter_id)
        if adapter is None or adapter.retired or is_wanted_down(turn, adapter):
            continue
        if not adapter.op:
            turn.aim(adapter, adapter.state)
        elif adapter.goal == UNREGISTERED != adapter.state:
            turn.aim(adapter, EVICTED)


def refuse_waiters(
    turn: Turn, adapter: Adapter, code: ErrorCode, message: str, *, downward: bool
) -> None:
    """Tell those who wait for this adapter to go down (or up) that it won't."""
    for request_id in tuple(adapter.waiters):
        waiting = turn.world.waiting.get(request_id)
        if waiting is not None and (waiting.kind in DOWNWARD) == downward:
            refuse_request(turn, request_id, code, message)
