"""A model of which nothing but its layers is known: a custom module or a diffusion transformer.

There is no probe, because the arguments of its forward are unknown. So layers are not packed, and
each one's input must have one row per entry of a mapping, in its order: `index_mapping` for layers
that see every token, `prompt_mapping` for those that see one row per sample.
"""

import torch
from torch import nn

from engine.adapters.module_paths import Equivalence
from engine.config import LoRAConfig
from engine.errors import ModelRefused
from engine.layers import wrappers_for
from engine.models.preparation import WrapScope, module_shapes, prepare_unprobed
from engine.models.served_model import ServedModel
from engine.models.vision.mapping import ImageMapper


class PlainModel(ServedModel):
    """Any module with linear or embedding layers; only the program that holds it can run it."""

    task = "embed"
    equivalences: tuple[Equivalence, ...] = ()

    def __init__(self, model: nn.Module, lora_config: LoRAConfig) -> None:
        """Wrap the layers of `model` in place; raises `ModelRefused`."""
        self.model = model.eval().requires_grad_(False)
        first = next((p for p in model.parameters() if p.dtype.is_floating_point), None)
        if first is None:
            raise ModelRefused(f"{type(model).__name__} has no floating parameter to adapt")
        self.device: torch.device = first.device
        self.dtype = first.dtype
        self.tokenizer = None
        self.image_mapper = ImageMapper(None)
        self.image_part = None
        self.vocab_size = self.context_tokens_max = 0
        self.media_tokens = frozenset()
        self._warn_about_unused(lora_config)
        table = wrappers_for(lora_config.enable_mixed_moe_lora_format, fully_sharded=False)
        scope = WrapScope(lora_config.target_modules, table)
        self.layers, self.parts, self.image_layers, self.norms = prepare_unprobed(model, scope)
        self.shapes = module_shapes(self.layers)
