"""Mixtures of experts: deltas inside each expert, before its activation and before the sum.

What it is: the wrappers of the experts modules that `expert_layout` understands. What it is not: a
router, a shared expert or an attention layer; those are layers of their own. One rule: a batch
without groups, as `group_experts` makes them, runs the module's own forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from engine.kernels.expert_groups import ExpertGroups, Routed
from engine.kernels.operands import Directory, LoRASlices
from engine.layers.base import BaseLayerWithLoRA, SliceShape, slices_of
from engine.layers.expert_layout import Adder, Call, ExpertLayout, layout_of
from engine.layers.parallel_experts import ParallelExperts
from engine.layout import WHOLE, ModuleKind, ModuleShape, Shard, Within
from engine.parallel import SINGLE, ParallelGroup
from engine.punica.wrapper import Halves, PunicaWrapper


class Delta:
    """What adapters add on one side of the activation."""

    def __init__(self, slices: LoRASlices) -> None:
        self._slices = slices

    def touches(self, slot: int) -> bool:
        """Whether the adapter in `slot` has weights here."""
        return any(pair is not None for pair in self._slices.pairs(slot))

    def add(
        self, punica: PunicaWrapper, ys: Sequence[Tensor], x: Tensor, groups: ExpertGroups
    ) -> None:
        """Add to each slice's `ys` [pairs, out] what `x` [pairs, in] gives, in place."""
        punica.add_lora_fused_moe(ys, x, self._slices, groups)


class ExchangedDelta(Delta):
    """The same where ranks exchange what was shrunk; every rank adds for the same groups."""

    def __init__(self, halves: Halves, exchange: Callable[[Tensor], Tensor]) -> None:
        super().__init__(halves.shrink)
        self._halves, self._exchange = halves, exchange

    def add(
        self, punica: PunicaWrapper, ys: Sequence[Tensor], x: Tensor, groups: ExpertGroups
    ) -> None:
        """As the base class, in two halves."""
        punica.add_lora_fused_moe_halves(ys, x, self._halves, groups, self._exchange)


class Deltas(NamedTuple):
    """Of w1 and w3, before the activation, and of w2, behind it."""

    up: Delta
    down: Delta


class ExpertsWithLoRA(BaseLayerWithLoRA):
    """What both formats share: routing, the two products, and where the deltas go in.

    The last slice is w2; all before it lie before the activation.
    """

    _deltas: Deltas | None = None

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        layout = layout_of(base_layer)
        if layout is None:
            raise TypeError(f"{type(base_layer).__name__} is no experts module that is understood")
        self.layout: ExpertLayout = layout

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every experts module whose layout is understood."""
        return layout_of(layer) is not None

    @property
    def group(self) -> ParallelGroup:
        """The ranks that share the experts."""
        base = self.base_layer
        return base.group if isinstance(base, ParallelExperts) else SINGLE

    def up_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The columns of each slice before the activation; rows: [pairs, up_features]."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its slices go")

    def down_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The columns that this rank writes behind it; rows: [pairs, out_features]."""
        return (rows,)

    def module_shapes(self, name: str, first: int) -> list[ModuleShape]:
        """The layer's slices, called as the projections of the module at `name` are."""
        return super().module_shapes(f"{name}.", first)

    def _bind(self, directory: Directory) -> None:
        shapes, columns = self.slice_shapes, self._columns
        up = slices_of(directory, shapes[:-1], columns[:-1])
        down = slices_of(directory, shapes[-1:], columns[-1:])
        self._deltas = self._deltas_of(up, down)

    def _deltas_of(self, up: LoRASlices, down: LoRASlices) -> Deltas:
        return Deltas(Delta(up), Delta(down))

    def adapter_enabled(self, slot: int) -> bool:
        """Whether the adapter in `slot` touches these experts."""
        return any(delta.touches(slot) for delta in self._deltas or ())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, deltas included, [tokens, out_features].

        hidden_states: [tokens, in_features], one row a token of the mapping. top_k_index,
        top_k_weights: [tokens, top_k], the router's choice.
        """
        base = self.base_layer
        call = Call(hidden_states, top_k_index, top_k_weights)
        own = base.localized(call) if isinstance(base, ParallelExperts) else call
        work = self._work(own)
        if work is None:
            result: Tensor = base(hidden_states, top_k_index, top_k_weights)
            return result
        return self.group.all_reduce(self.layout.forward(base, own, *work))

    def _work(self, call: Call) -> tuple[Routed, Adder, Adder] | None:
        """The call's pairs, and what adds to them on both sides; None where nothing is added."""
        punica, deltas = self._punica, self._deltas
        if punica is None or deltas is None:
            return None
        tokens, experts = len(call.hidden_states), self.layout.experts
        found = punica.group_experts(tokens, self.adapter_enabled, call.top_k_index, experts)
        if found is None:
            return None
        routed = self.layout.route(call)
        groups = found.at(routed.places)

        def add_up(y: Tensor, x: Tensor) -> None:
            deltas.up.add(punica, self.up_views(y), x, groups)

        def add_down(y: Tensor, x: Tensor) -> None:
            deltas.down.add(punica, self.down_views(y), x, groups)

        return routed, add_up, add_down

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
