"""The first half of the experts' deltas: each pair down to its adapter's rank.

What it is: the plain PyTorch reference, which is the specification and the oracle. What it is not:
fast. One rule: what is shrunk lies in the groups' order, which is alike on all ranks that hold a
batch together, because they route alike.
"""

import torch
from torch import Tensor

from engine.kernels.checks import check_experts_shrink
from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.operands import LoRASlices
from engine.kernels.reference.matmul import Product, matrix_product


def experts_shrink_reference(
    y: Tensor,
    x: Tensor,
    weights: LoRASlices,
    groups: ExpertGroups,
    *,
    product: Product = matrix_product,
) -> None:
    """`y[s, i, :rank] = x[p] @ A[s][slot(p)][expert(p)].T` for each `p = groups.pairs[i]`.

    y: [slices, pairs, rank_max] float32 or float64, the accumulator. x: [pairs, in_features]. Not
    written: pairs in no group, slices for which a pair's slot has nothing, and columns from the
    adapter's own rank on.
    """
    check_experts_shrink(y, x, weights, groups)
    for slot, start, end, experts, sizes in groups.spans:
        rows = x[groups.pairs[start:end]].to(y.dtype)
        for target, pair in zip(y, weights.pairs(slot), strict=True):
            if pair is not None:
                whole = (rows, target[start:end, : pair.a.shape[1]])
                pieces = (torch.split(tensor, sizes) for tensor in whole)
                for expert, own, result in zip(experts, *pieces, strict=True):
                    result.copy_(product(own, pair.a[expert].to(y.dtype)))
