"""The controller's main loop: log, then handle, then act.

All inputs of one poll form a group: it is written with one write, handled while the system syncs
it, and its actions are performed once it is durable. What is not in the log never happened, and
what was acknowledged is in the log.
"""

import gc
import os
import time
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import structlog

from loradock.controller.core.actions import (
    Action,
    PublishEvent,
    RestartEngine,
    SendCommand,
    SendReply,
    SetTimer,
)
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.format import LogFull
from loradock.controller.log.retention import retention_from
from loradock.controller.log.writer import Log
from loradock.controller.server.client_sessions import ClientSessions
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.default_adapters import DefaultAdapters
from loradock.controller.server.engine_link import BEAT_INTERVAL_NS, EngineLink
from loradock.controller.server.event_stream import EVENTS_BEAT_NS, EventStream
from loradock.controller.server.input_handler import GroupInput, InputHandler, recover
from loradock.controller.server.logical_clock import SYSTEM_CLOCKS, Clocks, LogicalClock
from loradock.controller.server.operating.engine_supervision import EngineSupervision
from loradock.controller.server.operating.engine_watch import EngineWatch
from loradock.controller.server.operating.preloads import (
    is_preload,
    preload_requests,
    waiting_preloads,
)
from loradock.controller.server.operating.settings_file import SettingsFile
from loradock.controller.server.operating.supervisor_link import SupervisorLink
from loradock.controller.server.snapshot_process import SnapshotProcess
from loradock.controller.server.transport import Transport
from loradock.messages import records
from loradock.messages.commands import RequestInventory, ResendTokens, StartInference
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import Seq
from loradock.messages.records import FORMAT, Header, Input, Record
from loradock.messages.reports import EngineInventory
from loradock.messages.requests import LifecycleRequest
from loradock.messages.wire import EVENTS
from loradock.processes.progress import Progress

LOG_RETRY_NS: Final = 1_000_000_000
PAUSE_NS_MIN: Final = 2_000_000_000
"""Iterations follow each other more closely, unless the process does not run or is very busy."""

STEP_BOUND_S: Final = 60.0
"""The bound of an iteration that is reported to the supervisor; a sync may take many seconds."""

REPLY_INTERVAL: Final = 32
"""Inputs of a group after which replies are sent: clients work while the others are answered."""

_OF_LINK: Final = frozenset({records.ControllerStarted, EngineInventory})
"""Inputs with which the link to an engine begins or opens."""

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
        self._transport = transport
        self._log = opened
        self._supervisor = supervisor or SupervisorLink(Progress(), Progress())
        self._progress = self._supervisor.progress
        self._events = EventStream(opened.directory, opened.storage)
        self._snapshots = SnapshotProcess(
            opened.directory,
            config.snapshot_interval,
            retention_from(config.log_retention, config.log_keep_hours),
            opened.storage,
        )
        self._controller, unlogged_skips = recover(config, opened, self._events, self._snapshots)
        self._events.end_recovery(self._controller.world.events_seq)
        self._handler = InputHandler(self._controller, opened, config.checked, self._progress)
        self._clock = LogicalClock(self._controller.world.time_ns, clocks)
        defaults = DefaultAdapters(config.default_mm_loras)
        for modality, default in defaults.by_modality.items():
            log.info("default adapter", modality=modality, adapter=default.name, path=default.path)
        self._sessions = ClientSessions(
            self._controller,
            self._events,
            transport.reply,
            os.getpid(),
            defaults,
            transport.can_reply,
            transport.access,
        )
        self._sessions.log_facts = self._snapshots.facts
        self._control = self._sessions.control
        self._preloads = config.preloads
        self._control.change = self._change_settings
        self._settings_file = SettingsFile(Path(config.directory), config.limits, config.policy)
        transport.on_gone = self._events.drop_client
        self._link = EngineLink(transport.command, config.engine_timeout_ms * 1_000_000)
        self._sessions.engine_beat = lambda: (self._link.statistics, self._link.running)
        self._control.engine_is_local = lambda: transport.is_local(self._link.peer)
        self._interval_sync = config.sync == "interval"
        # The server's own inputs for the next group.
        self._pending = [GroupInput(skipped) for skipped in unlogged_skips]
        self._timer_ns = self._controller.world.timer_ns
        self._beat_ns = 0
        self._published_ns = 0
        self._iterated_ns = time.monotonic_ns()
        self._digest_seq = 0
        self._log_retry_ns = 0
        self._engine_supervision = EngineSupervision(
            self._link,
            EngineWatch(transport.watch, transport.unwatch),
            self._supervisor,
            self._controller.world,
        )
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
                if self._control.may_end(time.monotonic_ns()):
                    self._end_after_stop()
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

    @property
    def snapshot_until(self) -> Seq:
        """The last record of a snapshot; 0 while the log lacks that a record is skipped."""
        if any(isinstance(one.message, records.InputSkipped) for one in self._pending):
            return 0
        return self._controller.world.seq

    def _end_after_stop(self) -> None:
        log.info("stopping: no request is waited for any more")
        self._stopping = True
        self._supervisor.stop_all()

    def _change_settings(self, limits: Limits, policy: str) -> None:
        if not self._log.has_record:
            self._commit([GroupInput(records.TimerFired())])
        self._log.change_header(Header(FORMAT, RULES, policy, limits_to(limits), 0))
        self._perform(self._controller.reconfigure(limits, policy))
        self._publish()
        log.info("settings changed", policy=policy, **limits_to(limits))
        self._settings_file.write(limits, policy)

    def _start_epoch(self) -> None:
        world = self._controller.world
        wall_ns = self._clock.wall_ns()
        epoch = max(world.epoch + 1, wall_ns // 1_000_000_000)
        started = records.ControllerStarted(epoch, wall_ns - self._clock.now_ns())
        lost = self._engine_supervision.loss_before()
        # Those of earlier starts are refused with the engine that they wait for.
        preloads = preload_requests(self._preloads, () if lost else waiting_preloads(world))
        inputs: list[Input] = [started, *([lost] if lost else []), *preloads]
        group, self._pending = [*self._pending, *map(GroupInput, inputs)], []
        self._commit(group)
        # Objects made by the recovery live as long as the process: garbage collection skips them.
        gc.collect()
        gc.freeze()
        log.info("started", epoch=world.epoch, seq=world.seq, adapters=len(world.adapters))

    def _timeout_ms(self) -> int:
        if self._sessions.has_group:
            return 0
        now = time.monotonic_ns()
        left = (self._log_retry_ns if self._pending else self._beat_ns + BEAT_INTERVAL_NS) - now
        left = min(left, self._published_ns + EVENTS_BEAT_NS - now)
        for wait_ns in (self._sessions.queries_wait_ns(now), self._control.ends_in_ns(now)):
            if wait_ns is not None:
                left = min(left, wait_ns)
        if self._timer_ns:
            left = min(left, self._timer_ns - self._clock.now_ns())
        return max(0, (left + 999_999) // 1_000_000)

    def _iterate(self, ready: set[int]) -> None:
        now = time.monotonic_ns()
        if now - self._iterated_ns > PAUSE_NS_MIN:
            self._link.excuse(now - self._iterated_ns)
        self._iterated_ns = now
        group, self._pending = self._pending, []
        frames = list(self._transport.receive_reports())
        output = self._link.receive(frames, now)
        reports = self._control.failures.without_details(output.inputs)
        group += [GroupInput(report, report_seq=seq) for report, seq in reports]
        if (lost := self._engine_supervision.loss(now, ready)) is not None:
            group.append(GroupInput(lost))
        self._sessions.receive_all(self._transport.receive_requests())
        group += self._sessions.take_group()
        if self._timer_ns and self._clock.now_ns() >= self._timer_ns:
            self._timer_ns = 0
            group.append(GroupInput(records.TimerFired()))
        for report in output.private:
            self._sessions.forward(report)
        results = self._log_and_handle(group) if group else None
        # These requests are for the next group; the system syncs meanwhile.
        self._sessions.receive_all(self._transport.receive_requests())
        if results is not None:
            self._finish_group(group, results)
        if self._link.is_open:
            self._request_resends()
        self._sessions.answer_queries()
        if self._events.wake_fd in ready:
            self._events.deliver()
        self._send_replies()
        self._tick(now)

    def _send_replies(self) -> None:
        self._sessions.flush()
        self._transport.flush()

    def _commit(self, group: list[GroupInput]) -> None:
        """Log a group, handle its inputs one by one, and perform their actions."""
        results = self._log_and_handle(group)
        if results is not None:
            self._finish_group(group, results)

    def _log_and_handle(self, group: list[GroupInput]) -> list[list[Action] | None] | None:
        """Write a group, and handle it while the system syncs it; None if it is refused."""
        world = self._controller.world
        now = self._clock.now_ns()
        batch = [Record(now, g.message, "", g.body, g.report_seq) for g in group]
        if world.seq - self._digest_seq >= self._controller.limits.digest_interval:
            self._digest_seq = world.seq
            batch[0] = msgspec.structs.replace(batch[0], digest=world.digest())
        try:
            return self._handler.log_and_handle(batch, self._note)
        except LogFull as error:
            self._refuse_group(group, str(error))
            return None

    def _finish_group(self, group: list[GroupInput], results: list[list[Action] | None]) -> None:
        """Perform the actions of a group, once it is durable."""
        self._log.end_group()
        self._link.note_logged()
        self._perform_all(group, results)
        self._control.note_group([received.message for received in group], self._iterated_ns)
        self._publish()
        self._engine_supervision.watch(is_local=self._control.engine_is_local())

    def _perform_all(self, group: list[GroupInput], results: list[list[Action] | None]) -> None:
        """Perform the actions of each input; None is the result of a skip."""
        for number, (received, actions) in enumerate(zip(group, results, strict=True), 1):
            if type(received.message) in _OF_LINK:
                self._advance_link(received.message)
            if actions is None:
                self._after_skip(received)
            else:
                self._perform(actions)
            if number % REPLY_INTERVAL == 0:
                self._send_replies()

    def _note(self, message: Input) -> None:
        """Note an inference, or what an engine reports, before it is handled."""
        if isinstance(message, records.InferenceRequested):
            self._sessions.note_resend(message.request_id)
        else:
            self._control.note_report(message)

    def _advance_link(self, message: Input) -> None:
        """Begin or open the link before the actions of an input of `_OF_LINK` are performed."""
        if isinstance(message, records.ControllerStarted):
            engine = self._controller.world.engine
            engine_id, reported = (engine.engine_id, engine.reported) if engine else ("", 0)
            # The epoch is in the log, so no other process can have the same one.
            self._link.start(message.epoch, engine_id, time.monotonic_ns(), reported)
        else:
            self._link.open()

    def _after_skip(self, received: GroupInput) -> None:
        """Answer the client, or find what the engine did: its report is lost."""
        message = received.message
        self._timer_ns = self._controller.world.timer_ns
        if isinstance(message, EngineInventory):
            reason = "its inventory can't be handled"
            self._pending.append(GroupInput(records.EngineLost(message.engine_id, reason)))
            self._engine_supervision.restart(message.engine_id, message.pid, reason)
        elif isinstance(message, LifecycleRequest | records.InferenceRequested):
            code = ErrorCode.HANDLING_FAILED
            self._sessions.refuse_unlogged(message, received.body, NOT_HANDLED, code)
        elif not isinstance(message, records.ShellInput):
            self._link.send(RequestInventory(0), time.monotonic_ns())

    def _request_resends(self) -> None:
        """Have the engine send output again to clients that may lack some."""
        now = time.monotonic_ns()
        if self._controller.world.engine is None:
            # The core refused the engine's inventory; a later one may be consistent.
            self._link.synchronise_later(now)
            return
        for request_id in self._sessions.take_resends():
            self._link.send(ResendTokens(request_id), now)

    def _refuse_group(self, group: list[GroupInput], why: str) -> None:
        """Refuse a group that could not be logged; keep the server's own inputs."""
        now = time.monotonic_ns()
        if now >= self._log_retry_ns:
            log.error("the log can't be written; serving reads only", error=why)
            self._log_retry_ns = now + LOG_RETRY_NS
        self._link.forget_unlogged(now)
        for received in group:
            message = received.message
            if is_preload(message):
                self._pending.append(received)
            elif isinstance(message, LifecycleRequest | records.InferenceRequested):
                self._sessions.refuse_unlogged(message, received.body, why)
            elif isinstance(message, records.ShellInput):
                # Clients and the engine repeat their inputs; this one would be lost.
                self._pending.append(received)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            # The most frequent ones first: this is the hot path.
            if type(action) is SendReply:
                self._sessions.answer(action.message)
            elif type(action) is PublishEvent:
                self._events.add(action.message)
            elif type(action) is SendCommand:
                self._send_command(action)
            elif type(action) is SetTimer:
                self._timer_ns = action.at_ns
            elif type(action) is RestartEngine:
                self._engine_supervision.restart(action.engine_id, action.pid, action.reason)

    def _send_command(self, action: SendCommand) -> None:
        command = action.message
        self._control.note_command(command)
        if isinstance(command, StartInference):
            complete = self._sessions.with_payload(command)
            if complete is None:
                self._pending.append(GroupInput(records.PayloadLost(command.request_id)))
                return
            command = complete
        self._link.send(command, time.monotonic_ns())

    def _publish(self, *, beat: bool = False) -> None:
        """Publish the new events; without any, only a beat has a frame."""
        batch = self._events.take_batch()
        if batch or beat:
            world = self._controller.world
            self._transport.publish(EVENTS.encode(batch, world.epoch, world.events_seq))
            self._published_ns = time.monotonic_ns()

    def _tick(self, now: int) -> None:
        self._link.tick(now)
        if now - self._beat_ns >= BEAT_INTERVAL_NS:
            self._beat_ns = now
            if self._interval_sync:
                self._log.sync()
            self._snapshots.tick(self.snapshot_until)
        if now - self._published_ns >= EVENTS_BEAT_NS:
            self._publish(beat=True)
