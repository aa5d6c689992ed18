"""Operations of an implementation and their signatures.

The reference implementation specifies each operation; every other implementation must match it.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from loradock.engine.kernels.block_attention import BlockAttention
from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.operands import GroupBounds, Groups, LoRASlices

LinearKernel = Callable[[Tensor, Tensor, LoRASlices, Groups], None]
"""(y, x, slices, groups); also the signature of `shrink` and of `expand`."""
EmbeddingKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, float], None]
"""(y, token_ids, slices, groups, scale)."""

ExpertsKernel = Callable[[Sequence[Tensor], Tensor, LoRASlices, ExpertGroups], None]
"""(ys, x, slices, groups); also the signature of `experts_expand`."""
ExpertsShrinkKernel = Callable[[Tensor, Tensor, LoRASlices, ExpertGroups], None]
"""(y, x, slices, groups)."""


class LinearPlan(Protocol):
    """A layer's delta for one batch, with operands checked and the strategy chosen.

    Valid for one `Groups` object, one version of the directory, and operands of the shapes, strides
    and dtypes that it was made for.
    """

    def run(self, y: Tensor, x: Tensor) -> None:
        """Compute as `linear_reference` does."""


PlanLinear = Callable[[Tensor, Tensor, LoRASlices, Groups], LinearPlan]
"""(y, x, slices, groups); raises ValueError as the operation does."""


ACTIVATIONS: Final = ("silu", "gelu_tanh")
"""The activations of a gate: SiLU, and GELU by its approximation with tanh."""


class FusedOperations(NamedTuple):
    """One kernel each in place of a chain of PyTorch's.

    `rms_norm`: (x, weight, eps, offset) -> `x / sqrt(mean(x ** 2) + eps) * (offset + weight)` over
    the last axis; x: [..., width], weight: [width], of one dtype. Raises ValueError for a width
    that it can't hold. `add_norm`: (x, added, weight, eps, offset) -> `x + added`, rounded, and the
    norm of that. `rotate`: (query, keys, cos, sin) -> queries and keys, rotated by the angles
    of their tokens in pairs of their halves; query, keys: [rows, heads, tokens, width]; cos, sin:
    [rows, tokens, width], of equal strides, the last of which is 1, as that of queries and keys.
    `gate`: (gate, up, activation) -> `activation(gate) * up`, for one of `ACTIVATIONS`; gate, up:
    [..., width], of one shape.
    """

    rms_norm: Callable[[Tensor, Tensor, float, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor, Tensor, str], Tensor]


class Kernels(NamedTuple):
    """One implementation of every operation; scratch memory is shared within the tuple only.

    `plan_linear`: makes a plan of `linear`; None if the implementation prepares nothing.
    `attention`: over blocks; None if PyTorch's own functions are to be used. `fused`: in place of
    a model's own norms and rotations; None if these are to be used.
    `variant_of`: what identifies the kernels that are compiled for a batch of rows with these
    bounds; None if the implementation compiles nothing. Those of experts are for batches of pairs.
    """

    shrink: LinearKernel
    expand: LinearKernel
    linear: LinearKernel
    embedding: EmbeddingKernel
    experts: ExpertsKernel
    experts_shrink: ExpertsShrinkKernel
    experts_expand: ExpertsKernel
    plan_linear: PlanLinear | None = None
    attention: BlockAttention | None = None
    fused: FusedOperations | None = None
    variant_of: Callable[[GroupBounds], object] | None = None
