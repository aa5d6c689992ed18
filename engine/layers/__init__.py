"""Wrapped layers, one family a file, and the one table from base layer to wrapper.

What it is: the base model's layers with adapters added. What it is not: preparation of a whole
model, which is `engine.model`'s. One rule: a layer is chosen by its type and by the wrapper's own
`can_replace_layer`, never by a class's name.
"""

from typing import Final

from torch import nn

from engine.layers.base import BaseLayerWithLoRA, SliceShape
from engine.layers.replicated import ReplicatedLinearWithLoRA

__all__ = ["WRAPPERS", "BaseLayerWithLoRA", "ReplicatedLinearWithLoRA", "SliceShape", "wrapper_of"]

WRAPPERS: Final[tuple[tuple[type[nn.Module], type[BaseLayerWithLoRA]], ...]] = (
    (nn.Linear, ReplicatedLinearWithLoRA),
)
"""In order of preference: the first whose type and `can_replace_layer` accept a layer wraps it."""


def wrapper_of(layer: nn.Module) -> type[BaseLayerWithLoRA] | None:
    """The class that wraps `layer`; None where it stays as it is."""
    for base_type, wrapper in WRAPPERS:
        if isinstance(layer, base_type) and wrapper.can_replace_layer(layer):
            return wrapper
    return None
