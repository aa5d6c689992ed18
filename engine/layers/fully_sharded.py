"""Fully sharded LoRA: also the half that is replicated by default is split over the ranks.

What it is: S-LoRA's scheme, as two ways of adding a delta that linear families mix in, and what
experts share with them. What it is not: a family of its own; what is wrapped, and how the base
layer's part is computed, is theirs. One rule:
what crosses between ranks is the shrunk activations, as wide as a rank and not as a layer, in
float32.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from engine.kernels.operands import Directory, LoRASlices
from engine.layers.base import BaseLayerWithLoRA, SliceShape, slices_of
from engine.layers.tensor_parallel import RowParallelLinear
from engine.parallel import ParallelGroup
from engine.punica.wrapper import Halves


def dealt(shape: SliceShape, group: ParallelGroup) -> SliceShape:
    """The slice with A's rows dealt out to the ranks."""
    shard = replace(shape.shard, rank_parts=group.world_size, rank_part=group.rank)
    return shape._replace(shard=shard)


def halves_of_dealt(slices: LoRASlices, group: ParallelGroup) -> Halves:
    """A and B of slices whose A is dealt out: their columns are given as those of A."""
    parts = group.world_size
    if parts == 1:
        return Halves(slices, slices)
    # A and B have columns of their own: an A without outputs, and a B without inputs.
    kind, nothing = (slices.kind, slices.experts), (0,) * len(slices.columns)
    behind = tuple(column + 1 for column in slices.columns)
    shrink = LoRASlices(slices.directory, slices.columns, slices.in_features, nothing, *kind)
    expand = LoRASlices(slices.directory, behind, 0, slices.out_features, *kind)
    return Halves(shrink, expand, parts)


def gather_ranks(group: ParallelGroup, shrunk: Tensor) -> Tensor:
    """All ranks' columns: rank 0's first, rank 1's first, ..., rank 0's second, as rows are dealt.

    shrunk: [slices, rows, n] to [slices, rows, world_size * n].
    """
    return group.all_gather(shrunk).movedim(0, -1).flatten(-2)


class ShardedLoRA(BaseLayerWithLoRA):
    """A layer whose shrunk activations are exchanged between ranks before they are expanded."""

    _halves: Halves | None = None

    def exchange(self, shrunk: Tensor) -> Tensor:
        """Every rank's part brought together: [slices, tokens, n] to [slices, tokens, rank_max]."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its ranks exchange")

    def own_columns(self, rows: Tensor) -> Tensor:
        """Those to which this rank adds; rows: [rows, out], what it computes of the layer."""
        return rows

    def _halves_of(self, slices: LoRASlices) -> Halves:
        raise NotImplementedError(f"{type(self).__name__} does not say how its weights lie")

    def _bind(self, directory: Directory) -> None:
        self._halves = self._halves_of(slices_of(directory, self.slice_shapes, self._columns))

    def with_lora(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`base(x)` first: the exchange leaves nothing to run beside it."""
        return self.add_lora(base(x), x)

    def add_lora(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the batch's deltas to `y` in place, in two halves with an exchange between them."""
        if self._punica is not None and self._halves is not None:
            rows, inputs = self.own_columns(y.view(-1, y.shape[-1])), x.reshape(-1, x.shape[-1])
            self._punica.add_lora_halves(rows, inputs, self._halves, self.exchange)
        return y


class ColumnShardedLoRA(ShardedLoRA):
    """A's rows dealt out, B's rows as the outputs: what is shrunk is gathered over the rank."""

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The family's slices, with A's rows dealt out too."""
        return tuple(dealt(shape, self.group) for shape in super().slice_shapes)

    def exchange(self, shrunk: Tensor) -> Tensor:
        """Gathered as the rows were dealt."""
        return gather_ranks(self.group, shrunk)

    def _halves_of(self, slices: LoRASlices) -> Halves:
        return halves_of_dealt(slices, self.group)


class RowShardedLoRA(ShardedLoRA):
    """A's columns as the inputs, B's rows split: what is shrunk is summed over the ranks.

    Each rank writes its own columns of the delta, before the layer's own sum.
    """

    base_layer: RowParallelLinear

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The family's slice, with B's rows split too."""
        rows = self._rows
        return tuple(
            shape._replace(shard=replace(shape.shard, b_rows=(rows,)))
            for shape in super().slice_shapes
        )

    def exchange(self, shrunk: Tensor) -> Tensor:
        """The sum of every rank's products."""
        return self.group.all_reduce(shrunk)

    def own_columns(self, rows: Tensor) -> Tensor:
        """Those of its rows of B, out of all."""
        return rows[:, self._rows.start : self._rows.stop]

    @property
    def _rows(self) -> range:
        return self.group.part_of(self.base_layer.out_features, "out_features")

    def _halves_of(self, slices: LoRASlices) -> Halves:
        return Halves(slices, slices)
