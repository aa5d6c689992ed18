"""Several linear layers that read the same input, as one: the base layer, and its children.

What it is: the fused weight, the small modules that stand where the children stood, and the one
call that they share. What it is not: a wrapper; adapters are added by the families that wrap it.
One rule: a part is handed out only to the input it was computed from, which is the very same
tensor object; anything else is computed anew.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from engine.layers.tensor_parallel import ColumnParallelLinear
from engine.layout import Shard
from engine.parallel import SINGLE


class Share(NamedTuple):
    """How wide a part of a packed layer is as a whole, and which rows this rank keeps.

    `rows` None: all of them.
    """

    whole_width: int
    rows: tuple[range, ...] | None = None

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """What this rank has of a linear layer."""
        if isinstance(layer, ColumnParallelLinear):
            return cls(layer.whole_out_features, layer.rows)
        return cls(layer.out_features)

    @property
    def shard(self) -> Shard:
        """What this rank keeps of an adapter's A and B."""
        return Shard(b_rows=self.rows)


class PackedLinear(nn.Linear):
    """Linear layers side by side in one weight and one output, each part behind those before it.

    One GEMM makes them all, but on a CPU, where one a part is faster (`forward`).

    `widths`: the columns of each part. `child_names`: what the parts are called where the model
    knows them one by one; empty where it knows one layer, as a checkpoint that stores them fused.
    `shares`: where the outputs are split over `group`, what each part is of its whole.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        widths: Sequence[int],
        child_names: Sequence[str] = (),
        unbiased: Collection[int] = (),
    ) -> None:
        """`weight` [sum of widths, in_features] and `bias` [sum of widths] are taken, not copied.

        `unbiased`: the places of the children that have no bias of their own.
        """
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, bias is not None, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.widths = list(widths)
        self.child_names = tuple(child_names)
        self._unbiased = frozenset(unbiased)
        self.group = SINGLE
        self.shares = [Share(width) for width in self.widths]

    @classmethod
    def of_children(cls, children: Mapping[str, nn.Linear]) -> Self:
        """The children packed, by name; see `of_layers`."""
        return cls.of_layers(list(children.values()), list(children))

    @classmethod
    def of_layers(cls, layers: Sequence[nn.Linear], names: Sequence[str] = ()) -> Self:
        """The layers packed, their weights copied; their inputs must be equally wide.

        Layers whose outputs are split over ranks make a packed layer that is split alike. Where
        only some have a bias the others get one of zeros, which changes no result.
        """
        unbiased = [place for place, layer in enumerate(layers) if layer.bias is None]
        has_bias = len(unbiased) < len(layers)
        packed = cls(
            torch.cat([layer.weight.detach() for layer in layers]),
            torch.cat([_bias_or_zeros(layer) for layer in layers]) if has_bias else None,
            [layer.out_features for layer in layers],
            names,
            unbiased,
        )
        packed.shares = [Share.of(layer) for layer in layers]
        packed.group = next(
            (layer.group for layer in layers if isinstance(layer, ColumnParallelLinear)), SINGLE
        )
        return packed

    def weight_of(self, place: int) -> Tensor:
        """A child's weight, [widths[place], in_features], as a view."""
        return torch.split(self.weight, self.widths)[place]

    def bias_of(self, place: int) -> Tensor | None:
        """A child's bias as a view; None where it has none of its own."""
        return None if place in self._unbiased else torch.split(self.bias, self.widths)[place]

    def forward(self, x: Tensor) -> Tensor:
        """All parts' outputs side by side, [..., sum of widths]; x: [..., in_features]."""
        rows = x.numel() // self.in_features
        # On a CPU a float32 GEMM of more than one row takes longer over a wide weight than over its
        # parts one by one: 10 to 20 % up to 128 rows, a few percent beyond (measured with MKL).
        if x.device.type != "cpu" or x.dtype != torch.float32 or rows <= 1:
            return super().forward(x)
        y = x.new_empty((*x.shape[:-1], self.out_features))
        self._multiply_parts(x.reshape(rows, -1), y.view(rows, -1))
        return y

    def _multiply_parts(self, x: Tensor, y: Tensor) -> None:
        """One GEMM a part, each straight into its columns of `y`."""
        weights, ends = torch.split(self.weight, self.widths), torch.split(y, self.widths, dim=1)
        for place, (weight, columns) in enumerate(zip(weights, ends, strict=True)):
            if self.bias is None:
                torch.mm(x, weight.t(), out=columns)
            else:
                bias = torch.split(self.bias, self.widths)[place]
                torch.addmm(bias, x, weight.t(), out=columns)


class MergedColumnParallelLinear(PackedLinear):
    """Projections of any kind that read the same input, such as gate and up."""


class QKVParallelLinear(PackedLinear):
    """The query, key and value projections of one attention layer, in this order."""


class SharedCall:
    """One call of a packed layer, whose parts its children take one after the other.

    The first child that sees an input computes all parts; the others take theirs when they are
    called with that very tensor object, which is kept until the last part is taken.
    """

    def __init__(self, layer: nn.Module, base_layer: PackedLinear) -> None:
        """`layer` is what is called: `base_layer` itself, or its wrapper."""
        self.layer = layer
        self.base_layer = base_layer
        self._input: Tensor | None = None
        self._version = 0
        self._parts: dict[int, Tensor] = {}

    def part(self, place: int, x: Tensor) -> Tensor:
        """A child's columns of the packed layer's output for `x`, as a view."""
        if x is not self._input or place not in self._parts or _version(x) != self._version:
            parts = self.layer(x).split(self.base_layer.widths, dim=-1)
            self._input, self._version = x, _version(x)
            self._parts = dict(enumerate(parts))
        part = self._parts.pop(place)
        if not self._parts:
            self._input = None
        return part


class PackedSlice(nn.Module):
    """What stands in the model where one child of a packed layer stood; it has no weights."""

    def __init__(self, call: SharedCall, place: int) -> None:
        super().__init__()
        self._call = call
        self._place = place
        self.in_features = call.base_layer.in_features
        self.out_features = call.base_layer.widths[place]

    @property
    def weight(self) -> Tensor:
        """The child's weight, a view of the packed one."""
        return self._call.base_layer.weight_of(self._place)

    @property
    def bias(self) -> Tensor | None:
        """The child's bias, a view of the packed one."""
        return self._call.base_layer.bias_of(self._place)

    def forward(self, x: Tensor) -> Tensor:
        """The child's output, [..., out_features]; x: [..., in_features]."""
        return self._call.part(self._place, x)


def _version(x: Tensor) -> int:
    """How often `x` was written in place; tensors of inference mode do not count that."""
    return 0 if x.is_inference() else x._version


def _bias_or_zeros(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
