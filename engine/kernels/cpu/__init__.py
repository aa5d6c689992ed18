"""The operations made fast on a CPU.

What it is: three strategies for the fused pair and a table of costs that chooses among them. What
it is not: a cache of weights; what is copied or converted lives in scratch, for one product. One
rule: there is a Python loop over groups, never over rows.
"""

from functools import partial

from engine.kernels.cpu.blocks import Cutter
from engine.kernels.cpu.halves import CpuHalves
from engine.kernels.cpu.linear import CpuLinear
from engine.kernels.cpu.scratch import Scratch
from engine.kernels.experts import experts_cpu, experts_reference
from engine.kernels.kinds import Kernels
from engine.kernels.products import ordered_product


def cpu_kernels(batch_invariant: bool) -> Kernels:
    """New kernels with scratch of their own."""
    cutter, scratch = Cutter(batch_invariant), Scratch()
    halves = CpuHalves(cutter, scratch)
    linear = CpuLinear(cutter, scratch)
    experts = partial(experts_reference, product=ordered_product)
    return Kernels(
        shrink=halves.shrink,
        expand=halves.expand,
        linear=linear,
        embedding=halves.embedding,
        experts=experts if batch_invariant else experts_cpu,
    )
