"""A base model that generates: its layers wrapped, proved fit for batches, and its forward pass.

What it is: a `transformers` model as `engine.generate` runs it. What it is not: generation, the
choice of layers, or a holder of adapter weights. One rule: what can't be batched rightly is refused
when the model is prepared, with the reason, and never found out by a request.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from engine.config import LoRAConfig
from engine.models.image_batch_probe import try_images
from engine.models.image_processor import ImageReader, ImagesRefused, Processor
from engine.models.kv_cache import RowCache, left_padding_mask
from engine.models.probe import generation_trial
from engine.models.served_model import ServedModel, Tokenizer
from engine.models.vision.media import Media, media_arguments

_NO_PROCESSOR: Final = ImagesRefused("the model was prepared without a processor")


class PreparedModel(ServedModel):
    """A causal language model, or the language part of an image-text model, to generate with.

    `context_tokens_max`: prompt and output of one row together. `eos_ids`: the tokens that end an
    output. `reader` reads prompts with images; it is None where they are refused, and then
    `without_images` says why.
    """

    task = "generate"

    def __init__(
        self,
        model: PreTrainedModel,
        lora_config: LoRAConfig,
        tokenizer: Tokenizer = None,
        context_tokens_max: int = 0,
        processor: Processor | ImagesRefused = _NO_PROCESSOR,
    ) -> None:
        """Wrap the layers of `model` in place; `processor` reads images, or says why none are."""
        super().__init__(model, tokenizer, context_tokens_max)
        self.eos_ids = _eos_ids(model, tokenizer)
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._prepare(generation_trial(self.forward), lora_config)
        self.reader, self.without_images = self._reader_of(processor)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, rows: RowCache, media: Sequence[Media | None] = ()
    ) -> Tensor:
        """The logits after each row's last token, [rows, vocabulary]; fills `rows` in place.

        input_ids: [rows, tokens] int64, on any device; a row that brings fewer tokens has padding
        on the left. `rows.lengths` already counts the new tokens, and `rows.offsets` the images.
        media: in a prefill with images, what each row has.
        """
        tokens = input_ids.shape[1]
        lengths, following = torch.tensor([rows.lengths, rows.positions], device=self.device)
        mask = left_padding_mask(lengths, rows.width + tokens)
        places = torch.arange(-tokens, 0, device=self.device)
        positions = (following[:, None] + places).clamp(min=0)
        own: dict[str, Tensor] = {}
        if any(media):
            found = media_arguments(media, positions.cpu())
            own = {name: tensor.to(self.device) for name, tensor in found.items()}
            positions = own.pop("position_ids")
        return self.run(input_ids.to(self.device), mask, positions, rows.cache, own)

    @torch.inference_mode()
    def run(
        self,
        input_ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: Cache,
        media: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The logits after the last column, [rows, vocabulary]; all tensors are on the device.

        input_ids: [rows, tokens] int64. mask: [rows, columns] int64, 1 for what a row may see.
        positions: [rows, tokens] int64, or what media make of them.
        """
        arguments: dict[str, Any] = {
            "attention_mask": mask,
            "past_key_values": cache,
            "use_cache": True,
            **(media or {}),
        }
        if "position_ids" in self._accepts:
            arguments["position_ids"] = positions
        if "logits_to_keep" in self._accepts:
            arguments["logits_to_keep"] = 1
        output = self.model(input_ids, **arguments)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _reader_of(self, processor: Processor | ImagesRefused) -> tuple[ImageReader | None, str]:
        """What reads images, once it is proved that they can be batched; else why they can't."""
        if isinstance(processor, ImagesRefused):
            return None, str(processor)
        try:
            reader = ImageReader(processor, self, self._accepts)
            try_images(self.forward, reader)
        except ImagesRefused as refusal:
            return None, str(refusal)
        return reader, ""


def _eos_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
