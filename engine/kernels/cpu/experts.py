"""The operations on experts on a CPU, specified by their references.

Loops over the groups with pairs, or over copies of their weights for each pair, if that takes
less time: while decoding most groups have one pair. Weights of experts without pairs are not read.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from loradock.engine.kernels.checks import check_experts, check_experts_expand, check_experts_shrink
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.expert_groups import ExpertGroups, ExpertSpan
from loradock.engine.kernels.operands import LoRAPair, LoRASlices
from loradock.engine.kernels.threads import threads_for

_GATHERED_BYTES_MAX: Final = 32 << 20
"""The most bytes of weights that are copied for one product."""

GATHERED_PAIRS_MAX: Final = 1.5
GATHERED_PAIRS_MAX_BFLOAT16: Final = 4.0
"""The most pairs per group for which the weights are copied for each pair.

A call of a bfloat16 product takes ten times as long as one in float32.
"""

_SlotPairs = list[tuple[ExpertSpan, LoRAPair]]
"""The slots with weights in one slice."""


class CpuExperts:
    """`experts` for one engine; called by one thread at a time."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def __call__(
        self, ys: Sequence[Tensor], x: Tensor, slices: LoRASlices, groups: ExpertGroups
    ) -> None:
        """Compute as `experts_reference` does, with one gather and one sum per slice."""
        check_experts(ys, x, slices, groups)
        for index, y in enumerate(ys):
            pairs = ((span, slices.pairs(span.slot)[index]) for span in groups.spans)
            active = [(span, pair) for span, pair in pairs if pair is not None]
            if active:
                self._add_deltas(y, x, groups, active)

    def _add_deltas(self, y: Tensor, x: Tensor, groups: ExpertGroups, active: _SlotPairs) -> None:
        """Add the deltas of all groups with weights to their rows of `y`."""
        rows = torch.cat([groups.pairs[span.start : span.end] for span, _ in active])
        inputs = x[rows].to(torch.promote_types(x.dtype, active[0][1].a.dtype))
        deltas = inputs.new_empty(len(rows), y.shape[1])
        if self._gathers(active, inputs.dtype):
            self._multiply_gathered(inputs, deltas, groups, active)
        else:
            _multiply_groups(inputs, deltas, active)
        y.index_add_(0, rows, deltas.to(y.dtype))

    def _gathers(self, active: _SlotPairs, dtype: torch.dtype) -> bool:
        """Return whether a copy of the weights for each pair takes less time than a call for each
        group.

        It does for few pairs per group, as in a decode step, and needs one rank in all of them.
        """
        (_, rank, inputs), outputs = active[0][1].a.shape, active[0][1].b.shape[1]
        if any(pair.a.shape[1] != rank for _, pair in active):
            return False
        groups = sum(len(span.experts) for span, _ in active)
        pairs = sum(span.end - span.start for span, _ in active)
        if pairs * rank * (inputs + outputs) * dtype.itemsize > _GATHERED_BYTES_MAX:
            return False
        is_half = dtype == torch.bfloat16
        return pairs <= groups * (GATHERED_PAIRS_MAX_BFLOAT16 if is_half else GATHERED_PAIRS_MAX)

    def _multiply_gathered(
        self, x: Tensor, y: Tensor, groups: ExpertGroups, active: _SlotPairs
    ) -> None:
        """Compute `y = x @ A.T @ B.T` with a copy of A and B for each pair, in two products."""
        stored = active[0][1]
        a, b = (
            self._scratch.take(f"expert {use}", (len(x), *matrices.shape[1:]), matrices.dtype)
            for use, matrices in zip("ab", stored, strict=True)
        )
        experts, begin = groups.keys % groups.experts, 0
        for span, pair in active:
            own, begin = slice(begin, begin + span.end - span.start), begin + span.end - span.start
            chosen = experts[span.start : span.end]
            torch.index_select(pair.a, 0, chosen, out=a[own])
            torch.index_select(pair.b, 0, chosen, out=b[own])
        with threads_for(1):
            shrunk = torch.bmm(x[:, None], a.to(x.dtype).mT)
            torch.bmm(shrunk, b.to(x.dtype).mT, out=y[:, None])


def _multiply_groups(x: Tensor, y: Tensor, active: _SlotPairs) -> None:
    """Compute `y = x @ A.T @ B.T`, the rows of each group by its own matrices."""
    sizes = [size for span, _ in active for size in span.sizes]
    a, b = (
        [one for span, pair in active for one in _transposed(pair[side], span.experts, x.dtype)]
        for side in range(2)
    )
    row_blocks = (tensor.split_with_sizes(sizes) for tensor in (x, y))
    with threads_for(max(sizes)):
        for first, second, rows, result in zip(a, b, *row_blocks, strict=True):
            torch.mm(torch.mm(rows, first), second, out=result)


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
