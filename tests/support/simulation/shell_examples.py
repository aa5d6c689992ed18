"""Peers of a real controller: a client and an engine that can send any frame.

They are plain sockets, and every wait has a generous deadline.
"""

import resource
import secrets
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from loradock.controller.log.segments import read
from loradock.engine.worker.controller_link import ControllerLink
from loradock.messages import commands, reports, requests
from loradock.messages.addresses import endpoint
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED
from loradock.messages.views import EngineStatistics
from loradock.messages.wire import COMMANDS, EVENTS, REPLIES, REQUESTS, TOKEN_BYTES
from tests.support.parallel.processes import ControllerProcess
from tests.support.simulation.key_examples import use_engine_keys
from tests.support.waiting import HANG_S, wait_until

RETRY_S = 2.0
BEAT_S = 0.1


def eventually(probe: Callable[[], Any], what: str = "") -> Any:
    """Return the first true value of `probe`."""
    return wait_until(probe, what=what)


def logged(directory: Path) -> list[Any]:
    """Return the inputs that a controller's log contains at the moment."""
    return [record.input for _, _, record in read(directory / "log")]


def set_file_limit(process: ControllerProcess, size_bytes: int) -> None:
    """Bound the size of files that the process writes: to it, the disk is full."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


class Peer:
    """One socket to a running controller."""

    def __init__(self, directory: Path, name: str, kind: int = zmq.DEALER) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger = 0
        # A peer that is gone takes nothing: the test fails instead of waiting for ever.
        self.socket.sndtimeo = int(1000 * HANG_S)
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        if name == "engine.sock":
            use_engine_keys(self.socket, directory)
        self.socket.connect(endpoint(directory, name))

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = HANG_S) -> bytes:
        assert self.socket.poll(timeout_s * 1000), "nothing came"
        return self.socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawClient(Peer):
    """A client that sends the frames of a test."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "requests.sock")
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._count = 0
        self._replies: deque[requests.Reply] = deque()

    def new_id(self) -> str:
        self._count += 1
        return f"raw-{id(self)}-{self._count}"

    def send_request(self, *batch: requests.Request) -> None:
        self.send(REQUESTS.encode(batch, token=self.token))

    def reply(self) -> requests.Reply:
        while not self._replies:
            self._replies += REPLIES.decode(self.receive()).message
        return self._replies.popleft()

    def call(self, request: requests.Request) -> requests.Reply:
        """Send a request and return its final reply; other replies are dropped.

        It is sent again after a silence, because a controller that ends loses frames.
        """
        self.send_request(request)
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline and not self.socket.poll(RETRY_S * 1000):
            self.send_request(request)
        return self.final_reply(request.request_id)

    def final_reply(self, request_id: str) -> requests.Reply:
        """Return the final reply to a request; other replies are dropped."""
        while True:
            reply = self.reply()
            streams = isinstance(reply, requests.TokensStreamed | requests.VectorsStreamed)
            if reply.request_id == request_id and not streams:
                return reply

    def replies_until(self, sentinel: requests.Request) -> list[requests.Reply]:
        """Send `sentinel`, and return the replies before its own."""
        self.send_request(sentinel)
        found = []
        while (reply := self.reply()).request_id != sentinel.request_id:
            found.append(reply)
        return found

    def status(self) -> requests.StatusShown:
        return self.call(requests.ShowStatus(self.new_id()))

    def list(self) -> requests.AdaptersListed:
        return self.call(requests.ListAdapters(self.new_id()))

    def load(self, adapter: str, **fields: Any) -> requests.Reply:
        return self.call(requests.LoadAdapter(self.new_id(), adapter, **fields))

    def activate(self, adapter: str) -> requests.Reply:
        return self.call(requests.ActivateAdapter(self.new_id(), adapter))


class Subscriber(Peer):
    """A subscriber of all events."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "events.sock", zmq.SUB)

    def frame(self) -> Any:
        return EVENTS.decode(self.receive())


DONE: dict[type, Callable[[Any], reports.OperationReport]] = {
    commands.CheckAdapter: lambda c: reports.AdapterChecked(c.op, f"print-{c.path}", 8, 1024, 512),
    commands.LoadWeights: lambda c: reports.WeightsLoaded(c.op),
    commands.StageWeights: lambda c: reports.WeightsStaged(c.op),
    commands.UnstageWeights: lambda c: reports.WeightsUnstaged(c.op),
    commands.WriteSlot: lambda c: reports.SlotWritten(c.op),
    commands.ResetSlot: lambda c: reports.SlotReset(c.op),
    commands.DropWeights: lambda c: reports.WeightsDropped(c.op),
    commands.StartGeneration: lambda c: reports.GenerationEnded(c.op, "length", 3, 2),
    commands.StartPooling: lambda c: reports.PoolingEnded(c.op, len(c.inputs), 3),
}


class StandInEngine:
    """An engine without a model: a thread that reports each command's operation as done.

    `delayed`: the commands whose reports wait for `finish`. While `paused` it neither reads nor
    sends, as a stopped process. `inventory_requests` and `beats` are their numbers so far,
    `adapters` is the inventory. `pid`: the process that the controller watches. `refused`: text and
    details with which checks of adapters fail. `statistics` are sent with each beat.
    """

    def __init__(self, directory: Path, engine_id: str, pid: int, max_loras: int = 3) -> None:
        self.engine_id = engine_id
        self.delayed: set[type] = set()
        self.paused = False
        self.received: list[Any] = []
        self.running: dict[int, Any] = {}
        self.failure = ""
        self.refused: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.inventory_requests = self.beats = 0
        self.statistics = EngineStatistics()
        self._pid, self._max_loras = pid, max_loras
        self.adapters: dict[int, reports.InventoryAdapter] = {}
        self._last_op = 0
        self._seen: set[int] = set()
        self._finish: list[int] = []
        self._link = ControllerLink()
        self._peer = Peer(directory, "engine.sock")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "StandInEngine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peer.close()
        assert not self.failure, self.failure

    def finish(self) -> None:
        """Report all delayed operations, and delay no others."""
        self.delayed = set()
        self._finish += list(self.running)

    @property
    def epoch(self) -> int:
        """The epoch of the controller that commands come from, 0 before the first one."""
        return self._link.epoch

    def commands_of(self, kind: type) -> list[Any]:
        """Return the commands of this kind that were received."""
        return [command for command in list(self.received) if isinstance(command, kind)]

    def _run(self) -> None:
        try:
            beat_at = 0.0
            while not self._stop.is_set():
                if self.paused:
                    time.sleep(0.005)
                    continue
                if self._peer.socket.poll(5):
                    self._receive(self._peer.socket.recv())
                while self._finish:
                    self._report(self.running.pop(self._finish.pop(0)))
                if self._link.needs_sync:
                    self._synchronise()
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_S
                    numbers = self.engine_id, self._last_op
                    self._send(reports.EngineBeat(*numbers, statistics=self.statistics))
                    self.beats += 1
        except Exception:
            self.failure = traceback.format_exc()

    def _receive(self, data: bytes) -> None:
        frame = COMMANDS.decode(data)
        command = frame.message
        if not self._link.accept(frame) or isinstance(
            command, commands.ControllerBeat | commands.RequestInventory | commands.ResendTokens
        ):
            return
        self._last_op = max(self._last_op, command.op)
        if isinstance(command, commands.StopGeneration) or command.op in self._seen:
            return
        self._seen.add(command.op)
        self.received.append(command)
        if type(command) in self.delayed:
            self.running[command.op] = command
        else:
            self._report(command)

    def _report(self, command: Any) -> None:
        if isinstance(command, commands.CheckAdapter) and command.adapter in self.refused:
            refused = self.refused[command.adapter]
            self._send(reports.OperationFailed(command.op, ErrorCode.DOES_NOT_FIT, *refused))
            return
        self._apply(command)
        if isinstance(command, commands.StartGeneration):
            self._send(requests.TokensStreamed(command.request_id, 0, (1, 2), "ab"))
        if isinstance(command, commands.StartPooling):
            vectors = tuple(struct.pack("<2f", place, 1) for place in range(len(command.inputs)))
            self._send(requests.VectorsStreamed(command.request_id, 0, vectors))
        self._send(DONE[type(command)](command))

    def _apply(self, command: Any) -> None:
        adapters = self.adapters
        match command:
            case commands.LoadWeights(_, adapter_id, adapter, path, fingerprint):
                adapters[adapter_id] = reports.InventoryAdapter(
                    *(adapter_id, adapter, path, fingerprint, 8, CPU_CACHED),
                    *(NO_SLOT, 0, 1024, 512),
                )
            case commands.StageWeights() | commands.UnstageWeights():
                state = PINNED if isinstance(command, commands.StageWeights) else CPU_CACHED
                self._change(command.adapter_id, state=state)
            case commands.WriteSlot(_, adapter_id, slot, generation):
                self._change(adapter_id, state=GPU_SLOT, slot=slot, generation=generation)
            case commands.ResetSlot(_, slot):
                [adapter_id] = [a for a, entry in adapters.items() if entry.slot == slot]
                self._change(adapter_id, state=PINNED, slot=NO_SLOT, generation=0)
            case commands.DropWeights():
                del adapters[command.adapter_id]

    def _change(self, adapter_id: int, **changes: Any) -> None:
        self.adapters[adapter_id] = msgspec.structs.replace(self.adapters[adapter_id], **changes)

    def _synchronise(self) -> None:
        inventory = reports.EngineInventory(
            engine_id=self.engine_id,
            pid=self._pid,
            model="stand-in",
            max_loras=self._max_loras,
            device_bytes_max=8 << 20,
            last_op=self._last_op,
            running=tuple(self.running),
            adapters=tuple(self.adapters.values()),
            answers=self._link.inventory_request_seq,
        )
        self.inventory_requests += bool(self._link.inventory_request_seq)
        for frame in self._link.unacknowledged_frames():
            self._peer.send(frame)
        self._send(inventory)
        self._link.mark_synchronised()

    def _send(self, report: reports.Report) -> None:
        frame = self._link.encode(report)
        # As the real engine: after a lost report, later ones wait for the synchronisation.
        if not self._link.needs_sync or isinstance(
            report, reports.EngineInventory | reports.EngineBeat | reports.PrivateReport
        ):
            self._peer.send(frame)
