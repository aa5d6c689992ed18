"""Reference of `linear`: both products of a linear layer's delta, added to its output."""

from itertools import accumulate

from torch import Tensor

from loradock.engine.kernels.checks import check_linear
from loradock.engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from loradock.engine.kernels.reference.matmul import Matmul, blas_matmul


def linear_reference(
    y: Tensor,
    x: Tensor,
    slices: LoRASlices,
    groups: Groups,
    scale: float,
    *,
    matmul: Matmul = blas_matmul,
) -> None:
    """Compute `y[t, o_s :][:out_s] += scale * x[t] @ A[s][slot(t)].T @ B[s][slot(t)].T` in place.

    y: [tokens, sum of out_features]. x: [tokens, in_features]. `o_s` is the sum of `out_features`
    before slice `s`. Rows of the base model, and slices that a row's adapter lacks, are not
    written. Logits are computed by this operation too, over the groups of the sampled rows.
    """
    check_linear(y, x, slices, groups)
    dtype = accumulator_dtype(x.dtype)
    offsets = list(accumulate(slices.out_features, initial=0))
    for slot, start, end in groups.spans:
        rows = groups.rows[start:end]
        x_rows = x[rows].to(dtype)
        for index, pair in enumerate(slices.pairs(slot)):
            if pair is None:
                continue
            columns = slice(offsets[index], offsets[index + 1])
            shrunk = scale * matmul(x_rows, pair.a.to(dtype))
            delta = matmul(shrunk, pair.b.to(dtype))
            y[rows, columns] = (y[rows, columns].to(dtype) + delta).to(y.dtype)
