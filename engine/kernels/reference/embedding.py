"""Reference of `embedding`: a token embedding's delta, A by token times B."""

from torch import Tensor

from loradock.engine.kernels.checks import check_embedding
from loradock.engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from loradock.engine.kernels.reference.matmul import Matmul, blas_matmul


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
