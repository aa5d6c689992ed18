"""Warm-up adapters: all zeros, present for their size."""

from collections.abc import Mapping, Sequence

import torch

from engine.adapters.in_memory import _whole_shapes
from engine.adapters.lora_model import LoRALayerWeights, LoRAModel
from engine.layout import ModuleKind, ModuleShape

OwnWeights = tuple[torch.Tensor, torch.Tensor]
"""A head's own weight `[out, in]` and bias `[out, 1]`."""


def dummy_adapter(
    lora_model_id: int, rank: int, modules: Sequence[ModuleShape], heads: Mapping[str, OwnWeights]
) -> LoRAModel:
    """An adapter of `rank` on every module, all zeros: it takes all the room and adds nothing.

    A head has no rank, and what an adapter brings takes its place: so it is given the weights that
    it has, which `heads` names.
    """
    loras = {}
    for shape in modules:
        if shape.kind is ModuleKind.HEAD:
            own, a, b = 1, *heads[shape.name]
        else:
            own, (a, b) = rank, map(torch.zeros, _whole_shapes(shape, rank))
        loras[shape.name] = LoRALayerWeights(shape.name, own, own, a, b, kind=shape.kind)
    return LoRAModel(lora_model_id, rank, loras)


def warmup_rank(default: int, rank_max: int, group_size: int) -> int:
    """`default`, raised to a multiple of `group_size`; ValueError where that passes `rank_max`."""
    if not 1 <= default <= rank_max:
        raise ValueError(f"a warm-up rank of {default}; 1 to {rank_max} (max_lora_rank) are served")
    rank = -(-default // group_size) * group_size
    if rank > rank_max:
        raise ValueError(
            f"fully sharded adapters need a rank that {group_size} ranks divide; from {default} on "
            f"that is {rank}, and max_lora_rank is {rank_max}"
        )
    return rank
