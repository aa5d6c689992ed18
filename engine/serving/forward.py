"""Forward passes: of a batch under its adapters, with their failures, and packed ones over blocks.

A batch decides what a pass consists of and owns its sequences' keys and values. There are two: over
blocks of tokens (`engine/serving/paged_batch.py`), whose passes are packed, and over a padded cache
(`engine/serving/padded_batch.py`). Both report to `BatchEvents`, which the scheduler implements.
"""

import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from loradock.engine.errors import (
    MODEL_CODE_ERRORS,
    DeviceOutOfMemory,
    EngineError,
    Malformed,
    is_out_of_memory,
)
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_inputs import ImageInputs
from loradock.engine.models.library.names import PreTrainedConfig
from loradock.engine.punica.mapping import LoRAMapping
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.serving.attention import longest_lookback, packed_attention
from loradock.engine.serving.blocks import BlockPool, BlockTable, root_key
from loradock.engine.serving.paged_cache import PackedChunk, PackedStep, PagedKVCache
from loradock.engine.serving.queue import SlotTable, WaitingQueue
from loradock.engine.serving.sampling import (
    NOT_FINITE,
    PROMPT_LOGITS_BYTES_MAX,
    PromptChunk,
    sample,
    score_prompts,
)
from loradock.engine.serving.sequence import Sequence
from loradock.messages.views import KVLayout


class ForwardError(Exception):
    """A forward pass that failed for its own sequences, with the error to report; others continue.

    The cache of these sequences may be half written, so none of them can continue with it.
    """

    def __init__(self, error: EngineError, has_images: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.has_images = has_images


class BatchEvents(Protocol):
    """The reports of a batch during a step."""

    def on_tokens(self, sequences: list[Sequence], tokens: list[int]) -> list[int]:
        """Accept a token per sequence; return the indices of the sequences that continue."""

    def on_failure(self, sequences: list[Sequence], failure: ForwardError) -> None:
        """Fail these sequences, which have left the batch, or let them wait again."""

    def on_preemption(self, sequences: list[Sequence]) -> None:
        """Let these sequences, which have left the batch, wait again."""


class Waiting(NamedTuple):
    """The sequences that may enter a batch.

    `sequences_max`: the most sequences that the batch may have. `one_by_one`: whether sequences are
    prefilled one at a time, because one of them may have caused a failure. `is_resident`: whether
    a sequence's adapter is in its slot; a sequence for which it is not has failed.
    """

    queue: WaitingQueue[Sequence]
    sequences_max: int
    one_by_one: bool
    is_resident: Callable[[Sequence], bool]


class KVUse(NamedTuple):
    """The bytes of keys and values, and their budget, 0 if there is none; and their layout.

    A paged cache has `blocks` of `block_tokens` tokens each. `shares_prefixes`: whether prompts
    reuse those of earlier ones.
    """

    size_bytes: int
    size_bytes_max: int
    layout: KVLayout = ""
    blocks: int = 0
    block_tokens: int = 0
    shares_prefixes: bool = False


class ForwardRunner:
    """Runs forward passes of some sequences and samples their tokens."""

    def __init__(self, model: CausalModel, punica: PunicaWrapper, slots: SlotTable) -> None:
        self.model: Final = model
        self.slots: Final = slots
        self._punica = punica

    def forward(
        self,
        sequences: SequenceOf[Sequence],
        mapping: LoRAMapping,
        forward: Callable[[], Tensor],
        images: SequenceOf[ImageInputs | None] = (),
    ) -> Tensor:
        """Call `forward` under `mapping` and return its logits.

        Raises `ForwardError` if only these sequences are affected, and the model's own error if the
        engine can't continue.
        """
        residents = self.slots.residents
        self._punica.update_metadata(mapping, residents)
        adapter_ids = [sequence.command.adapter_id for sequence in sequences]
        try:
            with self.model.image_mapper.mapped(adapter_ids, images, residents):
                return forward()
        except (*MODEL_CODE_ERRORS, MemoryError) as error:
            # A local name for the new exception would make a cycle that keeps the pass's tensors.
            raise self.failure_of(error, len(sequences), has_images=any(images)) from error

    def failure_of(
        self, error: Exception, sequences: int, *, has_images: bool = False
    ) -> ForwardError:
        """Return the failure of some sequences alone; raise the error if the engine must end."""
        if not self.model.group.is_trivial:
            # The other ranks are still in the forward pass and can't be interrupted.
            raise error
        if is_out_of_memory(error):
            reason = f"a batch of {sequences} sequences: {error}"
            return ForwardError(DeviceOutOfMemory(reason), has_images)
        if has_images:
            reason = f"the model can't process these images: {str(error)[:300]}"
            return ForwardError(Malformed(reason), has_images)
        raise error

    def prefix_root(self, sequence: Sequence) -> bytes:
        """Return the key before the first block of a sequence, for those that can share blocks."""
        version, images = self.slots.version_of(sequence.command), sequence.images
        length = self.model.row_lengths.key_of(sequence.prompt_length)
        return root_key(version, images.digest if images else b"", length)

    @property
    def scored_tokens_max(self) -> int:
        """The most tokens of a pass whose logits fit into the bound on those of prompts."""
        token_bytes = torch.float32.itemsize * self.model.vocab_size
        return max(1, PROMPT_LOGITS_BYTES_MAX // token_bytes)

    def score(self, chunks: SequenceOf[PromptChunk]) -> None:
        """Store the log-probabilities of prompts' tokens; only the leader reports them."""
        if self.model.group.is_leader:
            score_prompts(chunks)

    def sample(self, sequences: SequenceOf[Sequence], logits: Tensor) -> list[int]:
        """Return a token per sequence, the leader's on all ranks; `NOT_FINITE` if there is none.

        logits: [sequences, vocabulary].
        """
        group = self.model.group
        tokens = [NOT_FINITE] * len(sequences)
        if group.is_leader:
            tokens = sample([sequence.sampler for sequence in sequences], logits)
        return group.broadcast_numbers(tokens)


class PackedModel:
    """A model over a paged cache of `blocks` blocks: all new tokens in one line, without padding.

    `lookback`: how many tokens before itself a token attends to at most, in any layer; sequences
    may give up the others. `groups_decodes`: as in `PackedStep`.
    """

    def __init__(self, model: CausalModel, blocks: int, lookback: int = sys.maxsize) -> None:
        self.cache: Final = PagedKVCache(blocks)
        self.lookback: Final = lookback
        self.groups_decodes = model.device.type != "cpu"
        self._model = model
        self._configs = _configs_of(model.model.config)

    def allocate(self) -> None:
        """Make the buffers of all layers now, by a pass of one token."""
        self._run_one_token()

    def measure_lookback(self) -> int:
        """Return the longest lookback of the masks of all layers, by a pass of one token."""
        functions = self._run_one_token().mask_functions
        return longest_lookback(functions, self._model.max_model_len, self._model.device)

    def forward(self, chunks: SequenceOf[PackedChunk]) -> Tensor:
        """Return the logits after the last `logits` tokens of each chunk, [logits, vocabulary].

        They are in the order of the chunks, which need one each unless their tokens are scored.
        The tables have blocks for the new tokens, and do not count them yet. Raises `RuntimeError`
        if a layer attends to a token whose block its sequence has given up.
        """
        step = PackedStep(chunks, self._model.device, groups_decodes=self.groups_decodes)
        return self._run(chunks, step)

    def _run_one_token(self) -> PackedStep:
        table = BlockTable(BlockPool(self.cache.blocks), None)
        table.reserve(1)
        chunks = [PackedChunk([0], table)]
        step = PackedStep(chunks, self._model.device)
        self._run(chunks, step)
        return step

    @torch.inference_mode()
    def _run(self, chunks: SequenceOf[PackedChunk], step: PackedStep) -> Tensor:
        model, device = self._model, self._model.device
        tokens = torch.tensor(
            [[token for chunk in chunks for token in chunk.tokens]], device=device
        )
        arguments: dict[str, Any] = {model.cache_argument: self.cache.cache, "use_cache": True}
        if "position_ids" in model.accepts:
            positions = [
                index + chunk.offset
                for chunk in chunks
                for index in range(chunk.table.length, chunk.end)
            ]
            arguments["position_ids"] = torch.tensor([positions], device=device)
        selects = "logits_to_keep" in model.accepts
        if selects:
            arguments["logits_to_keep"] = step.kept
        prompts = [chunk.prompt for chunk in chunks for _ in chunk.tokens]
        longest = max(max(chunk.end, chunk.prompt) for chunk in chunks)
        self.cache.step = step
        try:
            with (
                packed_attention(self._configs, step),
                model.row_lengths.of([prompts], longest, device),
            ):
                output = model.model(tokens, **arguments)
        finally:
            self.cache.step = None
        logits: Tensor = output.logits[0]
        return logits if selects else logits[step.kept]


def _configs_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and those of its parts, parents first."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(found for part in parts if part is not None for found in _configs_of(part))]


def adapter_ids_of(sequences: SequenceOf[Sequence]) -> Tensor:
    """Return each sequence's adapter id, [sequences] int64."""
    return torch.tensor([one.command.adapter_id for one in sequences], dtype=torch.int64)
