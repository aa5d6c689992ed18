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

from engine.adapters.compatibility import ModelSide
from engine.adapters.module_paths import equivalences_of
from engine.config import LoRAConfig
from engine.errors import ModelRefused
from engine.layers import BaseLayerWithLoRA, wrappers_for
from engine.layout import ModuleShape
from engine.models.preparation import Scope, module_shapes, prepare_layers
from engine.models.probe import Trial
from engine.models.tasks import Task
from engine.models.vision.encoder import ImagePart, find_image_part
from engine.models.vision.mapping import NO_PUNICAS, ImageMapper, ImagePunicas
from engine.parallel import SINGLE, ParallelGroup
from engine.punica.mapping import MappingType
from engine.punica.wrapper import PunicaWrapper
from engine.residency.arena import Arena

_MEDIA_TOKENS: Final = ("image_token_id", "video_token_id", "audio_token_id")

Tokenizer = Any
"""A `transformers` tokenizer; the library brings no types."""


class ServedModel:
    """A base model on its way to be served; its task's class calls `_prepare` when it can run.

    `layers`: name -> wrapper, in the directory's order; `parts`: which part of the model each of
    them is of; `image_layers`: the paths of those that read images, wrapped or not.
    `image_part`: what reads images, None where requests bring none. `image_mapper`: has images run
    under their adapters. `shapes`: one `ModuleShape` a slice, by index. `vocab_size`: the rows of
    the token embedding. `context_tokens_max`: the tokens of one row. `tokenizer` None: prompts are
    token ids. `media_tokens`: those that stand for an image or the like, which a text alone may not
    have. `without_images`: why prompts may bring none; empty where they may. `group`: the ranks
    that hold it together. `without_head`: it classifies, and was saved without the head for that.
    Raises `ModelRefused` for a model that can't be served.
    """

    task: Task
    without_images: str = "a model that embeds or classifies takes text alone"
    group: ParallelGroup = SINGLE
    without_head: bool = False
    image_part: ImagePart | None
    layers: Mapping[str, BaseLayerWithLoRA]
    parts: Mapping[str, MappingType]
    image_layers: frozenset[str]
    shapes: tuple[ModuleShape, ...]

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context_tokens_max: int
    ) -> None:
        """`context_tokens_max` 0 takes the model's own."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device: torch.device = model.device
        self.image_mapper = ImageMapper(None)
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.context_tokens_max = _context_tokens_max(model.config, context_tokens_max)
        found = (getattr(model.config, name, None) for name in _MEDIA_TOKENS)
        self.media_tokens = frozenset(token for token in found if token is not None)

    def _prepare(self, trial: Trial, lora_config: LoRAConfig) -> None:
        """Wrap the model's layers in place."""
        self.image_part = find_image_part(self.model) if self.task == "generate" else None
        if lora_config.enable_tower_connector_lora and self.image_part is None:
            raise ModelRefused(
                "enable_tower_connector_lora is set, and this model reads no images; leave it off"
            )
        scope = Scope(
            lora_config.target_modules,
            wrappers_for(lora_config.enable_mixed_moe_lora_format, lora_config.fully_sharded_loras),
            self.image_part,
            lora_config.enable_tower_connector_lora,
        )
        prepared = prepare_layers(self.model, trial, self.vocab_size, scope)
        self.layers, self.parts, self.image_layers = prepared
        self.shapes = module_shapes(self.layers)

    def side(self, lora_config: LoRAConfig) -> ModelSide:
        """What an adapter is held against; `lora_config` has its dtype resolved."""
        return ModelSide(
            {shape.name: shape for shape in self.shapes},
            lora_config,
            equivalences_of(self.model),
            self.image_layers,
            wants_head=self.without_head,
        )

    def bind(
        self, arena: Arena, punica: PunicaWrapper, image_punicas: ImagePunicas = NO_PUNICAS
    ) -> None:
        """Let every wrapped layer read its columns of `arena`, and its part's mapping.

        `image_punicas`: those of the tower and of the connector; a layer of a part that has none
        computes the base.
        """
        columns = iter([shape.index for shape in self.shapes])
        by_part = {MappingType.LANGUAGE: punica, **image_punicas}
        for name, layer in self.layers.items():
            layer.create_lora_weights(arena, list(islice(columns, len(layer.slice_shapes))))
            if self.parts[name] in by_part:
                layer.set_mapping(by_part[self.parts[name]])
        self.image_mapper = ImageMapper(self.image_part, image_punicas)


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
