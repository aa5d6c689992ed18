"""A token embedding's delta: A is looked up by token, B expanded.

What it is: the plain PyTorch reference, which is the specification and the oracle. What it is
not: fast. One rule: only the rows of A that the batch's tokens name are read.
"""

from torch import Tensor

from engine.kernels.checks import check_embedding
from engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from engine.kernels.reference.matmul import Product, matrix_product


def embedding_reference(
    y: Tensor,
    token_ids: Tensor,
    weights: LoRASlices,
    groups: Groups,
    scale: float,
    *,
    product: Product = matrix_product,
) -> None:
    """`y[t] += scale * A[slot(t)][token_ids[t]] @ B[slot(t)].T`, in place.

    y: [tokens, out_features[0]]. token_ids: [tokens] int64, each below `in_features`. `weights` has
    one slice of kind EMBEDDING, so A is [in_features, rank]. Not written: rows of the base model,
    and rows whose adapter has nothing here. Raises ValueError where it is not defined.
    """
    check_embedding(y, token_ids, weights, groups)
    dtype = accumulator_dtype(y.dtype)
    for slot, start, end in groups.spans:
        (pair,) = weights.pairs(slot)
        if pair is not None:
            rows = groups.rows[start:end]
            shrunk = scale * pair.a[token_ids[rows]].to(dtype)
            delta = product(shrunk, pair.b.to(dtype))
            y[rows] = (y[rows].to(dtype) + delta).to(y.dtype)
