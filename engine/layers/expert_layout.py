"""Layout of the experts modules of `transformers`, read from their parameters and attributes.

`transformers` marks a module whose experts any implementation may compute by five attributes
(`has_gate`, `has_bias`, `is_transposed`, `is_concatenated`, and later `has_post_expert_norm`), and
a gated one has a method `_apply_gate`. A module without these attributes has a layout if its own
forward computes what the layout computes. Model names are not used. A module whose parameters or
call are not fully recognised has no layout and is not wrapped.

`ParallelExperts` is such a module split over ranks, by columns of each expert or by expert: every
rank routes alike and computes its shard, and each token's output is the sum over the ranks.
"""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.kernels.expert_groups import RoutedPairs, sort_by_expert
from loradock.engine.kernels.grouped_matmul import grouped_matmul
from loradock.engine.parallel import ParallelGroup, ParameterShard

FLAGS: Final = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""The attributes of every supported experts module."""

_CALL_ARGUMENTS: Final = 3

_ROUNDING: Final = 0.02
"""The relative norm up to which a module without the attributes computes what its layout does."""


class ExpertsInput(NamedTuple):
    """The arguments of an experts module's call.

    hidden_states: [tokens, in_features]. top_k_index, top_k_weights: [tokens, top_k]. `is_partial`:
    an index can be `up_experts` or more, for an expert that the module lacks.
    """

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    is_partial: bool = False


AddDelta = Callable[[Tensor, Tensor], object]
"""(y, x): adds to y [pairs, out] the delta of x [pairs, in], both in the order of `route`."""


@dataclass(frozen=True)
class ExpertLayout:
    """The shapes of one experts module, and the computation of its rows.

    `up_name`: the parameter before the activation, `gate_up_proj` or `up_proj`. `experts`: the
    number of experts. `inter_features`: the columns after the activation. `is_interleaved`: columns
    of gate and up alternate instead of being contiguous. `identities`: the experts after the last
    one, which return their input; `up_name` can have matrices for them, which are never used.
    """

    up_name: str
    experts: int
    in_features: int
    inter_features: int
    out_features: int
    is_gated: bool
    is_transposed: bool
    is_interleaved: bool
    is_biased: bool
    identities: int = 0

    @property
    def up_experts(self) -> int:
        """The matrices of the parameter before the activation."""
        return self.experts + self.identities

    @property
    def up_features(self) -> int:
        """The columns before the activation: gate and up together."""
        return self.inter_features * (2 if self.is_gated else 1)

    def gate_and_up(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of gate and of up as views; rows: [..., up_features]."""
        ranges = self.gate_and_up_rows()
        return tuple(rows[..., part.start : part.stop : part.step] for part in ranges)

    def gate_and_up_rows(self) -> tuple[range, ...]:
        """Return the parameter's outputs for gate and those for up; all outputs without a gate."""
        up, inter = self.up_features, self.inter_features
        if not self.is_gated:
            return (range(up),)
        if self.is_interleaved:
            return range(0, up, 2), range(1, up, 2)
        return range(inter), range(inter, up)

    def up_rows(self, inter: range) -> tuple[range, ...]:
        """Return the outputs of the parameter that these columns after the activation depend on."""
        if self.is_interleaved:
            return (range(2 * inter.start, 2 * inter.stop),)
        return tuple(part[inter.start : inter.stop] for part in self.gate_and_up_rows())

    def route(self, call: ExpertsInput) -> RoutedPairs:
        """Return the call's pairs in the order in which they are computed."""
        return sort_by_expert(call.top_k_index, self.experts)

    def forward(
        self,
        module: nn.Module,
        call: ExpertsInput,
        routed: RoutedPairs,
        add_up_delta: AddDelta | None = None,
        add_down_delta: AddDelta | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, [tokens, out_features]; see `route`.

        `add_up_delta` and `add_down_delta` may add to the activation's input and to the experts'
        outputs. An expert that `module` lacks counts as zeros.
        """
        x = call.hidden_states[routed.tokens]
        inner = self.up(module, x, routed.experts, routed.ends)
        if add_up_delta is not None:
            add_up_delta(inner, x)
        activated = self.activate(module, inner)
        outer = self.down(module, activated, routed.experts, routed.ends)
        if add_down_delta is not None:
            add_down_delta(outer, activated)
        outer = self.finish(module, outer)
        if call.is_partial:
            # These rows were not computed, so their contents are undefined.
            outer = torch.where((routed.experts < self.experts)[:, None], outer, 0)
        if self.identities:
            is_identity = (routed.experts >= self.experts) & (routed.experts < self.up_experts)
            outer = torch.where(is_identity[:, None], x, outer)
        pairs = outer[routed.row_of_pair].view(*call.top_k_index.shape, -1)
        weighted = pairs * call.top_k_weights[..., None]
        return weighted.sum(dim=1).to(call.hidden_states.dtype)

    def up(self, module: nn.Module, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Return the activation's input, [rows, up_features]; x: [rows, in_features].

        experts: [rows] each row's expert, ascending. ends: [experts] int32, the end of each
        expert's rows; rows after the last end are undefined.
        """
        return self._product(module, self.up_name, x, experts, ends)

    def down(self, module: nn.Module, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Return each row's output, [rows, out_features]; the other arguments as in `up`."""
        return self._product(module, "down_proj", x, experts, ends)

    def activate(self, module: nn.Module, rows: Tensor) -> Tensor:
        """Apply the module's activation: [rows, inter_features]; rows: [rows, up_features]."""
        name = _activation_name(self.is_gated)
        if hasattr(module, name):
            activate: Callable[[Tensor], Tensor] = getattr(module, name)
            return activate(rows)
        gate, up = self.gate_and_up(rows)
        activated: Tensor = module.get_submodule("act_fn")(gate) * up
        return activated

    def finish(self, module: nn.Module, rows: Tensor) -> Tensor:
        """Apply what the module does to an expert's output before the weighted sum."""
        if not getattr(module, "has_post_expert_norm", False):
            return rows
        normed: Tensor = module.get_submodule("post_expert_norm")(rows)
        return normed

    def _product(
        self, module: nn.Module, name: str, x: Tensor, experts: Tensor, ends: Tensor
    ) -> Tensor:
        weights: Tensor = getattr(module, name)
        if len(weights) > self.experts:
            weights = weights[: self.experts]
        matrices = weights.transpose(1, 2) if self.is_transposed else weights
        product = grouped_matmul(x.to(weights.dtype), matrices, ends)
        if self.is_biased:
            bias: Tensor = getattr(module, f"{name}_bias")
            product += bias[experts.clamp(max=self.experts - 1)]
        return product


def layout_of(module: nn.Module) -> ExpertLayout | None:
    """Return the layout of an experts module; None for any module that is not supported."""
    if isinstance(module, ParallelExperts):
        return module.layout
    flags = [getattr(module, name, None) for name in FLAGS]
    if all(flag is None for flag in flags):
        return _observed_layout(module)
    if not all(isinstance(flag, bool) for flag in flags) or not _accepts_routing(module):
        return None
    is_gated, is_biased, is_transposed, is_concatenated = flags
    up_name = "gate_up_proj" if is_gated else "up_proj"
    expected = {up_name, "down_proj"}
    expected |= {f"{name}_bias" for name in expected} if is_biased else set()
    parameters = dict(module.named_parameters(recurse=False))
    activation = getattr(module, _activation_name(bool(is_gated)), None)
    if parameters.keys() != expected or not callable(activation):
        return None
    up, down = parameters[up_name], parameters["down_proj"]
    if up.ndim != 3 or down.ndim != 3 or not up.dtype.is_floating_point:
        return None
    shapes = [list(p.shape)[1:][:: -1 if is_transposed else 1] for p in (up, down)]
    (up_features, in_features), (out_features, inter_features) = shapes
    layout = ExpertLayout(
        up_name,
        len(up),
        in_features,
        inter_features,
        out_features,
        is_gated=bool(is_gated),
        is_transposed=bool(is_transposed),
        is_interleaved=bool(is_gated and not is_concatenated),
        is_biased=bool(is_biased),
    )
    return layout if layout.up_features == up_features and len(down) == len(up) else None


def _observed_layout(module: nn.Module) -> ExpertLayout | None:
    """Return the layout of a gated module without the attributes, if its forward confirms it."""
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() != {"gate_up_proj", "down_proj"} or not _accepts_routing(module):
        return None
    up, down = parameters["gate_up_proj"], parameters["down_proj"]
    is_known = up.ndim == down.ndim == 3 and up.dtype.is_floating_point
    if not is_known or not isinstance(getattr(module, "act_fn", None), nn.Module):
        return None
    (experts, out_features, inter_features), identities = down.shape, len(up) - len(down)
    if identities < 0 or up.shape[1:] != (2 * inter_features, out_features):
        return None
    sizes = (experts, out_features, inter_features, out_features)
    flags = {"is_gated": True, "is_transposed": False, "is_interleaved": False, "is_biased": False}
    layout = ExpertLayout("gate_up_proj", *sizes, **flags, identities=identities)
    return layout if _computes(_with_values(module), layout) else None


def _with_values(module: nn.Module) -> nn.Module:
    """Return a module that has weights: itself, or for parameters on meta one with a random expert.

    That expert stands for all of them, so that no whole weight is allocated.
    """
    if not any(one.is_meta for one in module.parameters(recurse=False)):
        return module
    generator = torch.Generator().manual_seed(0)
    filled = copy(module)
    filled._parameters = {
        name: nn.Parameter(
            torch.randn(one.shape[1:], generator=generator, device="cpu").expand(one.shape),
            requires_grad=False,
        )
        for name, one in module.named_parameters(recurse=False)
    }
    return filled


@torch.inference_mode()
def _computes(module: nn.Module, layout: ExpertLayout) -> bool:
    """Return whether a module's forward equals `layout`'s, for its first and last experts."""
    up: Tensor = getattr(module, layout.up_name)
    chosen = sorted({0, layout.experts - 1, layout.up_experts - 1})
    index = torch.tensor([[one, chosen[0]] for one in chosen], device=up.device)
    # Of both signs and different in each column, so that exchanging gate and up is seen.
    x = torch.linspace(-3, 2, len(chosen) * layout.in_features, dtype=up.dtype, device=up.device)
    x = x.view(len(chosen), -1).sin()
    weights = torch.linspace(0.5, 2, index.numel(), dtype=up.dtype, device=up.device)
    call = ExpertsInput(x, index, weights.view(index.shape))
    try:
        own = module(*call[:_CALL_ARGUMENTS])
    except MODEL_CODE_ERRORS:
        return False
    found = layout.forward(module, call, layout.route(call))
    if not isinstance(own, Tensor) or own.shape != found.shape:
        return False
    return bool((found.double() - own.double()).norm() <= _ROUNDING * own.double().norm())


def _activation_name(is_gated: bool) -> str:
    """Return the activation's attribute; with a gate it is called with gate and up as stored."""
    return "_apply_gate" if is_gated else "act_fn"


def _accepts_routing(module: nn.Module) -> bool:
    """Return whether it is called with rows, each row's experts, and their weights."""
    return len(inspect.signature(module.forward).parameters) == _CALL_ARGUMENTS


class ParallelExperts(nn.Module):
    """One rank's shard of an experts module, whose parameters are removed from it.

    `whole`: the layout before. `inter_range`: this rank's columns after the activation, None for
    all (tensor parallel). `expert_range`: this rank's experts, None for all (expert parallel). The
    tokens of experts that return their input are added by the leader alone. Raises ValueError for a
    module that can't be split.
    """

    def __init__(self, module: nn.Module, group: ParallelGroup, by_expert: bool) -> None:
        super().__init__()
        whole = layout_of(module)
        if whole is None:
            raise ValueError(f"{type(module).__name__} is not a supported experts module")
        if getattr(module, "has_post_expert_norm", False):
            raise ValueError("experts with normalised outputs can't be split over ranks")
        self.whole: ExpertLayout = whole
        self.group = group
        self.expert_range = group.shard_range(whole.experts, "experts") if by_expert else None
        self.inter_range = (
            None if by_expert else group.shard_range(whole.inter_features, "expert columns")
        )
        inter, experts = self.inter_range, self.expert_range
        self.layout: ExpertLayout = replace(
            whole,
            experts=whole.experts if experts is None else len(experts),
            inter_features=whole.inter_features if inter is None else len(inter),
            identities=whole.identities if group.is_leader else 0,
        )
        name = _activation_name(whole.is_gated)
        # A bound method of the module, which reads attributes that only the module has, or a layer.
        name = name if hasattr(module, name) else "act_fn"
        setattr(self, name, getattr(module, name))
        parameters = list(module.named_parameters(recurse=False))
        self.shards: Mapping[str, ParameterShard] = {
            name: self._shard(name) for name, _ in parameters
        }
        for name, parameter in parameters:
            part = self.shards[name].take(parameter.detach())
            setattr(self, name, nn.Parameter(part, requires_grad=False))
            module.register_parameter(name, None)

    def localized(self, call: ExpertsInput) -> ExpertsInput:
        """Return the call with this rank's numbering of experts."""
        index, own = call.top_k_index, self.expert_range
        if own is None:
            return call._replace(is_partial=self.layout.identities < self.whole.identities)
        is_own = (index >= own.start) & (index < own.stop)
        local = (index - own.start).where(is_own, self.layout.up_experts)
        if self.layout.identities:
            identity = index - self.whole.experts
            local = local.where(identity < 0, identity + len(own))
        return call._replace(top_k_index=local, is_partial=True)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the whole module's output, [tokens, out_features]; the arguments are whole too."""
        call = self.localized(ExpertsInput(hidden_states, top_k_index, top_k_weights))
        return self.group.all_reduce(self.layout.forward(self, call, self.layout.route(call)))

    def _shard(self, name: str) -> ParameterShard:
        """Return this rank's part of a parameter, in the layout of the whole."""
        if self.expert_range is not None:
            return ParameterShard(0, (self.expert_range,))
        is_up = name.startswith(self.whole.up_name)
        if name.endswith("_bias"):
            # Ranks' outputs are summed, so only one rank adds the bias after the sum.
            return (
                self._columns(1, is_up)
                if is_up
                else ParameterShard(is_zero=not self.group.is_leader)
            )
        return self._columns(2 if is_up == self.whole.is_transposed else 1, is_up)

    def _columns(self, dimension: int, is_up: bool) -> ParameterShard:
        inter = range(self.whole.inter_features) if self.inter_range is None else self.inter_range
        return ParameterShard(dimension, self.whole.up_rows(inter) if is_up else (inter,))
