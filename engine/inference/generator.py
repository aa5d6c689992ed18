"""Continuous batching: requests join and leave the running batch between two forward passes.

What it is: a queue, the running rows, and one `step`. What it is not: a scheduler of adapters; a
request comes with the slot and generation that its adapter has. One rule: before every forward
each row's (slot, generation) is checked against the arena, and a stale row fails alone (L007).
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import (
    FOREIGN_FAILURES,
    DeviceOutOfMemory,
    NotFinite,
    NotResident,
    RequestRefused,
    code_of,
)
from engine.inference.admission import Slots, admit
from engine.inference.decode_probe import choose_steps
from engine.inference.image_prefetch import PromptJobs
from engine.inference.output_cache import KeptOutputs
from engine.inference.sequence import Row
from engine.jobs import Jobs
from engine.models.causal_model import PreparedModel
from engine.models.image_processor import Reading
from engine.models.kv_cache import RowCache
from engine.models.tokenization import prompt_tokens
from engine.models.vision.media import Media, offsets_of
from engine.punica.mapping import BASE, LoRAMapping
from engine.punica.wrapper import PunicaWrapper
from messages.commands import StartGeneration
from messages.ids import OpId, RequestId
from messages.reports import GenerationEnded, OperationFailed, Report, TokensGenerated
from messages.requests import FinishReason, IllustratedPrompt

PREFILL_TOKENS_MAX: Final = 8192
"""The most prompt tokens, padding included, in one forward; a longer prompt is alone in its own."""

UNSOUND: Final = -1
"""In place of a token: the row's logits are not finite."""


class Generator:
    """All generations of an engine; driven by one thread, which calls `step` while not idle.

    Reports leave through `emit`; `jobs` reads images.
    """

    def __init__(
        self,
        model: PreparedModel,
        punica: PunicaWrapper,
        slots: Slots,
        config: EngineConfig,
        emit: Callable[[Report], None],
        jobs: Jobs[OpId],
    ) -> None:
        self._model = model
        self._punica = punica
        self._slots = slots
        self._config = config
        self._emit = emit
        self._unread = PromptJobs(jobs)
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        # How many of the next rows go into a forward of their own.
        self._singly = 0
        self._steps = choose_steps(model, punica, len(slots.residents), config)
        self._cache = RowCache([], keeps_room=self._steps.keeps_room)
        self._alive: dict[RequestId, Row] = {}
        self._ended = KeptOutputs()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do in a step."""
        return not self._waiting and not self._running

    @property
    def is_reading(self) -> bool:
        """Whether images are being read, here or on another rank; only `collect` sees the end."""
        return self._unread.is_busy

    @property
    def operations(self) -> list[OpId]:
        """The operations whose generations have not ended."""
        return [row.command.op for row in self._alive.values()]

    def start(self, command: StartGeneration) -> None:
        """Queue a generation; raises `EngineError` where it can't be run."""
        waiting = len(self._waiting) + len(self._unread)
        admit(command, waiting, self._config.queue_requests_max, self._alive)
        self._slots.check(command)
        row = Row(command, self._model)
        self._line_up(row)
        self._alive[command.request_id] = row

    def stop(self, target: OpId) -> None:
        """End the generation that operation `target` started, if it has not ended by itself."""
        row = next((row for row in self._alive.values() if row.command.op == target), None)
        if row is None:
            return
        self._tell(row, (), row.rest())
        self._end(row, "cancelled")
        if row in self._running:
            self._keep([place for place, other in enumerate(self._running) if other is not row])
        elif row in self._waiting:
            self._waiting.remove(row)
        else:
            self._unread.drop(row)

    def resend(self, request_id: RequestId) -> None:
        """Send an output again from its first token, if it is running or was lately."""
        row = self._alive.get(request_id)
        output = self._ended.get(request_id) if row is None else row.everything()
        if output is not None:
            self._emit(output)

    def collect(self) -> None:
        """Let rows whose images have been read wait with the others."""
        for row, future in self._unread.take(self._unused):
            error = future.exception()
            if error is not None:
                self._fail(row, error)
            else:
                row.take(future.result())
                self._waiting.append(row)

    def close(self) -> None:
        """Read nothing more."""
        self._unread.close()

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

    def _line_up(self, row: Row) -> None:
        """Have a prompt read: a text now, images by a job."""
        prompt, wanted = row.command.prompt, row.command.sampling.max_tokens
        if self._model.tokenizer is None and row.command.sampling.stop:
            raise RequestRefused(
                "the model's directory has no tokenizer, so stop strings can't be told"
            )
        if not isinstance(prompt, IllustratedPrompt):
            row.take(Reading(prompt_tokens(self._model, prompt, wanted)))
            self._waiting.append(row)
            return
        if self._model.reader is None:
            raise RequestRefused(
                f"images in the prompt, and the model is served for text alone: "
                f"{self._model.without_images}"
            )
        self._unread.add(row, partial(self._model.reader.read, prompt, wanted), self._unused)

    @property
    def _unused(self) -> int:
        """How many rows wait whose images have been read."""
        return sum(row.media is not None for row in self._waiting)

    def _admit(self) -> None:
        """Prefill waiting requests together and let those that go on join the running batch."""
        rows = self._next_rows()
        if not rows:
            return
        width = max(len(row.prompt) for row in rows)
        tokens = torch.tensor([[0] * (width - len(row.prompt)) + row.prompt for row in rows])
        media = [row.media for row in rows]
        cache = RowCache([len(row.prompt) for row in rows], offsets_of(media))
        prefill = partial(self._model.forward, tokens, cache, media)
        going_on = self._forward(rows, _mapping(rows, width), prefill, media)
        if not going_on:
            return
        for place in going_on:
            rows[place].media = None
        cache.keep(going_on)
        self._cache.join(cache)
        self._running += [rows[place] for place in going_on]

    def _next_rows(self) -> list[Row]:
        """Take from the queue, in order, what fits into the batch and into one forward."""
        rows: list[Row] = []
        width = 0
        while self._waiting and len(self._running) + len(rows) < self._config.max_num_seqs:
            width = max(width, len(self._waiting[0].prompt))
            if rows and (self._singly or width * (len(rows) + 1) > PREFILL_TOKENS_MAX):
                break
            row = self._waiting.popleft()
            if self._is_resident(row):
                rows.append(row)
        self._singly = max(0, self._singly - 1)
        return rows

    def _decode(self) -> None:
        self._cache.grow(1)
        tokens = torch.tensor([[row.output.tokens[-1]] for row in self._running])
        mapping = _step_mapping(self._running, self._steps.places(len(self._running)))
        step = partial(self._steps.run, tokens, self._cache)
        self._keep(self._forward(self._running, mapping, step))

    def _forward(
        self,
        rows: list[Row],
        mapping: LoRAMapping,
        run: Callable[[], Tensor],
        media: Sequence[Media | None] = (),
    ) -> list[int]:
        """Bring `rows` one token on by `run`, which gives their logits; the places of those that
        go on.
        """
        residents = self._slots.residents
        self._punica.update_metadata(mapping, residents)
        ids = [row.command.adapter_id for row in rows]
        try:
            with self._model.image_mapper.mapped(ids, media, residents):
                logits = run()
        except FOREIGN_FAILURES as error:
            if not self._give_up(rows, error, any(media)):
                raise
            return []
        tokens_chosen = self._choose(rows, logits)
        return [place for place, row in enumerate(rows) if self._accept(row, tokens_chosen[place])]

    def _give_up(self, rows: list[Row], error: Exception, with_images: bool) -> bool:
        """Let rows fail whose forward did; whether that is all that the error means.

        The cache may be half written, so none of the rows can go on with it.
        """
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if not (self._model.group.is_single and (is_memory or with_images)):
            # The other ranks are within the forward still, and can't be called back.
            return False
        if with_images and len(rows) > 1:
            # What one row's images do to the model is not the others' fault: each tries alone.
            self._waiting.extendleft(reversed(rows))
            self._singly = len(rows)
            return True
        for row in rows:
            if is_memory:
                self._fail(row, DeviceOutOfMemory(f"a batch of {len(rows)} rows: {error}"))
            else:
                text = f"the model can't take these images: {str(error)[:300]}"
                self._fail(row, RequestRefused(text))
        return True

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

    def _fail(self, row: Row, error: BaseException) -> None:
        self._emit(OperationFailed(row.command.op, code_of(error), str(error)))
        self._forget(row)

    def _forget(self, row: Row) -> None:
        """Let an ended row go, but for its output."""
        del self._alive[row.command.request_id]
        self._ended.keep(row.everything())

    def _keep(self, places: list[int]) -> None:
        """Keep only these of the running rows."""
        if len(places) == len(self._running):
            return
        self._running = [self._running[place] for place in places]
        self._cache.keep(places)


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


def _step_mapping(rows: Sequence[Row], places: int) -> LoRAMapping:
    """Each row's adapter at its one token, the base model at places that nobody has."""
    ids = [row.command.adapter_id for row in rows] + [BASE] * (places - len(rows))
    return LoRAMapping(ids, ids)
