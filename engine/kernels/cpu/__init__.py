"""The operations made fast on a CPU.

What it is: three strategies for the fused pair and a table of costs that chooses among them. What
it is not: a cache of weights; what is copied or converted lives in scratch, for one product. One
rule: there is a Python loop over groups, never over rows.
"""

from engine.kernels.cpu.blocks import Cutter
from engine.kernels.cpu.experts import experts_cpu, experts_expand_cpu, experts_shrink_cpu
from engine.kernels.cpu.linear import CpuLinear
from engine.kernels.cpu.scratch import Scratch
from engine.kernels.cpu.shrink_expand import CpuHalves
from engine.kernels.interface import Kernels
from engine.kernels.reference import reference_kernels


def cpu_kernels(batch_invariant: bool) -> Kernels:
    """New kernels with scratch of their own."""
    cutter, scratch = Cutter(batch_invariant), Scratch()
    halves = CpuHalves(cutter, scratch)
    linear = CpuLinear(cutter, scratch)
    whole = Kernels(
        shrink=halves.shrink,
        expand=halves.expand,
        linear=linear,
        embedding=halves.embedding,
        experts=experts_cpu,
        experts_shrink=experts_shrink_cpu,
        experts_expand=experts_expand_cpu,
    )
    if not batch_invariant:
        return whole
    # Few of an expert's rows are in any batch, so there is no number of them to settle on.
    exact = reference_kernels(batch_invariant)
    return whole._replace(
        experts=exact.experts,
        experts_shrink=exact.experts_shrink,
        experts_expand=exact.experts_expand,
    )
