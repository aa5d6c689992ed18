"""Dummy adapters for warm-up: zeros on every module, so that they change no output."""

from collections.abc import Mapping, Sequence

import torch

from loradock.engine.adapters.in_memory import whole_shapes
from loradock.engine.adapters.layer_weights import LoRALayerWeights
from loradock.engine.adapters.lora_model import LoRAModel
from loradock.engine.layout import ModuleKind, ModuleShape, columns_of_one_adapter

HeadWeights = tuple[torch.Tensor, torch.Tensor]
"""A head's weight `[out, in]` and bias `[out, 1]`."""


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
