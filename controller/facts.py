"""What a report tells: one function a report, and the engine's coming and going.

What it is: the only source of a state's change. What it is not: trust; a report that does not fit
its operation or the table is refused, published, and changes nothing. One rule: a report that names
no open operation is old news and is passed over.
"""

from collections.abc import Callable
from typing import Any, Final

from controller import drive, room
from controller.actions import Command
from controller.states import spec
from controller.states.table import HEIGHT, IllegalMoveError
from controller.turn import Turn
from controller.world import Adapter, Operation, TierName, Waiting
from messages import commands, events, reports, requests
from messages.errors import ErrorCode
from messages.ids import GPU_SLOT, UNREGISTERED, AdapterState

EXPECTED: Final[dict[str, type]] = {
    "CheckAdapter": reports.AdapterChecked,
    "LoadWeights": reports.WeightsLoaded,
    "StageWeights": reports.WeightsStaged,
    "UnstageWeights": reports.WeightsUnstaged,
    "WriteSlot": reports.SlotWritten,
    "ResetSlot": reports.SlotReset,
    "DropWeights": reports.WeightsDropped,
    "SetMapping": reports.MappingSet,
    "StartGeneration": reports.GenerationEnded,
}
"""The report that ends each operation where it succeeds."""

RESERVED_BY: Final[dict[str, TierName]] = {
    "LoadWeights": "host",
    "StageWeights": "pinned",
    "WriteSlot": "device",
}
"""The tier that an operation entered when it was sent."""


DOWNWARD_OPERATIONS: Final = ("ResetSlot", "UnstageWeights", "DropWeights")


def on_report(turn: Turn, report: Any) -> None:
    """Any report of an operation."""
    operation = turn.world.operations.get(report.op)
    if operation is None:
        return
    failed = isinstance(report, reports.OperationFailed)
    if not failed and type(report) is not EXPECTED[operation.kind]:
        _refuse(turn, report, f"{operation.kind} is not ended by {type(report).__name__}")
        return
    try:
        _follow(turn, operation, report)
    except IllegalMoveError as error:
        _refuse(turn, report, str(error))


def _refuse(turn: Turn, report: Any, why: str) -> None:
    turn.publish(events.ReportRefused(report.op, why))


def _follow(turn: Turn, operation: Operation, report: Any) -> None:
    if operation.request_id is not None:
        del turn.world.operations[report.op]
        _ON_REQUEST[type(report)](turn, operation, report)
        return
    adapter = turn.world.adapters[operation.adapter_id]
    trigger = type(report).__name__
    if trigger in _ENTRY:
        # First the move, which may be illegal; nothing may have been changed before it.
        turn.move(adapter, trigger)
    del turn.world.operations[report.op]
    adapter.op = 0
    turn.touch(adapter)
    if trigger in _ENTRY:
        _ENTRY[trigger](turn, adapter)
        if adapter.id in turn.world.adapters:
            drive.settle(turn, adapter)
    elif trigger == "AdapterChecked":
        _on_checked(turn, adapter, report)
    else:
        _on_failed(turn, adapter, operation, report)


def _on_loaded(turn: Turn, adapter: Adapter) -> None:
    adapter.loads += 1
    turn.publish(events.AdapterCached(adapter.name))
    if adapter.predecessor:
        _succeed(turn, turn.world.adapters[adapter.predecessor], adapter)


def _on_staged(turn: Turn, adapter: Adapter) -> None:
    room.pay(turn, adapter, "host", -adapter.host_bytes)
    turn.publish(events.AdapterPinned(adapter.name))


def _on_unstaged(turn: Turn, adapter: Adapter) -> None:
    room.leave(turn, adapter, "pinned")
    turn.publish(events.AdapterUnpinned(adapter.name))


def _on_written(turn: Turn, adapter: Adapter) -> None:
    turn.publish(events.AdapterActivated(adapter.name, adapter.slot, adapter.generation))


def _on_reset(turn: Turn, adapter: Adapter) -> None:
    slot = adapter.slot
    room.leave(turn, adapter, "device")
    if not adapter.retired:
        turn.publish(events.AdapterDeactivated(adapter.name, slot))


def _on_dropped(turn: Turn, adapter: Adapter) -> None:
    room.leave(turn, adapter, "host")
    room.leave(turn, adapter, "pinned")
    if adapter.retired:
        turn.publish(events.AdapterRetired(adapter.name, adapter.fingerprint))
        return
    asked = any(turn.world.waiting[r].kind in drive.DOWNWARD for r in adapter.waiters)
    reason: events.EvictionReason = "request" if asked else "policy"
    turn.publish(events.AdapterEvicted(adapter.name, reason))


_ENTRY: Final[dict[str, Callable[[Turn, Adapter], None]]] = {
    spec.WEIGHTS_LOADED: _on_loaded,
    spec.WEIGHTS_STAGED: _on_staged,
    spec.WEIGHTS_UNSTAGED: _on_unstaged,
    spec.SLOT_WRITTEN: _on_written,
    spec.SLOT_RESET: _on_reset,
    spec.WEIGHTS_DROPPED: _on_dropped,
}


def _on_checked(turn: Turn, adapter: Adapter, report: reports.AdapterChecked) -> None:
    adapter.fingerprint, adapter.rank = report.fingerprint, report.rank
    adapter.load_bytes, adapter.blob_bytes = report.host_bytes, report.blob_bytes
    turn.publish(
        events.AdapterAccepted(adapter.name, report.fingerprint, report.rank, report.blob_bytes)
    )
    current = turn.world.adapters.get(adapter.predecessor)
    if current is not None and not _may_succeed(turn, current, adapter):
        return
    drive.reconsider(turn, adapter)


def _may_succeed(turn: Turn, current: Adapter, candidate: Adapter) -> bool:
    """Whether the candidate is other content that may take over; if not, it is done with here."""
    wishes = [turn.world.waiting[request_id] for request_id in candidate.waiters]
    if candidate.fingerprint == current.fingerprint:
        _move_waiters(turn, candidate, current)
        turn.aim(candidate, UNREGISTERED)
        drive.forget(turn, candidate)
        drive.settle(turn, current)
        return False
    if all(wish.replace for wish in wishes):
        return True
    drive.give_up(
        turn,
        candidate,
        ErrorCode.CONFLICT,
        f"adapter {current.name!r} is known with other content (fingerprint "
        f"{current.fingerprint}, found {candidate.fingerprint}); load it with replace",
    )
    return False


def _succeed(turn: Turn, old: Adapter, new: Adapter) -> None:
    """The new version takes over name, goal, hold and waiters; the old one ends its requests."""
    turn.world.names[new.name] = new.id
    new.predecessor, old.successor = 0, 0
    old.retired = True
    new.uses, new.hits, new.evictions = old.uses, old.hits, old.evictions
    new.loads += old.loads
    new.failures += old.failures
    _move_waiters(turn, old, new)
    turn.aim(new, max(new.goal, old.goal, key=HEIGHT.__getitem__))
    if old.held:
        drive.release_hold(turn, old)
        drive.hold(turn, new)
        turn.aim(new, GPU_SLOT)
    turn.aim(old, UNREGISTERED)
    turn.publish(events.AdapterReplaced(new.name, new.fingerprint))
    drive.pursue(turn, old)


def _move_waiters(turn: Turn, source: Adapter, target: Adapter) -> None:
    world = turn.world
    for request_id in (*source.waiters, *world.batches):
        waiting = world.waiting[request_id]
        waiting.adapters = tuple(target.id if a == source.id else a for a in waiting.adapters)
        world.waiting.touch(request_id)
    target.waiters += source.waiters
    source.waiters = ()
    turn.touch(source)
    turn.touch(target)


def _on_failed(
    turn: Turn, adapter: Adapter, operation: Operation, report: reports.OperationFailed
) -> None:
    give_back(turn, adapter, operation)
    adapter.failures += 1
    turn.touch(adapter)
    state: AdapterState = adapter.state
    turn.publish(events.AdapterFailed(adapter.name, state, report.code, report.message))
    if operation.kind in DOWNWARD_OPERATIONS:
        # What was to be taken down is not there as we know it: let the engine say what is.
        turn.actions.append(Command(commands.RequestInventory(0)))
    drive.give_up(turn, adapter, report.code, report.message)


def give_back(turn: Turn, adapter: Adapter, operation: Operation) -> None:
    """Free what an operation that will not succeed had reserved."""
    tier = RESERVED_BY.get(operation.kind)
    if tier is not None:
        room.leave(turn, adapter, tier)
    elif operation.kind == "UnstageWeights":
        room.pay(turn, adapter, "host", -adapter.host_bytes)


def _on_generation_ended(turn: Turn, operation: Operation, report: reports.GenerationEnded) -> None:
    name = _adapter_name(turn, operation)
    reply = requests.GenerationDone(
        operation.request_id or "",
        name,
        report.finish_reason,
        report.prompt_tokens,
        report.output_tokens,
    )
    turn.publish(
        events.GenerationFinished(
            name or "", report.finish_reason, report.prompt_tokens, report.output_tokens
        )
    )
    end_generation(turn, operation, reply)


def _adapter_name(turn: Turn, operation: Operation) -> str | None:
    adapter = turn.world.adapters.get(operation.adapter_id)
    return None if adapter is None else adapter.name


def end_generation(turn: Turn, operation: Operation, reply: requests.Reply | None) -> None:
    """Answer a running generation and end its lease; the last one lets its adapter go."""
    request_id = operation.request_id or ""
    adapter = turn.world.adapters.get(operation.adapter_id)
    if adapter is not None:
        adapter.leases -= 1
        turn.touch(adapter)
    drive.end_request(turn, request_id, reply)
    if adapter is not None:
        drive.pursue(turn, adapter)


def _on_mapping_set(turn: Turn, operation: Operation, _report: reports.MappingSet) -> None:
    request_id = operation.request_id or ""
    waiting = turn.world.waiting.get(request_id)
    if waiting is not None:
        drive.end_request(turn, request_id, _placements(turn, request_id, waiting))


def _placements(turn: Turn, request_id: str, waiting: Waiting) -> requests.BatchDone:
    adapters = [turn.world.adapters[adapter_id] for adapter_id in waiting.adapters]
    return requests.BatchDone(
        request_id,
        tuple(requests.Placement(a.name, a.slot, a.generation) for a in adapters),
    )


def _on_request_failed(turn: Turn, operation: Operation, report: reports.OperationFailed) -> None:
    request_id = operation.request_id or ""
    refused = requests.Refused(request_id, report.code, report.message)
    if operation.kind == "StartGeneration":
        name = _adapter_name(turn, operation) or ""
        turn.publish(events.GenerationFinished(name, report.code, 0, 0))
        end_generation(turn, operation, refused)
    elif request_id in turn.world.waiting:
        drive.refuse_request(turn, request_id, report.code, report.message)


_ON_REQUEST: Final[dict[type, Callable[[Turn, Operation, Any], None]]] = {
    reports.GenerationEnded: _on_generation_ended,
    reports.MappingSet: _on_mapping_set,
    reports.OperationFailed: _on_request_failed,
}

REPORTS: Final = (*EXPECTED.values(), reports.OperationFailed)
