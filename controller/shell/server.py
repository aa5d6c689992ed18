"""The controller's process: one loop that logs, handles and acts.

What it is: the order of things. Whatever one poll brought is one group: written with one write and
one sync, then handled input by input, then acted on. What it is not: a decision (`core`), a
protocol (`link`, `desk`) or a socket (`transport`). One rule: what is not in the log never
happened, and what was acknowledged is in the log.
"""

import contextlib
import gc
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import msgspec
import structlog
from msgspec import Struct

from controller.core.actions import Action, Command, Publish, Reply, SetTimer
from controller.core.controller import Controller
from controller.core.eviction import POLICIES
from controller.core.limits import RULES, Limits, LimitsError, check_limits, limits_to
from controller.log.format import LogError, LogFull, LogSyncFailed
from controller.log.replay import replay
from controller.log.writer import Log, SyncPolicy
from controller.shell import stderr_logging
from controller.shell.client_sessions import Desk
from controller.shell.default_adapters import DefaultAdapters, DefaultPaths
from controller.shell.engine_link import BEAT_INTERVAL_NS, EngineLink
from controller.shell.event_stream import EventStream
from controller.shell.transport import Transport, TransportError
from messages import records
from messages.commands import ResendTokens, StartInference
from messages.records import FORMAT, Header, Input, Record
from messages.reports import EngineInventory, PrivateReport
from messages.requests import LifecycleRequest
from messages.wire import EVENTS

EXIT_FAILED: Final = 1
"""The disk failed: starting again reads what it holds."""
EXIT_CONFIG: Final = 2
"""No process can be started with these options."""
EXIT_SOCKET: Final = 6
EXIT_LOG: Final = 7
"""The log is damaged, foreign, in use or diverges: starting again would not help."""
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
    default_mm_loras: DefaultPaths = {}
    """Modality -> path of the adapter of requests that bring it and name none."""


class ConfigError(Exception):
    """Options that contradict one another or their bounds."""


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
        defaults = DefaultAdapters(config.default_mm_loras)
        for modality, default in defaults.by_modality.items():
            log.info("default adapter", modality=modality, adapter=default.name, path=default.path)
        self._desk = Desk(self._controller, self._events, transport.reply, os.getpid(), defaults)
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
                self._turn(ready)
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
        engine_id = "" if world.engine is None else world.engine.engine_id
        self._link.start(epoch, engine_id, time.monotonic_ns())
        self._watch_engine()
        # What recovery built lives as long as the process: no collection needs to visit it.
        gc.collect()
        gc.freeze()
        log.info("started", epoch=epoch, seq=world.seq, adapters=len(world.adapters))

    def _timeout_ms(self) -> int:
        now = time.monotonic_ns()
        left = (self._log_retry_ns if self._pending else self._beat_ns + BEAT_INTERVAL_NS) - now
        if self._timer_ns:
            left = min(left, self._timer_ns - time.time_ns())
        return max(0, (left + 999_999) // 1_000_000)

    def _turn(self, ready: set[int]) -> None:
        # The log's times are the calendar's; whoever only waits uses a clock that nobody sets.
        now = time.monotonic_ns()
        group, self._pending = self._pending, []
        frames = list(self._transport.receive_reports())
        output = self._link.receive(frames, now)
        group += [_Entry(report) for report in output.inputs]
        group += self._losses(now, self._engine_fd in ready)
        for client, frame in self._transport.receive_requests():
            group += [_Entry(*asked) for asked in self._desk.receive(client, frame)]
        if self._timer_ns and time.time_ns() >= self._timer_ns:
            self._timer_ns = 0
            group.append(_Entry(records.TimerFired()))
        self._stream(output.private)
        if group:
            self._commit(group)
        self._desk.answer_queries()
        if self._events.wake_fd in ready:
            self._events.deliver()
        self._transport.flush()
        self._tick(now)

    def _losses(self, now: int, ended: bool) -> list[_Entry]:
        if not ended and not self._link.is_overdue(now):
            return []
        reason = "its process ended" if ended else "its heartbeats stopped"
        lost = records.EngineLost(self._link.engine_id, reason)
        log.warning("engine lost", engine=lost.engine_id, reason=reason)
        self._link.lose(now, ended=ended)
        # At once: an ended process is ready for ever, and the log may be full for as long.
        self._unwatch_engine()
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
            self._refuse_group(group, str(error))
            return
        self._link.note_logged()
        handle = self._controller.handle
        for entry in group:
            if type(entry.message) is EngineInventory:
                self._link.open()
            if isinstance(entry.message, records.InferenceRequested):
                self._desk.note_repeated(entry.message.request_id)
            for action in handle(entry.message, now):
                self._perform(action)
        if self._link.is_open:
            self._serve_link()
        self._publish()
        self._watch_engine()

    def _serve_link(self) -> None:
        now = time.monotonic_ns()
        if self._controller.world.engine is None:
            # What it said of itself can't be true. Another time it may make sense.
            self._link.ask_later(now)
            return
        for request_id in self._desk.take_repeated():
            self._link.send(ResendTokens(request_id), now)

    def _refuse_group(self, group: list[_Entry], why: str) -> None:
        now = time.monotonic_ns()
        if now >= self._log_retry_ns:
            log.error("the log can't be written; serving reads only", error=why)
            self._log_retry_ns = now + LOG_RETRY_NS
        self._link.forget_unlogged(now)
        for entry in group:
            message = entry.message
            if isinstance(message, LifecycleRequest | records.InferenceRequested):
                self._desk.refuse_unlogged(message.request_id, why)
            elif isinstance(message, records.ShellInput):
                # Nobody would tell it again.
                self._pending.append(entry)

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
        if isinstance(command, StartInference):
            complete = self._desk.with_payload(command)
            if complete is None:
                self._pending.append(_Entry(records.PayloadLost(command.request_id)))
                return
            command = complete
        self._link.send(command, time.monotonic_ns())

    def _stream(self, private: list[PrivateReport]) -> None:
        for part in private:
            self._desk.stream(part)

    def _publish(self) -> None:
        batch = self._events.take_batch()
        if batch:
            world = self._controller.world
            self._transport.publish(EVENTS.encode(batch, world.epoch, world.events_seq))

    def _watch_engine(self) -> None:
        """Watch the attached engine's process: its end shows at once."""
        engine = self._controller.world.engine
        if engine is None or not self._link.engine_id:
            self._unwatch_engine()
        elif self._engine_fd < 0:
            # An engine that is gone already has no descriptor; its silence will show.
            with contextlib.suppress(OSError):
                self._engine_fd = os.pidfd_open(engine.pid)
                self._transport.watch(self._engine_fd)

    def _unwatch_engine(self) -> None:
        if self._engine_fd >= 0:
            self._transport.unwatch(self._engine_fd)
            os.close(self._engine_fd)
            self._engine_fd = -1

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
    stderr_logging.configure()
    parent_fd = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    try:
        _serve(_read_config(sys.argv[1]), parent_fd)
    except LogSyncFailed as error:
        log.error("the disk failed", error=str(error))
        return EXIT_FAILED
    except (LogError, LimitsError) as error:
        log.error("the log stops the start", error=str(error))
        return EXIT_LOG
    except ConfigError as error:
        log.error("wrong configuration", error=str(error))
        return EXIT_CONFIG
    except TransportError as error:
        log.error("a socket can't be opened", error=str(error))
        return EXIT_SOCKET
    return 0


def _read_config(text: str) -> ServerConfig:
    try:
        config = msgspec.json.decode(text, type=ServerConfig)
        check_limits(config.limits)
    except (msgspec.MsgspecError, LimitsError) as error:
        raise ConfigError(str(error)) from error
    if config.policy not in POLICIES:
        raise ConfigError(f"policy {config.policy!r} is not known; known are {sorted(POLICIES)}")
    return config


def _serve(config: ServerConfig, parent_fd: int) -> None:
    # A connection is a file, and the transport's library ends the process that has none left.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    opened = open_log(config)
    with Transport(Path(config.directory)) as transport:
        server = Server(config, transport, opened)
        signal.signal(signal.SIGTERM, server.stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN if parent_fd >= 0 else server.stop)
        server.run(parent_fd)


if __name__ == "__main__":
    sys.exit(main())
