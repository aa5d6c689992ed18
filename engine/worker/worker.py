"""The loop of the engine process: commands from one socket to the engine, reports back.

No frame ends the process; SIGTERM and the end of a parent process do. An error in the engine ends
it with a traceback.

The main thread has the socket, the link and the engine, except during a step. Then a second thread
has them: it receives, executes what no step notices (reading, packing and copying an adapter), and
reports, so an adapter passes its stages without waiting for the ends of steps. Other commands wait
for the end of this step. An engine of several processes has no second thread: all of them execute
a command before the same step.
"""

import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import zmq

from loradock.engine.jobs import compute_alone
from loradock.engine.worker.controller_link import ControllerLink
from loradock.engine.worker.engine import Engine, EngineCommand
from loradock.engine.worker.leader import Leader
from loradock.messages.commands import ControllerBeat, RequestInventory
from loradock.messages.ids import OpId
from loradock.messages.reports import EngineBeat, PrivateReport, Report, SlotReset, SlotWritten
from loradock.messages.wire import COMMANDS, WireError
from loradock.processes.progress import Progress

if TYPE_CHECKING:
    from loradock.engine.worker.spans import InferenceSpans

_log = structlog.get_logger()

BEAT_INTERVAL_S: Final = 0.5
CHANGE_INTERVAL_S: Final = 0.05
"""The next beat follows this long after the last one if other requests run since then."""

SILENCE_MAX_S: Final = 5.0
"""After this long without a frame from the controller, the inventory is sent again."""

WAIT_BOUND_S: Final = 30.0
"""The bound of a wait, which ends with the next beat at the latest; the rest is for starvation."""

COPY_POLL_MS: Final = 1
"""The interval at which an unfinished copy is polled."""

ANSWER_WAIT_MS: Final = 2
"""Longest wait of a step for the command that follows from a slot's report: without it, the slot
would be unused for a step. The controller takes a part of it, unless its disk is slow."""

FRAMES_MAX: Final = 256
"""The most frames that are read between two forward passes."""

BYTES_MAX: Final = 64 << 20
"""The frames of one pass end after this many bytes; images may make frames long."""

QUEUE_FRAMES: Final = 65_536
"""The most frames queued each way: more than a burst of commands, or a second of tokens."""


class Wakeup:
    """A pipe that ends a poll; written by the threads of jobs and by signal handlers."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """End the running or the next poll."""
        try:
            os.write(self.write_fd, b"\0")
        except BlockingIOError:
            # The pipe is full, so the poll ends anyway.
            return

    def clear(self) -> None:
        """Empty the pipe."""
        try:
            while os.read(self.read_fd, 4096):
                continue
        except BlockingIOError:
            return


class Worker:
    """The loop between one engine and one socket, until `stop` or the end of a parent.

    `parents`: pidfds of the processes that started this one; it ends when one of them does.
    `progress`: where each step of the loop is reported, with `step_bound_s`. `spans`: what traces
    requests; None while tracing is off.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        engine: Engine | Leader,
        socket: "zmq.Socket[bytes]",
        wakeup: Wakeup,
        parents: Sequence[int],
        progress: Progress | None = None,
        step_bound_s: float = 300.0,
        spans: "InferenceSpans | None" = None,
    ) -> None:
        self._engine = engine
        # The engine if it is one process; see the module's docstring.
        self._alone = None if isinstance(engine, Leader) else engine
        self._socket = socket
        self._wakeup = wakeup
        self._parents = frozenset(parents)
        self._progress = progress or Progress()
        self._step_bound_s: Final = step_bound_s
        self._spans: Final = spans
        self._link = ControllerLink()
        self._poller = zmq.Poller()
        self._poller.register(wakeup.read_fd, zmq.POLLIN)
        for parent in parents:
            self._poller.register(parent, zmq.POLLIN)
        self._stopping = False
        # Who has it has the socket, the link and the engine; see the module's docstring.
        self._turn = Lock()
        # Commands that were received during a step and wait for its end, and all bytes received.
        self._deferred: list[EngineCommand] = []
        self._beside_bytes = 0
        self._error_beside: BaseException | None = None
        # Whether a slot was written or reset in this iteration.
        self._slot_changed = False
        self._beat_due_s = self._last_frame_s = self._last_beat_s = time.monotonic()
        # The requests that the last beat named as running.
        self._named: tuple[OpId, ...] = ()
        self._malformed_count = 0

    def stop(self) -> None:
        """End the loop before its next iteration."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`; every iteration is bounded, so that beats are sent in time."""
        if self._alone is None:
            self._iterate()
            return
        beside = Thread(
            target=self._run_beside,
            args=(self._alone, self._socket.FD),
            name="beside-steps",
            daemon=True,
        )
        try:
            with self._turn:
                beside.start()
                self._iterate()
        finally:
            self.stop()
            self._wakeup.wake()
            beside.join()

    def _iterate(self) -> None:
        while not self._stopping:
            self._progress.enter("wait", WAIT_BOUND_S)
            self._wait()
            self._progress.enter("receive", self._step_bound_s)
            self._receive(self._engine.submit)
            self._note_silence()
            self._progress.enter("step", self._step_bound_s)
            self._step()
            self._progress.enter("report", self._step_bound_s)
            self._report()
            self._send_beat_or_resync()
        self._progress.enter("stop", self._step_bound_s)

    def _step(self) -> None:
        """Run a step, during which the other thread has its turn; execute what came meanwhile."""
        if self._alone is None or self._engine.is_idle:
            self._engine.step()
            return
        if self._engine.is_copying:
            # So that the other thread begins to poll for its end.
            self._wakeup.wake()
        self._beside_bytes = 0
        self._turn.release()
        try:
            self._engine.step()
        finally:
            self._turn.acquire()
        if self._error_beside is not None:
            raise self._error_beside
        deferred, self._deferred = self._deferred, []
        for command in deferred:
            self._engine.submit(command)

    def _run_beside(self, engine: Engine, socket_fd: int) -> None:
        """Serve the link during steps; an error ends the main loop after its step.

        `socket_fd` becomes readable once for all that has arrived until it is received.
        """
        compute_alone()
        poller = select.poll()
        for descriptor in (socket_fd, self._wakeup.read_fd):
            poller.register(descriptor, select.POLLIN)
        try:
            while not self._stopping:
                poller.poll(COPY_POLL_MS if engine.is_copying else None)
                with self._turn:
                    if not self._stopping:
                        self._wakeup.clear()
                        self._serve_beside(engine)
        except BaseException as error:
            self._error_beside = error

    def _serve_beside(self, engine: Engine) -> None:
        """Execute and report what can be done beside a step, until nothing follows from it.

        What waits for the step's end is bounded as what an iteration receives.
        """
        while self._beside_bytes < BYTES_MAX and len(self._deferred) < FRAMES_MAX:
            self._beside_bytes += self._receive(partial(self._submit_beside, engine))
            reports = engine.poll_beside()
            if not reports:
                return
            # What arrives while these are sent makes the descriptor readable no more.
            self._send_reports(reports)

    def _submit_beside(self, engine: Engine, command: EngineCommand) -> None:
        if not engine.submit_beside(command):
            self._deferred.append(command)

    def _wait(self) -> None:
        """Wait for a frame, a wake-up, a parent's end or the next beat, unless there is work."""
        wanted = zmq.POLLIN | (zmq.POLLOUT if self._link.needs_sync else 0)
        self._poller.register(self._socket, wanted)
        ready = dict(self._poller.poll(self._timeout_ms()))
        if self._wakeup.read_fd in ready:
            self._wakeup.clear()
        if not self._parents.isdisjoint(ready):
            _log.info("the supervisor is gone")
            self.stop()

    def _timeout_ms(self) -> int:
        if not self._engine.is_idle:
            return ANSWER_WAIT_MS if self._slot_changed else 0
        if self._engine.is_copying:
            return COPY_POLL_MS
        return max(0, ceil(1000 * (self._beat_due_s - time.monotonic())))

    def _receive(self, submit: Callable[[EngineCommand], None]) -> int:
        """Receive what has arrived, up to a bound; return its bytes."""
        size = 0
        for _ in range(FRAMES_MAX):
            if size >= BYTES_MAX:
                break
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            size += sum(map(len, parts))
            self._on_frame(parts, submit)
        return size

    def _on_frame(self, parts: Sequence[bytes], submit: Callable[[EngineCommand], None]) -> None:
        try:
            if len(parts) != 1:
                raise WireError(f"the message has {len(parts)} parts; one is allowed")
            frame = COMMANDS.decode(parts[0])
        except WireError as error:
            self._count_malformed(error)
            return
        if self._link.accept(frame):
            self._last_frame_s = time.monotonic()
            command = frame.message
            if not isinstance(command, ControllerBeat | RequestInventory):
                if self._spans is not None:
                    self._spans.on_command(command)
                submit(command)

    def _count_malformed(self, error: WireError) -> None:
        """Log the first, second, fourth, eighth..., so that a flood does not fill a disk."""
        self._malformed_count += 1
        if self._malformed_count.bit_count() == 1:
            _log.warning("malformed command", error=str(error), count=self._malformed_count)

    def _report(self) -> None:
        self._slot_changed = False
        self._send_reports(self._engine.poll())
        if self._link.needs_sync:
            self._synchronise()

    def _send_reports(self, reports: Sequence[Report]) -> None:
        """Send new reports; those that can't be sent are part of the next synchronisation."""
        for report in reports:
            self._slot_changed |= isinstance(report, SlotReset | SlotWritten)
            if self._spans is not None:
                self._spans.on_report(report)
            frame = self._link.encode(report)
            is_private = isinstance(report, PrivateReport)
            # A report that follows a lost one is sent after it, by the next synchronisation.
            if (is_private or not self._link.needs_sync) and not self._send(frame):
                self._link.needs_sync = True

    def _synchronise(self) -> None:
        # An inventory may be long, so it is made only if a controller is connected.
        if not self._socket.poll(0, zmq.POLLOUT):
            return
        answers = self._link.inventory_request_seq
        inventory = msgspec.structs.replace(self._engine.inventory(), answers=answers)
        frames = [*self._link.unacknowledged_frames(), self._link.encode(inventory)]
        if all(self._send(frame) for frame in frames):
            self._link.mark_synchronised()
            # The controller attaches this engine by the inventory: its statistics follow at once.
            self._beat_due_s = self._last_beat_s

    def _send_beat_or_resync(self) -> None:
        now = time.monotonic()
        if self._engine.running != self._named:
            self._beat_due_s = min(self._beat_due_s, self._last_beat_s + CHANGE_INTERVAL_S)
        if now >= self._beat_due_s:
            self._beat_due_s = now + BEAT_INTERVAL_S
            # The first frame to any controller is the inventory.
            if not self._link.needs_sync:
                self._send_beat(now)

    def _note_silence(self) -> None:
        """Send the inventory again to a controller from which nothing has arrived for long."""
        now = time.monotonic()
        if now >= self._last_frame_s + SILENCE_MAX_S:
            self._last_frame_s = now
            self._link.needs_sync = True

    def _send_beat(self, now: float) -> None:
        engine, self._named = self._engine, self._engine.running
        self._last_beat_s = now
        beat = EngineBeat(
            engine.engine_id, engine.last_op, statistics=engine.statistics(), running=self._named
        )
        self._send(self._link.encode(beat))

    def _send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
