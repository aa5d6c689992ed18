"""References of the products of a layer's delta: `linear`, `shrink`, `expand` and `embedding`."""

from itertools import accumulate

from torch import Tensor

from loradock.engine.kernels.checks import check_embedding, check_expand, check_linear, check_shrink
from loradock.engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from loradock.engine.kernels.reference.matmul import Matmul, blas_matmul


def linear_reference(
    y: Tensor,
    x: Tensor,
    slices: LoRASlices,
    groups: Groups,
    *,
    matmul: Matmul = blas_matmul,
) -> None:
    """Compute `y[t, o_s :][:out_s] += x[t] @ A[s][slot(t)].T @ B[s][slot(t)].T` in place.

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
            shrunk = matmul(x_rows, pair.a.to(dtype))
            delta = matmul(shrunk, pair.b.to(dtype))
            y[rows, columns] = (y[rows, columns].to(dtype) + delta).to(y.dtype)


def embedding_reference(
    y: Tensor,
    token_ids: Tensor,
    slices: LoRASlices,
    groups: Groups,
    scale: float,
    *,
    matmul: Matmul = blas_matmul,
) -> None:
    """Compute `y[t] += scale * A[slot(t)][token_ids[t]] @ B[slot(t)].T` in place.

    y: [tokens, out_features[0]]. token_ids: [tokens] int64, each below `in_features`. `slices` has
    one slice of kind EMBEDDING, so A is [in_features, rank]. Rows of the base model, and rows whose
    adapter has no weights here, are not written. Raises ValueError for operands that don't fit.
    """
    check_embedding(y, token_ids, slices, groups)
    dtype = accumulator_dtype(y.dtype)
    for slot, start, end in groups.spans:
        (pair,) = slices.pairs(slot)
        if pair is not None:
            rows = groups.rows[start:end]
            shrunk = scale * pair.a[token_ids[rows]].to(dtype)
            delta = matmul(shrunk, pair.b.to(dtype))
            y[rows] = (y[rows].to(dtype) + delta).to(y.dtype)


def shrink_reference(
    y: Tensor,
    x: Tensor,
    slices: LoRASlices,
    groups: Groups,
    *,
    matmul: Matmul = blas_matmul,
) -> None:
    """Compute `y[s, t, :rank] = x[t] @ A[s][slot(t)].T` in place.

    y: [slices, tokens, rank_max] float32 or float64, the accumulator. x: [tokens, in_features].
    Rows of the base model, rows whose adapter lacks the slice, and columns from the adapter's own
    rank on are not written.
    """
    check_shrink(y, x, slices, groups)
    for slot, start, end in groups.spans:
        rows = groups.rows[start:end]
        x_rows = x[rows].to(y.dtype)
        for index, pair in enumerate(slices.pairs(slot)):
            if pair is not None:
                y[index, rows, : len(pair.a)] = matmul(x_rows, pair.a.to(y.dtype))


def expand_reference(
    y: Tensor,
    x: Tensor,
    slices: LoRASlices,
    groups: Groups,
    *,
    matmul: Matmul = blas_matmul,
) -> None:
    """Compute `y[t, o_s :][:out_s] += x[s, t, :rank] @ B[s][slot(t)].T` in place.

    y: [tokens, sum of out_features]. x: [slices, tokens, rank_max] float32 or float64, the output
    of shrink. `o_s` is the sum of `out_features` before slice `s`. The sum is computed in the
    accumulator's dtype and rounded once. Rows of the base model, and slices that a row's adapter
    lacks, are not written.
    """
    check_expand(y, x, slices, groups)
    offsets = list(accumulate(slices.out_features, initial=0))
    for slot, start, end in groups.spans:
        rows = groups.rows[start:end]
        for index, pair in enumerate(slices.pairs(slot)):
            if pair is None:
                continue
            out_features, rank = pair.b.shape
            columns = slice(offsets[index], offsets[index] + out_features)
            delta = matmul(x[index, rows, :rank], pair.b.to(x.dtype))
            y[rows, columns] = (y[rows, columns].to(x.dtype) + delta).to(y.dtype)
