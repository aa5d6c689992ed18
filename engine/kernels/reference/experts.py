"""References of the operations on experts: each (token, expert) pair uses that expert's weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loradock.engine.kernels.checks import check_experts, check_experts_expand, check_experts_shrink
from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.operands import LoRASlices, accumulator_dtype
from loradock.engine.kernels.reference.matmul import Matmul, blas_matmul


def experts_reference(
    ys: Sequence[Tensor],
    x: Tensor,
    slices: LoRASlices,
    groups: ExpertGroups,
    *,
    matmul: Matmul = blas_matmul,
) -> None:
    """Add each pair's delta to its slices' outputs, in place.

    `ys[s][p] += x[p] @ A[s][slot(p)][expert(p)].T @ B[s][slot(p)][expert(p)].T`

    ys: one [rows, out_features[s]] per slice, views of any stride. x: [rows, in_features]. groups:
    its `pairs` are rows of both. `slices` are of kind EXPERTS. Rows in no group, and slices that a
    row's slot lacks, are not written. Raises ValueError for operands that don't fit.
    """
    check_experts(ys, x, slices, groups)
    dtype = accumulator_dtype(x.dtype)
    for slot, start, end, experts, sizes in groups.spans:
        row_blocks = torch.split(groups.pairs[start:end], sizes)
        for expert, rows in zip(experts, row_blocks, strict=True):
            for y, pair in zip(ys, slices.pairs(slot), strict=True):
                if pair is not None:
                    shrunk = matmul(x[rows].to(dtype), pair.a[expert].to(dtype))
                    delta = matmul(shrunk, pair.b[expert].to(dtype))
                    y[rows] = (y[rows].to(dtype) + delta).to(y.dtype)


def experts_shrink_reference(
    y: Tensor,
    x: Tensor,
    slices: LoRASlices,
    groups: ExpertGroups,
    *,
    matmul: Matmul = blas_matmul,
) -> None:
    """Compute `y[s, i, :rank] = x[p] @ A[s][slot(p)][expert(p)].T` for each `p = groups.pairs[i]`.

    y: [slices, pairs, rank_max] float32 or float64, the accumulator, in the order of the groups.
    That order is equal on all ranks that share a batch, because they route alike. x: [pairs,
    in_features]. Pairs in no group, slices that a pair's slot lacks, and columns from the adapter's
    own rank on are not written.
    """
    check_experts_shrink(y, x, slices, groups)
    for slot, start, end, experts, sizes in groups.spans:
        rows = x[groups.pairs[start:end]].to(y.dtype)
        for target, pair in zip(y, slices.pairs(slot), strict=True):
            if pair is not None:
                sliced = (rows, target[start:end, : pair.a.shape[1]])
                row_blocks = (torch.split(tensor, sizes) for tensor in sliced)
                for expert, x_rows, result in zip(experts, *row_blocks, strict=True):
                    result.copy_(matmul(x_rows, pair.a[expert].to(y.dtype)))


def experts_expand_reference(
    ys: Sequence[Tensor],
    x: Tensor,
    slices: LoRASlices,
    groups: ExpertGroups,
    *,
    matmul: Matmul = blas_matmul,
) -> None:
    """Add B's product with each pair's shrunk activations to its slices' outputs, in place.

    `ys[s][p] += x[s, i, :rank] @ B[s][slot(p)][expert(p)].T` for each `p = groups.pairs[i]`

    ys: one [pairs, out_features[s]] per slice, views of any stride. x: [slices, pairs, rank_max]
    float32 or float64, the output of `experts_shrink`. The sum is computed in the accumulator's
    dtype and rounded once. Pairs in no group, and slices that a pair's slot lacks, are not written.
    """
    check_experts_expand(ys, x, slices, groups)
    for slot, start, end, experts, sizes in groups.spans:
        pairs = groups.pairs[start:end]
        for y, shrunk, pair in zip(ys, x, slices.pairs(slot), strict=True):
            if pair is not None:
                sliced = (pairs, shrunk[start:end, : pair.b.shape[2]])
                row_blocks = (torch.split(tensor, sizes) for tensor in sliced)
                for expert, rows, x_rows in zip(experts, *row_blocks, strict=True):
                    delta = matmul(x_rows, pair.b[expert].to(x.dtype))
                    y[rows] = (y[rows].to(x.dtype) + delta).to(y.dtype)
