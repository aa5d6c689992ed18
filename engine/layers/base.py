"""What every wrapped layer does: keep the base layer, and reach the adapters' weights in the arena.

What it is: the base class and its contract. What it is not: a layer of its own; a method that a
family has to define raises until it does. One rule: a wrapper holds no adapter weights, only the
numbers of its columns in the slot directory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from engine.kernels.operands import Directory, LoRASlices
from engine.layout import WHOLE, ModuleKind, ModuleShape, Shard, directory_columns
from engine.parallel import SINGLE, ParallelGroup
from engine.punica.wrapper import PunicaWrapper
from engine.residency.arena import Arena

Parts = Sequence[Tensor | None]
"""One tensor a slice; None for a slice that an adapter does not touch."""


class SliceShape(NamedTuple):
    """One slice of a layer: its widths, and how its weights lie.

    A is [rank, in_features] and B [out_features, rank], whole. `name`: what the slice is called
    beside its siblings, where the model knows it by a name of its own; empty for a layer of one
    slice. The rest is as in `ModuleShape`.
    """

    in_features: int
    out_features: int
    name: str = ""
    transposed: bool = False
    kind: ModuleKind = ModuleKind.LINEAR
    experts: int = 1
    shard: Shard = WHOLE


class BaseLayerWithLoRA(nn.Module):
    """A layer of the base model to whose output the batch's adapters add.

    Until both `create_lora_weights` and `set_mapping` were called it computes the base layer.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._arena: Arena | None = None
        self._columns: tuple[int, ...] = ()
        self._slices: LoRASlices | None = None
        self._punica: PunicaWrapper | None = None

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Whether this wrapper's arithmetic is right for `layer`."""
        raise NotImplementedError(f"{cls.__name__} does not say which layers it can replace")

    @property
    def group(self) -> ParallelGroup:
        """The ranks among which the layer is split; one that every rank holds whole is alone."""
        return SINGLE

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The widths of each slice, and this rank's part of it."""
        raise NotImplementedError(f"{type(self).__name__} does not say how wide its slices are")

    def module_shapes(self, name: str, first: int) -> list[ModuleShape]:
        """The layer's slices as the directory has them, from column `first` on."""
        before_last = name[: len(name) - len(name.rpartition(".")[2])]
        shapes: list[ModuleShape] = []
        for shape in self.slice_shapes:
            shapes.append(
                ModuleShape(
                    name=before_last + shape.name if shape.name else name,
                    in_features=shape.in_features,
                    out_features=shape.out_features,
                    index=first + directory_columns(shapes),
                    transposed=shape.transposed,
                    kind=shape.kind,
                    experts=shape.experts,
                    shard=shape.shard,
                )
            )
        return shapes

    def slice_lora_a(self, lora_a: Parts) -> Parts:
        """This rank's part of each slice's A, from whole ones [rank, in_features].

        Raises ValueError for a rank that the group can't share.
        """
        pairs = zip(lora_a, self.slice_shapes, strict=True)
        return [None if a is None else shape.shard.cut_a(a) for a, shape in pairs]

    def slice_lora_b(self, lora_b: Parts) -> Parts:
        """This rank's part of each slice's B, from whole ones [out_features, rank]."""
        pairs = zip(lora_b, self.slice_shapes, strict=True)
        return [None if b is None else shape.shard.cut_b(b) for b, shape in pairs]

    def create_lora_weights(self, arena: Arena, columns: Sequence[int]) -> None:
        """Bind the layer to each slice's first column of the arena's directory; allocates nothing.

        Raises ValueError where there are more or fewer columns than slices.
        """
        shapes = self.slice_shapes
        if len(columns) != len(shapes):
            raise ValueError(f"{len(columns)} columns for a layer of {len(shapes)} slices")
        self._arena, self._columns = arena, tuple(columns)
        tables = (arena.data, arena.offsets, arena.ranks, arena.host_offsets, arena.host_ranks)
        self._bind(Directory(*tables, arena.edition))

    def _bind(self, directory: Directory) -> None:
        """Find what the layer's products read; who has more than one of them overrides this."""
        self._slices = slices_of(directory, self.slice_shapes, self._columns)

    def set_mapping(self, punica: PunicaWrapper) -> None:
        """Read every batch's mapping from `punica` from now on."""
        self._punica = punica

    def set_lora(self, slot: int, lora_a: Tensor | Parts, lora_b: Tensor | Parts) -> None:
        """Put one adapter's part of this layer into `slot`; the scaling is already in B.

        A packed layer takes one A and one B a slice, None for both where the adapter has nothing.
        Each slice gets an extent of its own; a whole adapter is better written with
        `Arena.begin_write`, which copies once. Raises ValueError for another number of slices, an
        A without its B, or other shapes, before anything changes; and what `Arena.write_slice`
        raises.
        """
        arena = self._bound()
        pairs = zip(
            self._columns,
            self.slice_lora_a(_parts(lora_a)),
            self.slice_lora_b(_parts(lora_b)),
            strict=True,
        )
        whole = [(column, a, b) for column, a, b in pairs if (a is None) == (b is None)]
        if len(whole) != len(self._columns):
            raise ValueError("A without its B, or B without its A; give both, or None for both")
        for column, a, b in whole:
            if a is not None and b is not None:
                arena.shape_at(column).check_fit(a, b)
        self.reset_lora(slot)
        for column, a, b in whole:
            if a is not None and b is not None:
                arena.write_slice(slot, column, a, b)

    def reset_lora(self, slot: int) -> None:
        """Clear this layer's columns in `slot`; rows that use it get the base output here."""
        arena = self._bound()
        for column in self._columns:
            arena.reset_slice(slot, column)

    def with_lora(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`base(x)`, [..., out], with the batch's deltas; the two may be made side by side.

        A family that adds its deltas in another way overrides this and `add_lora` together.
        """
        if self._punica is None or self._slices is None:
            return base(x)
        rows = x.reshape(-1, x.shape[-1])
        return self._punica.with_lora_linear(lambda: base(x), rows, self._slices)

    def add_lora(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the batch's deltas to `y` in place: y [..., out], contiguous; x [..., in]."""
        if self._punica is not None and self._slices is not None:
            rows = y.view(-1, y.shape[-1])
            self._punica.add_lora_linear(rows, x.reshape(-1, x.shape[-1]), self._slices)
        return y

    def _bound(self) -> Arena:
        if self._arena is None:
            raise RuntimeError("create_lora_weights was not called on this layer")
        return self._arena


def slices_of(
    directory: Directory, shapes: Sequence[SliceShape], columns: Sequence[int]
) -> LoRASlices:
    """This rank's part of slices that read the same input, as one product has them."""
    first = shapes[0]
    return LoRASlices(
        *(directory, tuple(columns), first.shard.a_width(first.in_features)),
        tuple(shape.shard.b_height(shape.out_features) for shape in shapes),
        first.kind,
        first.experts if first.shard.experts is None else len(first.shard.experts),
    )


def _parts(weights: Tensor | Parts) -> Parts:
    return [weights] if isinstance(weights, Tensor) else weights
