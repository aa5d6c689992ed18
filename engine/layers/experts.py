"""Wrappers of mixtures of experts: deltas inside each expert, on both sides of its activation.

A batch for which `group_experts` returns no groups runs the module's own forward. Routers, shared
experts and attention layers are separate layers.

With fully sharded adapters, for experts that are split over the ranks by columns: before the
activation A is sharded by rank dimension and B's rows are this rank's columns, and shrunk
activations are gathered. After it A's columns are those columns and B's rows are split; shrunk
activations are summed, and each rank writes its own columns of the outputs, before the sum over
ranks that the layer computes anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from loradock.engine.kernels.expert_groups import ExpertGroups, RoutedPairs
from loradock.engine.kernels.operands import LoRASlices
from loradock.engine.layers.base import (
    BaseLayerWithLoRA,
    SliceShape,
    SliceTensors,
    StackedViews,
    slice_tensors,
    slices_of,
)
from loradock.engine.layers.expert_layout import (
    AddDelta,
    ExpertLayout,
    ExpertsInput,
    ParallelExperts,
    layout_of,
)
from loradock.engine.layers.parallel import (
    gather_ranks,
    sharded_shrink_expand,
    with_sharded_rank,
)
from loradock.engine.layout import WHOLE, ModuleKind, ModuleShape, ParameterRows, Shard
from loradock.engine.parallel import SINGLE, ParallelGroup
from loradock.engine.punica.wrapper import PunicaWrapper, ShrinkExpand
from loradock.engine.residency.arena import Arena


class ExpertsDelta:
    """The adapters' deltas on one side of the activation."""

    def __init__(self, slices: LoRASlices) -> None:
        self._slices = slices

    def has_weights(self, slot: int) -> bool:
        """Return whether the adapter in `slot` has weights here."""
        return any(pair is not None for pair in self._slices.pairs(slot))

    def add(
        self, punica: PunicaWrapper, ys: Sequence[Tensor], x: Tensor, groups: ExpertGroups
    ) -> None:
        """Add the delta of `x` [pairs, in] to each slice's `ys` [pairs, out], in place."""
        punica.add_lora_fused_moe(ys, x, self._slices, groups)


class ExchangedExpertsDelta(ExpertsDelta):
    """The same with an exchange of shrunk activations.

    Every rank takes part in the exchange or none does: whether there are groups follows from the
    mapping and the directory alone, which agree on all ranks.
    """

    def __init__(self, slices: ShrinkExpand, exchange: Callable[[Tensor], Tensor]) -> None:
        super().__init__(slices.shrink)
        self._shrink_expand, self._exchange = slices, exchange

    def add(
        self, punica: PunicaWrapper, ys: Sequence[Tensor], x: Tensor, groups: ExpertGroups
    ) -> None:
        """As the base class, with the exchange between shrink and expand."""
        punica.add_lora_fused_moe_shrink_expand(ys, x, self._shrink_expand, groups, self._exchange)


class ExpertsDeltas(NamedTuple):
    """The deltas of w1 and w3, before the activation, and of w2, after it."""

    up: ExpertsDelta
    down: ExpertsDelta


class ExpertsWithLoRA(BaseLayerWithLoRA):
    """Base class for both formats: routing, the two products, and the addition of deltas.

    The last slice is w2; all before it are applied before the activation.
    """

    _deltas: ExpertsDeltas | None = None

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        layout = layout_of(base_layer)
        if layout is None:
            raise TypeError(f"{type(base_layer).__name__} is not a supported experts module")
        self.layout: ExpertLayout = layout

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every experts module whose layout is supported."""
        return layout_of(layer) is not None

    @property
    def group(self) -> ParallelGroup:
        """The ranks that share the experts."""
        base = self.base_layer
        return base.group if isinstance(base, ParallelExperts) else SINGLE

    def up_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of each slice before the activation; rows: [pairs, up_features]."""
        raise NotImplementedError(f"{type(self).__name__} must implement up_views")

    def down_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's columns after the activation; rows: [pairs, out_features]."""
        return (rows,)

    def module_shapes(self, name: str, first_column: int) -> list[ModuleShape]:
        """Return the layer's slices, named as the projections of the module `name`.

        Those of gate and of up are parts of the module's one parameter.
        """
        shapes = super().module_shapes(f"{name}.", first_column)
        if not self.whole.is_gated:
            return shapes
        parameter, rows = f"{name}.{self.whole.up_name}", self.whole.gate_and_up_rows()
        parts = dict(zip(("gate_proj", "up_proj"), rows, strict=True))
        return [
            replace(shape, parameter_rows=ParameterRows(parameter, parts[last]))
            if (last := shape.name.rpartition(".")[2]) in parts
            else shape
            for shape in shapes
        ]

    def _bind(self, arena: Arena) -> None:
        shapes, columns = self.slice_shapes, self._columns
        up = slices_of(arena, shapes[:-1], columns[:-1])
        down = slices_of(arena, shapes[-1:], columns[-1:])
        self._deltas = self._deltas_of(up, down)

    def _deltas_of(self, up: LoRASlices, down: LoRASlices) -> ExpertsDeltas:
        return ExpertsDeltas(ExpertsDelta(up), ExpertsDelta(down))

    def set_lora(
        self, index: int, lora_a: Tensor | SliceTensors, lora_b: Tensor | SliceTensors
    ) -> None:
        """As the base class, with the projections' tensors in vLLM's order: w1, w2, w3.

        w1 is gate, w2 down and w3 up. Experts without a gate have w1 and w2, and tensors for gate
        and up together are w13 and w2. Each A is [experts, rank, in], each B [experts, out, rank].
        """
        super().set_lora(index, self._by_slice(lora_a), self._by_slice(lora_b))

    def _by_slice(self, weights: Tensor | SliceTensors) -> SliceTensors:
        """Return one tensor per slice, None for those that are not among the projections."""
        tensors = slice_tensors(weights)
        names = [shape.name for shape in self.slice_shapes]
        orders = [order for order in self._projection_orders() if set(order) <= set(names)]
        order = next((order for order in orders if len(order) == len(tensors)), None)
        if order is None:
            raise ValueError(
                f"{len(tensors)} tensors for experts that take {' or '.join(map(str, orders))} in "
                "this order; pass one per projection, None for one without an adapter"
            )
        by_name = dict(zip(order, tensors, strict=True))
        return [by_name.get(name) for name in names]

    def _projection_orders(self) -> tuple[tuple[str, ...], ...]:
        if self.whole.is_gated:
            return ("gate_proj", "down_proj", "up_proj"), (self.whole.up_name, "down_proj")
        return (("up_proj", "down_proj"),)

    def adapter_enabled(self, slot: int) -> bool:
        """Return whether the adapter in `slot` has weights for these experts."""
        return any(delta.has_weights(slot) for delta in self._deltas or ())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts with deltas, [tokens, out_features].

        hidden_states: [tokens, in_features], one row per token of the mapping. top_k_index,
        top_k_weights: [tokens, top_k], the router's choice.
        """
        base = self.base_layer
        call = ExpertsInput(hidden_states, top_k_index, top_k_weights)
        local = base.localized(call) if isinstance(base, ParallelExperts) else call
        routed_deltas = self._route_with_deltas(local)
        if routed_deltas is None:
            result: Tensor = base(hidden_states, top_k_index, top_k_weights)
            return result
        return self.group.all_reduce(self.layout.forward(base, local, *routed_deltas))

    def _route_with_deltas(
        self, call: ExpertsInput
    ) -> tuple[RoutedPairs, AddDelta, AddDelta] | None:
        """Return the call's pairs and the functions that add deltas; None without any delta."""
        punica, deltas = self._punica, self._deltas
        if punica is None or deltas is None:
            return None
        tokens, experts = len(call.hidden_states), self.layout.experts
        pair_groups = punica.group_experts(tokens, self.adapter_enabled, call.top_k_index, experts)
        if pair_groups is None:
            return None
        routed = self.layout.route(call)
        groups = pair_groups.with_rows(routed.row_of_pair)

        def add_up_delta(y: Tensor, x: Tensor) -> None:
            deltas.up.add(punica, self.up_views(y), x, groups)

        def add_down_delta(y: Tensor, x: Tensor) -> None:
            deltas.down.add(punica, self.down_views(y), x, groups)

        return routed, add_up_delta, add_down_delta

    @property
    def hidden_size(self) -> int:
        """The inputs of every expert."""
        return self.whole.in_features

    @property
    def global_num_experts(self) -> int:
        """The experts of the layer."""
        return self.whole.experts

    @property
    def local_num_experts(self) -> int:
        """The experts that this rank keeps."""
        return self.layout.experts

    @property
    def use_ep(self) -> bool:
        """True if ranks keep whole experts."""
        base = self.base_layer
        return isinstance(base, ParallelExperts) and base.expert_range is not None

    @property
    def ep_rank(self) -> int:
        """This rank's place among those that keep whole experts; 0 if none do."""
        return self.group.rank if self.use_ep else 0

    @property
    def w13_lora_a_stacked(self) -> StackedViews:
        """A of each slice before the activation, as views: `[slice][slot]`."""
        return self.lora_a_stacked[:-1]

    @property
    def w13_lora_b_stacked(self) -> StackedViews:
        """B of each slice before the activation, as views: `[slice][slot]`."""
        return self.lora_b_stacked[:-1]

    @property
    def w2_lora_a_stacked(self) -> StackedViews:
        """A of w2, as views: `[0][slot]`."""
        return self.lora_a_stacked[-1:]

    @property
    def w2_lora_b_stacked(self) -> StackedViews:
        """B of w2, as views: `[0][slot]`."""
        return self.lora_b_stacked[-1:]

    @property
    def whole(self) -> ExpertLayout:
        """The layout of the module before it was split over ranks; adapters are made for it."""
        base = self.base_layer
        return base.whole if isinstance(base, ParallelExperts) else self.layout

    def _slice(self, in_features: int, out_features: int, name: str, shard: Shard) -> SliceShape:
        base, whole = self.base_layer, self.whole
        experts = whole.experts if name == "down_proj" else whole.up_experts
        if isinstance(base, ParallelExperts) and base.expert_range is not None:
            shard = Shard(experts=base.expert_range)
        elif experts > whole.experts:
            # Adapters have matrices for experts that return their input, and nothing reads them.
            shard = replace(shard, experts=range(whole.experts))
        return SliceShape(
            in_features, out_features, name, kind=ModuleKind.EXPERTS, experts=experts, shard=shard
        )

    def _down_slice(self) -> SliceShape:
        whole, inter_range = self.whole, self._inter_range
        shard = WHOLE if inter_range is None else Shard(a_columns=inter_range)
        return self._slice(whole.inter_features, whole.out_features, "down_proj", shard)

    @property
    def _inter_range(self) -> range | None:
        """This rank's columns after the activation; None for all."""
        base = self.base_layer
        return base.inter_range if isinstance(base, ParallelExperts) else None


class FusedMoEWithLoRA(ExpertsWithLoRA):
    """Experts with an A and a B for each projection: w1 (gate), w3 (up) and w2 (down).

    Experts without a gate have w1, which is their `up_proj`, and w2.
    """

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """`gate_proj` and `up_proj`, then `down_proj`."""
        return (*self._gate_and_up_slices(), self._down_slice())

    def _gate_and_up_slices(self) -> list[SliceShape]:
        whole = self.whole
        names = ("gate_proj", "up_proj") if whole.is_gated else ("up_proj",)
        shard = WHOLE if self._inter_range is None else Shard(b_rows=(self._inter_range,))
        sizes = (whole.in_features, whole.inter_features)
        return [self._slice(*sizes, name, shard) for name in names]

    def up_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of gate and of up."""
        return self.layout.gate_and_up(rows)


class FusedMoE3DWithLoRA(FusedMoEWithLoRA):
    """Experts of which an adapter has one A and one B for gate and up together (w13), and for w2.

    An adapter with an A and a B for each projection is stored as it is too: it fills the slices of
    gate and up, which stay empty for the others.
    """

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Experts with a gate; without one both formats are the same."""
        layout = layout_of(layer)
        return layout is not None and layout.is_gated

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """`gate_up_proj`, in the order of the module's own columns, then as the base class."""
        whole = self.whole
        shard = (
            WHOLE if self._inter_range is None else Shard(b_rows=whole.up_rows(self._inter_range))
        )
        both = self._slice(whole.in_features, whole.up_features, whole.up_name, shard)
        return (both, *super().slice_shapes)

    def up_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return all columns, those of gate and those of up; a slot adds to all or to the parts."""
        return (rows, *super().up_views(rows))


class ShardedExperts(ExpertsWithLoRA):
    """Base class for both formats, fully sharded.

    Raises ValueError for experts that are split by expert.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        if isinstance(base_layer, ParallelExperts) and base_layer.expert_range is not None:
            raise ValueError(
                "whole experts per rank leave nothing of their adapters to shard; use either "
                "expert_parallel or fully_sharded_loras"
            )

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The base class's slices, A sharded by rank dimension; the last has split rows of B."""
        *up_slices, down = super().slice_shapes
        shard = replace(down.shard, b_rows=(self._outputs,))
        return (
            *(with_sharded_rank(up, self.group) for up in up_slices),
            down._replace(shard=shard),
        )

    def down_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's columns."""
        return (rows[:, self._outputs.start : self._outputs.stop],)

    @property
    def _outputs(self) -> range:
        return self.group.shard_range(self.whole.out_features, "out_features")

    def _deltas_of(self, up: LoRASlices, down: LoRASlices) -> ExpertsDeltas:
        group = self.group
        return ExpertsDeltas(
            ExchangedExpertsDelta(sharded_shrink_expand(up, group), partial(gather_ranks, group)),
            ExchangedExpertsDelta(ShrinkExpand(down, down), group.all_reduce),
        )


class FusedMoEWithShardedLoRA(ShardedExperts, FusedMoEWithLoRA):
    """Experts with an A and a B for each projection, fully sharded."""


class FusedMoE3DWithShardedLoRA(ShardedExperts, FusedMoE3DWithLoRA):
    """Experts with one A and one B for gate and up together, fully sharded."""
