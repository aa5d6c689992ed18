"""The plain PyTorch implementation of every operation, put together.

What it is: a set of kernels from the references that lie beside each operation. What it is not:
arithmetic. One rule: with `batch_invariant` only the product changes, so both sets say the same.
"""

from functools import partial

from engine.kernels.embedding import embedding_reference
from engine.kernels.expand import expand_reference
from engine.kernels.experts import experts_reference
from engine.kernels.experts_expand import experts_expand_reference
from engine.kernels.experts_shrink import experts_shrink_reference
from engine.kernels.kinds import Kernels
from engine.kernels.linear import linear_reference
from engine.kernels.products import matrix_product, ordered_product
from engine.kernels.shrink import shrink_reference


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
