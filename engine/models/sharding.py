"""A model split over the ranks of a group, by the plan that it brings itself.

What it is: the walk over `transformers`' tensor-parallel plan, each entry a change of one layer.
What it is not: a plan of our own, or the split layers (`engine.layers.parallel`). One rule: a plan
is believed only as far as we know its words, and only if the split model was seen to answer as the
whole one did; every other model is refused, with the reason.
"""

import re
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.errors import FOREIGN_FAILURES, ModelRefused
from engine.layers.expert_layout import layout_of
from engine.layers.parallel_experts import ParallelExperts
from engine.layers.tensor_parallel import (
    ColumnParallelLinear,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from engine.models.probe import ERROR_MAX_HALF, ERRORS_MAX
from engine.models.vision.encoder import find_image_part
from engine.parallel import ParallelGroup

_PROMPT_TOKENS: Final = 5
"""How many tokens the whole and the split model are asked about."""

_BY_EXPERT: Final = "experts shared whole"
"""The plan's word for what no plan says."""

_SAME: Final = 1
_OTHER: Final = 0


def shard_model(
    model: PreTrainedModel, group: ParallelGroup, device: torch.device, by_expert: bool = False
) -> None:
    """Leave of `model`, which is whole on the host, this rank's part on `device`, in place.

    With `by_expert` a rank keeps some experts whole, and else some columns of each. Collective.
    Raises `ModelRefused`, on every rank, for a model without a plan, a plan with entries that we
    don't know, layers that can't be shared evenly, and a plan that changes what the model answers.
    """
    sharding = Sharding(model, group, by_expert)
    whole = _answer(model) if group.leads else None
    sharding.apply()
    model.to(device)
    # Rank 0 alone has run the whole model, on the host: longer than any later call may take.
    group.wait_for_all()
    try:
        split = _answer(model)
    except FOREIGN_FAILURES as error:
        raise ModelRefused(
            f"the model's tensor-parallel plan does not run on {group.world_size} ranks: "
            f"{type(error).__name__}: {error}"
        ) from error
    verdict = _OTHER if whole is not None and not _agree(whole, split) else _SAME
    if group.broadcast_numbers([verdict]) != [_SAME]:
        raise ModelRefused(
            f"split by its own plan over {group.world_size} ranks the model answers otherwise than "
            "whole; serve it on one rank"
        )


class Sharding:
    """One model, one group, and the plan between them."""

    def __init__(
        self, model: PreTrainedModel, group: ParallelGroup, by_expert: bool = False
    ) -> None:
        """`by_expert`: experts are shared whole, each by one rank, whatever the plan says."""
        self._model = model
        self._by_expert = by_expert
        self._group = group
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._styles: Mapping[str, Callable[[str, nn.Module], nn.Module]] = {
            "colwise": self._column,
            "colwise_gather_output": self._gathered_column,
            "rowwise": lambda _, layer: RowParallelLinear(_linear(layer), group),
            "rowwise_split_input": lambda _, layer: RowParallelLinear(_linear(layer), group, True),
            "embedding_rowwise": self._embedding_rows,
            "moe_tp_experts": lambda _, layer: ParallelExperts(layer, group, by_expert=False),
            _BY_EXPERT: lambda _, layer: ParallelExperts(layer, group, by_expert=True),
            "replicate": _whole,
            # Whole on every rank; the gradients that are summed do not exist here.
            "replicated_with_grad_allreduce": _whole,
            "mla_kv_a_proj": _whole,
        }
        self._planned = self._read_plan()
        self._heads = self._count_heads()

    def apply(self) -> None:
        """Put this rank's part in place of every layer that the plan names."""
        parts: dict[nn.Module, nn.Module] = {}
        for name, style in self._planned.items():
            layer = self._model.get_submodule(name)
            try:
                parts[layer] = self._styles[style](name, layer)
            except ValueError as error:
                raise ModelRefused(f"{name}: {error}") from error
        self._tie(parts)
        for path, layer in list(self._model.named_modules(remove_duplicate=False)):
            if layer in parts:
                self._model.set_submodule(path, parts[layer])
        self._set_head_groups()

    def _read_plan(self) -> dict[str, str]:
        """What the plan says of each module; refused where it says what we don't know.

        Every rank holds the part that reads images whole, whatever the plan says: it is small, and
        what a plan does to it is not seen in the answers to a text.
        """
        plan = self._model.tp_plan or {}
        images = find_image_part(self._model)
        layers = {
            name: layer
            for name, layer in self._model.named_modules()
            if images is None or layer not in images
        }
        modules = _matching(plan, layers)
        ends = (self._embedding, self._head)
        # Without its layers every rank would hold nearly all of the model.
        if all(layers[name] in ends for name in modules):
            raise ModelRefused(
                f"{type(self._model).__name__} has no tensor-parallel plan for its layers; serve "
                "it on one rank"
            )
        experts = experts_of(self._model)
        if self._by_expert:
            modules |= dict.fromkeys(experts, _BY_EXPERT)
        # How an experts module's parameters are cut follows from what is said of the module.
        parameters = {
            name: style
            for name, style in _matching(plan, dict(self._model.named_parameters())).items()
            if (owner := name.rpartition(".")[0]) in layers and owner not in experts
        }
        unknown = {_pattern_of(name): style for name, style in parameters.items()}
        unknown |= {
            _pattern_of(name): style for name, style in modules.items() if style not in self._styles
        }
        if unknown:
            said = ", ".join(f"{pattern}: {style}" for pattern, style in sorted(unknown.items()))
            raise ModelRefused(
                f"the model's tensor-parallel plan says {said}, which is not supported; serve it "
                "on one rank"
            )
        return modules

    def _count_heads(self) -> dict[str, dict[str, int]]:
        """By attention module, the projections whose outputs are split, and their heads."""
        heads: dict[str, dict[str, int]] = {}
        for name, style in self._planned.items():
            owner = name.rpartition(".")[0]
            head_dim = getattr(self._model.get_submodule(owner), "head_dim", None)
            if style == "colwise" and isinstance(head_dim, int):
                out_features = _linear(self._model.get_submodule(name)).out_features
                heads.setdefault(owner, {})[name] = out_features // head_dim
        return heads

    def _set_head_groups(self) -> None:
        """Tell attention modules how many query heads share a key and value head on this rank."""
        ranks = self._group.world_size
        for owner, heads in self._heads.items():
            attention = self._model.get_submodule(owner)
            if hasattr(attention, "num_key_value_groups"):
                queries, keys = max(heads.values()), min(heads.values())
                attention.num_key_value_groups = queries // ranks // max(keys // ranks, 1)

    def _column(self, name: str, layer: nn.Module) -> nn.Module:
        return ColumnParallelLinear(_linear(layer), self._group, self._rows(name, layer))

    def _rows(self, name: str, layer: nn.Module) -> list[range] | None:
        """Where key and value heads are fewer than ranks, the rows of one head; else None."""
        heads, ranks = self._heads.get(name.rpartition(".")[0], {}), self._group.world_size
        own = heads.get(name, 0)
        if own % ranks == 0:
            return None
        if own == max(heads.values()) or ranks % own:
            raise ValueError(f"{own} heads can't be shared evenly by {ranks} ranks")
        width = _linear(layer).out_features // own
        head = self._group.rank // (ranks // own)
        return [range(head * width, (head + 1) * width)]

    def _gathered_column(self, _name: str, layer: nn.Module) -> nn.Module:
        if layer is self._head:
            return ParallelHead(_linear(layer), self._group)
        return ColumnParallelLinear(_linear(layer), self._group, gathers=True)

    def _embedding_rows(self, _name: str, layer: nn.Module) -> nn.Module:
        # One that does more than look up (it scales, say) stays whole, which is right anywhere.
        if isinstance(layer, nn.Embedding) and type(layer).forward is nn.Embedding.forward:
            return VocabParallelEmbedding(layer, self._group)
        return layer

    def _tie(self, parts: Mapping[nn.Module, nn.Module]) -> None:
        """Let the part of a head that was tied to the embedding lie where the embedding's does."""
        head = None if self._head is None else parts.get(self._head)
        if isinstance(head, ParallelHead) and self._head.weight is self._embedding.weight:
            embedding = parts.get(self._embedding, self._embedding)
            if isinstance(embedding, VocabParallelEmbedding):
                head.weight = embedding.weight
            else:
                mine = embedding.weight[head.tokens.start : head.tokens.stop]
                head.weight = nn.Parameter(mine, requires_grad=False)


def _pattern_of(name: str) -> str:
    """A name as plans have it: every number is a star."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _matching(plan: Mapping[str, str], named: Mapping[str, object]) -> dict[str, str]:
    return {name: plan[_pattern_of(name)] for name in named if _pattern_of(name) in plan}


def experts_of(model: nn.Module) -> set[str]:
    """The paths of the experts modules that are understood."""
    return {name for name, module in model.named_modules() if layout_of(module) is not None}


def _linear(layer: nn.Module) -> nn.Linear:
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise ValueError(f"a {type(layer).__name__} can't be split; a plain linear layer can")
    return layer


def _whole(_name: str, layer: nn.Module) -> nn.Module:
    return layer


@torch.inference_mode()
def _answer(model: PreTrainedModel) -> Tensor:
    """What the model says of a short prompt, all in one row, on the host.

    A text's labels may be few, or one that is nearly zero; so a classifier is also asked for the
    states that they were made from.
    """
    tokens = torch.arange(_PROMPT_TOKENS, device=model.device)[None]
    arguments = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    said: list[Tensor] = [model(input_ids=tokens, **arguments)[0]]
    if said[0].ndim == 2:
        said.append(model.base_model(input_ids=tokens, **arguments)[0])
    return torch.cat([answer.flatten() for answer in said]).cpu()


def _agree(whole: Tensor, split: Tensor) -> bool:
    allowed = ERRORS_MAX.get(whole.dtype, ERROR_MAX_HALF)
    difference = split.double() - whole.double()
    return float(difference.norm() / whole.double().norm()) <= allowed
