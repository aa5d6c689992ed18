"""What a report tells: one function a report.

What it is: the only source of a state's change, but for the engine's coming and going (`engines`).
What it is not: trust; a report that does not fit its operation or the table is refused, published,
and changes nothing. One rule: a report that names no open operation is old news and is passed over.
"""

from collections.abc import Callable
from typing import Any, Final, cast

from controller.core import capacity, pending_requests, reconcile
from controller.core.actions import Command
from controller.core.context import Turn
from controller.core.tier_queues import TIERS, TierName
from controller.core.world import Adapter, Operation, Waiting
from controller.states import spec
from controller.states.table import HEIGHT, IllegalMoveError
from messages import commands, events, reports, requests
from messages.errors import ErrorCode
from messages.ids import GPU_SLOT, UNREGISTERED, AdapterId

EXPECTED: Final[dict[type, type]] = {
    commands.CheckAdapter: reports.AdapterChecked,
    commands.LoadWeights: reports.WeightsLoaded,
    commands.StageWeights: reports.WeightsStaged,
    commands.UnstageWeights: reports.WeightsUnstaged,
    commands.WriteSlot: reports.SlotWritten,
    commands.ResetSlot: reports.SlotReset,
    commands.DropWeights: reports.WeightsDropped,
    commands.SetMapping: reports.MappingSet,
    commands.StartGeneration: reports.GenerationEnded,
    commands.StartPooling: reports.PoolingEnded,
}
"""The report that ends each operation where it succeeds."""

RESERVED_BY: Final[dict[type, TierName]] = {
    commands.LoadWeights: "host",
    commands.StageWeights: "pinned",
    commands.WriteSlot: "device",
}
"""The tier that an operation entered when it was sent."""

DOWNWARD: Final = (commands.ResetSlot, commands.UnstageWeights, commands.DropWeights)


def on_report(turn: Turn, report: Any) -> None:
    """Any report of an operation."""
    world = turn.world
    operation = world.operations.get(report.op)
    if operation is None:
        _end_foreign(turn, report.op)
        return
    told = type(report)
    if told is not reports.OperationFailed and told is not EXPECTED[type(operation.command)]:
        kind = type(operation.command).__name__
        _refuse(turn, report, f"{kind} is not ended by {told.__name__}")
    elif operation.request_id:
        del world.operations[report.op]
        _ON_REQUEST[told](turn, operation, report)
    else:
        try:
            _follow(turn, operation, report)
        except IllegalMoveError as error:
            _refuse(turn, report, str(error))


def _refuse(turn: Turn, report: Any, why: str) -> None:
    turn.publish(events.ReportRefused(report.op, why))


def _end_foreign(turn: Turn, op: int) -> None:
    """Once nothing runs that the log does not know, the engine is asked again what it holds."""
    foreign = turn.world.foreign
    if op in foreign:
        del foreign[op]
        if not foreign:
            turn.actions.append(Command(commands.RequestInventory(0)))


def _follow(turn: Turn, operation: Operation, report: Any) -> None:
    adapter = turn.world.adapters[operation.adapter_id]
    told = type(report)
    enter = _ENTRY.get(told)
    if enter is not None:
        # First the move, which may be illegal; nothing may have been changed before it.
        turn.move(adapter, told.__name__)
        adapter.failed = False
    del turn.world.operations[report.op]
    adapter.op = 0
    turn.touch(adapter)
    turn.due[adapter.id] = None
    if enter is not None:
        enter(turn, adapter)
    elif told is reports.AdapterChecked:
        _on_checked(turn, adapter, report)
    else:
        _on_failed(turn, adapter, operation, report)


def _on_loaded(turn: Turn, adapter: Adapter) -> None:
    adapter.loads += 1
    succeed(turn, adapter)
    tell(turn, adapter, events.AdapterCached(adapter.name))


def _on_staged(turn: Turn, adapter: Adapter) -> None:
    capacity.pay(turn, adapter, "host", -adapter.host_bytes)
    tell(turn, adapter, events.AdapterPinned(adapter.name))


def _on_unstaged(turn: Turn, adapter: Adapter) -> None:
    capacity.leave(turn, adapter, "pinned")
    tell(turn, adapter, events.AdapterUnpinned(adapter.name))


def _on_written(turn: Turn, adapter: Adapter) -> None:
    place = (adapter.slot, adapter.generation)
    tell(turn, adapter, events.AdapterActivated(adapter.name, *place))


def _on_reset(turn: Turn, adapter: Adapter) -> None:
    slot = adapter.slot
    capacity.leave(turn, adapter, "device")
    tell(turn, adapter, events.AdapterDeactivated(adapter.name, slot))


def _on_dropped(turn: Turn, adapter: Adapter) -> None:
    capacity.leave(turn, adapter, "host")
    capacity.leave(turn, adapter, "pinned")
    asked = pending_requests.is_wanted_down(turn, adapter)
    reason: events.EvictionReason = "request" if asked else "policy"
    tell(turn, adapter, events.AdapterEvicted(adapter.name, reason))


def tell(turn: Turn, adapter: Adapter, event: events.Event) -> None:
    """Publish a move of the version that its name stands for; what others do is nobody's news."""
    if turn.world.names.get(adapter.name) == adapter.id:
        turn.publish(event)


_ENTRY: Final[dict[type, Callable[[Turn, Adapter], None]]] = {
    reports.WeightsLoaded: _on_loaded,
    reports.WeightsStaged: _on_staged,
    reports.WeightsUnstaged: _on_unstaged,
    reports.SlotWritten: _on_written,
    reports.SlotReset: _on_reset,
    reports.WeightsDropped: _on_dropped,
}


def _on_checked(turn: Turn, adapter: Adapter, report: reports.AdapterChecked) -> None:
    adapter.fingerprint, adapter.rank = report.fingerprint, report.rank
    adapter.load_bytes, adapter.blob_bytes = report.host_bytes, report.blob_bytes
    turn.publish(
        events.AdapterAccepted(adapter.name, report.fingerprint, report.rank, report.blob_bytes)
    )
    current = turn.world.adapters.get(adapter.predecessor)
    if current is not None:
        _compare(turn, current, adapter)


def _compare(turn: Turn, current: Adapter, candidate: Adapter) -> None:
    """Whether the candidate is other content that may take over; if not, it is done with here."""
    waiting = turn.world.waiting
    if candidate.fingerprint == current.fingerprint:
        _move_waiters(turn, candidate, current)
    elif not all(waiting[request_id].replace for request_id in candidate.waiters):
        reconcile.give_up(
            turn,
            candidate,
            ErrorCode.CONFLICT,
            f"adapter {current.name!r} is known with other content (fingerprint "
            f"{current.fingerprint or 'not read yet'}, found {candidate.fingerprint}); load it "
            "with replace",
        )


def succeed(turn: Turn, new: Adapter) -> None:
    """A version that was loaded takes over name, goal, hold and waiters, if somebody still asks.

    The old one ends its requests and goes.
    """
    world = turn.world
    old = world.adapters.get(new.predecessor)
    if old is None:
        return
    new.predecessor, old.successor = 0, 0
    turn.touch(old)
    if not new.waiters:
        # Whoever wanted it was told that it won't be: it goes as if it had never been there.
        new.retired, new.loads = True, 0
        turn.aim(new, UNREGISTERED)
        return
    world.names[new.name] = new.id
    old.retired = True
    new.uses, new.hits, new.evictions = old.uses, old.hits, old.evictions
    new.loads += old.loads
    new.failures += old.failures
    turn.publish(events.AdapterReplaced(new.name, new.fingerprint))
    _move_waiters(turn, old, new)
    turn.aim(new, max(new.goal, old.goal, key=HEIGHT.__getitem__))
    if old.held:
        # The name stays held; only the version changes, so nobody is told.
        old.held, new.held = False, True
        del world.held[old.id]
        world.held[new.id] = None
        turn.aim(new, GPU_SLOT)
    turn.aim(old, UNREGISTERED)
    turn.due[old.id] = None


def _move_waiters(turn: Turn, source: Adapter, target: Adapter) -> None:
    """Bind the requests that wait for `source` to `target`; what runs already ends as it began."""
    world = turn.world
    for request_id in (*source.waiters, *world.batches):
        waiting = world.waiting[request_id]
        waiting.adapters = tuple([target.id if a == source.id else a for a in waiting.adapters])
    for request_id in tuple(source.waiters):
        pending_requests.stop_waiting(turn, source, request_id)
        pending_requests.wait_for(turn, target, request_id, world.waiting[request_id].since)
    turn.due[source.id] = None
    turn.due[target.id] = None


def _on_failed(
    turn: Turn, adapter: Adapter, operation: Operation, report: reports.OperationFailed
) -> None:
    _give_back(turn, adapter, operation)
    adapter.failures += 1
    turn.publish(events.AdapterFailed(adapter.name, adapter.state, report.code, report.message))
    if isinstance(operation.command, DOWNWARD):
        _stay(turn, adapter, report)
    else:
        reconcile.give_up(turn, adapter, report.code, report.message)


def _stay(turn: Turn, adapter: Adapter, report: reports.OperationFailed) -> None:
    """What can't be taken down is the last to be tried again; the engine shall say what it is."""
    turn.aim(adapter, UNREGISTERED if adapter.retired else adapter.state)
    turn.mark_recent(adapter)
    pending_requests.refuse_waiters(turn, adapter, report.code, report.message, downward=True)
    if not adapter.waiters:
        reconcile.rest(turn, adapter)
    turn.actions.append(Command(commands.RequestInventory(0)))


def _give_back(turn: Turn, adapter: Adapter, operation: Operation) -> None:
    """Free what an operation that will not succeed had reserved."""
    tier = RESERVED_BY.get(type(operation.command))
    if tier is not None:
        capacity.leave(turn, adapter, tier)
    elif isinstance(operation.command, commands.UnstageWeights):
        capacity.pay(turn, adapter, "host", -adapter.host_bytes)


def abandon(turn: Turn, operation: Operation) -> None:
    """An operation that is open no more, without a report: what it had reserved is free."""
    world = turn.world
    if operation.request_id:
        waiting = world.waiting[operation.request_id]
        pending_requests.end_lease(turn, waiting)
        waiting.op = 0
        return
    adapter = world.adapters[operation.adapter_id]
    adapter.op = 0
    turn.touch(adapter)
    turn.due[adapter.id] = None
    _give_back(turn, adapter, operation)


def vanish(turn: Turn, adapter: Adapter) -> None:
    """The engine holds a resident adapter no more, though nobody took it down."""
    for tier in TIERS:
        capacity.leave(turn, adapter, tier)
    adapter.resting = False
    turn.move(adapter, spec.ENGINE_LOST)
    turn.due[adapter.id] = None
    tell(turn, adapter, events.AdapterEvicted(adapter.name, "engine-lost"))


def _on_generation_ended(turn: Turn, operation: Operation, report: reports.GenerationEnded) -> None:
    name = _adapter_name(turn, operation)
    tokens = (report.prompt_tokens, report.output_tokens)
    turn.publish(events.GenerationFinished(name or "", report.finish_reason, *tokens))
    request_id = operation.request_id
    reply = requests.GenerationDone(request_id, name, report.finish_reason, *tokens)
    _end(turn, request_id, reply)


def _on_pooling_ended(turn: Turn, operation: Operation, report: reports.PoolingEnded) -> None:
    request_id, name = operation.request_id, _adapter_name(turn, operation)
    # `EXPECTED` lets the end of no other command get here.
    task = cast("commands.StartPooling", operation.command).task
    counts = (report.inputs, report.input_tokens)
    turn.publish(events.PoolingFinished(name or "", task, "done", *counts))
    _end(turn, request_id, requests.PoolingDone(request_id, name, task, *counts))


def _adapter_name(turn: Turn, operation: Operation) -> str | None:
    adapters: tuple[AdapterId, ...] = turn.world.waiting[operation.request_id].adapters
    return turn.world.adapters[adapters[0]].name if adapters else None


def _end(turn: Turn, request_id: str, reply: requests.Reply | None) -> None:
    waiting = turn.world.waiting[request_id]
    pending_requests.end_lease(turn, waiting)
    pending_requests.end_request(turn, request_id, reply)


def _on_mapping_set(turn: Turn, operation: Operation, _report: reports.MappingSet) -> None:
    request_id = operation.request_id
    waiting = turn.world.waiting[request_id]
    _end(turn, request_id, requests.BatchDone(request_id, _placements(turn, waiting)))


def _placements(turn: Turn, waiting: Waiting) -> tuple[requests.Placement, ...]:
    adapters = [turn.world.adapters[adapter_id] for adapter_id in waiting.adapters]
    return tuple([requests.Placement(a.name, a.slot, a.generation) for a in adapters])


def _on_request_failed(turn: Turn, operation: Operation, report: reports.OperationFailed) -> None:
    request_id = operation.request_id
    if isinstance(operation.command, commands.StartInference):
        name = _adapter_name(turn, operation) or ""
        turn.publish(_account_of_failure(operation.command, name, report.code))
    _end(turn, request_id, requests.Refused(request_id, report.code, report.message))


def _account_of_failure(
    command: commands.StartInference, name: str, code: ErrorCode
) -> events.GenerationFinished | events.PoolingFinished:
    if isinstance(command, commands.StartPooling):
        return events.PoolingFinished(name, command.task, code, 0, 0)
    return events.GenerationFinished(name, code, 0, 0)


_ON_REQUEST: Final[dict[type, Callable[[Turn, Operation, Any], None]]] = {
    reports.GenerationEnded: _on_generation_ended,
    reports.PoolingEnded: _on_pooling_ended,
    reports.MappingSet: _on_mapping_set,
    reports.OperationFailed: _on_request_failed,
}

REPORTS: Final = (*EXPECTED.values(), reports.OperationFailed)
