"""Answers to requests about the server itself: its requests, its settings, and its end."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, get_args

import msgspec
import structlog

from loradock.controller.core.context import Refusal
from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.limits import FIXED, Limits, LimitsError, limits_from, limits_to
from loradock.controller.core.views import show_adapter
from loradock.controller.log.format import LogFull
from loradock.controller.server.operating.failures import Failures
from loradock.controller.server.operating.process_facts import memory_bytes
from loradock.controller.server.operating.request_times import RequestTimes
from loradock.messages import VERSION, commands, control, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import OpId, RequestId
from loradock.messages.records import EngineLost, GenerationRequested, Input, PoolingRequested
from loradock.messages.reports import AdapterChecked, EngineInventory, OperationFailed

STOPPING_RETRY_MS: Final = 1000
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

ChangeSettings = Callable[[Limits, str], None]
"""Puts settings into force; raises `LogFull` and `OSError`."""

log = structlog.get_logger("controller")


class ServerControl:
    """The server as its operator sees it; `engine_device` and `engine_dtype` are the engine's."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._started_ns = time.monotonic_ns()
        self.times: Final = RequestTimes(self._started_ns)
        self.failures: Final = Failures()
        self.change: ChangeSettings = lambda _limits, _policy: None
        self.engine_is_local: Callable[[], bool] = lambda: True
        self.engine_device = ""
        self.engine_dtype = ""
        self._stop_at_ns = 0

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are refused."""
        return self._stop_at_ns != 0

    def may_end(self, now_ns: int) -> bool:
        """Whether a stopping server has nothing left to wait for."""
        if not self.is_stopping:
            return False
        return not self._has_awaited_request() or now_ns >= self._stop_at_ns

    def _has_awaited_request(self) -> bool:
        """Whether a client waits: adapters of the start are loaded at the next one as well."""
        pending = self._controller.world.pending_requests
        return any(not request_id.startswith(control.PRELOAD) for request_id in pending)

    def ends_in_ns(self, now_ns: int) -> int | None:
        """Return when a stopping server ends at the latest; None for one that does not stop."""
        return max(0, self._stop_at_ns - now_ns) if self.is_stopping else None

    def refuse(self, request_id: RequestId) -> requests.Refused:
        """Return the refusal of a new request while the server stops."""
        running = len(self._controller.world.pending_requests)
        return requests.Refused(
            request_id,
            ErrorCode.STOPPING,
            f"no new requests are accepted; {running} in progress are waited for",
            STOPPING_RETRY_MS,
        )

    def execute(self, message: control.ChangeSettings | control.StopServer) -> requests.Reply:
        """Return the answer to a command."""
        if isinstance(message, control.ChangeSettings):
            return self._change(message)
        now = time.monotonic_ns()
        # A repetition does not move the end, and a shorter time does.
        stop_at_ns = now + message.timeout_ms * _NS_PER_MS
        self._stop_at_ns = min(self._stop_at_ns or stop_at_ns, stop_at_ns)
        running = len(self._controller.world.pending_requests)
        return control.ServerStopping(message.request_id, running)

    def _change(self, message: control.ChangeSettings) -> requests.Reply:
        controller = self._controller
        policy = message.policy or controller.policy_name
        try:
            limits = limits_from(limits_to(controller.limits) | message.limits)
        except LimitsError as error:
            return requests.Refused(message.request_id, ErrorCode.MALFORMED, str(error))
        if policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            unknown = f"policy {policy!r} is not known; known are {known}"
            return requests.Refused(message.request_id, ErrorCode.MALFORMED, unknown)
        refusal = controller.change_refusal(limits)
        if refusal:
            return requests.Refused(message.request_id, ErrorCode.CONFLICT, refusal)
        try:
            self.change(limits, policy)
        except (LogFull, OSError) as error:
            return requests.Refused(message.request_id, ErrorCode.LOG_UNAVAILABLE, str(error))
        return self._settings(message.request_id)

    def answer(self, message: control.ServerQuery) -> requests.Reply:
        """Return the answer to a query."""
        now = time.monotonic_ns()
        match message:
            case control.ListRequests():
                pending = self._controller.world.pending_requests
                views = self.times.views(islice(self._pending(), message.limit), now)
                return control.RequestsListed(message.request_id, views, len(pending))
            case control.ListSlow():
                operations, waits = self.times.slow_operations(now), self.times.slow_requests(now)
                return control.SlowListed(message.request_id, operations, waits)
            case control.ShowSettings():
                return self._settings(message.request_id)

    def show_adapter(self, message: requests.ShowAdapter) -> requests.Reply:
        """Return the versions of a name, and why its latest operation failed.

        Raises `Refusal` for a name that is not known and has not failed.
        """
        failure = self.failures.view(message.adapter, time.monotonic_ns())
        try:
            shown = show_adapter(self._controller.world, message)
        except Refusal as refusal:
            if failure is None:
                raise
            text = f"{refusal.message}; the last attempt failed: {failure.code} {failure.message}"
            return requests.Refused(message.request_id, refusal.code, text, details=failure.details)
        return msgspec.structs.replace(shown, failure=failure)

    def _settings(self, request_id: RequestId) -> control.SettingsShown:
        limits = limits_to(self._controller.limits)
        return control.SettingsShown(request_id, limits, self._controller.policy_name, FIXED)

    def _pending(self) -> Iterator[tuple[RequestId, str, str, bool]]:
        world = self._controller.world
        for request_id, pending in world.pending_requests.items():
            used = [world.adapters[key] for key in pending.adapters if key in world.adapters]
            # A suspended generation waits for its adapter.
            runs = pending.op > 0 and not any(request_id in one.waiters for one in used)
            yield request_id, pending.kind, ",".join(one.name for one in used), runs

    def note_group(self, group: Iterable[Input], arrived_ns: int) -> None:
        """Note the requests of a group that was handled: those that wait, and slow answers.

        Most are answered within their group, all in the same time, so they are noted together.
        """
        now, times, world = time.monotonic_ns(), self.times, self._controller.world
        is_slow = times.is_slow_request(now, now - arrived_ns)
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

    def note_command(self, command: commands.Command) -> None:
        """Note an operation on an adapter, which takes time until its report."""
        adapter_id = getattr(command, "adapter_id", 0)
        kind = _OPERATIONS.get(type(command))
        if kind is not None and isinstance(command, commands.Operation):
            adapter = self._controller.world.adapters.get(adapter_id)
            name = "" if adapter is None else adapter.name
            self.times.begin_operation(command.op, kind, name, time.monotonic_ns())

    def note_report(self, message: object) -> None:
        """Note what an input reports about the engine, if it is a report."""
        op, now = getattr(message, "op", 0), time.monotonic_ns()
        if op:
            outcome = message.code.value if isinstance(message, OperationFailed) else "done"
            self.times.end_operation(op, outcome, now)
            name = self._adapter_of(op)
            self.failures.note(name, message, now)
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
        world = self._controller.world
        operation = world.operations.get(op)
        adapter = world.adapters.get(operation.adapter_id) if operation else None
        return "" if adapter is None else adapter.name

    def with_facts(self, status: requests.StatusShown) -> requests.StatusShown:
        """Return a status with what is known about the processes.

        The process id of an engine on another machine is that of some other process here.
        """
        engine_pid = status.engine_pid if self.engine_is_local() else 0
        return msgspec.structs.replace(
            status,
            version=VERSION,
            uptime_ms=(time.monotonic_ns() - self._started_ns) // _NS_PER_MS,
            memory_bytes=memory_bytes(os.getpid()),
            engine_pid=engine_pid,
            engine_memory_bytes=memory_bytes(engine_pid),
            device=self.engine_device if status.engine_id else "",
            dtype=self.engine_dtype if status.engine_id else "",
            stopping=self.is_stopping,
        )


def outcome_of(reply: requests.Reply | None) -> str:
    """Return how a request ended: the code of its refusal, or `done`."""
    return reply.code.value if type(reply) is requests.Refused else "done"
