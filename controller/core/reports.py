"""The engine's reports: the source of every state change while an engine is attached.

A report changes facts alone. If it does not fit its operation or the adapter's state, it is
refused, published, and changes nothing. A report without an open operation is a repetition and is
ignored.
"""

from collections.abc import Callable
from typing import Any, Final, cast

from loradock.controller.core import capacity, versions, waiting
from loradock.controller.core.actions import SendCommand
from loradock.controller.core.context import Context
from loradock.controller.core.indexes import TIERS, TierName
from loradock.controller.core.reconcile import abandon_goal, start_backoff
from loradock.controller.core.world import Adapter, Operation, PendingRequest, RequestKind
from loradock.controller.states.machine import IllegalTransitionError
from loradock.controller.states.table import ENGINE_LOST
from loradock.messages import commands, events, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import UNREGISTERED, RequestId
from loradock.messages.views import PoolingTask

SUCCESS_OF: Final[dict[str, type]] = {
    "CheckAdapter": reports.AdapterChecked,
    "LoadWeights": reports.WeightsLoaded,
    "StageWeights": reports.WeightsStaged,
    "UnstageWeights": reports.WeightsUnstaged,
    "WriteSlot": reports.SlotWritten,
    "ResetSlot": reports.SlotReset,
    "PreemptSlot": reports.SlotReset,
    "DropWeights": reports.WeightsDropped,
    "StartGeneration": reports.GenerationEnded,
    "StartPooling": reports.PoolingEnded,
}
"""The report that each operation ends with when it succeeds."""

RESERVED_BY: Final[dict[str, TierName]] = {
    "LoadWeights": "host",
    "StageWeights": "pinned",
    "WriteSlot": "device",
}
"""The tier that an operation entered when it was sent."""

DEMOTIONS: Final = ("ResetSlot", "PreemptSlot", "UnstageWeights", "DropWeights")


def on_report(context: Context, report: Any) -> None:
    """Handle a report of an operation."""
    world = context.world
    operation = world.operations.get(report.op)
    if operation is None:
        _end_unknown_operation(context, report.op)
        return
    kind = type(report)
    if kind is not SUCCESS_OF[operation.kind] and kind is not reports.OperationFailed:
        _refuse(context, report, f"{operation.kind} is not ended by {kind.__name__}")
    elif operation.request_id:
        del world.operations[report.op]
        _ON_REQUEST_REPORT[kind](context, operation, report)
    else:
        try:
            _move_adapter(context, operation, report)
        except IllegalTransitionError as error:
            _refuse(context, report, str(error))


def _refuse(context: Context, report: Any, why: str) -> None:
    context.publish(events.ReportRefused(report.op, why))


def _end_unknown_operation(context: Context, op: int) -> None:
    """After the last operation that is not in the log, request the engine's inventory again."""
    unknown = context.world.unknown_operations
    if op in unknown:
        del unknown[op]
        if not unknown:
            context.actions.append(SendCommand(commands.RequestInventory(0)))


def _move_adapter(context: Context, operation: Operation, report: Any) -> None:
    adapter = context.world.adapters[operation.adapter_id]
    kind = type(report)
    on_transition = _ON_TRANSITION.get(kind)
    if on_transition is not None:
        # First, because it raises for an illegal transition, which must change nothing.
        context.apply_transition(adapter, kind.__name__)
        adapter.failed = False
    del context.world.operations[report.op]
    adapter.op = 0
    context.mark_changed(adapter)
    context.dirty_adapters[adapter.id] = None
    if kind is not reports.OperationFailed:
        context.count_duration(adapter, operation.kind)
    if on_transition is not None:
        on_transition(context, adapter)
    elif kind is reports.AdapterChecked:
        _on_checked(context, adapter, report)
    else:
        _on_failed(context, adapter, operation, report)


def _on_loaded(context: Context, adapter: Adapter) -> None:
    adapter.announced = True
    versions.promote_version(context, adapter)
    cached = events.AdapterCached(adapter.name, context.step_ns(adapter))
    context.publish_if_current(adapter, cached)


def _on_staged(context: Context, adapter: Adapter) -> None:
    capacity.refund(context, adapter, "host")
    pinned = events.AdapterPinned(adapter.name, context.step_ns(adapter))
    context.publish_if_current(adapter, pinned)


def _on_unstaged(context: Context, adapter: Adapter) -> None:
    capacity.leave(context, adapter, "pinned")
    context.publish_if_current(adapter, events.AdapterUnpinned(adapter.name))


def _on_written(context: Context, adapter: Adapter) -> None:
    times_ns = context.step_ns(adapter), waiting.longest_wait_ns(context, adapter)
    activated = events.AdapterActivated(adapter.name, adapter.slot, adapter.generation, *times_ns)
    context.publish_if_current(adapter, activated)


def _on_reset(context: Context, adapter: Adapter) -> None:
    slot = adapter.slot
    capacity.leave(context, adapter, "device")
    if context.limits.turn_tokens:
        waiting.wait_since_now(context, adapter)
    context.publish_if_current(adapter, events.AdapterDeactivated(adapter.name, slot))


def _on_dropped(context: Context, adapter: Adapter) -> None:
    capacity.leave(context, adapter, "host")
    capacity.leave(context, adapter, "pinned")
    requested = context.world.is_wanted_down(adapter)
    reason: events.EvictionReason = "request" if requested else "policy"
    context.publish_if_current(adapter, events.AdapterEvicted(adapter.name, reason))


_ON_TRANSITION: Final[dict[type, Callable[[Context, Adapter], None]]] = {
    reports.WeightsLoaded: _on_loaded,
    reports.WeightsStaged: _on_staged,
    reports.WeightsUnstaged: _on_unstaged,
    reports.SlotWritten: _on_written,
    reports.SlotReset: _on_reset,
    reports.WeightsDropped: _on_dropped,
}


def _on_checked(context: Context, adapter: Adapter, report: reports.AdapterChecked) -> None:
    adapter.fingerprint, adapter.rank = report.fingerprint, report.rank
    adapter.load_bytes, adapter.blob_bytes = report.host_bytes, report.blob_bytes
    if report.warnings:
        context.world.warnings[adapter.id] = report.warnings
    context.count(adapter, "checks")
    context.publish(
        events.AdapterAccepted(
            adapter.name,
            report.fingerprint,
            report.rank,
            report.blob_bytes,
            context.step_ns(adapter),
        )
    )
    current = context.world.adapters.get(adapter.predecessor)
    if current is not None:
        _check_replacement(context, current, adapter)


def _check_replacement(context: Context, current: Adapter, candidate: Adapter) -> None:
    """Return a candidate's waiters to the current version if both have the same content.

    One with other content is abandoned unless all its requests allow to replace.
    """
    pending = context.world.pending_requests
    if candidate.fingerprint == current.fingerprint:
        versions.move_waiters(context, candidate, current)
    elif not all(pending[request_id].replace for request_id in candidate.waiters):
        abandon_goal(
            context,
            candidate,
            ErrorCode.CONFLICT,
            f"adapter {current.name!r} is known with other content (fingerprint "
            f"{current.fingerprint or 'not read yet'}, found {candidate.fingerprint}); load it "
            "with replace",
        )


def _on_failed(
    context: Context, adapter: Adapter, operation: Operation, report: reports.OperationFailed
) -> None:
    _refund_reservation(context, adapter, operation)
    context.count(adapter, "failures")
    context.publish(events.AdapterFailed(adapter.name, adapter.state, report.code, report.message))
    if operation.kind in DEMOTIONS:
        _abandon_demotion(context, adapter, report)
    else:
        abandon_goal(context, adapter, report.code, report.message)


def _abandon_demotion(context: Context, adapter: Adapter, report: reports.OperationFailed) -> None:
    """Keep an adapter that can't be demoted, and request the inventory: its state is in doubt."""
    ends = adapter.retired and not context.world.awaits_first_slot(adapter)
    context.set_goal(adapter, UNREGISTERED if ends else adapter.state)
    context.touch_lru(adapter)
    waiting.refuse_waiters(context, adapter, report.code, report.message, downward=True)
    if not adapter.waiters:
        start_backoff(context, adapter)
    context.actions.append(SendCommand(commands.RequestInventory(0)))


def _refund_reservation(context: Context, adapter: Adapter, operation: Operation) -> None:
    """Free what an operation that ends without success had reserved."""
    tier = RESERVED_BY.get(operation.kind)
    if tier is not None:
        capacity.leave(context, adapter, tier)
    elif operation.kind == "UnstageWeights":
        capacity.refund(context, adapter, "host")


def discard_operation(context: Context, operation: Operation) -> None:
    """Free what a closed operation without a report had reserved or leased."""
    world = context.world
    if operation.request_id:
        pending = world.pending_requests[operation.request_id]
        waiting.end_use(context, operation.request_id, pending)
        pending.op = 0
        return
    adapter = world.adapters[operation.adapter_id]
    adapter.op = 0
    context.mark_changed(adapter)
    context.dirty_adapters[adapter.id] = None
    _refund_reservation(context, adapter, operation)


def mark_lost(context: Context, adapter: Adapter) -> None:
    """Evict a resident adapter that the engine no longer has."""
    for tier in TIERS:
        capacity.leave(context, adapter, tier)
    adapter.backing_off = False
    context.apply_transition(adapter, ENGINE_LOST)
    context.dirty_adapters[adapter.id] = None
    context.publish_if_current(adapter, events.AdapterEvicted(adapter.name, "engine-lost"))


def _on_generation_ended(
    context: Context, operation: Operation, report: reports.GenerationEnded
) -> None:
    request_id = operation.request_id
    pending = context.world.pending_requests[request_id]
    adapter = _adapter_of(context, pending)
    name = None if adapter is None else adapter.name
    reason, prompt, output = report.finish_reason, report.prompt_tokens, report.output_tokens
    duration_ns = context.world.time_ns - pending.arrived_ns
    context.publish(events.GenerationFinished(name or "", reason, prompt, output, duration_ns))
    reply = requests.GenerationDone(request_id, name, reason, prompt, output)
    context.count_served(adapter, prompt, output, report.prefix_tokens)
    _end_request(context, request_id, pending, reply)


def _on_pooling_ended(context: Context, operation: Operation, report: reports.PoolingEnded) -> None:
    request_id = operation.request_id
    pending = context.world.pending_requests[request_id]
    adapter = _adapter_of(context, pending)
    name = None if adapter is None else adapter.name
    # `on_report` refuses this report for every other command.
    task = cast("PoolingTask", pending.kind)
    counts = (report.inputs, report.input_tokens)
    context.count_served(adapter, report.input_tokens)
    duration_ns = context.world.time_ns - pending.arrived_ns
    context.publish(events.PoolingFinished(name or "", task, "done", *counts, duration_ns))
    done = requests.PoolingDone(request_id, name, task, *counts)
    _end_request(context, request_id, pending, done)


def _adapter_of(context: Context, pending: PendingRequest) -> Adapter | None:
    """Return the adapter of an inference, None for the base model."""
    return context.world.adapters[pending.adapters[0]] if pending.adapters else None


def _end_request(
    context: Context, request_id: RequestId, pending: PendingRequest, reply: requests.Reply
) -> None:
    waiting.end_use(context, request_id, pending)
    waiting.remove(context, request_id, pending, reply)


def _on_request_failed(
    context: Context, operation: Operation, report: reports.OperationFailed
) -> None:
    request_id = operation.request_id
    pending = context.world.pending_requests[request_id]
    adapter = _adapter_of(context, pending)
    name = "" if adapter is None else adapter.name
    duration_ns = context.world.time_ns - pending.arrived_ns
    context.publish(_failure_event(pending.kind, name, report.code, duration_ns))
    refused = requests.Refused(request_id, report.code, report.message)
    _end_request(context, request_id, pending, refused)


def _failure_event(
    kind: RequestKind, name: str, code: ErrorCode, duration_ns: int
) -> events.GenerationFinished | events.PoolingFinished:
    if kind == "generate":
        return events.GenerationFinished(name, code, 0, 0, duration_ns)
    return events.PoolingFinished(name, kind, code, 0, 0, duration_ns)


_ON_REQUEST_REPORT: Final[dict[type, Callable[[Context, Operation, Any], None]]] = {
    reports.GenerationEnded: _on_generation_ended,
    reports.PoolingEnded: _on_pooling_ended,
    reports.OperationFailed: _on_request_failed,
}

REPORTS: Final = (*SUCCESS_OF.values(), reports.OperationFailed)
