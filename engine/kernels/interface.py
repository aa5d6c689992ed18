"""Operations of an implementation and their signatures.

The reference implementation specifies each operation; every other implementation must match it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.operands import Groups, LoRASlices

ShrinkKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, float], None]
"""(y, x, slices, groups, scale)."""
ExpandKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, int, bool], None]
"""(y, x, slices, groups, offset, add_inputs)."""
LinearKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, float], None]
"""(y, x, slices, groups, scale)."""
EmbeddingKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, float], None]
"""(y, token_ids, slices, groups, scale)."""

ExpertsKernel = Callable[[Sequence[Tensor], Tensor, LoRASlices, ExpertGroups], None]
"""(ys, x, slices, groups); also the signature of `experts_expand`."""
ExpertsShrinkKernel = Callable[[Tensor, Tensor, LoRASlices, ExpertGroups], None]
"""(y, x, slices, groups)."""


BaseLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
"""(x, weight, bias): a base layer's own output; None where the layer is to compute it itself."""


class Kernels(NamedTuple):
    """One implementation of every operation; scratch memory is shared within the tuple only.

    `base_linear`: the product of plain base layers; None where they always compute it themselves.
    """

    shrink: ShrinkKernel
    expand: ExpandKernel
    linear: LinearKernel
    embedding: EmbeddingKernel
    experts: ExpertsKernel
    experts_shrink: ExpertsShrinkKernel
    experts_expand: ExpertsKernel
    base_linear: BaseLinear | None = None
