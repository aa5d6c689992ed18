"""Linear layers that read the same input, packed into one, and the modules that replace them.

The modules share one call. A part of its output is returned only for the very tensor object that it
was computed from; anything else is computed again.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from loradock.engine.layers.tensor_parallel import ColumnParallelLinear
from loradock.engine.layout import Shard
from loradock.engine.parallel import SINGLE


class ChildShare(NamedTuple):
    """The size of a part of a packed layer as a whole, and the rows of it on this rank.

    `rows` None: all of them.
    """

    whole_width: int
    rows: tuple[range, ...] | None = None

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """Return the share of a linear layer on this rank."""
        if isinstance(layer, ColumnParallelLinear):
            return cls(layer.whole_out_features, layer.rows)
        return cls(layer.out_features)

    @property
    def shard(self) -> Shard:
        """This rank's shard of an adapter's A and B."""
        return Shard(b_rows=self.rows)


class PackedLinear(nn.Linear):
    """Linear layers whose weights and outputs are concatenated: one GEMM computes all parts.

    `widths`: the columns of each part. `child_names`: the names of the parts in the model; empty
    if the model names them as one layer, as with a checkpoint that stores them fused. `shares`:
    if the outputs are split over `group`, the share of each part.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        widths: Sequence[int],
        child_names: Sequence[str] = (),
        without_bias: Collection[int] = (),
    ) -> None:
        """`weight` [sum of widths, in_features] and `bias` [sum of widths] are used without a copy.

        `without_bias`: indices of the children that have no bias.
        """
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, bias is not None, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.widths = list(widths)
        self.child_names = tuple(child_names)
        self._without_bias = frozenset(without_bias)
        self.group = SINGLE
        self.shares = [ChildShare(width) for width in self.widths]

    @classmethod
    def of_children(cls, children: Mapping[str, nn.Linear]) -> Self:
        """Pack the children by name; see `of_layers`."""
        return cls.of_layers(list(children.values()), list(children))

    @classmethod
    def of_layers(cls, layers: Sequence[nn.Linear], names: Sequence[str] = ()) -> Self:
        """Pack copies of the layers' weights; their inputs must be equally wide.

        Layers whose outputs are split over ranks make a packed layer that is split equally. Where
        only some have a bias the others get zeros, which change no result.
        """
        without_bias = [index for index, layer in enumerate(layers) if layer.bias is None]
        has_bias = len(without_bias) < len(layers)
        packed = cls(
            torch.cat([layer.weight.detach() for layer in layers]),
            torch.cat([_bias_or_zeros(layer) for layer in layers]) if has_bias else None,
            [layer.out_features for layer in layers],
            names,
            without_bias,
        )
        packed.shares = [ChildShare.of(layer) for layer in layers]
        packed.group = next(
            (layer.group for layer in layers if isinstance(layer, ColumnParallelLinear)), SINGLE
        )
        return packed

    def part_weight(self, index: int) -> Tensor:
        """Return a child's weight, [widths[index], in_features], as a view."""
        return torch.split(self.weight, self.widths)[index]

    def part_bias(self, index: int) -> Tensor | None:
        """Return a child's bias as a view; None if it has none."""
        return None if index in self._without_bias else torch.split(self.bias, self.widths)[index]


class MergedColumnParallelLinear(PackedLinear):
    """Projections of any kind that read the same input, such as gate and up."""


class QKVParallelLinear(PackedLinear):
    """The query, key and value projections of one attention layer, in this order."""


class SharedCall:
    """One call of a packed layer that its children share.

    The first child that is called with an input computes all parts. The others return theirs if
    they are called with the same tensor object, unchanged. The input is kept until the last part is
    returned.

    `parts`: those that were not returned yet, by the child's index. `version`: the number of
    in-place writes to `input`, which inference-mode tensors do not count.
    """

    def __init__(self, layer: nn.Module, base_layer: PackedLinear) -> None:
        """`layer`: the module to call, which is `base_layer` or its wrapper."""
        self.layer = layer
        self.base_layer = base_layer
        self.input: Tensor | None = None
        self.version = 0
        self.parts: dict[int, Tensor] = {}


class PackedSlice(nn.Module):
    """The module that replaces a child of a packed layer in the model; it has no parameters."""

    def __init__(self, call: SharedCall, index: int) -> None:
        super().__init__()
        self._call = call
        self._index = index
        self.in_features = call.base_layer.in_features
        self.out_features = call.base_layer.widths[index]

    @property
    def is_whole(self) -> bool:
        """True if this rank has all of the child's rows."""
        return self._call.base_layer.group.is_trivial

    @property
    def weight(self) -> Tensor:
        """The child's weight, a view of the packed one."""
        return self._call.base_layer.part_weight(self._index)

    @property
    def bias(self) -> Tensor | None:
        """The child's bias, a view of the packed one."""
        return self._call.base_layer.part_bias(self._index)

    def forward(self, x: Tensor) -> Tensor:
        """Return the child's output, [..., out_features]; x: [..., in_features]."""
        call = self._call
        version = 0 if x.is_inference() else x._version
        if x is not call.input or self._index not in call.parts or version != call.version:
            parts = torch.split_with_sizes(call.layer(x), call.base_layer.widths, dim=-1)
            # The call can have written to its input.
            call.version = 0 if x.is_inference() else x._version
            call.input, call.parts = x, dict(enumerate(parts))
        part = call.parts.pop(self._index)
        if not call.parts:
            call.input = None
        return part


def _bias_or_zeros(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
