"""The engine's process: a command comes in, a report goes out.

What it is: the one loop, and the only file of the engine with sockets. What it is not: anything
that knows what a command does (`engine.engine`) or how frames are numbered (`engine.link`). One
rule: nothing that arrives ends the process but SIGTERM or the end of its supervisor; an error of
our own does, loudly.

    python -m engine.worker --connect ipc:///run/loradock/engine --model DIR --adapter-root DIR
    torchrun --nproc-per-node 2 -m engine.worker ...    the same, as one engine of two ranks
"""

import os
import time
from collections.abc import Sequence
from math import ceil
from typing import Final

import msgspec
import structlog
import zmq

from engine.worker.controller_link import Link
from engine.worker.engine import Engine
from engine.worker.leader import Leader
from messages.commands import ControllerBeat, RequestInventory
from messages.reports import EngineBeat, PrivateReport
from messages.wire import COMMANDS, WireError

_log = structlog.get_logger()

BEAT_INTERVAL_S: Final = 0.5
SILENCE_MAX_S: Final = 5.0
"""Without a frame from the controller for this long, it is told again who is here."""

COPY_POLL_MS: Final = 1
"""How often a copy on its way to the device is looked after while nothing else happens."""

FRAMES_MAX: Final = 256
"""How many frames are read between two forward passes."""

BYTES_MAX: Final = 64 << 20
"""How many bytes of them, but for the last one's: images may make them long."""

QUEUE_FRAMES: Final = 65_536
"""How many frames may wait each way: more than a burst of commands, or a second of tokens."""


class Wakeup:
    """A pipe that ends a poll: written by file threads and by signal handlers."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """End the running or the next poll."""
        try:
            os.write(self.write_fd, b"\0")
        except BlockingIOError:
            # A full pipe wakes as well as one more byte would.
            return

    def clear(self) -> None:
        """Forget what was written so far."""
        try:
            while os.read(self.read_fd, 4096):
                continue
        except BlockingIOError:
            return


class Worker:
    """The loop between one engine and one socket, until `stop` or the end of a parent.

    `parents`: descriptors of the processes that started this one, which end with them.
    """

    def __init__(
        self,
        engine: Engine | Leader,
        socket: "zmq.Socket[bytes]",
        wakeup: Wakeup,
        parents: Sequence[int],
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._wakeup = wakeup
        self._parents = frozenset(parents)
        self._link = Link()
        self._poller = zmq.Poller()
        self._poller.register(wakeup.read_fd, zmq.POLLIN)
        for parent in parents:
            self._poller.register(parent, zmq.POLLIN)
        self._stopping = False
        self._beat_due_s = self._heard_s = time.monotonic()
        self._malformed = 0

    def stop(self) -> None:
        """End the loop before its next turn."""
        self._stopping = True

    def run(self) -> None:
        """Serve until told to stop; every turn is bounded, so that beats keep their time."""
        while not self._stopping:
            self._wait()
            self._receive()
            self._engine.step()
            self._report()
            self._keep_in_touch()

    def _wait(self) -> None:
        """Sleep until something happens, or not at all while there is work."""
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
            return 0
        if self._engine.is_copying:
            return COPY_POLL_MS
        return max(0, ceil(1000 * (self._beat_due_s - time.monotonic())))

    def _receive(self) -> None:
        size = 0
        for _ in range(FRAMES_MAX):
            if size >= BYTES_MAX:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            size += sum(map(len, parts))
            self._on_frame(parts)

    def _on_frame(self, parts: Sequence[bytes]) -> None:
        try:
            if len(parts) != 1:
                raise WireError(f"a message of {len(parts)} parts; one is allowed")
            frame = COMMANDS.decode(parts[0])
        except WireError as error:
            self._count_malformed(error)
            return
        if self._link.accept(frame):
            self._heard_s = time.monotonic()
            command = frame.message
            if not isinstance(command, ControllerBeat | RequestInventory):
                self._engine.submit(command)

    def _count_malformed(self, error: WireError) -> None:
        """Tell of the first, second, fourth, eighth..., so that a flood does not fill a disk."""
        self._malformed += 1
        if self._malformed & (self._malformed - 1) == 0:
            _log.warning("malformed command", error=str(error), count=self._malformed)

    def _report(self) -> None:
        """Send what has happened; where that can't be, all of it goes with the next sync."""
        for report in self._engine.poll():
            frame = self._link.encode(report)
            is_private = isinstance(report, PrivateReport)
            # A report that overtook a lost one would look like a report that never was.
            if (is_private or not self._link.needs_sync) and not self._send(frame):
                self._link.needs_sync = True
        if self._link.needs_sync:
            self._synchronise()

    def _synchronise(self) -> None:
        # An inventory may be long; it is not made for a controller that is not there.
        if not self._socket.poll(0, zmq.POLLOUT):
            return
        held = msgspec.structs.replace(self._engine.inventory(), answers=self._link.asked)
        inventory = self._link.encode(held)
        if all(self._send(frame) for frame in (*self._link.unacknowledged(), inventory)):
            self._link.synchronised()

    def _keep_in_touch(self) -> None:
        now = time.monotonic()
        if now >= self._beat_due_s:
            self._beat_due_s = now + BEAT_INTERVAL_S
            # The first word to a controller is the inventory, whenever it came.
            if not self._link.needs_sync:
                beat = EngineBeat(self._engine.engine_id, self._engine.last_op)
                self._send(self._link.encode(beat))
        if now >= self._heard_s + SILENCE_MAX_S:
            self._heard_s = now
            self._link.needs_sync = True

    def _send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
