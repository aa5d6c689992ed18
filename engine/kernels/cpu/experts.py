"""The operations on experts on a CPU, specified by their references.

Loops over the groups with pairs, which is the fastest way for a CPU to multiply many small matrices
that are not contiguous; while decoding most groups have one pair. Weights of experts without pairs
are not read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.checks import check_experts, check_experts_expand, check_experts_shrink
from engine.kernels.expert_groups import ExpertGroups, ExpertSpan
from engine.kernels.operands import LoRAPair, LoRASlices
from engine.kernels.threads import threads_for


def experts_cpu(ys: Sequence[Tensor], x: Tensor, slices: LoRASlices, groups: ExpertGroups) -> None:
    """Compute as `experts_reference` does, with one gather and one sum per slice."""
    check_experts(ys, x, slices, groups)
    for index, y in enumerate(ys):
        active = _ActiveGroups([], [], [], [])
        for span in groups.spans:
            pair = slices.pairs(span.slot)[index]
            if pair is not None:
                active.append(groups.pairs[span.start : span.end], pair, span, x.dtype)
        if active.sizes:
            _add_deltas(y, x, active)


def experts_shrink_cpu(y: Tensor, x: Tensor, slices: LoRASlices, groups: ExpertGroups) -> None:
    """Compute as `experts_shrink_reference` does."""
    check_experts_shrink(y, x, slices, groups)
    for span in groups.spans:
        rows = x[groups.pairs[span.start : span.end]].to(y.dtype)
        for target, pair in zip(y, slices.pairs(span.slot), strict=True):
            if pair is not None:
                _multiply(rows, pair.a, span, target[span.start : span.end, : pair.a.shape[1]])


def experts_expand_cpu(
    ys: Sequence[Tensor], x: Tensor, slices: LoRASlices, groups: ExpertGroups
) -> None:
    """Compute as `experts_expand_reference` does, with one sum per slot and slice."""
    check_experts_expand(ys, x, slices, groups)
    for span in groups.spans:
        pairs = groups.pairs[span.start : span.end]
        for y, shrunk, pair in zip(ys, x, slices.pairs(span.slot), strict=True):
            if pair is not None:
                delta = x.new_empty(len(pairs), y.shape[1])
                _multiply(shrunk[span.start : span.end, : pair.b.shape[2]], pair.b, span, delta)
                y.index_add_(0, pairs, delta.to(y.dtype))


def _multiply(x: Tensor, matrices: Tensor, span: ExpertSpan, y: Tensor) -> None:
    """Compute `y = x @ matrices[expert].T`, the rows of each expert of a span by its own matrix."""
    row_blocks = (torch.split(tensor, span.sizes) for tensor in (x, y))
    transposed = _transposed(matrices, span.experts, x.dtype)
    with threads_for(max(span.sizes)):
        for rows, result, matrix in zip(*row_blocks, transposed, strict=True):
            torch.mm(rows, matrix, out=result)


def _transposed(matrices: Tensor, experts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Return the transposes of these experts' matrices in `dtype`; no other matrix is converted."""
    all_transposed = matrices.transpose(1, 2)
    chosen = [all_transposed[expert] for expert in experts]
    return chosen if matrices.dtype == dtype else [matrix.to(dtype) for matrix in chosen]


class _ActiveGroups(NamedTuple):
    """Groups with weights: the rows of each slot, and the size and matrices of each group.

    a, b: transposed, [in, rank] and [rank, out].
    """

    rows: list[Tensor]
    sizes: list[int]
    a: list[Tensor]
    b: list[Tensor]

    def append(self, rows: Tensor, pair: LoRAPair, span: ExpertSpan, dtype: torch.dtype) -> None:
        """Add the experts with rows of one slot; matrices in `dtype` or a wider one."""
        wider = torch.promote_types(dtype, pair.a.dtype)
        self.rows.append(rows)
        self.sizes.extend(span.sizes)
        self.a.extend(_transposed(pair.a, span.experts, wider))
        self.b.extend(_transposed(pair.b, span.experts, wider))


def _add_deltas(y: Tensor, x: Tensor, active: _ActiveGroups) -> None:
    """Add the deltas of all active groups to their rows of `y`."""
    rows = torch.cat(active.rows)
    inputs = x[rows].to(active.a[0].dtype)
    deltas = inputs.new_empty(len(rows), y.shape[1])
    row_blocks = (tensor.split_with_sizes(active.sizes) for tensor in (inputs, deltas))
    with threads_for(max(active.sizes)):
        for a, b, x_rows, delta in zip(active.a, active.b, *row_blocks, strict=True):
            torch.mm(torch.mm(x_rows, a), b, out=delta)
    y.index_add_(0, rows, deltas.to(y.dtype))
