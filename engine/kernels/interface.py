"""The operations that an implementation has to bring, and their signatures.

What it is: one tuple of callables. What it is not: an implementation. One rule: an operation's
contract is told once, by its reference; all others keep it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.operands import Groups, LoRASlices

ShrinkKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, float], None]
"""(y, x, weights, groups, scale)."""
ExpandKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, int, bool], None]
"""(y, x, weights, groups, offset, add_inputs)."""
LinearKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, float], None]
"""(y, x, weights, groups, scale)."""
EmbeddingKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, float], None]
"""(y, token_ids, weights, groups, scale)."""

ExpertsKernel = Callable[[Sequence[Tensor], Tensor, LoRASlices, ExpertGroups], None]
"""(ys, x, weights, groups); also of the expand alone."""
ExpertsShrinkKernel = Callable[[Tensor, Tensor, LoRASlices, ExpertGroups], None]
"""(y, x, weights, groups)."""


class Kernels(NamedTuple):
    """One implementation of every operation; what they share (scratch) belongs to this tuple."""

    shrink: ShrinkKernel
    expand: ExpandKernel
    linear: LinearKernel
    embedding: EmbeddingKernel
    experts: ExpertsKernel
    experts_shrink: ExpertsShrinkKernel
    experts_expand: ExpertsKernel
