"""Experts' deltas: each (token, expert) pair by its slot's A and B of that expert.

What it is: the reference, which is the specification and the oracle, and the implementation for
CPUs. What it is not: the experts' own products, activation or weighted sum. One rule: only pairs of
slots that have weights here are read or written.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.checks import check_experts
from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.operands import LoRASlices, Pair, accumulator_dtype
from engine.kernels.products import Product, matrix_product
from engine.kernels.threads import threads_for


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
    for slot, bounds in zip(groups.slots, groups.host_bounds(), strict=True):
        for expert, (start, end) in enumerate(pairwise(bounds)):
            rows = groups.pairs[start:end]
            if not len(rows):
                continue
            for y, pair in zip(ys, weights.pairs(slot), strict=True):
                if pair is not None:
                    shrunk = product(x[rows].to(dtype), pair.a[expert].to(dtype))
                    delta = product(shrunk, pair.b[expert].to(dtype))
                    y[rows] = (y[rows].to(dtype) + delta).to(y.dtype)


def experts_cpu(ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups) -> None:
    """As the reference, with one gather, one sum and no weight copied for each slice.

    What is looped over are the groups that have rows: that is how a CPU multiplies many small
    matrices of different memory fastest (one row to a group is usual while decoding).
    """
    check_experts(ys, x, weights, groups)
    all_bounds = groups.host_bounds()
    for place, y in enumerate(ys):
        rows: list[Tensor] = []
        parts: list[_Part] = []
        for slot, bounds in zip(groups.slots, all_bounds, strict=True):
            pair = weights.pairs(slot)[place]
            if pair is not None:
                rows.append(groups.pairs[bounds[0] : bounds[-1]])
                parts += _parts(pair, bounds, x.dtype)
        if parts:
            _add(y, x, torch.cat(rows), parts)


class _Part(NamedTuple):
    """Some rows, and the matrices of their slot and expert: A turned [in, rank], B [rank, out]."""

    rows: int
    a: Tensor
    b: Tensor


def _parts(pair: Pair, bounds: Sequence[int], dtype: torch.dtype) -> list[_Part]:
    """The experts of one slot that have rows, in `dtype` or a wider one."""
    wider = torch.promote_types(dtype, pair.a.dtype)
    a, b = (matrices.to(wider).transpose(1, 2) for matrices in pair)
    return [
        _Part(end - start, a[expert], b[expert])
        for expert, (start, end) in enumerate(pairwise(bounds))
        if end > start
    ]


def _add(y: Tensor, x: Tensor, rows: Tensor, parts: Sequence[_Part]) -> None:
    """Add the deltas of `rows`, which are the parts' rows one after the other."""
    inputs = x[rows].to(parts[0].a.dtype)
    deltas = inputs.new_empty(len(rows), y.shape[1])
    sizes = [part.rows for part in parts]
    pieces = (torch.split(tensor, sizes) for tensor in (inputs, deltas))
    with threads_for(max(sizes)):
        for (_, a, b), own, delta in zip(parts, *pieces, strict=True):
            torch.mm(torch.mm(own, a), b, out=delta)
    y.index_add_(0, rows, deltas.to(y.dtype))
