"""The wrapper of classification heads, which an adapter replaces whole (`modules_to_save`).

A saved head is multiplied exactly as the base head is, so its scores equal those of a model that
was fine-tuned in place, bit by bit.
"""

from torch import Tensor, nn

from loradock.engine.layers.base import SliceShape
from loradock.engine.layers.replicated import ReplicatedLinearWithLoRA
from loradock.engine.layers.saved import SavedWeights
from loradock.engine.layout import ModuleKind
from loradock.engine.residency.arena import Arena


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
    def saved_shapes(self) -> tuple[SliceShape, ...]:
        """None: the layer's only slice is the whole head."""
        return ()

    @property
    def affine_shapes(self) -> tuple[SliceShape, ...]:
        """None: a head is replaced whole."""
        return ()

    @property
    def _saved_widths(self) -> tuple[int, ...]:
        return (self.base_layer.out_features,)

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice, a whole head."""
        base = self.base_layer
        return (SliceShape(base.in_features, base.out_features, kind=ModuleKind.HEAD),)

    def base_head(self) -> tuple[Tensor, Tensor]:
        """Return the base head's weight and bias, in the shapes of a saved head's."""
        weight, bias = self.base_layer.weight, self.base_layer.bias
        column = weight.new_zeros(len(weight), 1) if bias is None else bias[:, None]
        return weight.detach(), column.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores; x: [..., hidden], one row per sequence or per token of the mapping."""
        y: Tensor = self.base_layer(x)
        return self.replace_rows(y, x)

    def _bind(self, arena: Arena) -> None:
        self._saved = (SavedWeights(arena, self._columns[0]),)
