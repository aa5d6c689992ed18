"""Base class of wrapped layers.

A wrapper stores no adapter weights, only its columns of the slot directory. A method that every
wrapper must implement raises NotImplementedError here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from loradock.engine.errors import NotFinite
from loradock.engine.kernels.operands import LoRASlices, RowOrder
from loradock.engine.layers.saved import (
    AffineStep,
    SavedRows,
    SavedStep,
    SavedWeights,
    Step,
    TokenRows,
    TokenVectors,
)
from loradock.engine.layout import (
    AFFINE_SUFFIX,
    SAVED_SUFFIX,
    TOKENS_SUFFIX,
    WHOLE,
    ModuleKind,
    ModuleShape,
    Shard,
    directory_columns,
)
from loradock.engine.parallel import SINGLE, ParallelGroup
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.residency.arena import Arena

SliceTensors = Sequence[Tensor | None]
"""One tensor per slice; None for a slice that an adapter lacks."""


StackedViews = tuple[tuple[Tensor | None, ...], ...]
"""A tensor per slice and slot, at the adapter's own rank; None for an empty one."""


class SliceShape(NamedTuple):
    """Shape and layout of one slice of a layer.

    The whole A is [rank, in_features] and the whole B [out_features, rank]. `name`: the slice's
    last name component, if the model names slices separately; empty for a layer of one slice.
    The other fields are as in `ModuleShape`.
    """

    in_features: int
    out_features: int
    name: str = ""
    transposed: bool = False
    kind: ModuleKind = ModuleKind.LINEAR
    experts: int = 1
    shard: Shard = WHOLE
    kernel: tuple[int, ...] = ()


class LayerPlan:
    """Additions of one batch's adapters to a layer's base output, as ordered steps.

    Valid for one batch of the Punica wrapper, one version of the directory, and one shape and dtype
    of the layer's input.
    """

    __slots__ = ("_steps",)

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = tuple(steps)

    def run(self, y: Tensor, x: Tensor) -> None:
        """Change y in place: [..., out], contiguous; x: the layer's input, [..., in]."""
        if self._steps:
            outputs, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]).contiguous()
            for step in self._steps:
                step.run(outputs, inputs)


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
        self._saved: tuple[SavedWeights, ...] = ()
        self._affine: tuple[SavedWeights, ...] = ()
        self._tokens: tuple[TokenRows, ...] = ()
        self._plans: dict[tuple[object, ...], LayerPlan] = {}
        self._planned_for: tuple[object, int] = (None, -1)
        # Of the inputs, as a probe observed it.
        self.row_order = RowOrder.MAPPING

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapper lacks from the base layer: models read `in_features` and such."""
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        is_read = "base_layer" in modules and not name.startswith("__")
        return getattr(modules["base_layer"], name) if is_read else super().__getattr__(name)

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Return whether this wrapper computes correctly for `layer`."""
        raise NotImplementedError(f"{cls.__name__} must implement can_replace_layer")

    @property
    def group(self) -> ParallelGroup:
        """The ranks over which the layer is split; a group of one for a replicated layer."""
        return SINGLE

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The shape of each slice, and this rank's shard of it."""
        raise NotImplementedError(f"{type(self).__name__} must implement slice_shapes")

    @property
    def tp_rank(self) -> int:
        """This process's rank in `group`."""
        return self.group.rank

    @property
    def tp_size(self) -> int:
        """The number of ranks in `group`."""
        return self.group.world_size

    @property
    def n_slices(self) -> int:
        """The number of slices."""
        return len(self.slice_shapes)

    @property
    def input_size(self) -> int:
        """The inputs of the whole layer."""
        return self.slice_shapes[0].in_features

    @property
    def output_size(self) -> int:
        """The outputs of the whole layer."""
        return sum(self.output_sizes)

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """The outputs of each slice of the whole layer."""
        return tuple(shape.out_features for shape in self.slice_shapes)

    @property
    def output_slices(self) -> tuple[int, ...]:
        """The outputs of each slice on this rank."""
        return tuple(shape.shard.b_height(shape.out_features) for shape in self.slice_shapes)

    @property
    def lora_a_stacked(self) -> StackedViews:
        """This rank's A of each slice and slot, as views of the arena: `[slice][slot]`."""
        return self._views(0)

    @property
    def lora_b_stacked(self) -> StackedViews:
        """This rank's B of each slice and slot, with the scaling, as views: `[slice][slot]`."""
        return self._views(1)

    def _views(self, matrix: int) -> StackedViews:
        arena = self._bound()
        return tuple(
            tuple(
                None if (pair := arena.weights(slot, column)) is None else pair[matrix]
                for slot in range(arena.max_loras)
            )
            for column in self._columns
        )

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
                    kernel=shape.kernel,
                )
            )
        for saved in self.saved_shapes:
            column = first_column + directory_columns(shapes)
            whole = parent + saved.name if saved.name else name
            sizes = (saved.in_features, saved.out_features, column)
            shapes.append(
                ModuleShape(whole + SAVED_SUFFIX, *sizes, kind=ModuleKind.HEAD, is_optional=True)
            )
        for affine in self.affine_shapes:
            column = first_column + directory_columns(shapes)
            whole = (parent + affine.name if affine.name else name) + AFFINE_SUFFIX
            sizes = (1, affine.out_features, column)
            shapes.append(ModuleShape(whole, *sizes, kind=ModuleKind.HEAD, is_optional=True))
        for tokens in self.token_shapes:
            whole, column = name + TOKENS_SUFFIX, first_column + directory_columns(shapes)
            sizes = (tokens.in_features, tokens.out_features, column)
            shapes.append(ModuleShape(whole, *sizes, kind=ModuleKind.TOKENS, is_optional=True))
        return shapes

    @property
    def token_shapes(self) -> tuple[SliceShape, ...]:
        """The layer, if an adapter can replace rows of single tokens: embeddings and heads."""
        return ()

    @property
    def affine_shapes(self) -> tuple[SliceShape, ...]:
        """The modules of the layer whose outputs an adapter can scale and shift (DoRA, biases)."""
        return ()

    def base_weights(self, index: int) -> tuple[Tensor, Tensor | None] | None:  # noqa: ARG002
        """Return weight `[out, in]` and bias of a module of `affine_shapes`; None if unreadable."""
        return None

    @property
    def saved_shapes(self) -> tuple[SliceShape, ...]:
        """The modules of the layer that an adapter can replace whole (`modules_to_save`)."""
        return ()

    @overload
    def slice_lora_a(self, lora_a: Tensor) -> Tensor: ...

    @overload
    def slice_lora_a(self, lora_a: SliceTensors) -> SliceTensors: ...

    def slice_lora_a(self, lora_a: Tensor | SliceTensors) -> Tensor | SliceTensors:
        """Return this rank's shard of each slice's A, from whole ones [rank, in_features].

        A layer of one slice also accepts and returns the tensor itself. Raises ValueError for a
        rank that the group can't divide, and for another number of tensors than slices.
        """
        return self._sliced(lora_a, self._shard_of_a)

    @overload
    def slice_lora_b(self, lora_b: Tensor) -> Tensor: ...

    @overload
    def slice_lora_b(self, lora_b: SliceTensors) -> SliceTensors: ...

    def slice_lora_b(self, lora_b: Tensor | SliceTensors) -> Tensor | SliceTensors:
        """Return this rank's shard of each slice's B, from whole ones [out_features, rank]."""
        return self._sliced(lora_b, lambda b, shape: shape.shard.select_b(b))

    def _shard_of_a(self, a: Tensor, shape: SliceShape) -> Tensor:
        """Return this rank's part of one A, in the arena's layout; overridden if it differs."""
        return shape.shard.select_a(a)

    def _sliced(
        self, weights: Tensor | SliceTensors, select: Callable[[Tensor, SliceShape], Tensor]
    ) -> Tensor | SliceTensors:
        shapes = self.slice_shapes
        tensors = [weights] if isinstance(weights, Tensor) else weights
        if len(tensors) != len(shapes):
            raise ValueError(_wrong_count(len(tensors), shapes))
        if isinstance(weights, Tensor):
            return select(weights, shapes[0])
        pairs = zip(tensors, shapes, strict=True)
        return [None if tensor is None else select(tensor, shape) for tensor, shape in pairs]

    def create_lora_weights(self, arena: Arena, columns: Sequence[int]) -> None:
        """Bind the layer to the first directory column of each slice; allocates nothing.

        Columns of modules that adapters can replace whole follow, or are left out. Raises
        ValueError for another number.
        """
        slices, saved = len(self.slice_shapes), len(self.saved_shapes)
        whole = saved + len(self.affine_shapes)
        if len(columns) not in (slices, slices + whole + len(self.token_shapes)):
            raise ValueError(f"{len(columns)} columns for a layer of {slices} slices")
        self._arena, self._columns = arena, tuple(columns[:slices])
        optional = columns[slices:]
        weights = tuple(SavedWeights(arena, column) for column in optional[:whole])
        self._saved, self._affine = weights[:saved], weights[saved:]
        self._tokens = tuple(TokenRows(arena, column) for column in optional[whole:])
        self._planned_for = (None, -1)
        self._bind(arena)

    def _bind(self, arena: Arena) -> None:
        """Create the operands of the layer's products; overridden by layers with several."""
        self._slices = slices_of(arena, self.slice_shapes, self._columns)
        self._slices.row_order = self.row_order

    def set_mapping(self, punica_wrapper: PunicaWrapper) -> None:
        """Use the mapping of `punica_wrapper` for every batch from now on."""
        self._punica = punica_wrapper
        self._planned_for = (None, -1)

    def set_lora(
        self, index: int, lora_a: Tensor | SliceTensors, lora_b: Tensor | SliceTensors
    ) -> None:
        """Write one adapter's weights for this layer to slot `index`; B includes the scaling.

        A packed layer expects one A and one B per slice, None for both if the adapter lacks the
        slice. Each slice is stored in a separate extent; for a whole adapter `Arena.begin_write` is
        better, which copies once. Raises ValueError for another number of slices, an A without B,
        a rank above the maximum, wrong shapes, or values that are not finite, before anything
        changes; also raises what `Arena.write_slice` raises.
        """
        arena = self._bound()
        slices = self.slice_lora_a(slice_tensors(lora_a)), self.slice_lora_b(slice_tensors(lora_b))
        pairs = zip(self._columns, *slices, strict=True)
        whole = [(column, a, b) for column, a, b in pairs if (a is None) == (b is None)]
        if len(whole) != len(self._columns):
            raise ValueError("A without B, or B without A; pass both, or None for both")
        given = [(column, a, b) for column, a, b in whole if a is not None and b is not None]
        for column, a, b in given:
            arena.shape_at(column).check_fit(a, b)
            self._check_rank(int(b.shape[-1]))
            _check_finite(arena, a, b)
        self.reset_lora(index)
        for column, a, b in given:
            arena.write_slice(index, column, a, b)

    def reset_lora(self, index: int) -> None:
        """Clear this layer's columns in slot `index`; rows that use it get the base output."""
        arena = self._bound()
        for column in self._columns:
            arena.reset_slice(index, column)

    def _check_rank(self, rank: int) -> None:
        rank_max = rank if self._punica is None else self._punica.rank_max
        if rank > rank_max:
            raise ValueError(f"the rank is {rank}; 1 to {rank_max} (max_lora_rank) are allowed")

    def pack_weights(self, is_shared: Callable[[Tensor], bool]) -> None:
        """Pack the base layer's weight, if this kind of layer is a product that reads it alone.

        `is_shared`: whether another layer reads a weight too; then it stays as it is.
        """

    def with_lora(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `base(x)`, [..., out], with the batch's deltas; both can be computed concurrently.

        Deltas are added to what an adapter has in place of the base output.
        """
        punica, arena, slices = self._punica, self._arena, self._slices
        if punica is None or arena is None or slices is None:
            return base(x)
        if punica.is_concurrent:
            return punica.with_lora_linear(lambda: self._own_output(base(x), x), x, slices)
        y = base(x).contiguous()
        self.plan(y, x, punica, arena).run(y, x)
        return y

    def add_lora(self, y: Tensor, x: Tensor) -> Tensor:
        """Apply the batch's adapters to `y` in place: y [..., out], contiguous; x [..., in]."""
        punica, arena = self._punica, self._arena
        if punica is not None and arena is not None:
            self.plan(y, x, punica, arena).run(y, x)
        return y

    def plan(self, y: Tensor, x: Tensor, punica: PunicaWrapper, arena: Arena) -> LayerPlan:
        """Return the layer's plan for the current batch of `punica`; y, x as in `add_lora`.

        It is made at the first call with a shape and dtype of `x` after the mapping or the
        directory has changed.
        """
        batch = (punica.batch, arena.directory.version)
        if batch != self._planned_for:
            self._plans.clear()
            self._planned_for = batch
        key = (x.shape, x.dtype, punica.only_slot)
        if key in self._plans:
            return self._plans[key]
        plan = LayerPlan([*self._own_steps(x), *self._delta_steps(y, x)])
        if punica.batch is not batch[0]:
            # Other groups were made for these rows, which are valid alone.
            self._plans.clear()
            self._planned_for = (punica.batch, batch[1])
        self._plans[key] = plan
        return plan

    def _own_steps(self, x: Tensor) -> Iterator[Step]:
        """Yield the steps for rows that adapters change other than by a delta.

        x: [..., in]. A module's columns of the output are in the order of `affine_shapes` or
        `saved_shapes`.
        """
        if not self._has_own_outputs():
            return
        start = 0
        for affine, shape in zip(self._affine, self.affine_shapes, strict=bool(self._affine)):
            columns = slice(start, start + shape.out_features)
            start = columns.stop
            for rows in affine.rows_of(self._punica, x.shape[:-1], self.row_order):
                yield AffineStep(columns, rows)
        start = 0
        for saved, width in zip(self._saved, self._saved_widths, strict=True):
            columns = slice(start, start + width)
            start = columns.stop
            for rows in saved.rows_of(self._punica, x.shape[:-1], self.row_order):
                yield self._saved_step(columns, rows)
        for tokens in self._tokens:
            for own in tokens.vectors_of(self._punica, x.shape[:-1], self.row_order):
                yield self._token_step(own)

    def _has_own_outputs(self) -> bool:
        is_bound = self._arena is not None and bool(self._affine or self._saved or self._tokens)
        return is_bound and self._bound().has_heads

    def _saved_step(self, columns: slice, rows: SavedRows) -> Step:
        return SavedStep(columns, rows)

    def _token_step(self, own: TokenVectors) -> Step:
        """Return the step for trained tokens; implemented by layers with `token_shapes`."""
        raise NotImplementedError(f"{type(self).__name__} must implement _token_step")

    def _own_output(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the base output with the rows that adapters change other than by a delta."""
        y = y.contiguous()
        LayerPlan([*self._own_steps(x)]).run(y, x)
        return y

    def _delta_steps(self, y: Tensor, x: Tensor) -> Iterator[Step]:
        """Yield the step that adds the batch's deltas, if there are any."""
        if self._punica is None or self._slices is None:
            return
        outputs, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]).contiguous()
        plan = self._punica.plan_linear(outputs, inputs, self._slices, x.shape[:-1])
        if plan is not None:
            yield plan

    @property
    def _saved_widths(self) -> tuple[int, ...]:
        """The outputs of each saved module, in the order of `_saved`."""
        return tuple(shape.out_features for shape in self.saved_shapes)

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


def slice_tensors(weights: Tensor | SliceTensors) -> SliceTensors:
    """Return a list of one tensor per slice."""
    return [weights] if isinstance(weights, Tensor) else weights


def _wrong_count(count: int, shapes: Sequence[SliceShape]) -> str:
    named = ", ".join(shape.name for shape in shapes if shape.name)
    return (
        f"{count} tensors for a layer of {len(shapes)} slices"
        f"{f' ({named})' if named else ''}; pass one per slice, None for a slice without an adapter"
    )


def _check_finite(arena: Arena, *tensors: Tensor) -> None:
    """Raise `NotFinite` for a tensor that has, or after rounding would have, other values."""
    if not all(bool(torch.isfinite(one.to(arena.dtype)).all()) for one in tensors):
        raise NotFinite(
            f"a tensor has NaN or infinity, or values that {arena.dtype} can't hold; such an "
            "adapter is not served"
        )
