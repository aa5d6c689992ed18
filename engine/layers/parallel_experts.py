"""Experts split over ranks: by columns of each expert, or by expert.

Every rank routes alike and computes its shard; each token's output is the sum over the ranks.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from loradock.engine.layers.expert_layout import FLAGS, ExpertLayout, ExpertsInput, layout_of
from loradock.engine.parallel import ParallelGroup, ParameterShard


class ParallelExperts(nn.Module):
    """One rank's shard of an experts module, whose parameters are removed from it.

    `whole`: the layout before. `inter_range`: this rank's columns after the activation, None for
    all (tensor parallel). `expert_range`: this rank's experts, None for all (expert parallel). The
    module has the same attributes as the whole one, so that it can be wrapped like it. Raises
    ValueError for a module that can't be split.
    """

    def __init__(self, module: nn.Module, group: ParallelGroup, by_expert: bool) -> None:
        super().__init__()
        whole = layout_of(module)
        if whole is None:
            raise ValueError(f"{type(module).__name__} is not a supported experts module")
        if getattr(module, "has_post_expert_norm", False):
            raise ValueError("experts with normalised outputs can't be split over ranks")
        if whole.identities:
            # Each rank would add the tokens of experts that return their input.
            raise ValueError("experts that return their input can't be split over ranks")
        self.whole: ExpertLayout = whole
        self.group = group
        self.expert_range = group.shard_range(whole.experts, "experts") if by_expert else None
        self.inter_range = (
            None if by_expert else group.shard_range(whole.inter_features, "expert columns")
        )
        for name in FLAGS:
            setattr(self, name, getattr(module, name))
        # A bound method of the module: it reads attributes that only the module has.
        self._apply_gate: Callable[[Tensor], Tensor] | None = getattr(module, "_apply_gate", None)
        if not whole.is_gated:
            self.act_fn = module.act_fn
        parameters = list(module.named_parameters(recurse=False))
        self.shards: Mapping[str, ParameterShard] = {
            name: self._shard(name) for name, _ in parameters
        }
        for name, parameter in parameters:
            part = self.shards[name].take(parameter.detach())
            setattr(self, name, nn.Parameter(part, requires_grad=False))
            module.register_parameter(name, None)
        self.layout: ExpertLayout = self._shard_layout()

    def localized(self, call: ExpertsInput) -> ExpertsInput:
        """Return the call with this rank's numbering of experts."""
        if self.expert_range is None:
            return call
        index = call.top_k_index - self.expert_range.start
        is_local = (index >= 0) & (index < len(self.expert_range))
        return call._replace(
            top_k_index=index.where(is_local, len(self.expert_range)), is_partial=True
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the whole module's output, [tokens, out_features]; the arguments are whole too."""
        call = self.localized(ExpertsInput(hidden_states, top_k_index, top_k_weights))
        return self.group.all_reduce(self.layout.forward(self, call, self.layout.route(call)))

    def _shard_layout(self) -> ExpertLayout:
        layout = layout_of(self)
        if layout is None:
            raise RuntimeError("a shard of an experts module has no layout")
        return layout

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
