"""Packing of sibling projections into one layer: the table of rules, the search, and the exchange.

A packed layer is wrapped like any other. The model's own code stays as it is, and continues to call
the children by their names.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple

from torch import Tensor, nn

from loradock.engine.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from loradock.engine.layers.packed import PackedLinear, PackedSlice, SharedCall


class PackingRule(NamedTuple):
    """Names of sibling projections that can read the same input, and the layer that packs them."""

    parent: str
    children: tuple[str, ...]
    base_type: type[PackedLinear]


PACKING_RULES: Final = (
    PackingRule("qkv_proj", ("q_proj", "k_proj", "v_proj"), QKVParallelLinear),
    PackingRule("qkv", ("query", "key", "value"), QKVParallelLinear),
    PackingRule("gate_up_proj", ("gate_proj", "up_proj"), MergedColumnParallelLinear),
    PackingRule("w13", ("w1", "w3"), MergedColumnParallelLinear),
    PackingRule("qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"), MergedColumnParallelLinear),
)
"""Rules match names only; that the inputs are the same is verified by the probe."""


class PackingGroup(NamedTuple):
    """The children of one rule under one parent module, whose path is `path`."""

    path: str
    rule: PackingRule

    @property
    def name(self) -> str:
        """The packed layer's path."""
        return _join(self.path, self.rule.parent)

    @property
    def children(self) -> tuple[str, ...]:
        """The children's paths."""
        return tuple(_join(self.path, child) for child in self.rule.children)


def find_packing_groups(model: nn.Module, names: Collection[str]) -> list[PackingGroup]:
    """Return the groups whose children are all among `names` and can share one weight.

    The children must be plain linear layers (a quantised one has its own forward) or a rank's rows
    of plain ones, with one input width, dtype and device, and must not be reachable by further
    paths.
    """
    path_counts = _count_paths(model)
    groups = [
        PackingGroup(path, rule)
        for path, module in model.named_modules()
        for rule in PACKING_RULES
        if not hasattr(module, rule.parent)
    ]
    return [
        group
        for group in groups
        if all(child in names for child in group.children) and _can_share(model, group, path_counts)
    ]


def pack(
    model: nn.Module, group: PackingGroup, wrap: Callable[[PackedLinear], BaseLayerWithLoRA]
) -> BaseLayerWithLoRA:
    """Replace a group's children by one wrapped layer, in place, and return that layer."""
    owner = model.get_submodule(group.path)
    children = {name: _linear(owner, name) for name in group.rule.children}
    base_layer = group.rule.base_type.of_children(children)
    layer = wrap(base_layer)
    owner.add_module(group.rule.parent, layer)
    call = SharedCall(layer, base_layer)
    for index, name in enumerate(children):
        owner.set_submodule(name, PackedSlice(call, index))
    return layer


def with_implied_targets(target: str) -> set[str]:
    """Return a target and those that it implies: a packed parent's children, a child's siblings."""
    path, dot, last = target.rpartition(".")
    related = {name for rule in _rules_for(last) for name in (rule.parent, *rule.children)}
    return {path + dot + name for name in related | {last}}


def _rules_for(name: str) -> Iterator[PackingRule]:
    return (rule for rule in PACKING_RULES if name in (rule.parent, *rule.children))


def _count_paths(model: nn.Module) -> dict[nn.Module, int]:
    """Return the number of paths by which each module is reached."""
    counts: dict[nn.Module, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        counts[module] = counts.get(module, 0) + 1
    return counts


def _can_share(model: nn.Module, group: PackingGroup, path_counts: dict[nn.Module, int]) -> bool:
    layers = [model.get_submodule(child) for child in group.children]
    if not all(_is_plain(layer) for layer in layers):
        return False
    kinds = {
        (type(layer), layer.in_features, layer.weight.dtype, layer.weight.device)
        for layer in layers
    }
    parent_paths = path_counts[model.get_submodule(group.path)]
    return len(kinds) == 1 and all(path_counts[layer] == parent_paths for layer in layers)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is only a matrix product: a whole linear layer, or a rank's rows of
    one.

    A quantised one is not: its class or its weight's has its own product.
    """
    if isinstance(layer, ColumnParallelLinear):
        return not layer.gathers
    return type(layer) is nn.Linear and _is_plain_weight(layer.weight)


def _is_plain_weight(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and type(weight.data) is Tensor


def _linear(owner: nn.Module, name: str) -> nn.Linear:
    layer = owner.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"{name} is no linear layer; pack only what find_packing_groups returns")
    return layer


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
