"""Batches of texts to embed or to classify, of many requests and adapters at once.

What it is: a queue of requests, and one `step` that runs one forward over the texts at its head.
What it is not: a scheduler of adapters; a request comes with the slot and generation that its
adapter has. One rule: before every forward each request's (slot, generation) is checked against
the arena, and a stale one fails alone (L007).
"""

import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from engine.arena import Arena
from engine.config import EngineConfig
from engine.errors import (
    Conflict,
    DeviceOutOfMemory,
    EngineError,
    EngineOverloaded,
    NotFinite,
    NotResident,
    RequestRefused,
)
from engine.pooled_model import PooledModel
from engine.prompts import prompt_tokens
from engine.punica import PunicaWrapper
from engine.slots import Slots
from messages.commands import StartPooling
from messages.ids import AdapterId, OpId, RequestId
from messages.reports import OperationFailed, PoolingEnded, Report, VectorsComputed
from messages.requests import TextPrompt

BATCH_TOKENS_MAX: Final = 8192
"""The most tokens, padding included, in one forward; a longer text is alone in its own."""

KEPT_MAX: Final = 256
"""How many ended requests' vectors are kept for clients that lost their connection."""

KEPT_BYTES_MAX: Final = 64 << 20
"""How many bytes these may take together."""


@dataclass
class Request:
    """One request on its way: its inputs' tokens, the places that are left, the vectors by place.

    `left` has the longest input first and is taken from its end: inputs of like length share a
    forward, with little padding.
    """

    command: StartPooling
    inputs: list[list[int]]
    left: list[int] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)
    is_sound: bool = True

    def __post_init__(self) -> None:
        places = range(len(self.inputs))
        self.left = sorted(places, key=lambda place: len(self.inputs[place]), reverse=True)

    def take(self, row: Tensor, is_sound: bool) -> None:
        """The result of the last place that is left; row: [width] float32."""
        self.is_sound = self.is_sound and is_sound
        self.vectors[self.left.pop()] = packed(row)

    def report(self, labels: tuple[str, ...]) -> VectorsComputed:
        """All vectors, in the order of the inputs."""
        vectors = tuple(self.vectors[place] for place in range(len(self.inputs)))
        return VectorsComputed(self.command.request_id, 0, vectors, labels)

    @property
    def input_tokens(self) -> int:
        """The tokens of all inputs whose vectors are there."""
        return sum(len(self.inputs[place]) for place in self.vectors)


def size_bytes(computed: VectorsComputed) -> int:
    """What a request's vectors take."""
    return sum(map(len, computed.vectors))


def packed(row: Tensor) -> bytes:
    """A vector as it travels: float32, little endian."""
    numbers = array("f", row.tolist())
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class Pooler:
    """All embeddings or classifications of an engine; driven by one thread, as `Generator` is."""

    def __init__(
        self,
        model: PooledModel,
        punica: PunicaWrapper,
        arena: Arena,
        residents: Sequence[AdapterId | None],
        config: EngineConfig,
        emit: Callable[[Report], None],
    ) -> None:
        self._model = model
        self._punica = punica
        self._slots = Slots(arena, residents)
        self._config = config
        self._emit = emit
        self._waiting: deque[Request] = deque()
        self._ended: dict[RequestId, VectorsComputed] = {}
        self._kept_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do in a step."""
        return not self._waiting

    @property
    def operations(self) -> list[OpId]:
        """The operations that have not ended."""
        return [request.command.op for request in self._waiting]

    def start(self, command: StartPooling) -> None:
        """Queue a request; raises `EngineError` where it can't be run."""
        if len(self._waiting) >= self._config.queue_requests_max:
            raise EngineOverloaded(
                f"{len(self._waiting)} requests wait for their batch, the most that may; try again "
                "when some have ended"
            )
        if any(request.command.request_id == command.request_id for request in self._waiting):
            raise Conflict(f"request {command.request_id!r} is running; use another request_id")
        self._slots.check(command)
        inputs = [self._input_tokens(place, prompt) for place, prompt in enumerate(command.inputs)]
        self._waiting.append(Request(command, inputs))

    def _input_tokens(self, place: int, prompt: TextPrompt) -> list[int]:
        try:
            tokens = prompt_tokens(self._model, prompt)
        except RequestRefused as error:
            raise RequestRefused(f"input {place}: {error}") from error
        if tokens[-1] == self._model.foreign_token:
            raise RequestRefused(
                f"input {place} ends with token {tokens[-1]}, with which this model's batches are "
                "padded; give the model a padding token of its own"
            )
        return tokens

    def stop(self, target: OpId) -> None:
        """End the request that operation `target` started, if it has not ended by itself."""
        for request in self._waiting:
            if request.command.op == target:
                self._finish(request)
                return

    def resend(self, request_id: RequestId) -> None:
        """Send the vectors of a request that ended lately again."""
        ended = self._ended.get(request_id)
        if ended is not None:
            self._emit(ended)

    def step(self) -> None:
        """One forward over as many inputs as fit, of the requests that came first."""
        for request in tuple(self._waiting):
            try:
                self._slots.check(request.command)
            except NotResident as error:
                self._fail(request, error)
        batch = self._next_inputs()
        if batch:
            self._run(batch)

    def _next_inputs(self) -> list[tuple[Request, list[int]]]:
        """What fits into one forward: requests in order, each with inputs' tokens in its own."""
        batch: list[tuple[Request, list[int]]] = []
        width = 0
        for request in self._waiting:
            for place in reversed(request.left):
                width = max(width, len(request.inputs[place]))
                is_full = len(batch) >= self._config.max_num_seqs
                if batch and (is_full or width * (len(batch) + 1) > BATCH_TOKENS_MAX):
                    return batch
                batch.append((request, request.inputs[place]))
        return batch

    def _run(self, batch: list[tuple[Request, list[int]]]) -> None:
        prompts = [tokens for _, tokens in batch]
        adapter_ids = [request.command.adapter_id for request, _ in batch]
        mapping = self._model.mapping(prompts, adapter_ids)
        self._punica.update_metadata(mapping, self._slots.residents)
        ops = {request.command.op for request, _ in batch}
        concerned = [request for request in self._waiting if request.command.op in ops]
        group = self._model.group
        try:
            results = self._model.results(self._model.forward(prompts)).cpu()
        except torch.OutOfMemoryError as error:
            if not group.is_single:
                # The other ranks are within the forward still, and can't be called back.
                raise
            for request in concerned:
                self._fail(request, DeviceOutOfMemory(f"a batch of {len(batch)} inputs: {error}"))
            return
        # Vectors are rank 0's; so is the word on them, for requests end alike on all ranks.
        sound = group.broadcast_numbers(results.isfinite().all(-1).tolist())
        for (request, _), row, is_sound in zip(batch, results, sound, strict=True):
            request.take(row, bool(is_sound))
        for request in concerned:
            if not request.is_sound:
                unsound = "the model's output is not finite; is the adapter sound?"
                self._fail(request, NotFinite(unsound))
            elif not request.left:
                self._finish(request)

    def _finish(self, request: Request) -> None:
        """Give out what there is, and the account of it."""
        self._waiting.remove(request)
        # Of a request that was stopped only some are there, and nobody waits for them.
        if not request.left:
            computed = request.report(self._model.labels)
            self._emit(computed)
            self._keep(computed)
        done, tokens = len(request.vectors), request.input_tokens
        self._emit(PoolingEnded(request.command.op, done, tokens))

    def _fail(self, request: Request, error: EngineError) -> None:
        self._waiting.remove(request)
        self._emit(OperationFailed(request.command.op, error.code, str(error)))

    def _keep(self, ended: VectorsComputed) -> None:
        """Keep an ended request's vectors, and nothing else of it, until others end after it."""
        before = self._ended.pop(ended.request_id, None)
        self._kept_bytes -= 0 if before is None else size_bytes(before)
        self._ended[ended.request_id] = ended
        self._kept_bytes += size_bytes(ended)
        while self._kept_bytes > KEPT_BYTES_MAX or len(self._ended) > KEPT_MAX:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._kept_bytes -= size_bytes(oldest)
