"""Forward passes of a generation batch: prefill in chunks, and one decode step of running rows.

Row i of the KV cache belongs to the i-th running sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import (
    MODEL_CODE_ERRORS,
    DeviceOutOfMemory,
    EngineError,
    RequestRefused,
    is_out_of_memory,
)
from engine.inference.admission import SlotTable
from engine.inference.decode_probe import ProbeMapper, choose_decode
from engine.inference.prefill import PrefillBatch
from engine.inference.sampler import NOT_FINITE, sample
from engine.inference.sequence import Sequence
from engine.inference.step_budget import TOKENS_MAX, choose_budget
from engine.models.causal_model import CausalModel
from engine.models.kv_cache import BatchKVCache
from engine.models.vision.image_inputs import ImageInputs
from engine.punica.mapping import BASE, LoRAMapping
from engine.punica.wrapper import PunicaWrapper


class ForwardError(Exception):
    """A forward pass that failed for its own sequences, with the error to report; others continue.

    The cache of these sequences may be half written, so none of them can continue with it.
    """

    def __init__(self, error: EngineError, has_images: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.has_images = has_images


class BatchStep:
    """Prefill and decode; both return a token per sequence, `NOT_FINITE` where there is none.

    Both raise `ForwardError` where only their own sequences are affected, and the model's own
    error where the engine can't continue. Tokens are the leader's on every rank.
    """

    def __init__(
        self, model: CausalModel, punica: PunicaWrapper, slots: SlotTable, config: EngineConfig
    ) -> None:
        self._model = model
        self._punica = punica
        self._slots = slots
        slot_count = len(slots.residents)
        self._strategy = choose_decode(model, punica, slot_count, config)
        self.budget: Final = choose_budget(model, ProbeMapper(punica, slot_count), config)
        self._cache = BatchKVCache([], keeps_capacity=self._strategy.keeps_capacity)

    def prefill(self, batch: PrefillBatch, tokens_max: int) -> list[int] | None:
        """Run the next chunk of some prompts; return their first tokens after the last chunk.

        `tokens_max`: the most tokens of the chunk, padding included, where prompts are divided.
        """
        chunk = batch.next_chunk(tokens_max if self.budget.chunks else TOKENS_MAX)
        forward = partial(self._model.forward, chunk, batch.cache, batch.images)
        logits = self._forward(batch.sequences, batch.mapping(chunk), forward, batch.images)
        return self._sample(batch.sequences, logits) if batch.is_done else None

    def join(self, batch: PrefillBatch, rows: list[int]) -> None:
        """Append these rows of a prefill to the running batch; its cache must not be used again.

        Raises `ForwardError` where memory lacks; then no row of either can continue.
        """
        try:
            batch.cache.keep(rows)
            self._cache.join(batch.cache)
        except (RuntimeError, MemoryError) as error:
            reason = self._local_failure(error, len(self._cache) + len(rows), has_images=False)
            if reason is None:
                raise
            raise ForwardError(reason, has_images=False) from error

    def decode(self, running: list[Sequence]) -> list[int]:
        """Run the latest token of every running sequence."""
        self._cache.grow(1)
        tokens = torch.tensor([[sequence.output.tokens[-1]] for sequence in running])
        mapping = _decode_mapping(running, self._strategy.padded_rows(len(running)))
        run = partial(self._strategy.run, tokens, self._cache)
        return self._sample(running, self._forward(running, mapping, run, []))

    def keep(self, rows: list[int]) -> None:
        """Remove all running sequences but these from the cache."""
        self._cache.keep(rows)

    def _forward(
        self,
        sequences: list[Sequence],
        mapping: LoRAMapping,
        forward: Callable[[], Tensor],
        images: list[ImageInputs | None],
    ) -> Tensor:
        """Call `forward` under `mapping` and return the logits, [rows, vocabulary]."""
        residents = self._slots.residents
        self._punica.update_metadata(mapping, residents)
        adapter_ids = [sequence.command.adapter_id for sequence in sequences]
        try:
            with self._model.image_mapper.mapped(adapter_ids, images, residents):
                return forward()
        except (*MODEL_CODE_ERRORS, MemoryError) as error:
            reason = self._local_failure(error, len(sequences), any(images))
            if reason is None:
                raise
            # A local name for the new exception would make a cycle that keeps the pass's tensors.
            raise ForwardError(reason, any(images)) from error

    def _local_failure(
        self, error: Exception, sequences: int, has_images: bool
    ) -> EngineError | None:
        """Return the error of these sequences alone; None where the engine can't continue."""
        if not self._model.group.is_trivial:
            # The other ranks are still in the forward pass and can't be interrupted.
            return None
        if is_out_of_memory(error):
            return DeviceOutOfMemory(f"a batch of {sequences} sequences: {error}")
        if has_images:
            return RequestRefused(f"the model can't process these images: {str(error)[:300]}")
        return None

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> list[int]:
        """Return the leader's choice on every rank."""
        group = self._model.group
        tokens = [NOT_FINITE] * len(sequences)
        if group.is_leader:
            tokens = sample([sequence.sampler for sequence in sequences], logits)
        return group.broadcast_numbers(tokens)


def _decode_mapping(sequences: list[Sequence], rows: int) -> LoRAMapping:
    """Map each row's one token to its adapter and dummy rows to the base model."""
    ids = [sequence.command.adapter_id for sequence in sequences]
    ids += [BASE] * (rows - len(sequences))
    return LoRAMapping(ids, ids)
