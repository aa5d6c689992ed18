"""The paths of a model's modules and parameters before its layers are wrapped, and their values.

Wrapping changes paths; adapters name modules by the paths of the base model.
"""

from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from loradock.engine.adapters.target import BaseParameter
from loradock.engine.layers import BaseLayerWithLoRA
from loradock.engine.layers.packed import PackedSlice
from loradock.engine.layers.tensor_parallel import ParallelLinear, VocabParallelEmbedding
from loradock.engine.parallel import WHOLE_PARAMETER


class BasePaths(NamedTuple):
    """The paths of modules and parameters, those of shared ones several times.

    `token_embedding`: its path, empty if the model has none. `tied`: the modules that share its
    weight, itself included; none if no other does.
    """

    modules: frozenset[str]
    parameters: frozenset[str]
    token_embedding: str
    tied: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the paths of a model whose layers are not wrapped."""
        modules = dict(model.named_modules(remove_duplicate=False))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        embedding = _token_embedding(model)
        weight = getattr(embedding, "weight", None)
        paths = [path for path, module in modules.items() if module is embedding]
        tied = {
            path
            for path, module in modules.items()
            if isinstance(weight, Tensor) and _shares(getattr(module, "weight", None), weight)
        }
        is_tied = len(tied) > len(paths)
        return cls(
            frozenset(modules),
            frozenset(parameters),
            paths[0] if paths else "",
            frozenset(tied) if is_tied else frozenset(),
        )

    def has_parameter(self, name: str) -> bool:
        """Whether a parameter's path is, or ends in, a name."""
        return any(path == name or path.endswith(f".{name}") for path in self.parameters)

    def has_module(self, name: str) -> bool:
        """Whether a module's path ends in a name, as PEFT compares the names of saved modules."""
        return any(path.endswith(name) for path in self.modules)


def _token_embedding(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_input_embeddings", None)
    return find() if callable(find) else None


def _shares(weight: object, other: Tensor) -> bool:
    """Whether a weight is another one, or rows of it, as a rank's part of a tied head is."""
    if weight is other or not isinstance(weight, Tensor):
        return weight is other
    # Quantised and other special tensors have no storage of their own.
    have_storage = all(type(one.data) is Tensor and not one.is_meta for one in (weight, other))
    return (
        have_storage
        and weight.shape[1:] == other.shape[1:]
        and weight.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
    )


def held_weight(module: nn.Module, field: str) -> BaseParameter | None:
    """Return the part of a parameter that a layer, wrapped or not, has in this process.

    None for a quantised layer, and for a part that is not a range of rows.
    """
    layer: Any = module.base_layer if isinstance(module, BaseLayerWithLoRA) else module
    values = getattr(layer, field, None)
    if not isinstance(values, Tensor) or type(values.data) is not Tensor:
        return None
    if not values.is_floating_point():
        return None
    if isinstance(layer, ParallelLinear | VocabParallelEmbedding):
        return _held_by_rank(layer, field, values)
    is_part = isinstance(layer, PackedSlice) and not layer.is_whole
    return None if is_part else BaseParameter(values, tuple(values.shape))


def _held_by_rank(
    layer: ParallelLinear | VocabParallelEmbedding, field: str, values: Tensor
) -> BaseParameter | None:
    shard = layer.shards.get(field, WHOLE_PARAMETER)
    if shard.dimension or shard.ranges is None or len(shard.ranges) != 1:
        return None
    whole = layer.num_embeddings if isinstance(layer, nn.Embedding) else _whole_rows(layer)
    return BaseParameter(values, (whole, *values.shape[1:]), shard.ranges[0].start)


def _whole_rows(layer: Any) -> int:
    """Return the outputs of a linear layer on all ranks together."""
    return int(getattr(layer, "whole_out_features", layer.out_features))
