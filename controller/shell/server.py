"""The controller's process: one loop that logs, handles and acts.

What it is: the order of things. Whatever one poll brought is one group: written with one write and
one sync, then handled input by input, then acted on. What it is not: a decision (`core`), a
protocol (`link`, `desk`) or a socket (`transport`). One rule: what is not in the log never
happened, and what was acknowledged is in the log.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import msgspec
import structlog
from msgspec import Struct

from controller.actions import Action, Command, Publish, Reply, SetTimer
from controller.core import Controller
from controller.limits import RULES, Limits, limits_to
from controller.shell.desk import Desk
from controller.shell.link import BEAT_INTERVAL_NS, EngineLink
from controller.shell.log import Log, LogError, LogFull, SyncPolicy
from controller.shell.replay import replay
from controller.shell.stream import EventStream
from controller.shell.transport import Transport, TransportError
from messages import records
from messages.commands import ResendTokens, StartGeneration
from messages.errors import ErrorCode
from messages.records import FORMAT, Header, Input, Record
from messages.reports import EngineInventory, LoggedReport, TokensGenerated
from messages.requests import TokensStreamed
from messages.wire import EVENTS

EXIT_LOG: Final = 7
"""The log is damaged, foreign, in use or diverges: starting again would not help."""
EXIT_SOCKET: Final = 6
LOG_RETRY_NS: Final = 1_000_000_000

log = structlog.get_logger("controller")


class ServerConfig(Struct, frozen=True):
    """What a controller process is started with; durations in milliseconds, sizes in bytes."""

    directory: str
    limits: Limits = Limits()
    policy: str = "lru"
    sync: SyncPolicy = "group"
    sync_interval_ms: int = 100
    segment_bytes_max: int = 64 << 20
    engine_timeout_ms: int = 10_000
    checked: bool = False
    """Verify every invariant after every input; slow, for tests and doubts."""


class DivergedError(LogError):
    """The log's inputs do not add up to what they did when they were written."""


class _Entry(NamedTuple):
    message: Input
    client: bytes = b""


class Server:
    """One life of the controller."""

    def __init__(self, config: ServerConfig, transport: Transport, opened: Log) -> None:
        self._transport = transport
        self._log = opened
        self._events = EventStream(Path(config.directory) / "log")
        self._controller = _recover(config, self._events)
        self._desk = Desk(self._controller, self._events, transport.reply, os.getpid())
        self._link = EngineLink(transport.command, config.engine_timeout_ms * 1_000_000)
        self._interval_sync = config.sync == "interval"
        self._pending: list[_Entry] = []
        self._timer_ns = self._controller.world.timer_ns
        self._beat_ns = 0
        self._digest_seq = 0
        self._log_retry_ns = 0
        self._engine_fd = -1
        self._stopping = False
        transport.watch(self._events.wake_fd)

    def run(self, parent_fd: int = -1) -> None:
        """Serve until told to stop, or until the parent's end of `parent_fd` closes."""
        self._begin()
        if parent_fd >= 0:
            self._transport.watch(parent_fd)
        try:
            while not self._stopping:
                ready = self._transport.poll(self._timeout_ms())
                self._stopping = self._stopping or parent_fd in ready
                self._turn(self._engine_fd in ready)
        finally:
            self._events.close()
            self._log.close()
        log.info("stopped", seq=self._controller.world.seq)

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """End after this turn."""
        self._stopping = True

    def _begin(self) -> None:
        world = self._controller.world
        epoch = max(world.epoch + 1, int(time.time()))
        self._commit([_Entry(records.ControllerStarted(epoch))])
        engine = world.engine
        known = ("", 0) if engine is None else (engine.engine_id, engine.pid)
        self._link.start(epoch, *known, time.time_ns())
        self._watch_engine()
        # What recovery built lives as long as the process: no collection needs to visit it.
        gc.collect()
        gc.freeze()
        log.info("started", epoch=epoch, seq=world.seq, adapters=len(world.adapters))

    def _timeout_ms(self) -> int:
        now = time.time_ns()
        if self._pending:
            return max(0, (self._log_retry_ns - now) // 1_000_000)
        due = min(self._beat_ns + BEAT_INTERVAL_NS, self._timer_ns or now + BEAT_INTERVAL_NS)
        return max(0, (due - now + 999_999) // 1_000_000)

    def _turn(self, engine_ended: bool) -> None:
        now = time.time_ns()
        group, self._pending = self._pending, []
        frames = list(self._transport.receive_reports())
        output = self._link.receive(frames, now)
        group += [_Entry(report) for report in output.inputs]
        group += self._losses(now, engine_ended)
        for client, frame in self._transport.receive_requests():
            asked = self._desk.receive(client, frame)
            if asked is not None:
                group.append(_Entry(*asked))
        if self._timer_ns and now >= self._timer_ns:
            self._timer_ns = 0
            group.append(_Entry(records.TimerFired()))
        self._stream(output.tokens)
        if group:
            self._commit(group)
        self._desk.answer_queries()
        self._events.deliver()
        self._tick(now)

    def _losses(self, now: int, engine_ended: bool) -> list[_Entry]:
        reason = "its process ended" if engine_ended else ""
        if not reason and self._link.is_overdue(now):
            reason = "its heartbeats stopped"
        if not reason:
            return []
        lost = records.EngineLost(self._link.engine_id, reason)
        log.warning("engine lost", engine=self._link.engine_id, reason=reason)
        self._link.lose()
        return [_Entry(lost)]

    def _commit(self, group: list[_Entry]) -> None:
        world = self._controller.world
        now = max(time.time_ns(), world.time_ns)
        digest = ""
        if world.seq - self._digest_seq >= self._controller.limits.digest_interval:
            digest, self._digest_seq = world.digest(), world.seq
        batch = [Record(now, entry.message, entry.client) for entry in group]
        batch[0] = msgspec.structs.replace(batch[0], digest=digest)
        try:
            self._log.append(batch, world.epoch)
        except LogFull as error:
            self._refuse_group(group, str(error), now)
            return
        handle = self._controller.handle
        for entry in group:
            if type(entry.message) is EngineInventory:
                self._link.open()
            if type(entry.message) is records.GenerationRequested:
                self._desk.note_repeated(entry.message.request_id)
            for action in handle(entry.message, now):
                self._perform(action)
        if self._link.is_open:
            for request_id in self._desk.take_repeated():
                self._link.send(ResendTokens(request_id), now)
        self._publish()
        self._watch_engine()

    def _refuse_group(self, group: list[_Entry], why: str, now: int) -> None:
        if now >= self._log_retry_ns:
            log.error("the log can't be written; serving reads only", error=why)
            self._log_retry_ns = now + LOG_RETRY_NS
        reports = 0
        for message, _ in group:
            if isinstance(message, records.ShellInput) and not isinstance(
                message, records.GenerationRequested
            ):
                self._pending.append(_Entry(message))
            elif isinstance(message, LoggedReport):
                reports += 1
            else:
                self._desk.refuse(message.request_id, ErrorCode.LOG_UNAVAILABLE, why)
        if reports:
            self._link.forget_unlogged(reports, now)

    def _perform(self, action: Action) -> None:
        match action:
            case Reply():
                self._desk.answer(action.message)
            case Publish():
                self._events.add(action.message)
            case Command():
                self._command(action)
            case SetTimer():
                self._timer_ns = action.at_ns

    def _command(self, action: Command) -> None:
        command = action.message
        if isinstance(command, StartGeneration):
            complete = self._desk.with_prompt(command)
            if complete is None:
                self._pending.append(_Entry(records.PayloadLost(command.request_id)))
                return
            command = complete
        self._link.send(command, time.time_ns())

    def _stream(self, tokens: list[TokensGenerated]) -> None:
        for part in tokens:
            self._desk.answer(TokensStreamed(part.request_id, part.offset, part.tokens, part.text))

    def _publish(self) -> None:
        batch = self._events.take_batch()
        if batch:
            world = self._controller.world
            self._transport.publish(EVENTS.encode(batch, world.epoch, world.events_seq))

    def _watch_engine(self) -> None:
        """Watch the attached engine's process: its end shows at once."""
        engine = self._controller.world.engine
        if self._engine_fd >= 0 and (engine is None or not self._link.engine_id):
            self._transport.unwatch(self._engine_fd)
            os.close(self._engine_fd)
            self._engine_fd = -1
        if self._engine_fd < 0 and engine is not None and self._link.engine_id:
            # An engine that is gone already has no descriptor; its silence will show.
            with contextlib.suppress(OSError):
                self._engine_fd = os.pidfd_open(engine.pid)
                self._transport.watch(self._engine_fd)

    def _tick(self, now: int) -> None:
        self._link.tick(now)
        if now - self._beat_ns >= BEAT_INTERVAL_NS:
            self._beat_ns = now
            world = self._controller.world
            self._transport.publish(EVENTS.encode((), world.epoch, world.events_seq))
            if self._interval_sync:
                self._log.sync()


def _recover(config: ServerConfig, events: EventStream) -> Controller:
    started = time.monotonic()
    directory = Path(config.directory) / "log"
    result = replay(directory, sink=events.remember, checked=config.checked)
    if result.divergence is not None:
        seq, recorded, folded = result.divergence
        raise DivergedError(
            f"{directory}: before record {seq} the digest was {recorded}, folding gives {folded}; "
            "serve it with the version that wrote it"
        )
    log.info(
        "recovered",
        inputs=result.inputs,
        digests_compared=result.digests_compared,
        seconds=round(time.monotonic() - started, 3),
    )
    if result.controller is None:
        raise DivergedError(f"{directory}: the log has no header")
    return result.controller


def open_log(config: ServerConfig) -> Log:
    """Open the log for writing, which also makes this the only controller of its directory."""
    header = Header(FORMAT, RULES, config.policy, limits_to(config.limits), 0)
    opened = Log.open(
        Path(config.directory) / "log",
        header,
        sync=config.sync,
        sync_interval_ms=config.sync_interval_ms,
        segment_bytes_max=config.segment_bytes_max,
    )
    if opened.recovered.cut_bytes:
        log.warning(
            "a torn tail was cut: nothing in it had been acknowledged",
            bytes=opened.recovered.cut_bytes,
            file=str(opened.recovered.cut_from),
        )
    return opened


def main() -> int:
    """`python -m controller.shell.server CONFIG_JSON [PARENT_FD]`."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    config = msgspec.json.decode(sys.argv[1], type=ServerConfig)
    parent_fd = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    try:
        opened = open_log(config)
        with Transport(Path(config.directory)) as transport:
            server = Server(config, transport, opened)
            signal.signal(signal.SIGTERM, server.stop)
            signal.signal(signal.SIGINT, signal.SIG_IGN if parent_fd >= 0 else server.stop)
            server.run(parent_fd)
    except LogError as error:
        log.error("the log stops the start", error=str(error))
        return EXIT_LOG
    except TransportError as error:
        log.error("a socket can't be opened", error=str(error))
        return EXIT_SOCKET
    return 0


if __name__ == "__main__":
    sys.exit(main())
