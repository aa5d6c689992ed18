"""Modules of an adapter in memory, by the paths and in the shapes of this model.

A program may have loaded the adapter without a model. Then paths are those of its file, and experts
are single modules.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from loradock.engine.adapters.compatibility import AdapterTarget
from loradock.engine.adapters.expert_tensors import (
    PROJECTIONS,
    SINGLE_EXPERT,
    Experts,
    known_experts,
    renamed,
)
from loradock.engine.adapters.layer_weights import (
    LoRALayerWeights,
    PackedLoRALayerWeights,
    stack_experts,
)
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layout import SAVED_SUFFIX, ModuleKind, ModuleShape

K = TypeVar("K")

Loras = Mapping[str, LoRALayerWeights | PackedLoRALayerWeights]
"""An adapter's weights by module path; those of a packed layer may be under the layer's path."""


def by_module(loras: Loras, target: AdapterTarget) -> dict[str, LoRALayerWeights]:
    """Return the weights by this model's paths, with single experts stacked.

    Paths that are none of this model's stay. Raises `AdapterDoesNotFit` for a path that means
    several modules, two paths for one module, and incomplete stacks.
    """
    known, resolver = known_experts(target.modules.values()), target.path_resolver()
    found: dict[str, LoRALayerWeights] = {}
    singles: dict[str, dict[int, LoRALayerWeights]] = {}
    for name, lora in _unpacked(loras):
        if resolver.skips(f"{name}."):
            continue
        path = name if name in target.modules else resolver.locate(renamed(name, known))
        if lora.kind is ModuleKind.HEAD and path + SAVED_SUFFIX in target.modules:
            path += SAVED_SUFFIX
        match = SINGLE_EXPERT.match(path)
        experts = known.get(resolver.locate(match[1])) if match else None
        if match is None or experts is None:
            _add(found, path, lora)
        else:
            column = _column(experts, match[3])
            _add(singles.setdefault(column.name, {}), int(match[2]), lora)
    columns = {shape.name: shape for one in known.values() for shape in one.columns.values()}
    return found | {name: _stacked(columns[name], of) for name, of in singles.items()}


def _unpacked(loras: Loras) -> Iterator[tuple[str, LoRALayerWeights]]:
    """Yield each module's weights; those that are packed under the names of their own modules."""
    for name, lora in loras.items():
        if isinstance(lora, LoRALayerWeights):
            yield name, lora
        else:
            yield from ((child.module_name, child) for child in lora.loras if child)


def _add(found: dict[K, LoRALayerWeights], key: K, lora: LoRALayerWeights) -> None:
    other = found.setdefault(key, lora)
    if other is not lora:
        raise AdapterDoesNotFit(
            f"{other.module_name} and {lora.module_name} are one module of this model"
        )


def _column(experts: Experts, projection: str) -> ModuleShape:
    name = PROJECTIONS.get(projection, projection)
    if name not in experts.columns:
        raise AdapterDoesNotFit(
            f"{experts.path} has no {projection}; its projections are {', '.join(experts.columns)}"
        )
    return experts.columns[name]


def _stacked(column: ModuleShape, members: Mapping[int, LoRALayerWeights]) -> LoRALayerWeights:
    """Return all experts of one projection as a stack: A [experts, rank, in]."""
    missing = [expert for expert in range(column.experts) if expert not in members]
    unknown = [expert for expert in members if expert >= column.experts]
    if missing or unknown:
        raise AdapterDoesNotFit(
            f"{column.name} has adapters for {len(members)} experts, and this model has "
            f"{column.experts}: missing {missing[:4]}, unknown {unknown[:4]}"
        )
    return stack_experts(column.name, [members[expert] for expert in range(column.experts)])
