"""The wrapper of linear layers that every rank holds whole: `nn.Linear` and `Conv1D`.

The base layer's own forward computes the base output, so the layer may be of any kind, for example
quantised; only the delta is computed here.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape
from loradock.engine.models.library.names import Conv1D


class ReplicatedLinearWithLoRA(BaseLayerWithLoRA):
    """A linear layer with one slice; A and B are whole."""

    base_layer: nn.Linear | Conv1D

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Linear layers whose forward is called; attention reads the excluded kind's weight."""
        return not isinstance(layer, NonDynamicallyQuantizableLinear) and _is_product(layer)

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice over the whole layer; `Conv1D` stores its weight as [in, out]."""
        if isinstance(self.base_layer, Conv1D):
            return (SliceShape(self.base_layer.nx, self.base_layer.nf, transposed=True),)
        return (SliceShape(self.base_layer.in_features, self.base_layer.out_features),)

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, for models that read its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The base layer's bias."""
        return self.base_layer.bias

    @property
    def saved_shapes(self) -> tuple[SliceShape, ...]:
        """The whole layer, if it is a plain one: others compute more than a product."""
        if type(self.base_layer) is not nn.Linear:
            return ()
        return (SliceShape(self.base_layer.in_features, self.base_layer.out_features),)

    @property
    def affine_shapes(self) -> tuple[SliceShape, ...]:
        """The layer, if its weight can be read and it is only a product with it."""
        if isinstance(self.base_layer, Conv1D):
            return (SliceShape(self.base_layer.nx, self.base_layer.nf),)
        return self.saved_shapes if type(self.base_layer.weight.data) is Tensor else ()

    def base_weights(self, index: int) -> tuple[Tensor, Tensor | None] | None:  # noqa: ARG002
        """Return the base layer's."""
        weight, bias = self.base_layer.weight, self.base_layer.bias
        return (weight.T if isinstance(self.base_layer, Conv1D) else weight), bias

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return `x @ W.T + bias + delta`; the arguments are those of the base layer.

        The first, x: [..., in_features], has one row per mapped token.
        """
        x, base = split_call(self.base_layer, inputs, named)
        if type(self.base_layer) is nn.Linear:
            base = self.plain_product
        return self.with_lora(base, x)


def split_call(
    layer: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the first argument of a call, and the layer as a function of it alone.

    Models may call a layer with names, or pass more to a kind of their own.
    """
    if len(inputs) == 1 and not named:
        return inputs[0], layer
    rest = dict(named)
    if inputs:
        return inputs[0], lambda x: layer(x, *inputs[1:], **rest)
    first = next(iter(inspect.signature(layer.forward).parameters))
    return rest.pop(first), lambda x: layer(x, **rest)


def _is_product(layer: nn.Module) -> bool:
    """Whether a layer returns a product with its weight: a model's own kind may return more."""
    if type(layer) is nn.Linear or not isinstance(layer, nn.Linear):
        return True
    if type(layer).forward is nn.Linear.forward or not layer.weight.is_floating_point():
        return True
    try:
        with torch.inference_mode():
            y = layer(layer.weight.new_zeros(2, layer.in_features))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # A kind that is split over ranks or quantised may not run here.
        return True
    return isinstance(y, Tensor) and y.shape == (2, layer.out_features)
