"""Peers of a real controller: a client and an engine that can say anything.

What it is: bare sockets with deadlines. What it is not: a client library or a model. One rule:
nothing here waits for ever, and nothing asserts how long something took.
"""

import resource
import struct
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from controller.log.segments import read
from controller.shell.transport import endpoint
from engine.worker.controller_link import Link
from messages import commands, reports, requests
from messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED
from messages.wire import COMMANDS, EVENTS, REPLIES, REQUESTS
from tests.support.parallel.processes import ControllerProcess

PATIENCE_S = 60.0
RETRY_S = 2.0
BEAT_S = 0.1


def eventually(probe: Callable[[], Any], what: str = "it") -> Any:
    """The first true value of `probe`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = probe()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come: {probe}")


def logged(directory: Path) -> list[Any]:
    """The inputs in a controller's log, as its files are now."""
    return [record.input for _, _, record in read(directory / "log")]


def set_file_limit(process: ControllerProcess, size_bytes: int) -> None:
    """Let no file of the process grow beyond this: what a full disk is to it."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


class Peer:
    """One socket to a running controller."""

    def __init__(self, directory: Path, name: str, kind: int = zmq.DEALER) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger = 0
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        self.socket.connect(endpoint(directory, name))

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = PATIENCE_S) -> bytes:
        assert self.socket.poll(timeout_s * 1000), "nothing came"
        return self.socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawClient(Peer):
    """A client whose every frame is the test's own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "requests.sock")
        self._count = 0

    def new_id(self) -> str:
        self._count += 1
        return f"raw-{id(self)}-{self._count}"

    def put(self, request: requests.Request) -> None:
        self.send(REQUESTS.encode(request))

    def reply(self) -> requests.Reply:
        return REPLIES.decode(self.receive()).message

    def ask(self, request: requests.Request) -> requests.Reply:
        """The last word on a request; whatever else comes meanwhile is passed over.

        It is sent again after a silence, for a frame may meet a controller that just dies.
        """
        self.put(request)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not self.socket.poll(RETRY_S * 1000):
            self.put(request)
        return self.answer(request.request_id)

    def answer(self, request_id: str) -> requests.Reply:
        while True:
            reply = self.reply()
            streams = isinstance(reply, requests.TokensStreamed | requests.VectorsStreamed)
            if reply.request_id == request_id and not streams:
                return reply

    def replies_until(self, sentinel: requests.Request) -> list[requests.Reply]:
        """What came before the answer to `sentinel`, which is put last."""
        self.put(sentinel)
        found = []
        while (reply := self.reply()).request_id != sentinel.request_id:
            found.append(reply)
        return found

    def status(self) -> requests.StatusShown:
        return self.ask(requests.ShowStatus(self.new_id()))

    def list(self) -> requests.AdaptersListed:
        return self.ask(requests.ListAdapters(self.new_id()))

    def load(self, adapter: str, **fields: Any) -> requests.Reply:
        return self.ask(requests.LoadAdapter(self.new_id(), adapter, **fields))

    def activate(self, adapter: str) -> requests.Reply:
        return self.ask(requests.ActivateAdapter(self.new_id(), adapter))


class Subscriber(Peer):
    """All that is published."""

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
    commands.SetMapping: lambda c: reports.MappingSet(c.op),
    commands.StartGeneration: lambda c: reports.GenerationEnded(c.op, "length", 3, 2),
    commands.StartPooling: lambda c: reports.PoolingEnded(c.op, len(c.inputs), 3),
}


class StandInEngine:
    """An engine without a model: a thread that does what it is told, or keeps it for later.

    `keep` names the commands whose reports wait for `finish`. While `paused` it neither reads nor
    beats, as a stopped process does. `asked` counts the questions for an inventory, `held` is what
    it answers. `pid` is whoever the controller is to watch.
    """

    def __init__(self, directory: Path, engine_id: str, pid: int, slots_max: int = 3) -> None:
        self.engine_id = engine_id
        self.keep: set[type] = set()
        self.paused = False
        self.received: list[Any] = []
        self.running: dict[int, Any] = {}
        self.failure = ""
        self.asked = 0
        self._pid, self._slots_max = pid, slots_max
        self.held: dict[int, reports.InventoryAdapter] = {}
        self._last_op = 0
        self._seen: set[int] = set()
        self._finish: list[int] = []
        self._link = Link()
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
        """Report on all that was kept."""
        self.keep = set()
        self._finish += list(self.running)

    def got(self, kind: type) -> list[Any]:
        """The commands of this kind that came."""
        return [command for command in list(self.received) if isinstance(command, kind)]

    def _run(self) -> None:
        try:
            beat_at = 0.0
            while not self._stop.is_set():
                if self.paused:
                    time.sleep(0.005)
                    continue
                if self._peer.socket.poll(5):
                    self._take(self._peer.socket.recv())
                while self._finish:
                    self._report(self.running.pop(self._finish.pop(0)))
                if self._link.needs_sync:
                    self._synchronise()
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_S
                    self._say(reports.EngineBeat(self.engine_id, self._last_op))
        except Exception:
            self.failure = traceback.format_exc()

    def _take(self, data: bytes) -> None:
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
        if type(command) in self.keep:
            self.running[command.op] = command
        else:
            self._report(command)

    def _report(self, command: Any) -> None:
        self._hold(command)
        if isinstance(command, commands.StartGeneration):
            self._say(reports.TokensGenerated(command.request_id, 0, (1, 2), "ab"))
        if isinstance(command, commands.StartPooling):
            vectors = tuple(struct.pack("<2f", place, 1) for place in range(len(command.inputs)))
            self._say(reports.VectorsComputed(command.request_id, 0, vectors))
        self._say(DONE[type(command)](command))

    def _hold(self, command: Any) -> None:
        held = self.held
        match command:
            case commands.LoadWeights(_, adapter_id, adapter, path, fingerprint):
                held[adapter_id] = reports.InventoryAdapter(
                    *(adapter_id, adapter, path, fingerprint, 8, CPU_CACHED),
                    *(NO_SLOT, 0, 1024, 512),
                )
            case commands.StageWeights() | commands.UnstageWeights():
                state = PINNED if isinstance(command, commands.StageWeights) else CPU_CACHED
                self._change(command.adapter_id, state=state)
            case commands.WriteSlot(_, adapter_id, slot, generation):
                self._change(adapter_id, state=GPU_SLOT, slot=slot, generation=generation)
            case commands.ResetSlot(_, slot):
                [adapter_id] = [a for a, entry in held.items() if entry.slot == slot]
                self._change(adapter_id, state=PINNED, slot=NO_SLOT, generation=0)
            case commands.DropWeights():
                del held[command.adapter_id]

    def _change(self, adapter_id: int, **changes: Any) -> None:
        self.held[adapter_id] = msgspec.structs.replace(self.held[adapter_id], **changes)

    def _synchronise(self) -> None:
        inventory = reports.EngineInventory(
            engine_id=self.engine_id,
            pid=self._pid,
            model="stand-in",
            slots_max=self._slots_max,
            device_bytes_max=8 << 20,
            last_op=self._last_op,
            running=tuple(self.running),
            adapters=tuple(self.held.values()),
            answers=self._link.asked,
        )
        self.asked += bool(self._link.asked)
        for frame in self._link.unacknowledged():
            self._peer.send(frame)
        self._say(inventory)
        self._link.synchronised()

    def _say(self, report: reports.Report) -> None:
        frame = self._link.encode(report)
        # As the real one: a report that overtook a lost one would look as if that never was.
        if not self._link.needs_sync or isinstance(
            report, reports.EngineInventory | reports.EngineBeat | reports.PrivateReport
        ):
            self._peer.send(frame)
