"""Which projections are packed into one layer, and how that is done to a model.

What it is: the table of families, the search for groups in a model, and the exchange. What it is
not: a decision about LoRA; the packed layers are wrapped like any other. One rule: the model's own
code stays as it is and goes on calling the children by their names.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple

from torch import nn

from engine.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from engine.layers.packed import PackedLinear, PackedSlice, SharedCall


class Family(NamedTuple):
    """Projections beside each other that read the same input, as far as their names say."""

    parent: str
    children: tuple[str, ...]
    base_type: type[PackedLinear]


FAMILIES: Final = (
    Family("qkv_proj", ("q_proj", "k_proj", "v_proj"), QKVParallelLinear),
    Family("qkv", ("query", "key", "value"), QKVParallelLinear),
    Family("gate_up_proj", ("gate_proj", "up_proj"), MergedColumnParallelLinear),
    Family("w13", ("w1", "w3"), MergedColumnParallelLinear),
    Family("qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"), MergedColumnParallelLinear),
)
"""Whether the inputs really are the same is seen by the probe, never believed."""


class Group(NamedTuple):
    """One family's children in one place of a model; `path` is that of the module around them."""

    path: str
    family: Family

    @property
    def name(self) -> str:
        """The packed layer's path."""
        return _join(self.path, self.family.parent)

    @property
    def children(self) -> tuple[str, ...]:
        """The children's paths."""
        return tuple(_join(self.path, child) for child in self.family.children)


def find_groups(model: nn.Module, names: Collection[str]) -> list[Group]:
    """The groups whose children are all among `names` and can share one weight.

    They can if they are plain linear layers (a quantised one has its own forward), or a rank's rows
    of such, of one input width, dtype and device, and no child is also reached by another path.
    """
    paths = _paths(model)
    groups = [
        Group(path, family)
        for path, module in model.named_modules()
        for family in FAMILIES
        if not hasattr(module, family.parent)
    ]
    return [
        group
        for group in groups
        if all(child in names for child in group.children) and _can_share(model, group, paths)
    ]


def pack(
    model: nn.Module, group: Group, wrap: Callable[[PackedLinear], BaseLayerWithLoRA]
) -> BaseLayerWithLoRA:
    """Put one wrapped layer in place of a group's children, in place; that layer."""
    owner = model.get_submodule(group.path)
    children = {name: _linear(owner, name) for name in group.family.children}
    base_layer = group.family.base_type.of_children(children)
    layer = wrap(base_layer)
    owner.add_module(group.family.parent, layer)
    call = SharedCall(layer, base_layer)
    for place, name in enumerate(children):
        owner.set_submodule(name, PackedSlice(call, place))
    return layer


def with_relatives(target: str) -> set[str]:
    """A target, and what it implies: a packed parent its children, a child parent and siblings."""
    path, dot, last = target.rpartition(".")
    related = {name for family in _families_of(last) for name in (family.parent, *family.children)}
    return {path + dot + name for name in related | {last}}


def _families_of(name: str) -> Iterator[Family]:
    return (family for family in FAMILIES if name in (family.parent, *family.children))


def _paths(model: nn.Module) -> dict[nn.Module, int]:
    """By how many paths each module is reached."""
    counts: dict[nn.Module, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        counts[module] = counts.get(module, 0) + 1
    return counts


def _can_share(model: nn.Module, group: Group, paths: dict[nn.Module, int]) -> bool:
    layers = [model.get_submodule(child) for child in group.children]
    if not all(_is_plain(layer) for layer in layers):
        return False
    kinds = {
        (type(layer), layer.in_features, layer.weight.dtype, layer.weight.device)
        for layer in layers
    }
    own_paths = paths[model.get_submodule(group.path)]
    return len(kinds) == 1 and all(paths[layer] == own_paths for layer in layers)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer only multiplies: a whole linear layer, or a rank's rows of one."""
    if isinstance(layer, ColumnParallelLinear):
        return not layer.gathers
    return type(layer) is nn.Linear


def _linear(owner: nn.Module, name: str) -> nn.Linear:
    layer = owner.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"{name} is no linear layer; find_groups would not have named it")
    return layer


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
