"""Batches of texts to embed or to classify, of many requests and adapters at once.

Before every forward pass each request's slot and slot version are checked against the arena; a
stale request fails alone (L007). Adapters are not scheduled here: a request names its slot.
"""

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, NamedTuple

import structlog
from torch import Tensor

from loradock.engine.config import EngineConfig
from loradock.engine.errors import (
    DeviceOutOfMemory,
    EngineError,
    Malformed,
    NotFinite,
    NotResident,
    NotServed,
    Overloaded,
    is_device_out_of_memory,
)
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.models.tokenization import prompt_tokens
from loradock.engine.punica.mapping import BASE
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.serving.forward import KVUse
from loradock.engine.serving.generations import OutputCache
from loradock.engine.serving.queue import (
    Owner,
    SlotTable,
    check_admission,
    client_key,
    other_task,
    owner_of,
)
from loradock.messages.commands import StartInference, StartPooling
from loradock.messages.ids import OpId, RequestId, Slot
from loradock.messages.prompts import TextPrompt, Truncation
from loradock.messages.reports import OperationFailed, PoolingEnded, Report
from loradock.messages.requests import VectorsStreamed

BATCH_TOKENS_MAX: Final = 8192
"""The most tokens, padding included, in one forward pass; a longer text runs alone."""

BATCH_TOKENS_GROWTH: Final = 128
"""Tokens by which the bound rises after each forward pass, if a lack of memory lowered it."""

VECTORS_BYTES_MAX: Final = 64 << 20
"""The most bytes of vectors of one request, which are sent in one report."""

PENDING_BYTES_MAX: Final = 1 << 30
"""The most bytes of vectors of all waiting requests: they take turns, so each may already have most
of its vectors."""

_NUMBER_BYTES: Final = 4

_log = structlog.get_logger()


class TokenizedText(NamedTuple):
    """An input's tokens; `first`: the index of the first token that counts in a mean."""

    tokens: list[int]
    first: int = 0


@dataclass(eq=False)
class PoolingRequest:
    """A request's texts, the indices of the remaining ones, and vectors by index.

    `remaining` has the longest text first and is consumed from its end: texts of similar length
    share a forward pass, with little padding.
    """

    command: StartPooling
    texts: list[TokenizedText]
    remaining: list[int] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)
    is_finite: bool = True

    def __post_init__(self) -> None:
        def length(index: int) -> int:
            return len(self.texts[index].tokens)

        self.remaining = sorted(range(len(self.texts)), key=length, reverse=True)

    def add_result(self, row: Tensor, is_finite: bool) -> None:
        """Store the result of the last remaining text; row: [width] float32."""
        self.is_finite = self.is_finite and is_finite
        self.vectors[self.remaining.pop()] = pack_vector(row)

    def report(self, labels: tuple[str, ...]) -> VectorsStreamed:
        """Return all vectors, in the order of the inputs."""
        vectors = tuple(self.vectors[index] for index in range(len(self.texts)))
        return VectorsStreamed(self.command.request_id, 0, vectors, labels)

    @property
    def input_tokens(self) -> int:
        """The tokens of all inputs that have vectors."""
        return sum(len(self.texts[index].tokens) for index in self.vectors)


def pack_vector(row: Tensor) -> bytes:
    """Encode a vector for the wire: float32, little endian."""
    numbers = array("f", row.tolist())
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


Batch = list[tuple[PoolingRequest, TokenizedText]]
"""The texts of one forward pass; a request's own are the last of its `remaining`."""


class PoolingScheduler:
    """All embeddings or classifications of an engine; used by one thread."""

    def __init__(
        self,
        model: PoolingModel,
        punica: PunicaWrapper,
        slots: SlotTable,
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
        # Those of one owner are in the order in which `step` takes texts from them.
        self._waiting: dict[RequestId, PoolingRequest] = {}
        # The last step with a text of each owner that waits.
        self._last_steps: dict[Owner, int] = {}
        self._steps = 0
        self._outputs = OutputCache()

    @property
    def is_idle(self) -> bool:
        """True if `step` would do nothing."""
        return not self._waiting

    @property
    def is_reading(self) -> bool:
        """False: texts are tokenized when they arrive."""
        return False

    @property
    def operations(self) -> list[OpId]:
        """The operations that have not ended."""
        return [request.command.op for request in self._waiting.values()]

    @property
    def suspended(self) -> list[OpId]:
        """None: poolings are short, so adapters are not taken from them."""
        return []

    @property
    def running(self) -> list[OpId]:
        """The operations whose texts are in the next forward pass."""
        return list(dict.fromkeys(request.command.op for request, _ in self._next_batch()))

    @property
    def kv_use(self) -> KVUse:
        """The memory of keys and values, of which pooling keeps none."""
        return KVUse(0, 0)

    def start(self, command: StartInference) -> None:
        """Queue a request; raises `EngineError` if it can't be run."""
        if not isinstance(command, StartPooling) or command.task != self._model.task:
            raise other_task(self._model.task, command)
        waiting = Counter(client_key(one.command) for one in self._waiting.values())
        check_admission(command, self._slots, waiting, self._waiting_max, self._waiting)
        if self._model.without_head and command.adapter_id == BASE:
            raise NotServed(
                "the model was saved without a classification head, so it has no scores; name an "
                "adapter that contains one"
            )
        self._model.check_dimensions(command.dimensions)
        self._check_size(len(command.inputs))
        texts = [
            self._tokenize(index, prompt, command.truncation)
            for index, prompt in enumerate(command.inputs)
        ]
        self._waiting[command.request_id] = PoolingRequest(command, texts)

    def _check_size(self, inputs: int) -> None:
        each = self._model.width * _NUMBER_BYTES
        wanted = inputs * each
        if wanted > VECTORS_BYTES_MAX:
            raise Malformed(
                f"{inputs} inputs, of {self._model.width} numbers each; at most "
                f"{VECTORS_BYTES_MAX} bytes of them are sent for one request: send "
                f"{VECTORS_BYTES_MAX // each} inputs at a time"
            )
        pending = each * sum(len(request.texts) for request in self._waiting.values())
        if pending + wanted > PENDING_BYTES_MAX:
            raise Overloaded(
                f"{pending} bytes of vectors are pending, and these are {wanted}; at most "
                f"{PENDING_BYTES_MAX} may be: try again when some requests have ended"
            )

    def _tokenize(
        self, index: int, prompt: TextPrompt, truncation: Truncation | None
    ) -> TokenizedText:
        """Return an input's tokens, after the model's own prompt if it is a text."""
        first = 0
        if isinstance(prompt, str):
            prompt, first = self._model.prompt + prompt, self._model.skipped_tokens
            if self._model.prompt and truncation is not None and truncation.side == "left":
                raise Malformed(
                    "truncation_side left would cut the model's own prompt, which every input "
                    "begins with; use right"
                )
        try:
            tokens = prompt_tokens(self._model, prompt, truncation=truncation)
        except Malformed as error:
            raise error.about(f"input {index}") from error
        if first >= len(tokens):
            raise Malformed(
                f"input {index} has only the tokens of the model's own prompt, which do not count"
            )
        return TokenizedText(tokens, first)

    def stop(self, target: OpId) -> None:
        """End the request that operation `target` started; do nothing if it has ended."""
        for request in self._waiting.values():
            if request.command.op == target:
                self._finish(request)
                return

    def is_turn_over(self, slot: Slot, slot_version: int, tokens: int) -> bool:
        """Return whether no request uses a slot."""
        del tokens
        uses = [request.command for request in self._waiting.values()]
        return all((one.slot, one.generation) != (slot, slot_version) for one in uses)

    def leave(self, slot: Slot, slot_version: int) -> None:
        """Do nothing: requests whose adapter left its slot fail at the next step (L007)."""

    def resend(self, request_id: RequestId) -> None:
        """Send the vectors of a recently ended request again, if they are known."""
        for output in self._outputs.get(request_id):
            self._emit(output)

    def collect(self) -> None:
        """Do nothing: there are no jobs."""

    def close(self) -> None:
        """Do nothing: there are no jobs."""

    def step(self) -> None:
        """Run one forward pass over the texts of the first requests, up to the bounds."""
        for request in tuple(self._waiting.values()):
            try:
                self._slots.check(request.command)
            except NotResident as error:
                self._fail(request, error)
        batch = self._next_batch()
        if batch:
            self._steps += 1
            taken = {owner_of(request.command): self._steps for request, _ in batch}
            waiting = {owner_of(request.command) for request in self._waiting.values()}
            kept = self._last_steps.items()
            self._last_steps = {owner: step for owner, step in kept if owner in waiting} | taken
            self._run(batch)

    def _in_turns(self) -> Iterator[PoolingRequest]:
        """Yield one request of each owner, that of the longest wait first, then a second one..."""
        by_owner: dict[Owner, list[PoolingRequest]] = {}
        for request in self._waiting.values():
            by_owner.setdefault(owner_of(request.command), []).append(request)
        owners = sorted(by_owner, key=lambda owner: self._last_steps.get(owner, 0))
        for turn in zip_longest(*(by_owner[owner] for owner in owners)):
            yield from (request for request in turn if request is not None)

    def _next_batch(self) -> Batch:
        """Return the texts that fit into one forward pass."""
        batch: Batch = []
        width = 0
        for request in self._in_turns():
            for index in reversed(request.remaining):
                text = request.texts[index]
                width = max(width, len(text.tokens))
                is_full = len(batch) >= self._rows_max
                if batch and (is_full or width * (len(batch) + 1) > self._tokens_max):
                    return batch
                batch.append((request, text))
        return batch

    def _run(self, batch: Batch) -> None:
        results = self._compute(batch)
        if results is None:
            return
        self._tokens_max = min(self._tokens_max + BATCH_TOKENS_GROWTH, BATCH_TOKENS_MAX)
        # Vectors are the leader's. So is the check of them: requests must end alike on all ranks.
        finite = self._model.group.broadcast_numbers(results.isfinite().all(-1).tolist())
        for (request, _), row, is_finite in zip(batch, results, finite, strict=True):
            own = self._model.shortened(row, request.command.dimensions)
            request.add_result(own, bool(is_finite))
        for request in dict.fromkeys(request for request, _ in batch):
            if not request.is_finite:
                text = "the model's output is not finite; check the adapter's weights"
                self._fail(request, NotFinite(text))
            elif not request.remaining:
                self._finish(request)
            else:
                # A request with many texts goes to the end of the queue.
                request_id = request.command.request_id
                self._waiting[request_id] = self._waiting.pop(request_id)

    def _compute(self, batch: Batch) -> Tensor | None:
        """Return each text's result, [rows, width] on the host; None if memory ran out."""
        prompts = [text.tokens for _, text in batch]
        starts = [text.first for _, text in batch]
        mapping = self._model.mapping(prompts, [one.command.adapter_id for one, _ in batch])
        self._punica.update_metadata(mapping, self._slots.residents)
        try:
            return self._model.results(self._model.forward(prompts, starts)).cpu()
        except RuntimeError as error:
            # The other ranks are still in the forward pass and can't be interrupted.
            if not (self._model.group.is_trivial and is_device_out_of_memory(error)):
                raise
            reason = str(error)
        # The memory of the forward pass is released only after its error.
        self._reduce_batch(batch, reason)
        return None

    def _reduce_batch(self, batch: Batch, reason: str) -> None:
        """Halve the bound on a batch that ran out of memory; fail a text that ran alone."""
        width = max(len(text.tokens) for _, text in batch)
        if len(batch) == 1:
            self._fail(batch[0][0], DeviceOutOfMemory(f"an input of {width} tokens: {reason}"))
            return
        self._tokens_max = width * len(batch) // 2
        _log.warning("no memory for a batch", texts=len(batch), tokens=width * len(batch))

    def _finish(self, request: PoolingRequest) -> None:
        """Report the vectors, unless the request was stopped, and the end."""
        del self._waiting[request.command.request_id]
        # A stopped request has only some vectors, and no client waits for them.
        if not request.remaining:
            computed = request.report(self._model.labels)
            self._emit(computed)
            self._outputs.put(computed)
        done, tokens = len(request.vectors), request.input_tokens
        self._emit(PoolingEnded(request.command.op, done, tokens))

    def _fail(self, request: PoolingRequest, error: EngineError) -> None:
        del self._waiting[request.command.request_id]
        self._emit(OperationFailed(request.command.op, error.code, error.message))
