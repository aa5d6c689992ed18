"""Experts' deltas: each (token, expert) pair by its slot's A and B of that expert.

What it is: the plain PyTorch reference, which is the specification and the oracle. What it is not:
the experts' own products, activation or weighted sum. One rule: only pairs of slots that have
weights here are read or written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.checks import check_experts
from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.operands import LoRASlices, accumulator_dtype
from engine.kernels.reference.matmul import Product, matrix_product


def experts_reference(
    ys: Sequence[Tensor],
    x: Tensor,
    weights: LoRASlices,
    groups: ExpertGroups,
    *,
    product: Product = matrix_product,
) -> None:
    """`ys[s][p] += x[p] @ A[s][slot(p)][expert(p)].T @ B[s][slot(p)][expert(p)].T`, in place.

    ys: one [rows, out_features[s]] a slice, views with any stride. x: [rows, in_features]. groups:
    its `pairs` are rows of both. `weights` are of kind EXPERTS. Not written: rows in no group, and
    slices for which a row's slot has nothing. Raises ValueError for operands that don't fit.
    """
    check_experts(ys, x, weights, groups)
    dtype = accumulator_dtype(x.dtype)
    for slot, start, end, experts, sizes in groups.spans:
        pieces = torch.split(groups.pairs[start:end], sizes)
        for expert, rows in zip(experts, pieces, strict=True):
            for y, pair in zip(ys, weights.pairs(slot), strict=True):
                if pair is not None:
                    shrunk = product(x[rows].to(dtype), pair.a[expert].to(dtype))
                    delta = product(shrunk, pair.b[expert].to(dtype))
                    y[rows] = (y[rows].to(dtype) + delta).to(y.dtype)
