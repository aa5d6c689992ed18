"""The recent past for the operator: slow requests and operations, failures and refusals.

Times are those of a monotonic clock. Nothing of it is logged as an input or decides anything, and
every table is bounded and ends with the process. A text of the engine names the first finding of
many; the others would fill the log and the table of answers, so they are kept here.
"""

import heapq
import time
from collections.abc import Container, Iterable, Iterator
from itertools import count
from typing import Final, NamedTuple, TypeVar, get_args

import msgspec
import structlog
from msgspec import Struct

from loradock.controller.core.world import World
from loradock.messages import commands, requests
from loradock.messages.control import RequestView, SlowView
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import AdapterName, OpId, RequestId, Seq
from loradock.messages.records import EngineLost, GenerationRequested, Input, PoolingRequested
from loradock.messages.reports import (
    AdapterChecked,
    EngineInventory,
    LoggedReport,
    OperationFailed,
    SlotWritten,
    WeightsLoaded,
)
from loradock.messages.requests import Refused
from loradock.messages.views import Details, FailureView

SLOW_MAX: Final = 32
"""The most operations, and the most requests, that are kept as slow ones."""

SLOW_KEPT_NS: Final = 3_600_000_000_000
"""Time for which they are kept."""

FAILURES_MAX: Final = 128
"""Bound on the texts with details, and on the names with a failure; the oldest ones are dropped."""

REFUSALS_MAX: Final = 100
"""Bound on the lines of one window of time; the rest of its refusals are counted."""

WINDOW_NS: Final = 10_000_000_000

_REASON_CHARACTERS_MAX: Final = 500

_NS_PER_MS: Final = 1_000_000

_OPERATIONS: Final[dict[type, str]] = {
    commands.CheckAdapter: "check",
    commands.LoadWeights: "load",
    commands.StageWeights: "stage",
    commands.UnstageWeights: "unstage",
    commands.WriteSlot: "write",
    commands.DropWeights: "drop",
}
"""The operations on adapters, by their names in lists."""

_ADAPTER_REQUESTS: Final = tuple(
    kind for kind in get_args(requests.LifecycleRequest) if kind.__name__.endswith("Adapter")
)

_KINDS: Final[dict[type, str]] = {
    requests.CancelGeneration: "cancel",
    requests.ActivateBatch: "batch",
    GenerationRequested: "generate",
    PoolingRequested: "",
    **{kind: kind.__name__.removesuffix("Adapter").lower() for kind in _ADAPTER_REQUESTS},
}
"""The name of each kind of request in lists; empty for those that are named by their task."""

K = TypeVar("K")

V = TypeVar("V")

log = structlog.get_logger("controller")


class Slow(NamedTuple):
    """Something that has ended, with its duration and its end (monotonic)."""

    duration_ns: int
    number: int
    ended_ns: int
    kind: str
    adapter: str
    outcome: str


class SlowestTable:
    """The slowest of what ended within the last hour."""

    def __init__(self) -> None:
        self._heap: list[Slow] = []
        self._numbers = count()

    def add(self, now_ns: int, duration_ns: int, kind: str, adapter: str, outcome: str) -> None:
        """Keep it, if it is among the slowest."""
        if not self.accepts(now_ns, duration_ns):
            return
        if len(self._heap) >= SLOW_MAX:
            self._drop_old(now_ns)
        slow = Slow(duration_ns, next(self._numbers), now_ns, kind, adapter, outcome)
        if len(self._heap) < SLOW_MAX:
            heapq.heappush(self._heap, slow)
        else:
            heapq.heappushpop(self._heap, slow)

    def accepts(self, now_ns: int, duration_ns: int) -> bool:
        """Return whether something of this duration is kept."""
        if len(self._heap) < SLOW_MAX:
            return True
        shortest = self._heap[0]
        return duration_ns > shortest.duration_ns or shortest.ended_ns <= now_ns - SLOW_KEPT_NS

    def views(self, now_ns: int) -> tuple[SlowView, ...]:
        """Return them, the slowest first."""
        self._drop_old(now_ns)
        return tuple(
            SlowView(
                slow.kind,
                slow.adapter,
                slow.duration_ns // _NS_PER_MS,
                (now_ns - slow.ended_ns) // _NS_PER_MS,
                slow.outcome,
            )
            for slow in sorted(self._heap, reverse=True)
        )

    def _drop_old(self, now_ns: int) -> None:
        self._heap = [slow for slow in self._heap if slow.ended_ns > now_ns - SLOW_KEPT_NS]
        heapq.heapify(self._heap)


class _Running(Struct, gc=False):
    """A request or an operation that has not ended; `tokens` are those sent so far."""

    kind: str
    adapter: str
    since_ns: int
    tokens: int = 0


class RequestTimes:
    """Requests and operations in progress with their ages, and those that ended slowly."""

    def __init__(self, now_ns: int) -> None:
        """`now_ns`: the start of this process, since when earlier requests are counted."""
        self._started_ns = now_ns
        # For reading only outside of this class.
        self.requests: Final[dict[RequestId, _Running]] = {}
        self._operations: dict[OpId, _Running] = {}
        self.slow_requests: Final = SlowestTable()
        self.slow_operations: Final = SlowestTable()

    def begin_request(self, request_id: RequestId, kind: str, adapter: str, now_ns: int) -> None:
        """Record a request; a repetition changes nothing."""
        if request_id not in self.requests:
            self.requests[request_id] = _Running(kind, adapter, now_ns)

    def count_tokens(self, request_id: RequestId, tokens: int) -> None:
        """Record how many tokens of a generation have been sent."""
        running = self.requests.get(request_id)
        if running is not None:
            running.tokens = max(running.tokens, tokens)

    def end_request(self, request_id: RequestId, outcome: str, now_ns: int) -> None:
        """Record the answer to a request."""
        running = self.requests.pop(request_id, None)
        if running is not None:
            self.slow_requests.add(
                now_ns, now_ns - running.since_ns, running.kind, running.adapter, outcome
            )

    def begin_operation(self, op: OpId, kind: str, adapter: str, now_ns: int) -> None:
        """Record a command to the engine."""
        self._operations[op] = _Running(kind, adapter, now_ns)

    def end_operation(self, op: OpId, outcome: str, now_ns: int) -> None:
        """Record the engine's report."""
        running = self._operations.pop(op, None)
        if running is not None:
            self.slow_operations.add(
                now_ns, now_ns - running.since_ns, running.kind, running.adapter, outcome
            )

    def keep_operations(self, running: Container[OpId]) -> None:
        """Forget all operations but those that the engine runs: the others have no report."""
        self._operations = {op: one for op, one in self._operations.items() if op in running}

    def views(
        self, pending: Iterator[tuple[RequestId, str, str, bool]], now_ns: int
    ) -> tuple[RequestView, ...]:
        """Return pending requests: of each its id, kind, adapter and whether it runs."""
        return tuple(
            RequestView(
                request_id,
                kind,
                adapter,
                "running" if runs else "waiting",
                (now_ns - self._since(request_id)) // _NS_PER_MS,
                self.requests[request_id].tokens if request_id in self.requests else 0,
            )
            for request_id, kind, adapter, runs in pending
        )

    def _since(self, request_id: RequestId) -> int:
        running = self.requests.get(request_id)
        return self._started_ns if running is None else running.since_ns


class _Failure(NamedTuple):
    code: ErrorCode
    message: str
    failed_ns: int


class Failures:
    """The last failure of each adapter, and the details of the last texts."""

    def __init__(self) -> None:
        self._details: dict[tuple[ErrorCode, str], Details] = {}
        self._by_name: dict[AdapterName, _Failure] = {}

    def without_details(
        self, received: Iterable[tuple[LoggedReport, Seq]]
    ) -> Iterator[tuple[LoggedReport, Seq]]:
        """Yield reports as they are logged; what that leaves out is kept."""
        for report, seq in received:
            if isinstance(report, OperationFailed) and report.details:
                _put(self._details, (report.code, report.message), report.details)
                yield msgspec.structs.replace(report, details=()), seq
            else:
                yield report, seq

    def record(self, adapter: AdapterName, report: object, now_ns: int) -> None:
        """Record a report on an operation that moves an adapter; `adapter` is empty for others."""
        if isinstance(report, OperationFailed) and adapter:
            _put(self._by_name, adapter, _Failure(report.code, report.message, now_ns))
        elif isinstance(report, AdapterChecked | WeightsLoaded | SlotWritten):
            self._by_name.pop(adapter, None)

    def complete(self, refused: Refused) -> Refused:
        """Return a refusal with the details of its text, if they are kept."""
        details = self._details.get((refused.code, refused.message), ())
        return msgspec.structs.replace(refused, details=details) if details else refused

    def view(self, adapter: AdapterName, now_ns: int) -> FailureView | None:
        """Return the failure of an adapter on which no operation has succeeded since."""
        found = self._by_name.get(adapter)
        if found is None:
            return None
        details = self._details.get((found.code, found.message), ())
        age_ms = (now_ns - found.failed_ns) // _NS_PER_MS
        return FailureView(found.code, found.message, details, age_ms)


def _put(table: dict[K, V], key: K, value: V) -> None:
    """Make an entry the newest one, and drop the oldest beyond the bound."""
    table.pop(key, None)
    table[key] = value
    if len(table) > FAILURES_MAX:
        del table[next(iter(table))]


class RefusalLog:
    """Writes one line per refusal, and one line per window for those beyond the bound."""

    def __init__(self) -> None:
        self._window_ns = 0
        self._lines = 0
        self._dropped = 0

    def record(self, refused: Refused, now_ns: int) -> None:
        """Write a line about a refusal; `request` is its id inside the controller."""
        self.tick(now_ns)
        if self._lines >= REFUSALS_MAX:
            self._dropped += 1
            return
        self._lines += 1
        log.info(
            "request refused",
            code=refused.code.value,
            request=refused.request_id,
            reason=refused.message[:_REASON_CHARACTERS_MAX],
        )

    def tick(self, now_ns: int) -> None:
        """Begin a new window if the last one is over."""
        if now_ns - self._window_ns < WINDOW_NS:
            return
        if self._dropped:
            log.warning("more requests were refused than are logged", count=self._dropped)
        self._window_ns, self._lines, self._dropped = now_ns, 0, 0


class Diagnostics:
    """Requests and operations as shown to the operator; `engine_device` is the engine's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.started_ns: Final = time.monotonic_ns()
        self.times: Final = RequestTimes(self.started_ns)
        self.failures: Final = Failures()
        self.refusals: Final = RefusalLog()
        self.engine_device = ""
        self.engine_dtype = ""

    def pending(self) -> Iterator[tuple[RequestId, str, str, bool]]:
        """Yield pending requests: of each its id, kind, adapters and whether it runs."""
        world = self._world
        for request_id, pending in world.pending_requests.items():
            used = [world.adapters[key] for key in pending.adapters if key in world.adapters]
            # A suspended generation waits for its adapter.
            runs = pending.op > 0 and not any(request_id in one.waiters for one in used)
            yield request_id, pending.kind, ",".join(one.name for one in used), runs

    def record_group(self, group: Iterable[Input], arrived_ns: int) -> None:
        """Record the requests of a group that was handled: those that wait, and slow answers.

        Most are answered within their group, all in the same time, so they are recorded together.
        """
        now, times, world = time.monotonic_ns(), self.times, self._world
        is_slow = times.slow_requests.accepts(now, now - arrived_ns)
        for message in group:
            kind = _KINDS.get(type(message))
            if kind is None:
                continue
            request_id: RequestId = message.request_id  # type: ignore[union-attr]
            is_pending = request_id in world.pending_requests
            if not (is_pending or is_slow):
                continue
            kind = kind or message.task  # type: ignore[union-attr]
            times.begin_request(request_id, kind, getattr(message, "adapter", "") or "", arrived_ns)
            if not is_pending:
                answer = world.answers.get(request_id)
                outcome = outcome_of(answer.reply if answer else None)
                times.end_request(request_id, outcome, now)

    def record_command(self, command: commands.Command) -> None:
        """Record an operation on an adapter, which takes time until its report."""
        adapter_id = getattr(command, "adapter_id", 0)
        kind = _OPERATIONS.get(type(command))
        if kind is not None and isinstance(command, commands.Operation):
            adapter = self._world.adapters.get(adapter_id)
            name = "" if adapter is None else adapter.name
            self.times.begin_operation(command.op, kind, name, time.monotonic_ns())

    def record_report(self, message: object) -> None:
        """Record what an input reports about the engine, if it is a report."""
        op, now = getattr(message, "op", 0), time.monotonic_ns()
        if op:
            outcome = message.code.value if isinstance(message, OperationFailed) else "done"
            self.times.end_operation(op, outcome, now)
            name = self._adapter_of(op)
            self.failures.record(name, message, now)
            if name and isinstance(message, AdapterChecked) and message.warnings:
                log.warning(
                    "an adapter has warnings", adapter=name, warnings=list(message.warnings)
                )
        elif isinstance(message, EngineInventory):
            self.engine_device, self.engine_dtype = message.device, message.dtype
            # The core has the others carried out again, as new operations.
            self.times.keep_operations(message.running)
        elif isinstance(message, EngineLost):
            self.times.keep_operations(())

    def _adapter_of(self, op: OpId) -> str:
        """Return the name of the adapter that an operation moves; empty for none."""
        world = self._world
        operation = world.operations.get(op)
        adapter = world.adapters.get(operation.adapter_id) if operation else None
        return "" if adapter is None else adapter.name


def outcome_of(reply: requests.Reply | None) -> str:
    """Return how a request ended: the code of its refusal, or `done`."""
    return reply.code.value if type(reply) is requests.Refused else "done"
