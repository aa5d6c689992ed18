"""The plain PyTorch implementation: the specification of every operation, and the tests' oracle."""

from functools import partial

from loradock.engine.kernels.interface import Kernels
from loradock.engine.kernels.reference.attention import REFERENCE_ATTENTION
from loradock.engine.kernels.reference.experts import (
    experts_expand_reference,
    experts_reference,
    experts_shrink_reference,
)
from loradock.engine.kernels.reference.linear import (
    embedding_reference,
    expand_reference,
    linear_reference,
    shrink_reference,
)
from loradock.engine.kernels.reference.matmul import blas_matmul, ordered_matmul


def reference_kernels(batch_invariant: bool) -> Kernels:
    """Create the references; `batch_invariant` chooses the product whose order is fixed."""
    matmul = ordered_matmul if batch_invariant else blas_matmul
    return Kernels(
        shrink=partial(shrink_reference, matmul=matmul),
        expand=partial(expand_reference, matmul=matmul),
        linear=partial(linear_reference, matmul=matmul),
        embedding=partial(embedding_reference, matmul=matmul),
        experts=partial(experts_reference, matmul=matmul),
        experts_shrink=partial(experts_shrink_reference, matmul=matmul),
        experts_expand=partial(experts_expand_reference, matmul=matmul),
        attention=REFERENCE_ATTENTION,
    )
