"""The second half of the experts' deltas: from the adapter's rank up to each pair's outputs.

What it is: the plain PyTorch reference, which is the specification and the oracle. What it is not:
fast. One rule: the sum with the base output is made in the accumulator's dtype and rounded once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.checks import check_experts_expand
from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.operands import LoRASlices
from engine.kernels.reference.matmul import Product, matrix_product


def experts_expand_reference(
    ys: Sequence[Tensor],
    x: Tensor,
    weights: LoRASlices,
    groups: ExpertGroups,
    *,
    product: Product = matrix_product,
) -> None:
    """`ys[s][p] += x[s, i, :rank] @ B[s][slot(p)][expert(p)].T` for each `p = groups.pairs[i]`.

    ys: one [pairs, out_features[s]] a slice, views with any stride. x: [slices, pairs, rank_max]
    float32 or float64, as `experts_shrink` left it. Not written: pairs in no group, and slices for
    which a pair's slot has nothing.
    """
    check_experts_expand(ys, x, weights, groups)
    for slot, start, end, experts, sizes in groups.spans:
        pairs = groups.pairs[start:end]
        for y, shrunk, pair in zip(ys, x, weights.pairs(slot), strict=True):
            if pair is not None:
                whole = (pairs, shrunk[start:end, : pair.b.shape[2]])
                pieces = (torch.split(tensor, sizes) for tensor in whole)
                for expert, rows, own in zip(experts, *pieces, strict=True):
                    delta = product(own, pair.b[expert].to(x.dtype))
                    y[rows] = (y[rows].to(x.dtype) + delta).to(y.dtype)
