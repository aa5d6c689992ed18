"""Continuous batching: requests join and leave the running batch between two forward passes.

What it is: a queue, the running rows, and one `step`. What it is not: a scheduler of adapters; a
request comes with the slot and generation that its adapter has. One rule: before every forward
each row's (slot, generation) is checked against the arena, and a stale row fails alone (L007).
"""

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
from engine.kv_cache import RowCache
from engine.model import PreparedModel
from engine.prompts import prompt_tokens
from engine.punica import LoRAMapping, PunicaWrapper
from engine.sampling import Sampler
from engine.slots import Slots
from engine.text import Detokenizer, StopFilter
from messages.commands import StartGeneration
from messages.ids import OpId, RequestId
from messages.reports import GenerationEnded, OperationFailed, Report, TokensGenerated
from messages.requests import FinishReason

PREFILL_TOKENS_MAX: Final = 8192
"""The most prompt tokens, padding included, in one forward; a longer prompt is alone in its own."""

UNSOUND: Final = -1
"""In place of a token: the row's logits are not finite."""

ENDED_OUTPUTS_MAX: Final = 256
"""How many ended outputs are kept for clients that lost their connection."""


@dataclass
class Output:
    """What a request has got so far: all tokens, and the text that was given out with them."""

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Row:
    """One request on its way from the queue to its end."""

    def __init__(self, command: StartGeneration, prompt: list[int], model: PreparedModel) -> None:
        self.command = command
        self.prompt = prompt
        self.output = Output()
        self.sampler = Sampler(command.sampling)
        self.stops = StopFilter(command.sampling.stop)
        self._text = Detokenizer(model.tokenizer, prompt) if model.tokenizer is not None else None
        self._eos_ids = model.eos_ids

    def accept(self, token: int) -> tuple[str, FinishReason | None]:
        """Take the next token; the text it made readable, and how the output ended if it did.

        A token that ends the model's output is no part of it. The token that completed a stop
        string is, but the stop string's text is not.
        """
        if token in self._eos_ids:
            return self.rest(), "stop"
        self.output.tokens.append(token)
        text = self.stops.add(self._text.add(token)) if self._text else ""
        if self.stops.has_matched:
            return text, "stop"
        if len(self.output.tokens) < self.command.sampling.max_tokens:
            return text, None
        text += self.rest()
        return text, "stop" if self.stops.has_matched else "length"

    def rest(self) -> str:
        """The text that was still waiting, at the end of the output."""
        if self._text is None:
            return ""
        return self.stops.add(self._text.rest()) + self.stops.rest()


class Generator:
    """All generations of an engine; driven by one thread, which calls `step` while not idle.

    `residents[slot]` is the adapter id in each slot, None where it is empty; it is read only.
    Reports leave through `emit`.
    """

    def __init__(
        self,
        model: PreparedModel,
        punica: PunicaWrapper,
        arena: Arena,
        residents: Sequence[int | None],
        config: EngineConfig,
        emit: Callable[[Report], None],
    ) -> None:
        self._model = model
        self._punica = punica
        self._slots = Slots(arena, residents)
        self._config = config
        self._emit = emit
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._cache = RowCache([])
        self._alive: dict[RequestId, Row] = {}
        self._outputs: dict[RequestId, Output] = {}
        self._ended: deque[tuple[RequestId, Output]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do in a step."""
        return not self._waiting and not self._running

    @property
    def operations(self) -> list[OpId]:
        """The operations whose generations have not ended."""
        return [row.command.op for row in self._alive.values()]

    def start(self, command: StartGeneration) -> None:
        """Queue a generation; raises `EngineError` where it can't be run."""
        if len(self._waiting) >= self._config.queue_requests_max:
            raise EngineOverloaded(
                f"{len(self._waiting)} generations wait for a place in the batch, the most that "
                "may; try again when some have ended"
            )
        if command.request_id in self._alive:
            raise Conflict(f"request {command.request_id!r} is generating; use another request_id")
        self._slots.check(command)
        row = Row(command, self._prompt_tokens(command), self._model)
        self._alive[command.request_id] = row
        self._outputs[command.request_id] = row.output
        self._waiting.append(row)

    def stop(self, target: OpId) -> None:
        """End the generation that operation `target` started, if it has not ended by itself."""
        row = next((row for row in self._alive.values() if row.command.op == target), None)
        if row is None:
            return
        self._tell(row, (), row.rest())
        self._end(row, "cancelled")
        if row in self._running:
            self._keep([place for place, other in enumerate(self._running) if other is not row])
        else:
            self._waiting.remove(row)

    def resend(self, request_id: RequestId) -> None:
        """Send an output again from its first token, if it is running or was lately."""
        output = self._outputs.get(request_id)
        if output is not None:
            text = "".join(output.text)
            self._emit(TokensGenerated(request_id, 0, tuple(output.tokens), text))

    def step(self) -> None:
        """Let waiting requests join as far as there is room, then bring every row one token on."""
        self._fail_stale()
        self._admit()
        if self._running:
            self._decode()

    def _fail_stale(self) -> None:
        self._keep([place for place, row in enumerate(self._running) if self._is_resident(row)])

    def _is_resident(self, row: Row) -> bool:
        """Whether a row's adapter is still where it was; a row whose adapter is not has failed."""
        try:
            self._slots.check(row.command)
        except NotResident as error:
            self._fail(row, error)
            return False
        return True

    def _prompt_tokens(self, command: StartGeneration) -> list[int]:
        if self._model.tokenizer is None and command.sampling.stop:
            raise RequestRefused(
                "the model's directory has no tokenizer, so stop strings can't be told"
            )
        return prompt_tokens(self._model, command.prompt, command.sampling.max_tokens)

    def _admit(self) -> None:
        """Prefill waiting requests together and let those that go on join the running batch."""
        rows = self._next_rows()
        if not rows:
            return
        width = max(len(row.prompt) for row in rows)
        tokens = torch.tensor([[0] * (width - len(row.prompt)) + row.prompt for row in rows])
        cache = RowCache([len(row.prompt) for row in rows])
        going_on = self._forward(rows, tokens, cache)
        if not going_on:
            return
        cache.keep(going_on)
        if self._running:
            self._cache.join(cache)
        else:
            self._cache = cache
        self._running += [rows[place] for place in going_on]

    def _next_rows(self) -> list[Row]:
        """Take from the queue, in order, what fits into the batch and into one forward."""
        rows: list[Row] = []
        width = 0
        while self._waiting and len(self._running) + len(rows) < self._config.max_num_seqs:
            width = max(width, len(self._waiting[0].prompt))
            if rows and width * (len(rows) + 1) > PREFILL_TOKENS_MAX:
                break
            row = self._waiting.popleft()
            if self._is_resident(row):
                rows.append(row)
        return rows

    def _decode(self) -> None:
        self._cache.grow(1)
        tokens = torch.tensor([[row.output.tokens[-1]] for row in self._running])
        self._keep(self._forward(self._running, tokens, self._cache))

    def _forward(self, rows: list[Row], tokens: Tensor, cache: RowCache) -> list[int]:
        """Bring `rows` one token on; the places of those that go on."""
        self._punica.update_metadata(_mapping(rows, tokens.shape[1]), self._slots.residents)
        try:
            logits = self._model.forward(tokens, cache)
        except torch.OutOfMemoryError as error:
            if not self._model.group.is_single:
                # The other ranks are within the forward still, and can't be called back.
                raise
            # The cache may be half written, so none of these rows can go on.
            for row in rows:
                self._fail(row, DeviceOutOfMemory(f"a batch of {len(rows)} rows: {error}"))
            return []
        tokens_chosen = self._choose(rows, logits)
        return [place for place, row in enumerate(rows) if self._accept(row, tokens_chosen[place])]

    def _choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        """Every row's next token, or `UNSOUND`; on every rank what rank 0 has chosen."""
        group = self._model.group
        chosen = _choices(rows, logits) if group.leads else [UNSOUND] * len(rows)
        return group.broadcast_numbers(chosen)

    def _accept(self, row: Row, token: int) -> bool:
        """Give a row its next token; whether it goes on."""
        if token == UNSOUND:
            self._fail(row, NotFinite("the model's output is not finite; is the adapter sound?"))
            return False
        before = len(row.output.tokens)
        text, reason = row.accept(token)
        self._tell(row, row.output.tokens[before:], text)
        if reason is not None:
            self._end(row, reason)
        return reason is None

    def _tell(self, row: Row, tokens: Sequence[int], text: str) -> None:
        """Send tokens that are in the output already, and text that is not yet."""
        row.output.text.append(text)
        if tokens or text:
            offset = len(row.output.tokens) - len(tokens)
            self._emit(TokensGenerated(row.command.request_id, offset, tuple(tokens), text))

    def _end(self, row: Row, reason: FinishReason) -> None:
        tokens = len(row.output.tokens)
        self._emit(GenerationEnded(row.command.op, reason, len(row.prompt), tokens))
        self._forget(row)

    def _fail(self, row: Row, error: EngineError) -> None:
        self._emit(OperationFailed(row.command.op, error.code, str(error)))
        self._forget(row)

    def _forget(self, row: Row) -> None:
        """Let an ended row go; its output is kept until enough others have ended after it."""
        request_id = row.command.request_id
        del self._alive[request_id]
        self._ended.append((request_id, row.output))
        if len(self._ended) > ENDED_OUTPUTS_MAX:
            oldest, output = self._ended.popleft()
            # The same request may have been started again since.
            if self._outputs.get(oldest) is output:
                del self._outputs[oldest]

    def _keep(self, places: list[int]) -> None:
        """Keep only these of the running rows."""
        if len(places) == len(self._running):
            return
        self._running = [self._running[place] for place in places]
        if places:
            self._cache.keep(places)
        else:
            self._cache = RowCache([])


def _choices(rows: Sequence[Row], logits: Tensor) -> list[int]:
    likeliest = logits.argmax(-1).tolist()
    # NaN and +inf pass through the maximum, and it is -inf where every token is forbidden.
    sound = logits.amax(-1).isfinite().tolist()
    for place, row in enumerate(rows):
        if not sound[place]:
            likeliest[place] = UNSOUND
        elif not row.sampler.is_greedy:
            likeliest[place] = row.sampler.choose(logits[place])
    chosen: list[int] = likeliest
    return chosen


def _mapping(rows: Sequence[Row], width: int) -> LoRAMapping:
    """Each row's adapter at its own tokens, the base model at the padding before them."""
    ids = torch.tensor([row.command.adapter_id for row in rows])
    if width == 1:
        return LoRAMapping(ids, ids)
    padding = width - torch.tensor([len(row.prompt) for row in rows])
    own = torch.arange(width) >= padding[:, None]
    return LoRAMapping((own * ids[:, None]).flatten(), ids, is_prefill=True)
