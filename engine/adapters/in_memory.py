"""Adapters that a program passes in memory, checked as thoroughly as those of files.

A program may have loaded the adapter without a model. Then paths are those of its file, and experts
are single modules. The checked adapter shares its tensors with the caller until it is packed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import torch

from loradock.engine.adapters.experts import (
    PROJECTIONS,
    SINGLE_EXPERT,
    Experts,
    known_experts,
    renamed,
)
from loradock.engine.adapters.layer_weights import (
    LoRALayerWeights,
    PackedLoRALayerWeights,
    highest_rank,
    stack_experts,
)
from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.adapters.matching import EXCLUDED
from loradock.engine.adapters.pairs import TensorPair, check_rank_divisible, check_values
from loradock.engine.adapters.problems import Problems, shown
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.adapters.targets import check_targets
from loradock.engine.adapters.weights import value_range
from loradock.engine.config import DEFAULT_BOUNDS
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layout import (
    SAVED_SUFFIX,
    WHOLE,
    ModuleKind,
    ModuleShape,
    blob_bytes,
    columns_of_one_adapter,
    token_ids_of,
)

_EXPERTS: Final = ModuleKind.EXPERTS

K = TypeVar("K")

Loras = Mapping[str, LoRALayerWeights | PackedLoRALayerWeights]
"""An adapter's weights by module path; those of a packed layer may be under the layer's path."""

HeadWeights = tuple[torch.Tensor, torch.Tensor]
"""A head's weight `[out, in]` and bias `[out, 1]`."""


def check_in_memory(
    model: LoRAModel,
    target: AdapterTarget,
    fingerprint: str,
) -> LoadedAdapter:
    """Check an adapter in memory completely; `fingerprint` identifies this call's adapter.

    `model` holds whole modules, also if this process keeps a part, and is not changed. Raises
    one `EngineError` for all problems: `AdapterDoesNotFit`, or `NotFinite` if all shapes fit.
    """
    modules = target.modules
    problems = Problems(DEFAULT_BOUNDS.problems_max)
    with problems.collecting():
        found = by_module(model.loras, target)
        loras = {name: _detached(lora, modules.get(name)) for name, lora in found.items()}
    _raise(model.id, problems)
    if model.is_3d_lora_weight and not any(one.kind is _EXPERTS for one in loras.values()):
        problems.add(AdapterDoesNotFit, "is_3d_lora_weight is True, and no module has experts")
    if not loras:
        problems.add(AdapterDoesNotFit, "no module is touched")
    touched = [modules[name] for name in loras if name in modules]
    kept = {shape.name for shape in columns_of_one_adapter(touched)}
    both = [s.name for s in touched if not s.is_optional and s.name not in kept]
    problems.add_each(AdapterDoesNotFit, "adapted as a whole and in parts", both)
    for name, lora in loras.items():
        _check_fit(name, lora, target, problems)
    _raise(model.id, problems)
    warnings = _check_targets(model, loras, target, problems)
    _check_values(loras, target.lora_config.dtype, problems)
    _raise(model.id, problems)
    ranks = {name: lora.rank for name, lora in loras.items()}
    whole = LoRAModel(model.id, highest_rank(loras.values()), loras, model.is_3d_lora_weight)
    checked = whole.sharded(modules)
    size_bytes = blob_bytes(ranks, modules.values(), target.lora_config.dtype)
    host_bytes = checked.size_bytes
    return LoadedAdapter(
        fingerprint, checked, checked.rank, host_bytes, size_bytes, warnings=warnings
    )


def _check_targets(
    model: LoRAModel,
    loras: Mapping[str, LoRALayerWeights],
    target: AdapterTarget,
    problems: Problems,
) -> tuple[str, ...]:
    """Compare what the adapter touches with what its config names; nothing without a config."""
    if model.peft_helper is None:
        return ()
    has_experts = any(lora.kind is _EXPERTS for lora in loras.values())
    is_per_expert = has_experts and not model.is_3d_lora_weight
    return check_targets(
        loras, model.peft_helper, target, problems, has_single_experts=is_per_expert
    )


def _detached(lora: LoRALayerWeights, shape: ModuleShape | None) -> LoRALayerWeights:
    """Return detached weights, of the module's kind; `replace` checks the shapes again."""
    kind = lora.kind if shape is None else shape.kind
    return replace(lora, lora_a=lora.lora_a.detach(), lora_b=lora.lora_b.detach(), kind=kind)


def _check_fit(
    name: str, lora: LoRALayerWeights, target: AdapterTarget, problems: Problems
) -> None:
    shape = target.modules.get(name)
    if shape is None:
        why = EXCLUDED if target.excludes(name) else "not wrapped in this model"
        why = f"{why}: {target.unwrapped[name]}" if name in target.unwrapped else why
        problems.add(AdapterDoesNotFit, f"{shown(name)} is {why}")
        return
    rank_max = target.lora_config.max_lora_rank
    for text in misfits(name, lora, shape, rank_max):
        problems.add(AdapterDoesNotFit, text)
    if lora.shard == WHOLE:
        with problems.collecting():
            check_rank_divisible(name, lora.rank, shape.shard)


def misfits(name: str, lora: LoRALayerWeights, shape: ModuleShape, rank_max: int) -> Iterator[str]:
    """Yield how whole weights differ from what a module of this shape needs."""
    is_tokens = shape.kind is ModuleKind.TOKENS
    if is_tokens and not 1 <= lora.rank <= shape.out_features:
        most = shape.out_features
        yield f"{name} has {lora.rank} tokens; 1 to {most} (the vocabulary) are allowed"
    elif not is_tokens and not 1 <= lora.rank <= rank_max:
        yield f"{name} has rank {lora.rank}; 1 to {rank_max} (max_lora_rank) are allowed"
    if lora.shard != WHOLE:
        yield f"{name} is a part of a module; pass whole modules"
        return
    found, expected = (lora.lora_a.shape, lora.lora_b.shape), whole_shapes(shape, lora.rank)
    if found != expected:
        yield (
            f"{name} has A {list(found[0])} and B {list(found[1])}; in this model they are "
            f"{list(expected[0])} and {list(expected[1])}"
        )
    elif is_tokens:
        yield from _wrong_token_ids(name, lora, shape)
    for letter, tensor in (("A", lora.lora_a), ("B", lora.lora_b)):
        if not tensor.dtype.is_floating_point:
            yield f"{name}'s {letter} must have a floating dtype, got {tensor.dtype}"
        if tensor.is_meta or tensor.layout is not torch.strided:
            kind = f"{tensor.layout} on {tensor.device}"
            yield f"{name}'s {letter} must be a dense tensor with values, got {kind}"
    if not lora.scaling:
        yield f"{name} has alpha 0, so it would have no effect"


def _wrong_token_ids(name: str, lora: LoRALayerWeights, shape: ModuleShape) -> Iterator[str]:
    ids = token_ids_of(lora.lora_b)
    first, last = int(ids[0]), int(ids[-1])
    if not bool((ids[1:] > ids[:-1]).all()) or not 0 <= first <= last < shape.out_features:
        yield (
            f"token ids of {name} must be distinct, ascending and below {shape.out_features}, got "
            f"{first} to {last}"
        )


def whole_shapes(shape: ModuleShape, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return A's and B's shape of the whole module, as they are before packing."""
    whole = replace(shape, shard=WHOLE)
    a, b = whole.a_shape(rank), whole.b_shape(rank)
    return (a[::-1] if shape.kind is ModuleKind.EMBEDDING else a), b


def _check_values(
    loras: Mapping[str, LoRALayerWeights], dtype: torch.dtype, problems: Problems
) -> None:
    pairs, ranges = [], {}
    for name, lora in loras.items():
        a, b = f"{name}.lora_A", f"{name}.lora_B"
        pairs.append(TensorPair(name, a, b, lora.rank, lora.lora_alpha, lora.scaling))
        ranges[a], ranges[b] = value_range(lora.lora_a), value_range(lora.lora_b)
    check_values(pairs, ranges, dtype, problems)


def _raise(adapter_id: int, problems: Problems) -> None:
    if problems:
        raise problems.error().about(f"adapter {adapter_id}")


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


def dummy_adapter(
    lora_model_id: int, rank: int, modules: Sequence[ModuleShape], heads: Mapping[str, HeadWeights]
) -> LoRAModel:
    """Return an adapter of zeros with `rank` on every module, the largest of this rank.

    An adapter's weights replace those of a head, so a head gets its own weights, from `heads`.
    """
    loras = {}
    for shape in columns_of_one_adapter(modules):
        if shape.kind is ModuleKind.HEAD:
            own_rank, a, b = 1, *heads[shape.name]
        else:
            own_rank, (a, b) = rank, map(torch.zeros, whole_shapes(shape, rank))
        loras[shape.name] = LoRALayerWeights(shape.name, own_rank, own_rank, a, b, kind=shape.kind)
    return LoRAModel(lora_model_id, rank, loras)


def warmup_rank(default: int, rank_max: int, group_size: int) -> int:
    """Return `default` raised to a multiple of `group_size`; ValueError if over `rank_max`."""
    if not 1 <= default <= rank_max:
        raise ValueError(
            f"the warm-up rank is {default}; 1 to {rank_max} (max_lora_rank) are allowed"
        )
    rank = -(-default // group_size) * group_size
    if rank > rank_max:
        raise ValueError(
            f"fully sharded adapters need a rank that {group_size} divides; the next one from "
            f"{default} is {rank}, and max_lora_rank is {rank_max}"
        )
    return rank
