"""The experts' deltas on a CPU, whole and in two halves; contracts are told by the references.

What it is: loops over the groups that have pairs, which is how a CPU multiplies many small matrices
of different memory fastest (one pair to a group is usual while decoding). What it is not: a choice
among strategies. One rule: no weight of an expert without pairs is touched.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.checks import check_experts, check_experts_expand, check_experts_shrink
from engine.kernels.expert_groups import ExpertGroups, ExpertSpan
from engine.kernels.operands import LoRASlices, Pair
from engine.kernels.threads import threads_for


def experts_cpu(ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups) -> None:
    """As `experts_reference`, with one gather and one sum for each slice."""
    check_experts(ys, x, weights, groups)
    for place, y in enumerate(ys):
        touched = _Touched([], [], [], [])
        for span in groups.spans:
            pair = weights.pairs(span.slot)[place]
            if pair is not None:
                touched.take(groups.pairs[span.start : span.end], pair, span, x.dtype)
        if touched.sizes:
            _add(y, x, touched)


def experts_shrink_cpu(y: Tensor, x: Tensor, weights: LoRASlices, groups: ExpertGroups) -> None:
    """As `experts_shrink_reference`."""
    check_experts_shrink(y, x, weights, groups)
    for span in groups.spans:
        rows = x[groups.pairs[span.start : span.end]].to(y.dtype)
        for target, pair in zip(y, weights.pairs(span.slot), strict=True):
            if pair is not None:
                _multiply(rows, pair.a, span, target[span.start : span.end, : pair.a.shape[1]])


def experts_expand_cpu(
    ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups
) -> None:
    """As `experts_expand_reference`, with one sum for each slot and slice."""
    check_experts_expand(ys, x, weights, groups)
    for span in groups.spans:
        pairs = groups.pairs[span.start : span.end]
        for y, shrunk, pair in zip(ys, x, weights.pairs(span.slot), strict=True):
            if pair is not None:
                delta = x.new_empty(len(pairs), y.shape[1])
                _multiply(shrunk[span.start : span.end, : pair.b.shape[2]], pair.b, span, delta)
                y.index_add_(0, pairs, delta.to(y.dtype))


def _multiply(x: Tensor, matrices: Tensor, span: ExpertSpan, y: Tensor) -> None:
    """`y = x @ matrices[expert].T`, the rows of each of a span's experts by its own matrix."""
    pieces = (torch.split(tensor, span.sizes) for tensor in (x, y))
    turned = _turned(matrices, span.experts, x.dtype)
    with threads_for(max(span.sizes)):
        for own, result, matrix in zip(*pieces, turned, strict=True):
            torch.mm(own, matrix, out=result)


def _turned(matrices: Tensor, experts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """The transposes of some experts' matrices in `dtype`; none of the others is converted."""
    turned = matrices.transpose(1, 2)
    chosen = [turned[expert] for expert in experts]
    return chosen if matrices.dtype == dtype else [matrix.to(dtype) for matrix in chosen]


class _Touched(NamedTuple):
    """Groups that have weights: their rows, and one by one their sizes and matrices.

    rows: those of each slot. a: turned, [in, rank] each. b: turned, [rank, out] each.
    """

    rows: list[Tensor]
    sizes: list[int]
    a: list[Tensor]
    b: list[Tensor]

    def take(self, rows: Tensor, pair: Pair, span: ExpertSpan, dtype: torch.dtype) -> None:
        """The experts of one slot that have rows, in `dtype` or a wider one."""
        wider = torch.promote_types(dtype, pair.a.dtype)
        self.rows.append(rows)
        self.sizes.extend(span.sizes)
        self.a.extend(_turned(pair.a, span.experts, wider))
        self.b.extend(_turned(pair.b, span.experts, wider))


def _add(y: Tensor, x: Tensor, touched: _Touched) -> None:
    """Add the deltas of rows that lie in their groups' order."""
    rows = torch.cat(touched.rows)
    inputs = x[rows].to(touched.a[0].dtype)
    deltas = inputs.new_empty(len(rows), y.shape[1])
    pieces = (tensor.split_with_sizes(touched.sizes) for tensor in (inputs, deltas))
    with threads_for(max(touched.sizes)):
        for a, b, own, delta in zip(touched.a, touched.b, *pieces, strict=True):
            torch.mm(torch.mm(own, a), b, out=delta)
    y.index_add_(0, rows, deltas.to(y.dtype))
