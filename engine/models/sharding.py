"""Splitting of a model over the ranks of a group, by the tensor-parallel plan of `transformers`.

A plan is applied only if all of its entries are known, and only if the split model returns what the
whole one did. If it has no layers, as plans of hybrids, attention and gated MLPs are found by the
names of their projections, and all other layers are whole on every rank. Every other model is
refused, with the reason.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Final, cast

import torch
from torch import Tensor, nn

from loradock.engine.errors import MODEL_CODE_ERRORS, ModelRefused
from loradock.engine.layers.expert_layout import ParallelExperts, layout_of
from loradock.engine.layers.tensor_parallel import (
    ColumnParallelLinear,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from loradock.engine.models.image_part import find_image_part
from loradock.engine.models.library.names import PreTrainedModel
from loradock.engine.models.observation import error_max, relative_difference
from loradock.engine.parallel import WHOLE_PARAMETER, ParallelGroup, ParameterShard

_PROMPT_TOKENS: Final = 5
"""The number of tokens of the prompt that compares the whole and the split model."""

_BY_EXPERT: Final = "experts shared whole"
"""Our own style for whole experts, which no plan contains."""


class Sharding:
    """The change of one model for one rank, by its plan.

    `model`, which is whole on the host or without weights, is changed in place.
    """

    def __init__(
        self, model: PreTrainedModel, group: ParallelGroup, by_expert: bool = False
    ) -> None:
        """`by_expert`: each rank keeps some experts whole, regardless of the plan.

        Raises `ModelRefused`, on every rank, for a model without a plan, and a plan with unknown
        entries.
        """
        self.model = model
        self._by_expert = by_expert
        self._group = group
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._split_by_style: Mapping[str, Callable[[str, nn.Module], nn.Module]] = {
            "colwise": self._column,
            "colwise_gather_output": self._gathered_column,
            "rowwise": lambda _, layer: RowParallelLinear(_linear(layer), group),
            "rowwise_split_input": lambda _, layer: RowParallelLinear(_linear(layer), group, True),
            "embedding_rowwise": self._embedding_rows,
            "moe_tp_experts": lambda _, layer: ParallelExperts(layer, group, by_expert=False),
            _BY_EXPERT: lambda _, layer: ParallelExperts(layer, group, by_expert=True),
            "replicate": _whole,
            # Whole on every rank; gradients do not exist here.
            "replicated_with_grad_allreduce": _whole,
            "mla_kv_a_proj": _whole,
            # What these experts return is added by one rank: see `ParallelExperts`.
            "moe_identity_expert": _whole,
        }
        self._style_by_name = self._read_plan()
        self._heads = self._count_heads()
        self._whole: dict[nn.Module, WholeLayer] = {}
        self._paths: dict[str, nn.Module] = {}

    def apply(self) -> None:
        """Replace every layer that the plan names by this rank's part.

        The whole layers are kept without their weights. Raises `ModelRefused` for layers that can't
        be shared evenly.
        """
        parts: dict[nn.Module, nn.Module] = {}
        for name, style in self._style_by_name.items():
            layer = self.model.get_submodule(name)
            shapes = {one: weight.shape for one, weight in layer.named_parameters(recurse=False)}
            try:
                parts[layer] = self._split_by_style[style](name, layer)
            except ValueError as error:
                raise ModelRefused(f"{name}: {error}") from error
            if parts[layer] is not layer:
                self._whole[layer] = WholeLayer(layer, parts[layer], shapes, self._group)
        self._tie(parts)
        for path, layer in list(self.model.named_modules(remove_duplicate=False)):
            if layer in self._whole:
                self.model.set_submodule(path, parts[layer])
                self._paths[path] = layer
        for layer in self._whole.values():
            layer.forget()
        self._set_head_groups(self._group.world_size)

    def shards(self) -> dict[str, ParameterShard]:
        """Return this rank's part of each parameter that is not whole, by its name."""
        return {
            f"{path}.{name}": shard
            for path, layer in self._paths.items()
            for name, shard in self._whole[layer].shards.items()
        }

    def absent(self) -> set[str]:
        """Return the names of the whole model's parameters that this rank lacks."""
        names = {
            f"{path}.{name}"
            for path, layer in self._paths.items()
            for name in self._whole[layer].shapes
        }
        return names - self.shards().keys()

    def finish(self) -> None:
        """Cut a head that was tied to a whole embedding while the weights were read."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if isinstance(head, ParallelHead) and head.weight is embedding.weight:
            self._share_rows(head, embedding)

    def check(self, device: torch.device) -> None:
        """Move the model to `device`, and raise `ModelRefused` if it is not what it was whole.

        Collective: each whole layer is gathered from all ranks for its call alone.
        """
        self.model.to(device)
        # Ranks can need different times to read their parts: longer than any later call is allowed.
        self._group.wait_for_all()
        with self._whole_layers(device):
            whole = _outputs(self.model, device)
        try:
            split = _outputs(self.model, device)
        except MODEL_CODE_ERRORS as error:
            raise ModelRefused(
                f"the model does not run on {self._group.world_size} ranks: "
                f"{type(error).__name__}: {error}"
            ) from error
        is_same = relative_difference(split, whole) <= error_max(whole.dtype)
        if not self._group.all_true(is_same):
            raise ModelRefused(
                f"split over {self._group.world_size} ranks, the model's results differ from the "
                "whole model's; serve it on one rank"
            )

    @contextmanager
    def _whole_layers(self, device: torch.device) -> Iterator[None]:
        parts = {path: self.model.get_submodule(path) for path in self._paths}
        handles = [layer.gather_on_call(device) for layer in self._whole.values()]
        self._set_head_groups(1)
        for path, layer in self._paths.items():
            self.model.set_submodule(path, layer)
        try:
            yield
        finally:
            for path, part in parts.items():
                self.model.set_submodule(path, part)
            self._set_head_groups(self._group.world_size)
            for one in handles:
                one.close()

    def _read_plan(self) -> dict[str, str]:
        """Return the plan's style of each module; refuse a plan with unknown styles.

        Every rank holds the part that reads images whole, regardless of the plan: it is small, and
        a change of it would not be noticed in the results for a text.
        """
        plan = self.model.tp_plan or {}
        images = find_image_part(self.model)
        layers = {
            name: layer
            for name, layer in self.model.named_modules()
            if images is None or layer not in images
        }
        modules = _matching(plan, layers)
        ends = (self._embedding, self._head)
        if all(layers[name] in ends for name in modules):
            modules |= _plan_by_names(layers)
        # Without its layers every rank would hold nearly all of the model.
        if all(layers[name] in ends for name in modules):
            raise ModelRefused(
                f"{type(self.model).__name__} has no tensor-parallel plan for its layers; serve "
                "it on one rank"
            )
        experts = experts_of(self.model)
        if self._by_expert:
            modules |= dict.fromkeys(experts, _BY_EXPERT)
        # The split of an experts module's parameters follows from the module's own style.
        parameters = {
            name: style
            for name, style in _matching(plan, dict(self.model.named_parameters())).items()
            if (owner := name.rpartition(".")[0]) in layers and owner not in experts
        }
        unknown = {_pattern_of(name): style for name, style in parameters.items()}
        unknown |= {
            _pattern_of(name): style
            for name, style in modules.items()
            if style not in self._split_by_style
        }
        if unknown:
            entries = ", ".join(f"{pattern}: {style}" for pattern, style in sorted(unknown.items()))
            raise ModelRefused(
                f"the model's tensor-parallel plan has {entries}, which is not supported; serve it "
                "on one rank"
            )
        return modules

    def _count_heads(self) -> dict[str, dict[str, int]]:
        """Return, by attention module, the projections whose outputs are split, and their heads."""
        heads: dict[str, dict[str, int]] = {}
        for name, style in self._style_by_name.items():
            owner = name.rpartition(".")[0]
            head_dim = getattr(self.model.get_submodule(owner), "head_dim", None)
            if style == "colwise" and isinstance(head_dim, int):
                out_features = _linear(self.model.get_submodule(name)).out_features
                heads.setdefault(owner, {})[name] = out_features // head_dim
        return heads

    def _set_head_groups(self, ranks: int) -> None:
        """Set attention modules' number of query heads per key and value head on `ranks`."""
        for owner, heads in self._heads.items():
            attention = self.model.get_submodule(owner)
            if hasattr(attention, "num_key_value_groups"):
                queries, keys = max(heads.values()), min(heads.values())
                attention.num_key_value_groups = queries // ranks // max(keys // ranks, 1)

    def _column(self, name: str, layer: nn.Module) -> nn.Module:
        return ColumnParallelLinear(_linear(layer), self._group, self._rows(name, layer))

    def _rows(self, name: str, layer: nn.Module) -> list[range] | None:
        """Return the rows of one head if key and value heads are fewer than ranks, else None."""
        heads, ranks = self._heads.get(name.rpartition(".")[0], {}), self._group.world_size
        count = heads.get(name, 0)
        if count % ranks == 0:
            return None
        if count == max(heads.values()) or ranks % count:
            raise ValueError(f"{count} heads can't be shared evenly by {ranks} ranks")
        width = _linear(layer).out_features // count
        head = self._group.rank // (ranks // count)
        return [range(head * width, (head + 1) * width)]

    def _gathered_column(self, _name: str, layer: nn.Module) -> nn.Module:
        if layer is self._head:
            return ParallelHead(_linear(layer), self._group)
        return ColumnParallelLinear(_linear(layer), self._group, gathers=True)

    def _embedding_rows(self, _name: str, layer: nn.Module) -> nn.Module:
        # An embedding that does more than look up (such as scaling) stays whole, which is correct.
        if isinstance(layer, nn.Embedding) and type(layer).forward is nn.Embedding.forward:
            return VocabParallelEmbedding(layer, self._group)
        return layer

    def _tie(self, parts: Mapping[nn.Module, nn.Module]) -> None:
        """Share the embedding's memory with the part of a head that was tied to it."""
        head = None if self._head is None else parts.get(self._head)
        if isinstance(head, ParallelHead) and self._head.weight is self._embedding.weight:
            embedding = parts.get(self._embedding, self._embedding)
            if isinstance(embedding, VocabParallelEmbedding):
                head.weight = embedding.weight
            else:
                self._share_rows(head, embedding)

    def _share_rows(self, head: ParallelHead, embedding: nn.Module) -> None:
        """Let the head read its rows of an embedding that every rank holds whole."""
        if not isinstance(embedding, VocabParallelEmbedding):
            weight = embedding.get_parameter("weight")
            rows = weight[head.tokens.start : head.tokens.stop]
            head.weight = nn.Parameter(rows, requires_grad=False)


def _pattern_of(name: str) -> str:
    """Return a name as plans write it, with a star for every number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _matching(plan: Mapping[str, str], named: Mapping[str, object]) -> dict[str, str]:
    return {name: plan[_pattern_of(name)] for name in named if _pattern_of(name) in plan}


_PROJECTIONS: Final = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
)
"""Names of siblings that are split by columns, and of one after them that is split by rows."""


def _plan_by_names(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the styles of attention, gated MLPs and experts of a model whose plan has no layers.

    A module with parameters per head, as attention sinks, stays whole. That the names mean what
    they usually do is seen in the results of the split model.
    """
    plan = {name: "moe_tp_experts" for name, one in layers.items() if layout_of(one) is not None}
    for owner, module in layers.items():
        children = {name for name, one in module.named_children() if isinstance(one, nn.Linear)}
        if any(True for _ in module.parameters(recurse=False)):
            continue
        for columns, rows in _PROJECTIONS:
            last = children.intersection(rows)
            if children.issuperset(columns) and last:
                plan |= {f"{owner}.{name}": "colwise" for name in columns}
                plan |= {f"{owner}.{name}": "rowwise" for name in last}
    return plan


def experts_of(model: nn.Module) -> set[str]:
    """Return the paths of the experts modules with a known layout."""
    return {name for name, module in model.named_modules() if layout_of(module) is not None}


def _linear(layer: nn.Module) -> nn.Linear:
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise ValueError(f"a {type(layer).__name__} can't be split; only plain linear layers can")
    return layer


def _whole(_name: str, layer: nn.Module) -> nn.Module:
    return layer


@torch.inference_mode()
def _outputs(model: PreTrainedModel, device: torch.device) -> Tensor:
    """Return the model's outputs for a short prompt, flattened, on the host.

    A classifier can have few labels, or one that is nearly zero, so its hidden states are included.
    """
    tokens = torch.arange(_PROMPT_TOKENS, device=device)[None]
    arguments = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    outputs: list[Tensor] = [model(input_ids=tokens, **arguments)[0]]
    if outputs[0].ndim == 2:
        outputs.append(model.base_model(input_ids=tokens, **arguments)[0])
    return torch.cat([output.flatten() for output in outputs]).cpu()


class WholeLayer:
    """A layer before it was split, without its weights, and this rank's part of it.

    `shapes`: of its parameters, by name.
    """

    def __init__(
        self,
        layer: nn.Module,
        part: nn.Module,
        shapes: Mapping[str, torch.Size],
        group: ParallelGroup,
    ) -> None:
        self._layer = layer
        self._part = part
        self.shapes = shapes
        self._group = group

    @property
    def shards(self) -> Mapping[str, ParameterShard]:
        """Ranges of each parameter that the part holds."""
        return cast(Mapping[str, ParameterShard], self._part.shards)

    def forget(self) -> None:
        """Drop the whole weights."""
        for name in self.shapes:
            self._layer.register_parameter(name, None)

    def gather_on_call(self, device: torch.device) -> ExitStack:
        """Gather the weights before each call of the layer, and drop them after it.

        Closing the result ends that.
        """
        dtype = next(self._part.parameters()).dtype
        # Models also look at weights' dtypes and devices outside of calls.
        expanded = {
            name: torch.zeros((), dtype=dtype, device=device).expand(shape)
            for name, shape in self.shapes.items()
        }

        def gather(*_: object) -> None:
            for name, empty in expanded.items():
                whole = torch.zeros_like(empty, memory_format=torch.contiguous_format)
                part = getattr(self._part, name)
                shard = self.shards.get(name, WHOLE_PARAMETER)
                self._set(name, self._group.assemble(shard, part, whole))

        def drop(*_: object) -> None:
            for name, empty in expanded.items():
                self._set(name, empty)

        handles = ExitStack()
        handles.callback(self.forget)
        handles.callback(self._layer.register_forward_pre_hook(gather).remove)
        handles.callback(self._layer.register_forward_hook(drop).remove)
        drop()
        return handles

    def _set(self, name: str, weight: Tensor) -> None:
        setattr(self._layer, name, nn.Parameter(weight, requires_grad=False))
