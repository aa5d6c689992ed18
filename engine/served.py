"""What every served model has, whatever it is for.

What it is: the base model with its wrapped layers by name, its tokenizer and its limits. What it is
not: a forward pass; each task has its own. One rule: the layers' order is the directory's, so an
adapter that was packed for a model fits every process that prepared it alike.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from engine.arena import Arena
from engine.config import LoRAConfig
from engine.errors import ModelRefused
from engine.layers import BaseLayerWithLoRA, wrappers_for
from engine.layout import ModuleShape
from engine.parallel import SINGLE, ParallelGroup
from engine.preparation import module_shapes, prepare_layers
from engine.probe import Trial
from engine.punica import PunicaWrapper
from engine.tasks import Task

_MEDIA_TOKENS: Final = ("image_token_id", "video_token_id", "audio_token_id")

Tokenizer = Any
"""A `transformers` tokenizer; the library brings no types."""


class ServedModel:
    """A base model on its way to be served; its task's class calls `_prepare` when it can run.

    `layers`: name -> wrapper, in the directory's order. `shapes`: one `ModuleShape` a slice, by
    index. `vocab_size`: the rows of the token embedding. `context_tokens_max`: the tokens of one
    row. `tokenizer` None: prompts are token ids. `media_tokens`: those that stand for an image or
    the like, which prompts may not have. `group`: the ranks that hold it together. Raises
    `ModelRefused` for a model that can't be served.
    """

    task: Task
    group: ParallelGroup = SINGLE
    layers: Mapping[str, BaseLayerWithLoRA]
    shapes: tuple[ModuleShape, ...]

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context_tokens_max: int
    ) -> None:
        """`context_tokens_max` 0 takes the model's own."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device: torch.device = model.device
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.context_tokens_max = _context_tokens_max(model.config, context_tokens_max)
        found = (getattr(model.config, name, None) for name in _MEDIA_TOKENS)
        self.media_tokens = frozenset(token for token in found if token is not None)

    def _prepare(self, trial: Trial, lora_config: LoRAConfig) -> None:
        """Wrap the model's layers in place."""
        for name in ("enable_tower_connector_lora", "default_mm_loras"):
            if getattr(lora_config, name):
                raise ModelRefused(
                    f"{name} is set, and requests bring text alone: a tower or connector would "
                    "never be run; leave it out"
                )
        table = wrappers_for(
            lora_config.enable_mixed_moe_lora_format, lora_config.fully_sharded_loras
        )
        self.layers = prepare_layers(
            self.model, trial, self.vocab_size, lora_config.target_modules, table
        )
        self.shapes = module_shapes(self.layers)

    def bind(self, arena: Arena, punica: PunicaWrapper) -> None:
        """Let every wrapped layer read its columns of `arena`, and the batch's mapping."""
        columns = iter([shape.index for shape in self.shapes])
        for layer in self.layers.values():
            layer.create_lora_weights(arena, list(islice(columns, len(layer.slice_shapes))))
            layer.set_mapping(punica)


def _context_tokens_max(config: Any, wanted: int) -> int:
    text_config = config.get_text_config(decoder=True)
    own = getattr(text_config, "max_position_embeddings", 0) or 0
    known = [limit for limit in (own, wanted, *_batch_wide_limits(text_config)) if limit > 0]
    if not known:
        raise ModelRefused(
            "the model's config has no max_position_embeddings; set context_tokens_max"
        )
    return min(known)


def _batch_wide_limits(text_config: Any) -> list[int]:
    """Lengths beyond which one row changes the position encoding of all rows in its batch.

    "longrope" goes over to other frequencies as soon as any row is that long, and what the short
    rows have in the cache was made with the first ones.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    return [
        kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
