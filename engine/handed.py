"""Adapters that a program hands over in memory: the checks that files get, and warm-up adapters.

What it is: one check of a `LoRAModel` against this model, and adapters that are there for their
size. What it is not: a reader of files (`adapters`). One rule: what passes is nobody else's any
more; it shares tensors with its giver only until it is packed.
"""

from collections.abc import Mapping, Sequence

import torch

from engine.adapters import LoadedAdapter
from engine.config import DEFAULT_BOUNDS, LoRAConfig
from engine.errors import AdapterDoesNotFit
from engine.fitting import Pair
from engine.layout import ModuleKind, ModuleShape, blob_bytes
from engine.lora import LoRALayerWeights, LoRAModel
from engine.problems import Problems, shown
from engine.values import check_values, value_range


def check_handed(
    model: LoRAModel,
    modules: Mapping[str, ModuleShape],
    lora_config: LoRAConfig,
    fingerprint: str,
) -> LoadedAdapter:
    """Check an adapter in memory completely; `fingerprint` names this very handing over.

    `lora_config` has its dtype resolved. Nothing is copied, and `model` is only read. Raises one
    `EngineError` that tells all that was found: `AdapterDoesNotFit`, or `NotFinite` where shapes
    are sound.
    """
    problems = Problems(DEFAULT_BOUNDS.problems_max)
    loras = {name: _detached(lora) for name, lora in model.loras.items()}
    if not loras:
        problems.add(AdapterDoesNotFit, "no module is touched")
    for name, lora in loras.items():
        _check_fit(name, lora, modules, lora_config, problems)
    _raise(model.id, problems)
    _check_values(loras, lora_config.dtype, problems)
    _raise(model.id, problems)
    ranks = {name: lora.rank for name, lora in loras.items()}
    checked = LoRAModel(model.id, max(ranks.values()), loras)
    size_bytes = blob_bytes(ranks, modules.values(), lora_config.dtype)
    return LoadedAdapter(fingerprint, checked, checked.rank, checked.size_bytes, size_bytes)


def _detached(lora: LoRALayerWeights) -> LoRALayerWeights:
    """The same tensors without their gradients' history; shapes are looked at once more."""
    a, b = lora.lora_a.detach(), lora.lora_b.detach()
    return LoRALayerWeights(lora.module_name, lora.rank, lora.lora_alpha, a, b, lora.scaling)


def _check_fit(
    name: str,
    lora: LoRALayerWeights,
    modules: Mapping[str, ModuleShape],
    lora_config: LoRAConfig,
    problems: Problems,
) -> None:
    shape = modules.get(name)
    if shape is None:
        problems.add(AdapterDoesNotFit, f"{shown(name)} is not wrapped in this model")
        return
    if not 1 <= lora.rank <= lora_config.max_lora_rank:
        problems.add(
            AdapterDoesNotFit,
            f"{name} has rank {lora.rank}; 1 to {lora_config.max_lora_rank} (max_lora_rank) are "
            "served",
        )
    if (lora.input_dim, lora.output_dim) != (shape.in_features, shape.out_features):
        problems.add(
            AdapterDoesNotFit,
            f"{name} has A {list(lora.lora_a.shape)} and B {list(lora.lora_b.shape)}; this "
            f"model's takes {shape.in_features} and gives {shape.out_features}",
        )
    for letter, tensor in (("A", lora.lora_a), ("B", lora.lora_b)):
        if not tensor.dtype.is_floating_point:
            problems.add(
                AdapterDoesNotFit, f"{name}'s {letter} is {tensor.dtype}; a floating one is needed"
            )


def _check_values(
    loras: Mapping[str, LoRALayerWeights], dtype: torch.dtype, problems: Problems
) -> None:
    pairs, ranges = [], {}
    for name, lora in loras.items():
        a, b = f"{name}.lora_A", f"{name}.lora_B"
        pairs.append(Pair(name, a, b, lora.rank, lora.lora_alpha, lora.scaling))
        ranges[a], ranges[b] = value_range(lora.lora_a), value_range(lora.lora_b)
    check_values(pairs, ranges, dtype, problems)


def _raise(adapter_id: int, problems: Problems) -> None:
    if problems:
        error = problems.error()
        raise type(error)(f"adapter {adapter_id}: {error}")


def dummy_adapter(lora_model_id: int, rank: int, modules: Sequence[ModuleShape]) -> LoRAModel:
    """An adapter of `rank` on every module, all zeros: it takes its room and adds nothing."""
    loras = {}
    for shape in modules:
        if shape.kind is ModuleKind.EXPERTS:
            raise NotImplementedError(f"{shape.name} holds experts")
        a, b = torch.zeros(rank, shape.in_features), torch.zeros(shape.out_features, rank)
        loras[shape.name] = LoRALayerWeights(shape.name, rank, rank, a, b)
    return LoRAModel(lora_model_id, rank, loras)


def warmup_rank(default: int, rank_max: int, group_size: int) -> int:
    """`default`, raised to a multiple of `group_size`; ValueError where that passes `rank_max`."""
    if not 1 <= default <= rank_max:
        raise ValueError(f"a warm-up rank of {default}; 1 to {rank_max} (max_lora_rank) are served")
    rank = -(-default // group_size) * group_size
    if rank > rank_max:
        raise ValueError(
            f"fully sharded experts need a rank that {group_size} ranks divide; from {default} on "
            f"that is {rank}, and max_lora_rank is {rank_max}"
        )
    return rank
