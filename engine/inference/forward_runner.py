"""A forward pass under a mapping of adapters, its failures, and the choice of tokens."""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from loradock.engine.errors import (
    MODEL_CODE_ERRORS,
    DeviceOutOfMemory,
    EngineError,
    RequestRefused,
    is_out_of_memory,
)
from loradock.engine.inference.admission import SlotTable
from loradock.engine.inference.batch import ForwardError
from loradock.engine.inference.sequence import Sequence as Generation
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.vision.image_inputs import ImageInputs
from loradock.engine.punica.mapping import LoRAMapping
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.sampling.logprobs import PROMPT_LOGITS_BYTES_MAX, PromptChunk, score_prompts
from loradock.engine.sampling.sampler import NOT_FINITE, sample


class ForwardRunner:
    """Runs forward passes of some sequences and samples their tokens."""

    def __init__(self, model: CausalModel, punica: PunicaWrapper, slots: SlotTable) -> None:
        self.model: Final = model
        self.slots: Final = slots
        self._punica = punica

    def forward(
        self,
        sequences: Sequence[Generation],
        mapping: LoRAMapping,
        forward: Callable[[], Tensor],
        images: Sequence[ImageInputs | None] = (),
    ) -> Tensor:
        """Call `forward` under `mapping` and return its logits.

        Raises `ForwardError` where only these sequences are affected, and the model's own error
        where the engine can't continue.
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
        """Return the failure of some sequences alone; raise the error where the engine must end."""
        reason = self._local_failure(error, sequences, has_images)
        if reason is None:
            raise error
        return ForwardError(reason, has_images)

    def _local_failure(
        self, error: Exception, sequences: int, has_images: bool
    ) -> EngineError | None:
        """Return the error of these sequences alone; None where the engine can't continue."""
        if not self.model.group.is_trivial:
            # The other ranks are still in the forward pass and can't be interrupted.
            return None
        if is_out_of_memory(error):
            return DeviceOutOfMemory(f"a batch of {sequences} sequences: {error}")
        if has_images:
            return RequestRefused(f"the model can't process these images: {str(error)[:300]}")
        return None

    @property
    def scored_tokens_max(self) -> int:
        """The most tokens of a pass whose logits fit into the bound on those of prompts."""
        token_bytes = torch.float32.itemsize * self.model.vocab_size
        return max(1, PROMPT_LOGITS_BYTES_MAX // token_bytes)

    def score(self, chunks: Sequence[PromptChunk]) -> None:
        """Store the log-probabilities of prompts' tokens; only the leader reports them."""
        if self.model.group.is_leader:
            score_prompts(chunks)

    def sample(self, sequences: Sequence[Generation], logits: Tensor) -> list[int]:
        """Return a token per sequence, `NOT_FINITE` where there is none: the leader's on all ranks.

        logits: [sequences, vocabulary].
        """
        group = self.model.group
        tokens = [NOT_FINITE] * len(sequences)
        if group.is_leader:
            tokens = sample([sequence.sampler for sequence in sequences], logits)
        return group.broadcast_numbers(tokens)


def adapter_rows(sequences: Sequence[Generation]) -> Tensor:
    """Return each sequence's adapter id, [sequences] int64."""
    return torch.tensor([one.command.adapter_id for one in sequences], dtype=torch.int64)
