"""The wrapper of classification heads, which an adapter replaces whole (`modules_to_save`).

A saved head is multiplied exactly as the base head is, so its scores equal those of a model that
was fine-tuned in place, bit by bit.
"""

from torch import Tensor, nn
from torch.nn import functional

from engine.layers.base import SliceShape
from engine.layers.replicated import ReplicatedLinearWithLoRA
from engine.layout import ModuleKind


class ClassificationHeadWithLoRA(ReplicatedLinearWithLoRA):
    """A linear head with one slice of kind HEAD: a weight [labels, hidden], a bias [labels, 1].

    A saved head has no rank; the directory stores rank 1 for it. Where the layer has no bias, the
    saved one is zeros.
    """

    base_layer: nn.Linear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Linear heads."""
        return isinstance(layer, nn.Linear)

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice, a whole head."""
        base = self.base_layer
        return (SliceShape(base.in_features, base.out_features, kind=ModuleKind.HEAD),)

    def base_weights(self) -> tuple[Tensor, Tensor]:
        """Return the base head's weight and bias, in the shapes of a saved head's."""
        weight, bias = self.base_layer.weight, self.base_layer.bias
        column = weight.new_zeros(len(weight), 1) if bias is None else bias[:, None]
        return weight.detach(), column.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores; x: [..., hidden], one row per sequence or per token of the mapping."""
        y: Tensor = self.base_layer(x)
        if self._punica is not None and self._slices is not None:
            rows = x.reshape(-1, x.shape[-1])
            self._replace(y.view(len(rows), -1), rows)
        return y

    def _replace(self, y: Tensor, x: Tensor) -> None:
        """Write the scores of the rows whose adapter has a head."""
        arena = self._bound()
        groups = None if self._punica is None else self._punica.groups_of(len(x))
        for slot, start, end in () if groups is None else groups.spans:
            saved = arena.weights(slot, self._columns[0])
            if saved is not None and groups is not None:
                rows = groups.rows[start:end]
                weight, bias = (matrix.to(x.dtype) for matrix in saved)
                y[rows] = functional.linear(x[rows], weight, bias.flatten())
