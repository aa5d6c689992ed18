"""An engine and the controller's core in this process, under a load of requests.

There are no sockets and no log: what is measured is the engine's own work, and the core's decisions
on which adapter is in which slot.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from msgspec import structs

from benchmarks.serve_load import (
    ADAPTER_FILES,
    ADAPTERS,
    CLIENTS,
    OUTPUT_TOKENS,
    Load,
    Prompt,
    Shape,
    adapter_name,
    device_clock,
)
from loradock.controller.core.actions import SendCommand, SendReply
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import TURN_TOKENS_DEFAULT, Limits
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model
from loradock.engine.worker.engine import Engine
from loradock.messages import commands, records, requests
from loradock.messages.ids import RequestId
from loradock.messages.prompts import Sampling
from loradock.messages.requests import TokensStreamed

_NO_TIMEOUT_MS: Final = 3_600_000
_IDLE_S: Final = 0.0005
_GREEDY: Final = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)


class Stream(NamedTuple):
    """A request's wall times in seconds: when it arrived, and each of its tokens."""

    arrived: float
    tokens: list[float]

    @property
    def first_token_s(self) -> float:
        """The time to the first token."""
        return self.tokens[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """The seconds between consecutive tokens."""
        return [later - token for token, later in zip(self.tokens, self.tokens[1:], strict=False)]


class MeasuredLoad(NamedTuple):
    """A run, and the streams of its requests."""

    load: Load
    streams: list[Stream]

    @property
    def first_token_s(self) -> float:
        """The median time to the first token."""
        return median(stream.first_token_s for stream in self.streams)

    @property
    def gap_p95_s(self) -> float:
        """The 95th percentile of the gaps between tokens."""
        gaps = sorted(gap for stream in self.streams for gap in stream.gaps)
        return gaps[int(0.95 * (len(gaps) - 1))]


class ServedEngine:
    """An engine with `ADAPTERS` slots, and all adapters of the load staged."""

    def __init__(self, config: EngineConfig, lora: LoRAConfig, turn_tokens: int) -> None:
        model = load_model(config, lora)
        self._engine = Engine(model, config, lora, "benchmark")
        self._core = Controller(
            Limits(
                max_loras=lora.max_loras,
                device_bytes_max=config.device_bytes_max,
                request_timeout_ms=_NO_TIMEOUT_MS,
                generation_timeout_ms=_NO_TIMEOUT_MS,
                operation_timeout_ms=_NO_TIMEOUT_MS,
                turn_tokens=turn_tokens,
            )
        )
        self._payloads: dict[RequestId, tuple[tuple[int, ...], Sampling]] = {}
        self._replies: dict[RequestId, requests.Reply] = {}
        self._streams: dict[RequestId, Stream] = {}
        self._count = 0
        self._handle(self._engine.inventory())
        for number in range(ADAPTER_FILES):
            self.do(requests.StageAdapter, adapter_name(number))

    def close(self) -> None:
        """Free the engine's threads."""
        self._engine.close()

    def run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = _GREEDY,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> MeasuredLoad:
        """Run requests, `CLIENTS` at a time; `meanwhile` is called before every step."""
        sampling = structs.replace(sampling, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        waiting, running, streams = list(reversed(prompts)), set[RequestId](), []
        started = device_clock()
        while waiting or running:
            while waiting and len(running) < CLIENTS:
                request_id = self.generate(waiting.pop(), sampling)
                streams.append(self._streams[request_id])
                running.add(request_id)
            meanwhile()
            self.advance()
            for request_id in [one for one in running if one in self._replies]:
                running.remove(request_id)
                self._finish(request_id)
        seconds = device_clock() - started
        return MeasuredLoad(Load(seconds, sum(len(one.tokens) for one in streams)), streams)

    def generate(self, prompt: Prompt, sampling: Sampling = _GREEDY) -> RequestId:
        """Request a generation and return its id."""
        request_id = self._new_id()
        self._payloads[request_id] = (prompt.tokens, sampling)
        self._streams[request_id] = Stream(time.perf_counter(), [])
        name = None if prompt.adapter is None else adapter_name(prompt.adapter)
        self._handle(records.GenerationRequested(request_id, name))
        return request_id

    def start(self, kind: Callable[..., requests.LifecycleRequest], *fields: object) -> RequestId:
        """Make a request of an adapter's life cycle and return its id."""
        request_id = self._new_id()
        self._handle(kind(request_id, *fields))
        return request_id

    def do(self, kind: Callable[..., requests.LifecycleRequest], *fields: object) -> None:
        """Make a request of an adapter's life cycle and wait for its answer."""
        request_id = self.start(kind, *fields)
        while not self.is_done(request_id):
            self.advance()
            time.sleep(0.001)

    def is_done(self, request_id: RequestId) -> bool:
        """Whether a request is answered, after which its id is forgotten."""
        is_answered = request_id in self._replies
        if is_answered:
            self._finish(request_id)
        return is_answered

    def has_started(self, request_id: RequestId) -> bool:
        """Whether a running generation has its first token."""
        return bool(self._streams[request_id].tokens)

    def drain(self) -> None:
        """Run everything that was requested."""
        while self._core.world.pending_requests:
            self.advance()

    def advance(self) -> None:
        """Run one step, and handle its reports and those of the commands that follow from them."""
        if self._engine.is_idle:
            # It waits for a copy or a timer, as an engine's process does in a poll.
            time.sleep(_IDLE_S)
        self._engine.step()
        now = time.perf_counter()
        while found := self._engine.poll():
            for report in found:
                if not isinstance(report, TokensStreamed):
                    self._handle(report)
                elif report.request_id in self._streams:
                    self._streams[report.request_id].tokens.extend([now] * len(report.tokens))
        if 0 < self._core.world.timer_ns <= time.monotonic_ns():
            self._handle(records.TimerFired())

    def _finish(self, request_id: RequestId) -> None:
        reply = self._replies.pop(request_id)
        if isinstance(reply, requests.Refused):
            raise RuntimeError(f"the request was refused: {reply.message}")
        self._streams.pop(request_id, None)

    def _new_id(self) -> RequestId:
        self._count += 1
        return f"r-{self._count}"

    def _handle(self, message: records.Input) -> None:
        for action in self._core.handle(message, time.monotonic_ns()):
            if isinstance(action, SendReply):
                self._replies[action.message.request_id] = action.message
            elif isinstance(action, SendCommand):
                self._send(action.message)

    def _send(self, command: commands.Command) -> None:
        if isinstance(command, commands.RequestInventory):
            self._handle(self._engine.inventory())
            return
        assert not isinstance(command, commands.ControllerBeat)
        if isinstance(command, commands.StartGeneration):
            prompt, sampling = self._payloads.pop(command.request_id)
            command = structs.replace(command, prompt=prompt, sampling=sampling)
        self._engine.submit(command)


@contextmanager
def served_engine(
    root: Path,
    shape: Shape,
    rank_max: int,
    slots: int = ADAPTERS,
    turn_tokens: int = TURN_TOKENS_DEFAULT,
    clients: int = CLIENTS,
) -> Iterator[ServedEngine]:
    """Serve the files below `root`, whose model has `shape`."""
    lora = LoRAConfig(max_lora_rank=rank_max, max_loras=slots, max_cpu_loras=64)
    config = EngineConfig(
        root / "model", (root,), max_num_seqs=clients + 1, kv_cache_bytes=shape.cache_bytes
    )
    served = ServedEngine(config, lora, turn_tokens)
    try:
        yield served
    finally:
        served.close()
