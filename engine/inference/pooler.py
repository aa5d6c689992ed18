"""Batches of texts to embed or to classify, of many requests and adapters at once.

What it is: a queue of requests that take turns, and one `step` that runs one forward over the
texts at its head. What it is not: a scheduler of adapters; a request comes with the slot and
generation that its adapter has. One rule: before every forward each request's (slot, generation)
is checked against the arena, and a stale one fails alone (L007).
"""

import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import (
    DeviceOutOfMemory,
    EngineError,
    EngineOverloaded,
    NotFinite,
    NotResident,
    NotServed,
    RequestRefused,
)
from engine.inference.admission import Slots, admit
from engine.inference.output_cache import KeptOutputs
from engine.models.pooling_model import PooledModel
from engine.models.tokenization import prompt_tokens
from engine.punica.mapping import BASE
from engine.punica.wrapper import PunicaWrapper
from messages.commands import StartPooling
from messages.ids import OpId, RequestId
from messages.reports import OperationFailed, PoolingEnded, Report, VectorsComputed
from messages.requests import TextPrompt

BATCH_TOKENS_MAX: Final = 8192
"""The most tokens, padding included, in one forward; a longer text is alone in its own."""

BATCH_TOKENS_GROWTH: Final = 128
"""How many more there may be after a forward, where a lack of memory has made them fewer."""

VECTORS_BYTES_MAX: Final = 64 << 20
"""How many bytes of vectors one request may ask for: they travel in one report."""

UNDER_WAY_BYTES_MAX: Final = 1 << 30
"""How many bytes of vectors all requests that wait may come to: they take turns, so any may have
most of its own already."""

_NUMBER_BYTES: Final = 4

_log = structlog.get_logger()


class TextTokens(NamedTuple):
    """An input as the model reads it; `first`: the first of its tokens that counts in a mean."""

    tokens: list[int]
    first: int = 0


@dataclass(eq=False)
class Request:
    """One request on its way: its texts, the places that are left, and the vectors by place.

    `left` has the longest text first and is taken from its end: texts of like length share a
    forward, with little padding.
    """

    command: StartPooling
    texts: list[TextTokens]
    left: list[int] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)
    is_sound: bool = True

    def __post_init__(self) -> None:
        places = range(len(self.texts))
        self.left = sorted(places, key=lambda place: len(self.texts[place].tokens), reverse=True)

    def take(self, row: Tensor, is_sound: bool) -> None:
        """The result of the last place that is left; row: [width] float32."""
        self.is_sound = self.is_sound and is_sound
        self.vectors[self.left.pop()] = packed(row)

    def report(self, labels: tuple[str, ...]) -> VectorsComputed:
        """All vectors, in the order of the inputs."""
        vectors = tuple(self.vectors[place] for place in range(len(self.texts)))
        return VectorsComputed(self.command.request_id, 0, vectors, labels)

    @property
    def input_tokens(self) -> int:
        """The tokens of all inputs whose vectors are there."""
        return sum(len(self.texts[place].tokens) for place in self.vectors)


Batch = list[tuple[Request, TextTokens]]
"""Texts of one forward; each request's own are those from the end of its `left` on."""


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
        slots: Slots,
        config: EngineConfig,
        emit: Callable[[Report], None],
    ) -> None:
        self._model = model
        self._punica = punica
        self._slots = slots
        self._waiting_max = config.queue_requests_max
        self._rows_max = min(config.max_num_seqs, model.rows_max)
        self._tokens_max = BATCH_TOKENS_MAX
        self._emit = emit
        # In the order of their turns.
        self._waiting: dict[RequestId, Request] = {}
        self._ended = KeptOutputs()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do in a step."""
        return not self._waiting

    @property
    def is_reading(self) -> bool:
        """Texts are read as they come."""
        return False

    @property
    def operations(self) -> list[OpId]:
        """The operations that have not ended."""
        return [request.command.op for request in self._waiting.values()]

    def start(self, command: StartPooling) -> None:
        """Queue a request; raises `EngineError` where it can't be run."""
        admit(command, len(self._waiting), self._waiting_max, self._waiting)
        self._slots.check(command)
        if self._model.without_head and command.adapter_id == BASE:
            raise NotServed(
                "the model was saved without a classification head, so it has no scores of its "
                "own; name an adapter that brings one"
            )
        self._check_size(len(command.inputs))
        texts = [self._read(place, prompt) for place, prompt in enumerate(command.inputs)]
        self._waiting[command.request_id] = Request(command, texts)

    def _check_size(self, inputs: int) -> None:
        each = self._model.width * _NUMBER_BYTES
        wanted = inputs * each
        if wanted > VECTORS_BYTES_MAX:
            raise RequestRefused(
                f"{inputs} inputs, of {self._model.width} numbers each; at most "
                f"{VECTORS_BYTES_MAX} bytes of them are sent for one request: send "
                f"{VECTORS_BYTES_MAX // each} inputs at a time"
            )
        under_way = each * sum(len(request.texts) for request in self._waiting.values())
        if under_way + wanted > UNDER_WAY_BYTES_MAX:
            raise EngineOverloaded(
                f"{under_way} bytes of vectors are under way, and these are {wanted}; at most "
                f"{UNDER_WAY_BYTES_MAX} may be: try again when some requests have ended"
            )

    def _read(self, place: int, prompt: TextPrompt) -> TextTokens:
        """An input's tokens, with the model's own prompt before them where it is a text."""
        first = 0
        if isinstance(prompt, str):
            prompt, first = self._model.prompt + prompt, self._model.skipped
        try:
            tokens = prompt_tokens(self._model, prompt)
        except RequestRefused as error:
            raise RequestRefused(f"input {place}: {error}") from error
        if first >= len(tokens):
            raise RequestRefused(
                f"input {place} has no tokens beside the model's own prompt, which does not count"
            )
        return TextTokens(tokens, first)

    def stop(self, target: OpId) -> None:
        """End the request that operation `target` started, if it has not ended by itself."""
        for request in self._waiting.values():
            if request.command.op == target:
                self._finish(request)
                return

    def resend(self, request_id: RequestId) -> None:
        """Send the vectors of a request that ended lately again."""
        ended = self._ended.get(request_id)
        if ended is not None:
            self._emit(ended)

    def collect(self) -> None:
        """Nothing is read by jobs."""

    def close(self) -> None:
        """Nothing runs by itself."""

    def step(self) -> None:
        """One forward over as many inputs as fit, of the requests that came first."""
        for request in tuple(self._waiting.values()):
            try:
                self._slots.check(request.command)
            except NotResident as error:
                self._fail(request, error)
        batch = self._next_batch()
        if batch:
            self._run(batch)

    def _next_batch(self) -> Batch:
        """What fits into one forward."""
        batch: Batch = []
        width = 0
        for request in self._waiting.values():
            for place in reversed(request.left):
                text = request.texts[place]
                width = max(width, len(text.tokens))
                is_full = len(batch) >= self._rows_max
                if batch and (is_full or width * (len(batch) + 1) > self._tokens_max):
                    return batch
                batch.append((request, text))
        return batch

    def _run(self, batch: Batch) -> None:
        results = self._results(batch)
        if results is None:
            return
        self._tokens_max = min(self._tokens_max + BATCH_TOKENS_GROWTH, BATCH_TOKENS_MAX)
        # Vectors are rank 0's; so is the word on them, for requests end alike on all ranks.
        sound = self._model.group.broadcast_numbers(results.isfinite().all(-1).tolist())
        for (request, _), row, is_sound in zip(batch, results, sound, strict=True):
            request.take(row, bool(is_sound))
        for request in dict.fromkeys(request for request, _ in batch):
            if not request.is_sound:
                unsound = "the model's output is not finite; is the adapter sound?"
                self._fail(request, NotFinite(unsound))
            elif not request.left:
                self._finish(request)
            else:
                # Whoever asks for many texts lets others have their turn.
                request_id = request.command.request_id
                self._waiting[request_id] = self._waiting.pop(request_id)

    def _results(self, batch: Batch) -> Tensor | None:
        """What clients get of each text, [rows, width] on the host; None where memory ran out."""
        prompts = [text.tokens for _, text in batch]
        firsts = [text.first for _, text in batch]
        mapping = self._model.mapping(prompts, [one.command.adapter_id for one, _ in batch])
        self._punica.update_metadata(mapping, self._slots.residents)
        try:
            return self._model.results(self._model.forward(prompts, firsts)).cpu()
        except torch.OutOfMemoryError as error:
            if not self._model.group.is_single:
                # The other ranks are within the forward still, and can't be called back.
                raise
            full = str(error)
        # What the forward held is given back only now that its error is gone.
        self._make_do(batch, full)
        return None

    def _make_do(self, batch: Batch, full: str) -> None:
        """Half of a batch is tried next, until it is one text, which then fails."""
        width = max(len(text.tokens) for _, text in batch)
        if len(batch) == 1:
            self._fail(batch[0][0], DeviceOutOfMemory(f"an input of {width} tokens: {full}"))
            return
        self._tokens_max = width * len(batch) // 2
        _log.warning("no memory for a batch", texts=len(batch), tokens=width * len(batch))

    def _finish(self, request: Request) -> None:
        """Give out what there is, and the account of it."""
        del self._waiting[request.command.request_id]
        # Of a request that was stopped only some are there, and nobody waits for them.
        if not request.left:
            computed = request.report(self._model.labels)
            self._emit(computed)
            self._ended.keep(computed)
        done, tokens = len(request.vectors), request.input_tokens
        self._emit(PoolingEnded(request.command.op, done, tokens))

    def _fail(self, request: Request, error: EngineError) -> None:
        del self._waiting[request.command.request_id]
        self._emit(OperationFailed(request.command.op, error.code, str(error)))
