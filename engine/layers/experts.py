"""Mixtures of experts: deltas inside each expert, before its activation and before the sum.

What it is: the wrappers of the experts modules that `expert_layout` understands. What it is not: a
router, a shared expert or an attention layer; those are layers of their own. One rule: a batch in
which no row has weights here runs the module's own forward.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from engine.arena import Arena
from engine.kernels.expert_groups import ExpertGroups, sort_by_expert
from engine.kernels.operands import LoRASlices
from engine.layers.base import BaseLayerWithLoRA, SliceShape
from engine.layers.expert_layout import ExpertLayout, layout_of
from engine.layout import ModuleKind, ModuleShape, Within


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
        groups = self._groups(hidden_states, top_k_index)
        if groups is None:
            result: Tensor = self.base_layer(hidden_states, top_k_index, top_k_weights)
            return result
        return self._forward(hidden_states, top_k_index, top_k_weights, groups)

    def _groups(self, hidden_states: Tensor, top_k_index: Tensor) -> ExpertGroups | None:
        if self._punica is None or self._up is None:
            return None
        return self._punica.group_experts(
            len(hidden_states), self.adapter_enabled, top_k_index, self.layout.experts
        )

    def _forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        groups: ExpertGroups,
    ) -> Tensor:
        layout, module = self.layout, self.base_layer
        routed = sort_by_expert(top_k_index, layout.experts)
        placed = groups.at(routed.places)
        x = hidden_states[routed.tokens]
        inner = layout.up(module, x, routed.experts, routed.ends)
        self._add(self._up, self.up_views(inner), x, placed)
        activated = layout.activate(module, inner)
        outer = layout.down(module, activated, routed.experts, routed.ends)
        self._add(self._down, (outer,), activated, placed)
        outer = layout.finish(module, outer)[routed.places].view(*top_k_index.shape, -1)
        return (outer * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)

    def _add(
        self, slices: LoRASlices | None, ys: Sequence[Tensor], x: Tensor, groups: ExpertGroups
    ) -> None:
        if self._punica is not None and slices is not None:
            self._punica.add_lora_fused_moe(ys, x, slices, groups)


class FusedMoEWithLoRA(ExpertsWithLoRA):
    """Experts with an A and a B for each projection: w1 (gate), w3 (up) and w2 (down).

    Experts without a gate have w1, their `up_proj`, and w2.
    """

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """`gate_proj` and `up_proj`, then `down_proj`."""
        names = ("gate_proj", "up_proj") if self.layout.is_gated else ("up_proj",)
        widths = (self.layout.in_features, self.layout.inter_features)
        return (
            *(_slice(self.layout, *widths, name) for name in names),
            _down_slice(self.layout),
        )

    def module_shapes(self, name: str, first: int) -> list[ModuleShape]:
        """As the base class; gate and up are known as parts of the module's one parameter."""
        shapes = super().module_shapes(name, first)
        if not self.layout.is_gated:
            return shapes
        parameter = f"{name}.{self.layout.up_name}"
        parts = [*(Within(parameter, rows) for rows in self.layout.gate_and_up_rows()), None]
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
        layout = self.layout
        return (
            _slice(layout, layout.in_features, layout.up_features, layout.up_name),
            _down_slice(layout),
        )

    def up_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """All columns."""
        return (rows,)


def _slice(layout: ExpertLayout, in_features: int, out_features: int, name: str) -> SliceShape:
    return SliceShape(
        in_features, out_features, name, kind=ModuleKind.EXPERTS, experts=layout.experts
    )


def _down_slice(layout: ExpertLayout) -> SliceShape:
    return _slice(layout, layout.inter_features, layout.out_features, "down_proj")
