"""The controller's main loop: receive, check, log, handle, perform, publish, reply.

All inputs of one poll form a group: it is written with one write, handled while the system syncs
it, and its actions are performed once it is durable. What is not in the log never happened, and
what was acknowledged is in the log.
"""

import gc
import time
from pathlib import Path
from types import FrameType
from typing import Final, get_args

import structlog

from loradock.controller.core.actions import (
    Action,
    PublishEvent,
    RestartEngine,
    SendCommand,
    SendReply,
)
from loradock.controller.core.context import Refusal
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.format import LogFull
from loradock.controller.log.retention import retention_from
from loradock.controller.log.writer import Log
from loradock.controller.server.admin import Admin, SettingsFile
from loradock.controller.server.clients import Outbox
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.diagnostics import Diagnostics
from loradock.controller.server.engine_link import BEAT_INTERVAL_NS, EngineLink
from loradock.controller.server.event_stream import EVENTS_BEAT_NS, EventStream
from loradock.controller.server.inputs import (
    SYSTEM_CLOCKS,
    Clocks,
    GroupInput,
    InputHandler,
    LogHealth,
    LogicalClock,
    recover,
)
from loradock.controller.server.preloads import (
    DefaultAdapters,
    HistoryPrefetches,
    is_own_prefetch,
    is_preload,
    preload_requests,
    waiting_preloads,
)
from loradock.controller.server.queries import Queries
from loradock.controller.server.sessions import ClientSessions
from loradock.controller.server.snapshot_process import SnapshotProcess
from loradock.controller.server.supervision import EngineSupervision, SupervisorLink
from loradock.controller.server.transport import Transport
from loradock.messages import records, requests
from loradock.messages.commands import RequestInventory, ResendTokens, StartInference
from loradock.messages.control import ChangeSettings
from loradock.messages.errors import ErrorCode
from loradock.messages.events import PolicyFailed, Published
from loradock.messages.ids import Seq
from loradock.messages.records import FORMAT, Header, Input
from loradock.messages.reports import EngineInventory, LoggedReport, OperationReport
from loradock.messages.requests import LifecycleRequest
from loradock.messages.wire import EVENTS
from loradock.processes.progress import Progress

PAUSE_NS_MIN: Final = 2_000_000_000
"""Iterations follow each other more closely, unless the process does not run or is very busy."""

STEP_BOUND_S: Final = 60.0
"""The bound of an iteration that is reported to the supervisor; a sync can take many seconds."""

REPLY_INTERVAL: Final = 32
"""Inputs of a group after which replies are sent: clients work while the others are answered."""

_RECORDED: Final = frozenset(
    {records.EngineLost, *get_args(records.InferenceRequested), *get_args(LoggedReport)}
)
"""Inputs that are recorded before they are handled: then their operations are still known."""

NOT_HANDLED: Final = "handling failed in the controller; the input was skipped and changed nothing"

log = structlog.get_logger("controller")


class Server:
    """The controller between start and stop, which is one epoch."""

    def __init__(
        self,
        config: ServerConfig,
        transport: Transport,
        opened: Log,
        clocks: Clocks = SYSTEM_CLOCKS,
        supervisor: SupervisorLink | None = None,
    ) -> None:
        self._config = config
        self._transport = transport
        self._log = opened
        self._supervisor = supervisor or SupervisorLink(Progress(), Progress())
        self._progress = self._supervisor.progress
        self._events = EventStream(opened.directory, opened.storage)
        retention = retention_from(config.log_retention, config.log_keep_hours)
        self._snapshots = SnapshotProcess(
            opened.directory, config.snapshot_interval, retention, opened.storage
        )
        controller, unlogged_skips = recover(config, opened, self._events, self._snapshots)
        world, self._controller = controller.world, controller
        self._events.end_recovery(world.events_seq)
        self._inputs = InputHandler(controller, opened, config.checked, self._progress)
        self._clock = LogicalClock(world.time_ns, clocks)
        self._link = EngineLink(transport.command, config.engine_timeout_ms * 1_000_000)
        is_local = transport.is_local
        self._supervision = EngineSupervision(
            self._link, transport.watch, transport.unwatch, is_local, self._supervisor, world
        )
        self._diagnostics = Diagnostics(world)
        self._health = LogHealth(opened.directory, opened.storage)
        self._admin = Admin(
            controller,
            self._diagnostics,
            self._link,
            self._snapshots,
            self._health,
            is_local,
            self._supervision.loading_text,
        )
        self._settings_file = SettingsFile(Path(config.directory), config.limits, config.policy)
        self._outbox = Outbox(transport.reply)
        access = transport.access
        self._queries = Queries(
            controller, self._events, self._admin, self._outbox, access, transport.can_reply
        )
        defaults = DefaultAdapters(config.default_mm_loras)
        self._sessions = ClientSessions(
            controller,
            self._queries,
            self._admin,
            self._diagnostics,
            self._outbox,
            defaults,
            access,
        )
        self._prefetches = HistoryPrefetches() if config.prefetch_history else None
        # The server's own inputs for the next group.
        self._pending = [GroupInput(skipped) for skipped in unlogged_skips]
        self._epoch = 0
        self._beat_ns = 0
        self._published_ns = 0
        self._iterated_ns = time.monotonic_ns()
        self._stopping = False
        transport.watch(self._events.wake_fd)

    def run(self, parent_fd: int = -1) -> None:
        """Serve until `stop` is called, or until the parent's end of `parent_fd` closes."""
        self._start_epoch()
        if parent_fd >= 0:
            self._transport.watch(parent_fd)
        try:
            while not self._stopping:
                self._progress.enter("wait", STEP_BOUND_S)
                ready = self._transport.poll(self._timeout_ms())
                self._progress.enter("handle", STEP_BOUND_S)
                self._stopping = self._stopping or parent_fd in ready
                self._iterate(ready)
                if self._admin.may_end(time.monotonic_ns()):
                    log.info("stopping: no request is waited for any more")
                    self._stopping = True
                    self._supervisor.stop_all()
            self._progress.enter("stop", STEP_BOUND_S)
            self._log.sync()
            self._snapshots.finish(self.snapshot_until)
        finally:
            self._progress.enter("stop", STEP_BOUND_S)
            self._snapshots.close()
            self._events.close()
            self._log.close()
        log.info("stopped", seq=self._controller.world.seq)

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """End after this iteration; a signal handler."""
        self._stopping = True

    # The pipeline, one function for each stage.

    def _iterate(self, ready: set[int]) -> None:
        """Pass what arrived through all stages, as one group of inputs."""
        now = self._begin_iteration()
        group = self._receive(ready, now) + self._check()
        first_seq = self._log_group(group) if group else None
        if first_seq is not None:
            results = self._handle(group, first_seq)
            # These requests are for the next group; the system syncs meanwhile.
            self._receive_requests()
            self._perform(group, results)
            self._publish(self._events.take_batch())
        self._answer_reads(ready)
        self._reply()
        self._tick(now)

    def _begin_iteration(self) -> int:
        now = time.monotonic_ns()
        if now - self._iterated_ns > PAUSE_NS_MIN:
            self._link.extend_deadline(now - self._iterated_ns)
        self._iterated_ns = now
        return now

    def _receive(self, ready: set[int], now: int) -> list[GroupInput]:
        """Return the server's own inputs and the engine's; forward output that is not logged."""
        group, self._pending = self._pending, []
        if frames := list(self._transport.receive_reports()):
            output = self._link.receive(frames, now)
            logged = self._diagnostics.failures.without_details(output.inputs)
            group += [GroupInput(report, report_seq=seq) for report, seq in logged]
            for report in output.private:
                self._sessions.forward(report)
        if (lost := self._supervision.loss(now, ready)) is not None:
            group.append(GroupInput(lost))
        return group

    def _check(self) -> list[GroupInput]:
        """Return the clients' inputs that have to be logged, and the timer; answer the others."""
        self._receive_requests()
        group: list[GroupInput] = []
        if self._sessions.group or self._sessions.changes:
            for route, message in self._sessions.take_changes():
                self._outbox.add(route, self._change_settings(message))
            group = self._sessions.take_group()
        if group and self._controller.world.epoch != self._epoch:
            # Without a record of this start, copies of what the one before has refused have the
            # current epoch.
            self._refuse_group(group, "the server's start is not in the log yet")
            group = []
        if 0 < self._controller.world.timer_ns <= self._clock.now_ns():
            group.append(GroupInput(records.TimerFired()))
        if self._prefetches is not None:
            world = self._controller.world
            due = self._prefetches.take_due(self._clock.now_ns(), world.names)
            group += map(GroupInput, due if world.engine_ready else ())
        return group

    def _receive_requests(self) -> None:
        if self._transport.has_requests:
            self._sessions.receive_all(self._transport.receive_requests())

    def _log_group(self, group: list[GroupInput]) -> Seq | None:
        """Begin to write a group; returns its first record's number, None if it is refused."""
        try:
            first_seq = self._inputs.log(group, self._clock.now_ns())
        except LogFull as error:
            self._refuse_group(group, str(error))
            if not self._pending:
                # It is tried again until the log has it: that shows when there is space again.
                self._pending.append(GroupInput(records.TimerFired()))
            return None
        if self._health.error:
            log.info("the log can be written again")
            self._health.on_written()
            self._health.measure()
        return first_seq

    def _handle(self, group: list[GroupInput], first_seq: Seq) -> list[list[Action] | None]:
        """Handle a group while the system syncs it; a result is None if its input is skipped."""
        results = []
        for seq, received in enumerate(group, first_seq):
            if type(received.message) in _RECORDED:
                self._record(received.message)
            results.append(self._inputs.handle(seq, received))
        self._inputs.end_group()
        return results

    def _record(self, message: Input) -> None:
        if isinstance(message, records.InferenceRequested):
            self._sessions.record_resend(message.request_id)
            if self._prefetches is not None:
                self._prefetches.record(message, self._clock.now_ns())
        else:
            self._diagnostics.record_report(message)

    def _perform(self, group: list[GroupInput], results: list[list[Action] | None]) -> None:
        """Perform the actions of a group, once it is durable."""
        self._log.end_group()
        self._link.on_logged()
        for number, (received, actions) in enumerate(zip(group, results, strict=True), 1):
            if type(received.message) is records.ControllerStarted:
                self._start_link(received.message)
            elif type(received.message) is EngineInventory:
                self._link.open()
                self._supervision.watch()
            if actions is None:
                self._after_skip(received)
            else:
                self._perform_actions(actions)
            if number % REPLY_INTERVAL == 0:
                self._reply()
        self._diagnostics.record_group([one.message for one in group], self._iterated_ns)

    def _perform_actions(self, actions: list[Action]) -> None:
        for action in actions:
            # The most frequent ones first: this is the hot path.
            if type(action) is SendReply:
                self._sessions.answer(action.message)
            elif type(action) is PublishEvent:
                self._events.add(action.message)
                if type(event := action.message.event) is PolicyFailed:
                    log.warning("lru decides", policy=event.policy, reason=event.reason)
            elif type(action) is SendCommand:
                self._send_command(action)
            elif type(action) is RestartEngine:
                self._supervision.restart(action.engine_id, action.pid, action.reason)

    def _publish(self, batch: tuple[Published, ...], *, beat: bool = False) -> None:
        """Publish new events; without any, only a beat has a frame."""
        if batch or beat:
            world = self._controller.world
            self._transport.publish(EVENTS.encode(batch, world.epoch, world.events_seq))
            self._published_ns = time.monotonic_ns()

    def _answer_reads(self, ready: set[int]) -> None:
        """Answer queries and fetches of events, and have the engine send output again."""
        if self._link.is_open:
            self._request_resends()
        if self._queries.is_waiting:
            self._queries.answer()
        if self._events.wake_fd in ready:
            self._events.deliver()

    def _reply(self) -> None:
        """Send the replies, those to one connection in one frame."""
        self._outbox.flush(self._controller.world.epoch)
        for route in self._transport.flush():
            self._events.drop_client(route)

    def _tick(self, now: int) -> None:
        """Do what is due: heartbeats, syncs, snapshots."""
        self._link.tick(now)
        if now - self._beat_ns >= BEAT_INTERVAL_NS:
            self._beat_ns = now
            self._health.measure()
            if self._config.sync == "interval":
                self._log.sync()
            self._snapshots.tick(self.snapshot_until)
        if now - self._published_ns >= EVENTS_BEAT_NS:
            self._publish((), beat=True)

    # The start of an epoch, and what is not on the way of most inputs.

    def _start_epoch(self) -> None:
        for modality, default in self._sessions.defaults.by_modality.items():
            log.info("default adapter", modality=modality, adapter=default.name, path=default.path)
        world = self._controller.world
        wall_ns = self._clock.wall_ns()
        self._epoch = max(world.epoch + 1, wall_ns // 1_000_000_000)
        started = records.ControllerStarted(self._epoch, wall_ns - self._clock.now_ns())
        lost = self._supervision.loss_before()
        # Those of earlier starts are refused with the engine that they wait for.
        preloads = preload_requests(self._config.preloads, () if lost else waiting_preloads(world))
        inputs: list[Input] = [started, *([lost] if lost else []), *preloads]
        group, self._pending = [*self._pending, *map(GroupInput, inputs)], []
        self._commit(group)
        # Objects made by the recovery live as long as the process: garbage collection skips them.
        gc.collect()
        gc.freeze()
        log.info("started", epoch=world.epoch, seq=world.seq, adapters=len(world.adapters))

    def _commit(self, group: list[GroupInput]) -> None:
        """Pass a group of the server's own inputs through the stages."""
        first_seq = self._log_group(group)
        if first_seq is not None:
            self._perform(group, self._handle(group, first_seq))
            self._publish(self._events.take_batch())

    def _start_link(self, started: records.ControllerStarted) -> None:
        engine = self._controller.world.engine
        engine_id, reported = (engine.engine_id, engine.reported) if engine else ("", 0)
        # The epoch is in the log, so no other process can have the same one.
        self._link.start(started.epoch, engine_id, time.monotonic_ns(), reported)

    @property
    def snapshot_until(self) -> Seq:
        """The last record of a snapshot; 0 while the log lacks that a record is skipped."""
        if any(isinstance(one.message, records.InputSkipped) for one in self._pending):
            return 0
        return self._controller.world.seq

    def _timeout_ms(self) -> int:
        if self._sessions.group or self._sessions.changes:
            return 0
        if self._pending and not self._health.error:
            return 0
        now = time.monotonic_ns()
        left = min(self._beat_ns + BEAT_INTERVAL_NS, self._published_ns + EVENTS_BEAT_NS) - now
        for wait_ns in (self._queries.wait_ns(now), self._admin.ends_in_ns(now)):
            if wait_ns is not None:
                left = min(left, wait_ns)
        timer_ns = self._controller.world.timer_ns
        if timer_ns and not self._health.error:
            left = min(left, timer_ns - self._clock.now_ns())
        due_ns = None if self._prefetches is None else self._prefetches.next_ns()
        if due_ns is not None:
            left = min(left, due_ns - self._clock.now_ns())
        return max(0, (left + 999_999) // 1_000_000)

    def _change_settings(self, message: ChangeSettings) -> requests.Reply:
        """Change limits and policy, durably, and return the answer."""
        try:
            self._apply_settings(*self._admin.changed(message))
        except Refusal as refusal:
            return refusal.reply(message.request_id)
        except (LogFull, OSError) as error:
            return requests.Refused(message.request_id, ErrorCode.LOG_UNAVAILABLE, str(error))
        return self._admin.settings(message.request_id)

    def _apply_settings(self, limits: Limits, policy: str) -> None:
        former = self._controller.limits, self._controller.policy_name
        self._settings_file.write(limits, policy)
        try:
            self._change_header(Header(FORMAT, RULES, policy, limits_to(limits), 0))
        except (LogFull, OSError):
            self._settings_file.write(*former)
            raise
        self._perform_actions(self._controller.reconfigure(limits, policy))
        self._publish(self._events.take_batch())
        log.info("settings changed", policy=policy, **limits_to(limits))

    def _change_header(self, header: Header) -> None:
        """Begin a segment with this header; a segment without a record can't be followed."""
        if not self._log.has_record:
            self._commit([GroupInput(records.TimerFired())])
        if not self._log.has_record:
            raise LogFull(self._health.error)
        self._log.change_header(header)

    def _after_skip(self, received: GroupInput) -> None:
        """Answer the client, or find what the engine did: its report is lost."""
        message = received.message
        if isinstance(message, EngineInventory):
            reason = "its inventory can't be handled"
            self._pending.append(GroupInput(records.EngineLost(message.engine_id, reason)))
            self._supervision.restart(message.engine_id, message.pid, reason)
        elif isinstance(message, LifecycleRequest | records.InferenceRequested):
            code = ErrorCode.HANDLING_FAILED
            self._sessions.refuse_unlogged(message, received.body, NOT_HANDLED, code)
        elif not isinstance(message, records.ShellInput):
            self._link.send(RequestInventory(0), time.monotonic_ns())

    def _refuse_group(self, group: list[GroupInput], why: str) -> None:
        """Refuse a group that could not be logged; keep the server's own inputs.

        They come before those that are kept already. The record that an input is skipped has to be
        the next one: after any other, the input counts as handled.
        """
        now = time.monotonic_ns()
        if not self._health.error:
            log.error("the log can't be written; serving reads only", error=why)
        self._health.on_refused(why, now)
        self._link.forget_unlogged(now)
        kept: list[GroupInput] = []
        for received in group:
            message = received.message
            if is_preload(message):
                kept.append(received)
            elif is_own_prefetch(message) or isinstance(message, records.TimerFired):
                # The first would come too late, the second is due again.
                continue
            elif isinstance(message, LifecycleRequest | records.InferenceRequested):
                self._sessions.refuse_unlogged(message, received.body, why)
            elif isinstance(message, records.ShellInput):
                # Clients and the engine repeat their inputs; this one would be lost.
                kept.append(received)
        self._pending = [*kept, *self._pending]
        if self._health.is_lasting(now):
            ended = {g.message.op for g in group if isinstance(g.message, OperationReport)}
            self._sessions.refuse_waiting(why, ended)

    def _request_resends(self) -> None:
        """Have the engine send output again to clients that can lack some."""
        now = time.monotonic_ns()
        if self._controller.world.engine is None:
            # The core refused the engine's inventory; a later one can be consistent.
            self._link.synchronise_later(now)
            return
        for request_id in self._sessions.take_resends():
            self._link.send(ResendTokens(request_id), now)

    def _send_command(self, action: SendCommand) -> None:
        command = action.message
        self._diagnostics.record_command(command)
        if isinstance(command, StartInference):
            complete = self._sessions.with_payload(command)
            if complete is None:
                self._pending.append(GroupInput(records.PayloadLost(command.request_id)))
                return
            command = complete
        self._link.send(command, time.monotonic_ns())
