"""A base model that generates: its layers wrapped, verified for batching, and its forward pass.

A model that can't be batched correctly is refused when it is prepared, with the reason, before any
request.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from engine.config import LoRAConfig
from engine.models.image_batch_probe import probe_images
from engine.models.image_processor import ImagePromptReader, ImagesRefused, Processor
from engine.models.kv_cache import BatchKVCache, left_padding_mask
from engine.models.probe import generation_probe
from engine.models.served_model import ServedModel, Tokenizer
from engine.models.vision.image_inputs import ImageInputs, image_arguments

_NO_PROCESSOR: Final = ImagesRefused("the model was prepared without a processor")


class CausalModel(ServedModel):
    """A causal language model, or the language part of an image-text model, that generates.

    `context_tokens_max`: prompt and output of one row together. `eos_ids`: the tokens that end an
    output. `accepts`: the names of the model's arguments. `prompt_reader` reads prompts with
    images. It is None where these are refused, and then `no_images_reason` contains the reason.
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
        """Wrap the layers of `model` in place; `processor` may be a reason to refuse images."""
        super().__init__(model, tokenizer, context_tokens_max)
        self.eos_ids = _eos_ids(model, tokenizer)
        self.accepts = frozenset(inspect.signature(model.forward).parameters)
        self._prepare(generation_probe(self.forward), lora_config)
        self.prompt_reader, self.no_images_reason = self._make_reader(processor)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, cache: BatchKVCache, images: Sequence[ImageInputs | None] = ()
    ) -> Tensor:
        """Return the logits after each row's last token, [rows, vocabulary]; fill `cache` in place.

        input_ids: [rows, tokens] int64, on any device; rows with fewer tokens are padded on the
        left. `cache.lengths` already counts the new tokens, and `cache.offsets` the images. images:
        in a prefill with images, one entry per row.
        """
        tokens = input_ids.shape[1]
        lengths, next_positions = torch.tensor([cache.lengths, cache.positions], device=self.device)
        mask = left_padding_mask(lengths, cache.width + tokens)
        offsets = torch.arange(-tokens, 0, device=self.device)
        positions = (next_positions[:, None] + offsets).clamp(min=0)
        image_tensors: dict[str, Tensor] = {}
        if any(images):
            arguments = image_arguments(images, positions.cpu())
            image_tensors = {name: tensor.to(self.device) for name, tensor in arguments.items()}
            positions = image_tensors.pop("position_ids")
        return self.run(input_ids.to(self.device), mask, positions, cache.cache, image_tensors)

    @torch.inference_mode()
    def run(
        self,
        input_ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: Cache,
        image_tensors: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the logits after the last column, [rows, vocabulary], from tensors on the device.

        input_ids: [rows, tokens] int64. mask: [rows, columns] int64, 1 for the columns that a row
        attends to. positions: [rows, tokens] int64, or the shape that the model expects with
        images.
        """
        arguments: dict[str, Any] = {
            "attention_mask": mask,
            "past_key_values": cache,
            "use_cache": True,
            **(image_tensors or {}),
        }
        if "position_ids" in self.accepts:
            arguments["position_ids"] = positions
        if "logits_to_keep" in self.accepts:
            arguments["logits_to_keep"] = 1
        output = self.model(input_ids, **arguments)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _make_reader(
        self, processor: Processor | ImagesRefused
    ) -> tuple[ImagePromptReader | None, str]:
        """Return a reader of prompts with images, or None and why they can't be batched."""
        if isinstance(processor, ImagesRefused):
            return None, str(processor)
        try:
            reader = ImagePromptReader(processor, self, self.accepts)
            probe_images(self.forward, reader)
        except ImagesRefused as refusal:
            return None, str(refusal)
        return reader, ""


def _eos_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
