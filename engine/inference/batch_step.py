"""Forward passes of a generation batch: prefill of new sequences, one decode step of running ones.

Row i of the KV cache belongs to the i-th running sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import MODEL_CODE_ERRORS, DeviceOutOfMemory, EngineError, RequestRefused
from engine.inference.admission import SlotTable
from engine.inference.decode_probe import choose_decode
from engine.inference.sampler import NOT_FINITE, sample
from engine.inference.sequence import Sequence
from engine.models.causal_model import CausalModel
from engine.models.kv_cache import BatchKVCache
from engine.models.vision.image_inputs import ImageInputs, position_offsets
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


class Prefill(NamedTuple):
    """The first tokens of new sequences, and the cache that holds their prompts."""

    tokens: list[int]
    cache: BatchKVCache


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
        self._strategy = choose_decode(model, punica, len(slots.residents), config)
        self._cache = BatchKVCache([], keeps_capacity=self._strategy.keeps_capacity)

    def prefill(self, sequences: list[Sequence]) -> Prefill:
        """Run the prompts, left-padded, in one forward pass with a cache of its own."""
        lengths = [len(sequence.prompt) for sequence in sequences]
        width = max(lengths)
        input_ids = torch.tensor([[0] * (width - len(s.prompt)) + s.prompt for s in sequences])
        images = [sequence.images for sequence in sequences]
        cache = BatchKVCache(lengths, position_offsets(images))
        forward = partial(self._model.forward, input_ids, cache, images)
        return Prefill(self._run(sequences, _prefill_mapping(sequences), forward, images), cache)

    def join(self, prefill: Prefill, rows: list[int]) -> None:
        """Append these rows of a prefill to the running batch; its cache must not be used again."""
        prefill.cache.keep(rows)
        self._cache.join(prefill.cache)

    def decode(self, running: list[Sequence]) -> list[int]:
        """Run the latest token of every running sequence."""
        self._cache.grow(1)
        tokens = torch.tensor([[sequence.output.tokens[-1]] for sequence in running])
        mapping = _decode_mapping(running, self._strategy.padded_rows(len(running)))
        return self._run(running, mapping, partial(self._strategy.run, tokens, self._cache), [])

    def keep(self, rows: list[int]) -> None:
        """Remove all running sequences but these from the cache."""
        self._cache.keep(rows)

    def _run(
        self,
        sequences: list[Sequence],
        mapping: LoRAMapping,
        forward: Callable[[], Tensor],
        images: list[ImageInputs | None],
    ) -> list[int]:
        """Call `forward` under `mapping` and sample from the logits that it returns."""
        residents = self._slots.residents
        self._punica.update_metadata(mapping, residents)
        adapter_ids = [sequence.command.adapter_id for sequence in sequences]
        try:
            with self._model.image_mapper.mapped(adapter_ids, images, residents):
                logits = forward()
        except MODEL_CODE_ERRORS as error:
            reason = self._local_failure(error, len(sequences), any(images))
            if reason is None:
                raise
            # A local name for the new exception would make a cycle that keeps the pass's tensors.
            raise ForwardError(reason, any(images)) from error
        return self._sample(sequences, logits)

    def _local_failure(
        self, error: Exception, sequences: int, has_images: bool
    ) -> EngineError | None:
        """Return the error of these sequences alone; None where the engine can't continue."""
        if not self._model.group.is_trivial:
            # The other ranks are still in the forward pass and can't be interrupted.
            return None
        if isinstance(error, torch.OutOfMemoryError):
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


def _prefill_mapping(sequences: list[Sequence]) -> LoRAMapping:
    """Map each row's own tokens to its adapter and the padding before them to the base model."""
    ids = torch.tensor([sequence.command.adapter_id for sequence in sequences])
    lengths = torch.tensor([len(sequence.prompt) for sequence in sequences])
    width = int(lengths.max())
    if width == 1:
        return LoRAMapping(ids, ids)
    is_own = torch.arange(width) >= (width - lengths)[:, None]
    return LoRAMapping((is_own * ids[:, None]).flatten(), ids, is_prefill=True)


def _decode_mapping(sequences: list[Sequence], rows: int) -> LoRAMapping:
    """Map each row's one token to its adapter and dummy rows to the base model."""
    ids = [sequence.command.adapter_id for sequence in sequences]
    ids += [BASE] * (rows - len(sequences))
    return LoRAMapping(ids, ids)
