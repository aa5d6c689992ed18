"""How an experts module of `transformers` lies: read from its own parameters and attributes.

What it is: the one place that knows layouts, and the module's own two products and activation over
rows sorted by expert. What it is not: a list of model names. One rule: a module whose parameters
or call are not understood completely has no layout, and stays as it is.

`transformers` marks a module whose experts any implementation may compute with five attributes
(`has_gate`, `has_bias`, `is_transposed`, `is_concatenated`, and later `has_post_expert_norm`) and
gives a gated one the method `_apply_gate`. These are what is read here.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import Tensor, nn

from engine.kernels.expert_groups import Routed, sort_by_expert
from engine.kernels.grouped_matmul import grouped_product

FLAGS: Final = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What every experts module that is understood says of itself."""

_CALL_ARGUMENTS: Final = 3


class Call(NamedTuple):
    """What an experts module is called with.

    hidden_states: [tokens, in_features]. top_k_index, top_k_weights: [tokens, top_k]. `is_partial`:
    an index may be `experts`, for one that the module does not have.
    """

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    is_partial: bool = False


Adder = Callable[[Tensor, Tensor], object]
"""(y, x): add to y [pairs, out] what x [pairs, in] gives, both in the order of `route`."""


@dataclass(frozen=True)
class ExpertLayout:
    """The shapes of one experts module, and how its rows are computed.

    `up_name`: the parameter before the activation, `gate_up_proj` or `up_proj`. `experts`: how many
    there are. `inter_features`: the width behind the activation. `is_interleaved`: gate and up
    alternate column by column instead of standing side by side.
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

    @property
    def up_features(self) -> int:
        """The width before the activation: gate and up together."""
        return self.inter_features * (2 if self.is_gated else 1)

    def gate_and_up(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The columns of gate and of up as views; rows: [..., up_features]."""
        own = self.gate_and_up_rows()
        return tuple(rows[..., part.start : part.stop : part.step] for part in own)

    def gate_and_up_rows(self) -> tuple[range, ...]:
        """Which outputs of the parameter are gate's and which are up's; all where is no gate."""
        width, inter = self.up_features, self.inter_features
        if not self.is_gated:
            return (range(width),)
        if self.is_interleaved:
            return range(0, width, 2), range(1, width, 2)
        return range(inter), range(inter, width)

    def up_rows(self, inter: range) -> tuple[range, ...]:
        """The outputs of the parameter that give these columns behind the activation."""
        if self.is_interleaved:
            return (range(2 * inter.start, 2 * inter.stop),)
        return tuple(own[inter.start : inter.stop] for own in self.gate_and_up_rows())

    def route(self, call: Call) -> Routed:
        """The call's pairs in the order in which they are computed."""
        return sort_by_expert(call.top_k_index, self.experts)

    def forward(
        self,
        module: nn.Module,
        call: Call,
        routed: Routed,
        add_up: Adder | None = None,
        add_down: Adder | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts, [tokens, out_features]; `routed` as `route`.

        `add_up` and `add_down` may add to what enters the activation, and to the experts' outputs.
        An expert that `module` does not have counts as zeros.
        """
        x = call.hidden_states[routed.tokens]
        inner = self.up(module, x, routed.experts, routed.ends)
        if add_up is not None:
            add_up(inner, x)
        activated = self.activate(module, inner)
        outer = self.down(module, activated, routed.experts, routed.ends)
        if add_down is not None:
            add_down(outer, activated)
        outer = self.finish(module, outer)
        if call.is_partial:
            # Nothing was computed in these rows, so they may hold anything.
            outer = outer.masked_fill((routed.experts == self.experts)[:, None], 0)
        pairs = outer[routed.places].view(*call.top_k_index.shape, -1)
        weighted = pairs * call.top_k_weights[..., None]
        return weighted.sum(dim=1).to(call.hidden_states.dtype)

    def up(self, module: nn.Module, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """What enters the activation, [rows, up_features]; x: [rows, in_features].

        experts: [rows] each row's expert, ascending. ends: [experts] int32, where each one's rows
        end; rows behind the last end are not written.
        """
        return self._product(module, self.up_name, x, experts, ends)

    def down(self, module: nn.Module, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Each row's output, [rows, out_features]; the other arguments as in `up`."""
        return self._product(module, "down_proj", x, experts, ends)

    def activate(self, module: nn.Module, rows: Tensor) -> Tensor:
        """The module's own activation, [rows, inter_features]; rows: [rows, up_features]."""
        activate: Callable[[Tensor], Tensor] = getattr(module, _activation_name(self.is_gated))
        return activate(rows)

    def finish(self, module: nn.Module, rows: Tensor) -> Tensor:
        """What the module does to an expert's output before the weighted sum."""
        if not getattr(module, "has_post_expert_norm", False):
            return rows
        normed: Tensor = module.get_submodule("post_expert_norm")(rows)
        return normed

    def _product(
        self, module: nn.Module, name: str, x: Tensor, experts: Tensor, ends: Tensor
    ) -> Tensor:
        weights: Tensor = getattr(module, name)
        matrices = weights.transpose(1, 2) if self.is_transposed else weights
        product = grouped_product(x.to(weights.dtype), matrices, ends)
        if self.is_biased:
            bias: Tensor = getattr(module, f"{name}_bias")
            product += bias[experts.clamp(max=self.experts - 1)]
        return product


def layout_of(module: nn.Module) -> ExpertLayout | None:
    """The layout of an experts module; None for any other, and for one that is not understood."""
    flags = [getattr(module, name, None) for name in FLAGS]
    if not all(isinstance(flag, bool) for flag in flags) or not _takes_routing(module):
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


def _activation_name(is_gated: bool) -> str:
    """What a module's activation is called: with a gate it takes gate and up as they lie."""
    return "_apply_gate" if is_gated else "act_fn"


def _takes_routing(module: nn.Module) -> bool:
    """Whether it is called with rows, each row's experts, and their weights."""
    return len(inspect.signature(module.forward).parameters) == _CALL_ARGUMENTS
