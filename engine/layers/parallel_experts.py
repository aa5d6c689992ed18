"""Experts of which every rank holds a part: some columns of each, or some of the experts.

What it is: the part of an experts module's parameters that a rank keeps, and the sum over ranks.
What it is not: LoRA; `experts` wraps this like any experts module, for it has the same attributes.
One rule: every rank routes alike, computes its part, and what each token gets is the sum of all.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.layers.expert_layout import FLAGS, Call, ExpertLayout, layout_of
from engine.parallel import ParallelGroup


class ParallelExperts(nn.Module):
    """One rank's part of an experts module, whose parameters are taken out of it.

    `whole`: the layout before. `inter`: this rank's columns behind the activation, None for all
    (tensor parallel). `kept`: this rank's experts, None for all (expert parallel). Raises
    ValueError for a module that can't be shared so.
    """

    def __init__(self, module: nn.Module, group: ParallelGroup, by_expert: bool) -> None:
        super().__init__()
        whole = layout_of(module)
        if whole is None:
            raise ValueError(f"a {type(module).__name__} is no experts module that is understood")
        if getattr(module, "has_post_expert_norm", False):
            raise ValueError("experts whose outputs are normalised can't be summed part by part")
        self.whole: ExpertLayout = whole
        self.group = group
        self.kept = group.part_of(whole.experts, "experts") if by_expert else None
        self.inter = None if by_expert else group.part_of(whole.inter_features, "expert columns")
        for name in FLAGS:
            setattr(self, name, getattr(module, name))
        # A bound method of the module: it reads numbers that only the module has.
        self._apply_gate: Callable[[Tensor], Tensor] | None = getattr(module, "_apply_gate", None)
        if not whole.is_gated:
            self.act_fn = module.act_fn
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = self._part(name, parameter.detach()).clone()
            setattr(self, name, nn.Parameter(part, requires_grad=False))
            module.register_parameter(name, None)
        self.layout: ExpertLayout = self._own_layout()

    def localized(self, call: Call) -> Call:
        """The call with experts numbered as this rank has them."""
        if self.kept is None:
            return call
        index = call.top_k_index - self.kept.start
        is_own = (index >= 0) & (index < len(self.kept))
        return call._replace(top_k_index=index.where(is_own, len(self.kept)), is_partial=True)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the whole module computes, [tokens, out_features]; the arguments are whole too."""
        call = self.localized(Call(hidden_states, top_k_index, top_k_weights))
        return self.group.all_reduce(self.layout.forward(self, call, self.layout.route(call)))

    def _own_layout(self) -> ExpertLayout:
        layout = layout_of(self)
        if layout is None:
            raise RuntimeError("a part of an experts module has no layout")
        return layout

    def _part(self, name: str, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, which lies as the whole does."""
        if self.kept is not None:
            return parameter[self.kept.start : self.kept.stop]
        is_up = name.startswith(self.whole.up_name)
        if name.endswith("_bias"):
            if is_up:
                return self._columns(parameter, -1, is_up)
            # What all ranks add is summed, so one rank adds it.
            return parameter if self.group.leads else torch.zeros_like(parameter)
        is_last = is_up == self.whole.is_transposed
        return self._columns(parameter, -1 if is_last else -2, is_up)

    def _columns(self, parameter: Tensor, dimension: int, is_up: bool) -> Tensor:
        inter = range(self.whole.inter_features) if self.inter is None else self.inter
        rows = self.whole.up_rows(inter) if is_up else (inter,)
        parts = [parameter.narrow(dimension, own.start, len(own)) for own in rows]
        return torch.cat(parts, dim=dimension)
