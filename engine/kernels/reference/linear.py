"""Both halves of a LoRA product in one: a linear layer's delta, straight into its output.

What it is: the plain PyTorch reference, which is the specification and the oracle. What it is
not: fast. One rule: what lies between the halves is one group's, at that group's own rank.
"""

from itertools import accumulate

from torch import Tensor

from engine.kernels.checks import check_linear
from engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from engine.kernels.reference.matmul import Product, matrix_product


def linear_reference(
    y: Tensor,
    x: Tensor,
    weights: LoRASlices,
    groups: Groups,
    scale: float,
    *,
    product: Product = matrix_product,
) -> None:
    """`y[t, o_s :][:out_s] += scale * x[t] @ A[s][slot(t)].T @ B[s][slot(t)].T`, in place.

    y: [tokens, sum of out_features]. x: [tokens, in_features]. `o_s` is the sum of the slices
    before `s`. Not written: rows of the base model, and slices for which a row's adapter has
    nothing. The logits operation is this one, over the groups of the sampled rows.
    """
    check_linear(y, x, weights, groups)
    dtype = accumulator_dtype(x.dtype)
    firsts = list(accumulate(weights.out_features, initial=0))
    for slot, start, end in groups.spans:
        rows = groups.rows[start:end]
        x_rows = x[rows].to(dtype)
        for place, pair in enumerate(weights.pairs(slot)):
            if pair is None:
                continue
            columns = slice(firsts[place], firsts[place + 1])
            shrunk = scale * product(x_rows, pair.a.to(dtype))
            delta = product(shrunk, pair.b.to(dtype))
            y[rows, columns] = (y[rows, columns].to(dtype) + delta).to(y.dtype)
