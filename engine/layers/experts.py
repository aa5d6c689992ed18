"""Mixtures of experts: deltas inside each expert, before its activation and before the sum.

What it is: the wrappers of the experts modules that `expert_layout` understands. What it is not: a
router, a shared expert or an attention layer; those are layers of their own. One rule: a batch
without groups, as `group_experts` makes them, runs the module's own forward.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from engine.arena import Arena
from engine.kernels.expert_groups import ExpertGroups, Routed
from engine.kernels.operands import LoRASlices
from engine.layers.base import BaseLayerWithLoRA, SliceShape
from engine.layers.expert_layout import Call, ExpertLayout, layout_of
from engine.layers.parallel_experts import ParallelExperts
from engine.layout import WHOLE, ModuleKind, ModuleShape, Shard, Within


class ExpertsWithLoRA(BaseLayerWithLoRA):
    """What both formats share: routing, the two products, and where the deltas go in.

    The last slice is w2; all before it lie before the activation.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        layout = layout_of(base_layer)
        if layout is None:
            raise TypeError(f"{type(base_layer).__name__} is no experts module that is understood")
        self.layout: ExpertLayout = layout
        self._up: LoRASlices | None = None
        self._down: LoRASlices | None = None

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every experts module whose layout is understood."""
        return layout_of(layer) is not None

    def up_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The columns of each slice before the activation; rows: [pairs, up_features]."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its slices go")

    def module_shapes(self, name: str, first: int) -> list[ModuleShape]:
        """The layer's slices, called as the projections of the module at `name` are."""
        return super().module_shapes(f"{name}.", first)

    def create_lora_weights(self, arena: Arena, columns: Sequence[int]) -> None:
        """As the base class; w2 reads another width than the slices before it."""
        super().create_lora_weights(arena, columns)
        _, slices = self._bound()
        layout, widths = self.layout, slices.out_features
        experts = partial(LoRASlices, kind=ModuleKind.EXPERTS, experts=layout.experts)
        directory, columns = slices.directory, slices.columns
        self._up = experts(directory, columns[:-1], layout.in_features, widths[:-1])
        self._down = experts(directory, columns[-1:], layout.inter_features, widths[-1:])

    def adapter_enabled(self, slot: int) -> bool:
        """Whether the adapter in `slot` touches these experts."""
        if self._up is None or self._down is None:
            return False
        return any(pair is not None for pair in (*self._up.pairs(slot), *self._down.pairs(slot)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, deltas included, [tokens, out_features].

        hidden_states: [tokens, in_features], one row a token of the mapping. top_k_index,
        top_k_weights: [tokens, top_k], the router's choice.
        """
        base = self.base_layer
        call = Call(hidden_states, top_k_index, top_k_weights)
        own = base.localized(call) if isinstance(base, ParallelExperts) else call
        groups = self._groups(own)
        if groups is None:
            result: Tensor = base(hidden_states, top_k_index, top_k_weights)
            return result

        def add_up(y: Tensor, x: Tensor, routed: Routed) -> None:
            self._add(self._up, self.up_views(y), x, groups.at(routed.places))

        def add_down(y: Tensor, x: Tensor, routed: Routed) -> None:
            self._add(self._down, (y,), x, groups.at(routed.places))

        y = self.layout.forward(base, own, add_up, add_down)
        return base.group.all_reduce(y) if isinstance(base, ParallelExperts) else y

    def _groups(self, call: Call) -> ExpertGroups | None:
        if self._punica is None or self._up is None:
            return None
        return self._punica.group_experts(
            len(call.hidden_states), self.adapter_enabled, call.top_k_index, self.layout.experts
        )

    def _add(
        self, slices: LoRASlices | None, ys: Sequence[Tensor], x: Tensor, groups: ExpertGroups
    ) -> None:
        if self._punica is not None and slices is not None:
            self._punica.add_lora_fused_moe(ys, x, slices, groups)

    @property
    def whole(self) -> ExpertLayout:
        """The layout of the module as one rank alone has it, which is what adapters are for."""
        base = self.base_layer
        return base.whole if isinstance(base, ParallelExperts) else self.layout

    def _slice(self, in_features: int, out_features: int, name: str, shard: Shard) -> SliceShape:
        base, experts = self.base_layer, self.whole.experts
        if isinstance(base, ParallelExperts) and base.kept is not None:
            shard = Shard(experts=base.kept)
        return SliceShape(
            in_features, out_features, name, kind=ModuleKind.EXPERTS, experts=experts, shard=shard
        )

    def _down_slice(self) -> SliceShape:
        whole, inter = self.whole, self._inter
        shard = WHOLE if inter is None else Shard(a_columns=inter)
        return self._slice(whole.inter_features, whole.out_features, "down_proj", shard)

    @property
    def _inter(self) -> range | None:
        """This rank's columns behind the activation; None for all."""
        base = self.base_layer
        return base.inter if isinstance(base, ParallelExperts) else None


class FusedMoEWithLoRA(ExpertsWithLoRA):
    """Experts with an A and a B for each projection: w1 (gate), w3 (up) and w2 (down).

    Experts without a gate have w1, their `up_proj`, and w2.
    """

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """`gate_proj` and `up_proj`, then `down_proj`."""
        whole = self.whole
        names = ("gate_proj", "up_proj") if whole.is_gated else ("up_proj",)
        shard = WHOLE if self._inter is None else Shard(b_rows=(self._inter,))
        ups = [self._slice(whole.in_features, whole.inter_features, name, shard) for name in names]
        return (*ups, self._down_slice())

    def module_shapes(self, name: str, first: int) -> list[ModuleShape]:
        """As the base class; gate and up are known as parts of the module's one parameter."""
        shapes = super().module_shapes(name, first)
        if not self.whole.is_gated:
            return shapes
        parameter = f"{name}.{self.whole.up_name}"
        parts = [*(Within(parameter, rows) for rows in self.whole.gate_and_up_rows()), None]
        return [replace(shape, within=part) for shape, part in zip(shapes, parts, strict=True)]

    def up_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Gate's and up's own columns."""
        return self.layout.gate_and_up(rows)


class FusedMoE3DWithLoRA(ExpertsWithLoRA):
    """Experts with one A and one B for gate and up together (w13), and for down (w2)."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Experts with a gate; without one both formats are the same."""
        layout = layout_of(layer)
        return layout is not None and layout.is_gated

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """`gate_up_proj`, in the order of the module's own columns, then `down_proj`."""
        whole = self.whole
        shard = WHOLE if self._inter is None else Shard(b_rows=whole.up_rows(self._inter))
        up = self._slice(whole.in_features, whole.up_features, whole.up_name, shard)
        return (up, self._down_slice())

    def up_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """All columns."""
        return (rows,)
