"""The first half of a LoRA product: activations down to the adapter's rank.

What it is: the plain PyTorch reference, which is the specification and the oracle. What it is
not: fast. One rule: arithmetic follows each adapter's own rank, not the largest.
"""

from torch import Tensor

from engine.kernels.checks import check_shrink
from engine.kernels.operands import Groups, LoRASlices
from engine.kernels.reference.matmul import Product, matrix_product


def shrink_reference(
    y: Tensor,
    x: Tensor,
    weights: LoRASlices,
    groups: Groups,
    scale: float,
    *,
    product: Product = matrix_product,
) -> None:
    """`y[s, t, :rank] = scale * x[t] @ A[s][slot(t)].T`, in place.

    y: [slices, tokens, rank_max] float32 or float64, the accumulator. x: [tokens, in_features].
    Not written: rows of the base model, rows whose adapter has nothing for the slice, and columns
    from the adapter's own rank on.
    """
    check_shrink(y, x, weights, groups)
    for slot, start, end in groups.spans:
        rows = groups.rows[start:end]
        x_rows = x[rows].to(y.dtype)
        for place, pair in enumerate(weights.pairs(slot)):
            if pair is not None:
                shrunk = product(x_rows, pair.a.to(y.dtype))
                y[place, rows, : len(pair.a)] = scale * shrunk
