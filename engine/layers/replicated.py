"""A linear layer that every rank holds whole.

What it is: the wrapper of `nn.Linear`, and of `Conv1D`, which is one with its weight the other way
round. What it is not: sharded; the parallel kinds have files of their own. One rule: the base
layer's own forward makes the base output, so whatever that layer is (quantised, say), only the
delta is ours.
"""

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from engine.layers.base import BaseLayerWithLoRA, SliceShape


class ReplicatedLinearWithLoRA(BaseLayerWithLoRA):
    """A linear layer with one slice; A and B are whole."""

    base_layer: nn.Linear | Conv1D

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every linear layer whose forward is called; attention modules read this one's weight."""
        return not isinstance(layer, NonDynamicallyQuantizableLinear)

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice, as wide as the layer; `Conv1D` keeps its weight as [in, out]."""
        if isinstance(self.base_layer, Conv1D):
            return (SliceShape(self.base_layer.nx, self.base_layer.nf, transposed=True),)
        return (SliceShape(self.base_layer.in_features, self.base_layer.out_features),)

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, for models that ask for its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The base layer's bias."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """`x @ W.T + bias + delta`; x: [..., in_features], one row a token of the mapping."""
        return self.with_lora(self.base_layer, x)
