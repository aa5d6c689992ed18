"""The second half of a LoRA product: from the adapter's rank up to the layer's output.

What it is: the plain PyTorch reference, which is the specification and the oracle. What it is
not: fast. One rule: the sum with the base output is made in the accumulator's dtype and rounded
once.
"""

from itertools import accumulate

from torch import Tensor

from engine.kernels.checks import check_expand
from engine.kernels.operands import Groups, LoRASlices
from engine.kernels.reference.matmul import Product, matrix_product


# Callers give six arguments; the seventh is bound once, when kernels are chosen.
def expand_reference(  # noqa: PLR0913
    y: Tensor,
    x: Tensor,
    weights: LoRASlices,
    groups: Groups,
    offset: int,
    add_inputs: bool,
    *,
    product: Product = matrix_product,
) -> None:
    """`y[t, offset + o_s :][:out_s] += x[s, t, :rank] @ B[s][slot(t)].T`, in place.

    y: [tokens, width]. x: [slices, tokens, rank_max] float32 or float64, as shrink left it. `o_s`
    is the sum of the slices before `s`. Without `add_inputs` the product replaces what was there.
    Not written: rows of the base model, and slices for which a row's adapter has nothing.
    """
    check_expand(y, x, weights, groups, offset)
    firsts = list(accumulate(weights.out_features, initial=offset))
    for slot, start, end in groups.spans:
        rows = groups.rows[start:end]
        for place, pair in enumerate(weights.pairs(slot)):
            if pair is None:
                continue
            out_features, rank = pair.b.shape
            columns = slice(firsts[place], firsts[place] + out_features)
            result = product(x[place, rows, :rank], pair.b.to(x.dtype))
            if add_inputs:
                result += y[rows, columns].to(x.dtype)
            y[rows, columns] = result.to(y.dtype)
