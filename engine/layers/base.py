"""Base class of wrapped layers.

A wrapper stores no adapter weights, only its columns of the slot directory. A method that every
wrapper must implement raises NotImplementedError here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from engine.kernels.operands import LoRASlices
from engine.layout import WHOLE, ModuleKind, ModuleShape, Shard, directory_columns
from engine.parallel import SINGLE, ParallelGroup
from engine.punica.wrapper import PunicaWrapper
from engine.residency.arena import Arena

SliceTensors = Sequence[Tensor | None]
"""One tensor per slice; None for a slice that an adapter lacks."""


class SliceShape(NamedTuple):
    """Shape and layout of one slice of a layer.

    The whole A is [rank, in_features] and the whole B [out_features, rank]. `name`: the slice's
    last name component, where the model names slices separately; empty for a layer of one slice.
    The other fields are as in `ModuleShape`.
    """

    in_features: int
    out_features: int
    name: str = ""
    transposed: bool = False
    kind: ModuleKind = ModuleKind.LINEAR
    experts: int = 1
    shard: Shard = WHOLE


class BaseLayerWithLoRA(nn.Module):
    """A layer of the base model with the deltas of the batch's adapters added to its output.

    Before both `create_lora_weights` and `set_mapping` were called, it computes the base layer
    only.
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
        """Whether this wrapper computes correctly for `layer`."""
        raise NotImplementedError(f"{cls.__name__} must implement can_replace_layer")

    @property
    def group(self) -> ParallelGroup:
        """The ranks over which the layer is split; a group of one for a replicated layer."""
        return SINGLE

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The shape of each slice, and this rank's shard of it."""
        raise NotImplementedError(f"{type(self).__name__} must implement slice_shapes")

    def module_shapes(self, name: str, first_column: int) -> list[ModuleShape]:
        """Return the layer's slices as entries of the directory, from column `first_column` on."""
        parent = name[: len(name) - len(name.rpartition(".")[2])]
        shapes: list[ModuleShape] = []
        for shape in self.slice_shapes:
            shapes.append(
                ModuleShape(
                    name=parent + shape.name if shape.name else name,
                    in_features=shape.in_features,
                    out_features=shape.out_features,
                    index=first_column + directory_columns(shapes),
                    transposed=shape.transposed,
                    kind=shape.kind,
                    experts=shape.experts,
                    shard=shape.shard,
                )
            )
        return shapes

    def slice_lora_a(self, lora_a: SliceTensors) -> SliceTensors:
        """Return this rank's shard of each slice's A, from whole ones [rank, in_features].

        Raises ValueError for a rank that the group can't divide.
        """
        pairs = zip(lora_a, self.slice_shapes, strict=True)
        return [None if a is None else shape.shard.select_a(a) for a, shape in pairs]

    def slice_lora_b(self, lora_b: SliceTensors) -> SliceTensors:
        """Return this rank's shard of each slice's B, from whole ones [out_features, rank]."""
        pairs = zip(lora_b, self.slice_shapes, strict=True)
        return [None if b is None else shape.shard.select_b(b) for b, shape in pairs]

    def create_lora_weights(self, arena: Arena, columns: Sequence[int]) -> None:
        """Bind the layer to the first directory column of each slice; allocates nothing.

        Raises ValueError unless there is one column per slice.
        """
        shapes = self.slice_shapes
        if len(columns) != len(shapes):
            raise ValueError(f"{len(columns)} columns for a layer of {len(shapes)} slices")
        self._arena, self._columns = arena, tuple(columns)
        self._bind(arena)

    def _bind(self, arena: Arena) -> None:
        """Create the operands of the layer's products; overridden by layers with several."""
        self._slices = slices_of(arena, self.slice_shapes, self._columns)

    def set_mapping(self, punica: PunicaWrapper) -> None:
        """Use the mapping of `punica` for every batch from now on."""
        self._punica = punica

    def set_lora(
        self, slot: int, lora_a: Tensor | SliceTensors, lora_b: Tensor | SliceTensors
    ) -> None:
        """Write one adapter's weights for this layer to `slot`; B includes the scaling.

        A packed layer expects one A and one B per slice, None for both where the adapter lacks the
        slice. Each slice is stored in a separate extent; for a whole adapter `Arena.begin_write` is
        better, which copies once. Raises ValueError for another number of slices, an A without B,
        or wrong shapes, before anything changes; also raises what `Arena.write_slice` raises.
        """
        arena = self._bound()
        pairs = zip(
            self._columns,
            self.slice_lora_a(_slice_tensors(lora_a)),
            self.slice_lora_b(_slice_tensors(lora_b)),
            strict=True,
        )
        whole = [(column, a, b) for column, a, b in pairs if (a is None) == (b is None)]
        if len(whole) != len(self._columns):
            raise ValueError("A without B, or B without A; pass both, or None for both")
        for column, a, b in whole:
            if a is not None and b is not None:
                arena.shape_at(column).check_fit(a, b)
        self.reset_lora(slot)
        for column, a, b in whole:
            if a is not None and b is not None:
                arena.write_slice(slot, column, a, b)

    def reset_lora(self, slot: int) -> None:
        """Clear this layer's columns in `slot`; rows that use it get the base output."""
        arena = self._bound()
        for column in self._columns:
            arena.reset_slice(slot, column)

    def with_lora(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `base(x)`, [..., out], with the batch's deltas; both may be computed concurrently.

        A subclass that adds its deltas differently overrides this and `add_lora` together.
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


def slices_of(arena: Arena, shapes: Sequence[SliceShape], columns: Sequence[int]) -> LoRASlices:
    """Return the operands of one product over slices that read the same input, on this rank."""
    first = shapes[0]
    return LoRASlices(
        *(arena.directory, tuple(columns), first.shard.a_width(first.in_features)),
        tuple(shape.shard.b_height(shape.out_features) for shape in shapes),
        first.kind,
        first.experts if first.shard.experts is None else len(first.shard.experts),
    )


def _slice_tensors(weights: Tensor | SliceTensors) -> SliceTensors:
    return [weights] if isinstance(weights, Tensor) else weights
