"""The engine's process: the real loop and link over a modelled engine with outputs.

The model is `tests.support.simulation.engine.SimulatedEngine`, which asserts before every operation
that it is possible. Outputs are a function of the adapter's content and the prompt, so that a
client can compare what it received.
"""

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from loradock.controller.core.limits import Limits
from loradock.engine.worker.worker import Worker
from loradock.messages import commands, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import GPU_SLOT
from loradock.messages.views import EngineStatistics
from loradock.processes.progress import Step
from tests.support.campaign.machine import MACHINE, MS
from tests.support.campaign.network import Link
from tests.support.campaign.scheduler import Scheduler, Wakeup
from tests.support.simulation.engine import Files, SimulatedEngine

OUTPUT_TOKENS: Final = 5
"""The number that `SimulatedEngine` reports for each generation."""

TURNS_PER_GENERATION: Final = 30
"""How many times as long as other operations generations are where adapters take turns."""

POOLING_INPUTS: Final = 2
"""The number that `SimulatedEngine` reports for each pooling."""

_CODES: Final = (ErrorCode.DEVICE_OUT_OF_MEMORY, ErrorCode.NOT_FINITE, ErrorCode.NOT_FOUND)


def output_tokens(fingerprint: str, prompt: str) -> tuple[int, ...]:
    """Return the tokens of a generation with an adapter's content; '' is the base model."""
    seed = zlib.crc32(f"{fingerprint}|{prompt}".encode())
    return tuple((seed >> shift) & 0xFFFF for shift in range(OUTPUT_TOKENS))


def output_vector(fingerprint: str, text: str) -> bytes:
    """Return the vector of an input."""
    return zlib.crc32(f"{fingerprint}|{text}".encode()).to_bytes(4, "little")


class SimulatedProgress:
    """The step that a simulated process reports; see `loradock.processes.progress.Progress`."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._number = 0
        self.pid = 0

    def enter(self, name: str, bound_s: float) -> None:
        self._number += 1
        self._step = Step(self._number, self.pid, MACHINE.now_ns, int(bound_s * 1e9), name)

    def clear(self) -> None:
        self._step = None

    def read(self) -> Step | None:
        return self._step


class EngineConduct:
    """How an engine behaves: durations of operations, and probabilities of failures.

    An operation that is forgotten never ends.
    """

    def __init__(self) -> None:
        self.duration_ns = 2 * MS
        self.failure = 0.0
        self.forgetting = 0.0
        self.false_inventories = 0


class ModelledEngine:
    """The interface of `loradock.engine.worker.engine.Engine` over the simulated model."""

    def __init__(
        self, model: SimulatedEngine, conduct: EngineConduct, scheduler: Scheduler, pid: int
    ) -> None:
        self.engine_id = model.engine_id
        self.model = model
        self.is_idle, self.is_copying = True, False
        self.executions: dict[str, int] = {}
        """The number of inferences that were begun, by request."""
        self._conduct = conduct
        self._scheduler = scheduler
        self._pid = pid
        self._outbox: list[reports.Report] = []
        self._outputs: dict[str, list[reports.PrivateReport]] = {}
        self.on_change: Callable[[], None] = lambda: None

    @property
    def last_op(self) -> int:
        return max(self.model.seen, default=0)

    @property
    def running(self) -> tuple[int, ...]:
        return ()

    def statistics(self) -> EngineStatistics:
        """Return no statistics: they are not logged, and no promise is about them."""
        return EngineStatistics()

    def submit(self, command: Any) -> None:
        if isinstance(command, commands.ResendTokens):
            self._outbox += self._outputs.get(command.request_id, ())
            return
        # Only the link decides; the model would ignore a repetition.
        self.model.seen.discard(command.op)
        self.model.receive(command)
        if isinstance(command, commands.StopGeneration):
            return
        if isinstance(command, commands.StartInference):
            self._begin_inference(command)
        if self._conduct.forgetting and self._scheduler.rng.random() < self._conduct.forgetting:
            return
        self._complete_later(command.op)

    def _begin_inference(self, command: commands.StartInference) -> None:
        begun = self.executions.get(command.request_id, 0) + 1
        self.executions[command.request_id] = begun
        assert begun == 1, f"{command.request_id} is executed twice by {self.engine_id}"
        content = self.model.running[command.op].content
        fingerprint = "" if content is None else content.fingerprint
        if isinstance(command, commands.StartGeneration):
            tokens = output_tokens(fingerprint, str(command.prompt))
            split = self._scheduler.rng.randrange(OUTPUT_TOKENS + 1)
            output: list[reports.PrivateReport] = [
                _tokens(command.request_id, 0, tokens[:split]),
                _tokens(command.request_id, split, tokens[split:]),
            ]
        else:
            vectors = tuple(output_vector(fingerprint, str(text)) for text in command.inputs)
            output = [_vectors(command.request_id, vectors)]
        self._outputs[command.request_id] = output
        self._outbox.append(output[0])

    def _complete_later(self, op: int) -> None:
        rng = self._scheduler.rng
        delay = int(self._conduct.duration_ns * (0.1 + 2 * rng.random()))
        running = self.model.running.get(op)
        is_generation = running is not None and isinstance(
            running.command, commands.StartGeneration
        )
        if self.model.limits.turn_tokens and is_generation:
            # Longer than a turn.
            delay *= TURNS_PER_GENERATION
        self._scheduler.after(delay, lambda: self._complete(op))

    def _complete(self, op: int) -> None:
        if op not in self.model.running:
            return
        if op not in self.model.completable():
            self._complete_later(op)
            return
        command, rng = self.model.running[op].command, self._scheduler.rng
        if self._conduct.failure and rng.random() < self._conduct.failure:
            self.model.complete(op, rng.choice(_CODES))
        else:
            if isinstance(command, commands.StartInference):
                self._outbox += self._outputs[command.request_id][1:]
            self.model.complete(op)
        self.on_change()

    def step(self) -> None:
        return

    def poll(self) -> list[reports.Report]:
        collected = self._outbox + self.model.outbox
        self._outbox, self.model.outbox = [], []
        return collected

    def inventory(self) -> reports.EngineInventory:
        inventory = msgspec.structs.replace(self.model.inventory(), pid=self._pid)
        if self._conduct.false_inventories:
            self._conduct.false_inventories -= 1
            return _contradictory(inventory, self._scheduler.rng.randrange(3))
        return inventory


def _tokens(request_id: str, offset: int, tokens: tuple[int, ...]) -> reports.PrivateReport:
    text = "".join(chr(97 + token % 26) for token in tokens)
    return requests.TokensStreamed(request_id, offset, tokens, text)


def _vectors(request_id: str, vectors: tuple[bytes, ...]) -> reports.PrivateReport:
    return requests.VectorsStreamed(request_id, 0, vectors)


def _contradictory(inventory: reports.EngineInventory, kind: int) -> reports.EngineInventory:
    """Return an inventory that contradicts itself: it must be refused and change nothing."""
    entry = reports.InventoryAdapter(3, "a", "a", "false", 8, GPU_SLOT, 0, 1, 10, 10)
    other = msgspec.structs.replace(entry, adapter_id=4, adapter="b")
    match kind:
        case 0:
            entries = [entry, msgspec.structs.replace(entry, slot=1)]
        case 1:
            entries = [entry, other]
        case _:
            entries = [msgspec.structs.replace(entry, slot=inventory.max_loras)]
    known = {e.adapter_id for e in entries}
    kept = [e for e in inventory.adapters if e.adapter_id not in known]
    return msgspec.structs.replace(inventory, adapters=tuple(kept + entries))


class _NoWakeup:
    """A wake-up pipe that no thread writes."""

    read_fd = write_fd = 0


class _EngineSocket:
    """The worker's socket: frames are lost and refused as by a DEALER with IMMEDIATE."""

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.link: Link | None = None

    def recv_multipart(self, _flags: int) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        return [self.inbox.popleft()]

    def send(self, frame: bytes, _flags: int) -> None:
        if self.link is None:
            raise zmq.Again
        self.link.send(frame)

    def poll(self, _timeout: int, _events: int) -> int:
        return self.link is not None


class EngineProcess:
    """One life of an engine process."""

    def __init__(
        self, scheduler: Scheduler, number: int, conduct: EngineConduct, progress: SimulatedProgress
    ) -> None:
        self.number, self.pid = number, 10 + number
        self.is_running = True
        self.is_hung = False
        self._scheduler = scheduler
        self._conduct = conduct
        self._progress = progress
        self.socket = _EngineSocket()
        self.wakeup = Wakeup(scheduler, self._iterate)
        MACHINE.running_pids.add(self.pid)
        progress.pid = self.pid

    def start(self, limits: Limits, files: Files, **contents: Any) -> None:
        """Start the loop over an engine with the given contents."""
        model = SimulatedEngine(
            *(f"engine-{self.number}", limits, files, limits.max_loras, limits.device_bytes_max),
            **contents,
        )
        self.engine = ModelledEngine(model, self._conduct, self._scheduler, self.pid)
        self.engine.on_change = lambda: self.wakeup.request(0)
        arguments: Any = (self.engine, self.socket, _NoWakeup(), (), self._progress, 5.0)
        self.worker = Worker(*arguments)
        self.wakeup.request(0)

    def receive(self, frame: bytes) -> None:
        if self.is_running:
            self.socket.inbox.append(frame)
            self.wakeup.request(0)

    def end(self) -> None:
        """End the process at once."""
        self.is_running = False
        self.wakeup.end()
        self.socket.link = None
        self.engine.model.running.clear()
        self.engine.on_change = lambda: None
        MACHINE.running_pids.discard(self.pid)

    def _iterate(self) -> None:
        """Run one iteration of the worker's loop, as its `run` does."""
        if not self.is_running or self.is_hung:
            return
        self._scheduler.note("engine")
        worker = self.worker
        worker._receive(self.engine.submit)
        self.engine.step()
        worker._report()
        worker._send_beat_or_resync()
        self._progress.enter("wait", 30.0)
        self.wakeup.request(worker._timeout_ms() * MS + MS // 100)
