"""Fully sharded LoRA: also the half that is replicated by default is split over the ranks.

What it is: S-LoRA's scheme, as two ways of adding a delta that families mix in. What it is not: a
family of its own; what is wrapped, and how the base layer's part is computed, is theirs. One rule:
what crosses between ranks is the shrunk activations, as wide as a rank and not as a layer, in
float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from engine.arena import Arena
from engine.kernels.operands import LoRASlices
from engine.layers.base import BaseLayerWithLoRA, SliceShape
from engine.layers.parallel import RowParallelLinear
from engine.punica import Halves


class ShardedLoRA(BaseLayerWithLoRA):
    """A layer whose shrunk activations are exchanged between ranks before they are expanded."""

    _halves: Halves | None = None

    def exchange(self, shrunk: Tensor) -> Tensor:
        """Every rank's part brought together: [slices, tokens, n] to [slices, tokens, rank_max]."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its ranks exchange")

    def _halves_of(self, slices: LoRASlices) -> Halves:
        raise NotImplementedError(f"{type(self).__name__} does not say how its weights lie")

    def create_lora_weights(self, arena: Arena, columns: Sequence[int]) -> None:
        """As the base class, with both halves of the product apart."""
        super().create_lora_weights(arena, columns)
        self._halves = self._halves_of(self._bound()[1])

    def with_lora(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`base(x)` first: the exchange leaves nothing to run beside it."""
        return self.add_lora(base(x), x)

    def add_lora(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the batch's deltas to `y` in place, in two halves with an exchange between them."""
        if self._punica is not None and self._halves is not None:
            rows, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
            self._punica.add_lora_halves(rows, inputs, self._halves, self.exchange)
        return y


class ColumnShardedLoRA(ShardedLoRA):
    """A's rows dealt out, B's rows as the outputs: what is shrunk is gathered over the rank."""

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The family's slices, with A's rows dealt out too."""
        group = self.group
        return tuple(
            shape._replace(
                shard=replace(shape.shard, rank_parts=group.world_size, rank_part=group.rank)
            )
            for shape in super().slice_shapes
        )

    def exchange(self, shrunk: Tensor) -> Tensor:
        """Rank 0's first column, rank 1's first, ..., rank 0's second: as the rows were dealt."""
        return self.group.all_gather(shrunk).movedim(0, -1).flatten(-2)

    def _halves_of(self, slices: LoRASlices) -> Halves:
        parts = self.group.world_size
        if parts == 1:
            return Halves(slices, slices)
        # A and B have columns of their own: an A without outputs, and a B without inputs.
        nothing = (0,) * len(slices.columns)
        behind = tuple(column + 1 for column in slices.columns)
        shrink = LoRASlices(slices.directory, slices.columns, slices.in_features, nothing)
        expand = LoRASlices(slices.directory, behind, 0, slices.out_features)
        return Halves(shrink, expand, parts)


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

    @property
    def _rows(self) -> range:
        return self.group.part_of(self.base_layer.out_features, "out_features")

    def _halves_of(self, slices: LoRASlices) -> Halves:
        return Halves(slices, slices, offset=self._rows.start)
