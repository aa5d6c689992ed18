"""The plain PyTorch implementation of every operation, put together.

What it is: a set of kernels from the references that lie beside each operation. What it is not:
arithmetic. One rule: with `batch_invariant` only the product changes, so both sets say the same.
"""

from functools import partial

from engine.kernels.interface import Kernels
from engine.kernels.reference.embedding import embedding_reference
from engine.kernels.reference.expand import expand_reference
from engine.kernels.reference.experts import experts_reference
from engine.kernels.reference.experts_expand import experts_expand_reference
from engine.kernels.reference.experts_shrink import experts_shrink_reference
from engine.kernels.reference.linear import linear_reference
from engine.kernels.reference.matmul import matrix_product, ordered_product
from engine.kernels.reference.shrink import shrink_reference


def reference_kernels(batch_invariant: bool) -> Kernels:
    """The references; with `batch_invariant` a row's bits don't depend on the rest of a batch."""
    product = ordered_product if batch_invariant else matrix_product
    return Kernels(
        shrink=partial(shrink_reference, product=product),
        expand=partial(expand_reference, product=product),
        linear=partial(linear_reference, product=product),
        embedding=partial(embedding_reference, product=product),
        experts=partial(experts_reference, product=product),
        experts_shrink=partial(experts_shrink_reference, product=product),
        experts_expand=partial(experts_expand_reference, product=product),
    )
