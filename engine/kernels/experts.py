"""Experts' deltas: each (token, expert) pair by its slot's A and B of that expert.

What it is: the reference, which is the specification and the oracle, and the implementation for
CPUs. What it is not: the experts' own products, activation or weighted sum. One rule: only pairs of
slots that have weights here are read or written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.grouped import grouped_product
from engine.kernels.operands import LoRASlices, accumulator_dtype
from engine.kernels.products import Product, matrix_product


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
    slices for which a row's slot has nothing.
    """
    dtype = accumulator_dtype(x.dtype)
    for (slot, first, _), ends in zip(groups.spans, groups.ends.tolist(), strict=True):
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            rows = groups.pairs[first + start : first + end]
            if not len(rows):
                continue
            for y, pair in zip(ys, weights.pairs(slot), strict=True):
                if pair is not None:
                    shrunk = product(x[rows].to(dtype), pair.a[expert].to(dtype))
                    delta = product(shrunk, pair.b[expert].to(dtype))
                    y[rows] = (y[rows].to(dtype) + delta).to(y.dtype)


def experts_cpu(ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups) -> None:
    """As the reference, with one grouped product over all experts for each slot and half."""
    for (slot, first, _), ends in zip(groups.spans, groups.ends, strict=True):
        rows = groups.pairs[first : first + int(ends[-1])]
        x_rows = x[rows]
        for y, pair in zip(ys, weights.pairs(slot), strict=True):
            if pair is not None:
                dtype = torch.promote_types(x.dtype, pair.a.dtype)
                shrunk = grouped_product(x_rows.to(dtype), pair.a.to(dtype), ends)
                delta = grouped_product(shrunk, pair.b.to(dtype), ends)
                y.index_add_(0, rows, delta.to(y.dtype))
