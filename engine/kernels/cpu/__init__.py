"""The CPU implementation of every operation.

Weights are never cached: copies and conversions are stored in scratch memory for one product.
Python loops run over groups, never over rows.
"""

from loradock.engine.kernels.cpu.blocks import BatchTiler
from loradock.engine.kernels.cpu.experts import CpuExperts, experts_expand_cpu, experts_shrink_cpu
from loradock.engine.kernels.cpu.linear import CpuProducts
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.interface import Kernels
from loradock.engine.kernels.reference import reference_kernels


def cpu_kernels(batch_invariant: bool) -> Kernels:
    """Create kernels with their own scratch memory."""
    tiler, scratch = BatchTiler(batch_invariant), Scratch()
    products = CpuProducts(tiler, scratch)
    kernels = Kernels(
        shrink=products.shrink,
        expand=products.expand,
        linear=products.linear,
        embedding=products.embedding,
        experts=CpuExperts(scratch),
        experts_shrink=experts_shrink_cpu,
        experts_expand=experts_expand_cpu,
        plan_linear=products.plan,
    )
    if not batch_invariant:
        return kernels
    # An expert has few rows in any batch, so padding to a fixed number of rows would not pay.
    exact = reference_kernels(batch_invariant)
    return kernels._replace(
        experts=exact.experts,
        experts_shrink=exact.experts_shrink,
        experts_expand=exact.experts_expand,
    )
