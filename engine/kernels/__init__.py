"""The arithmetic of LoRA, one operation a file, and the one table that chooses implementations.

What it is: kernels over (arena, offsets, ranks) and a batch's groups. What it is not: a place
that knows adapters, requests or messages. One rule: every implementation of an operation has the
reference's signature and passes the reference's tests.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from torch import Tensor

from engine.kernels.expand import expand_reference
from engine.kernels.operands import Groups, LoRASlices
from engine.kernels.shrink import shrink_reference

ShrinkKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, float], None]
ExpandKernel = Callable[[Tensor, Tensor, LoRASlices, Groups, int, bool], None]


class Kernels(NamedTuple):
    """One implementation of every operation."""

    shrink: ShrinkKernel
    expand: ExpandKernel


IMPLEMENTATIONS: Final[dict[str, Kernels]] = {
    "reference": Kernels(shrink_reference, expand_reference),
}

DEFAULTS: Final[dict[str, str]] = {"cpu": "reference", "cuda": "reference"}
"""The implementation for each type of device."""


def choose_kernels(device_type: str, name: str = "auto") -> Kernels:
    """The implementation called `name`; "auto" takes the device's own.

    Raises ValueError for a name or a device that is not in the tables.
    """
    chosen = DEFAULTS.get(device_type) if name == "auto" else name
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(
            f"kernels {name!r} on device type {device_type!r}; there are "
            f"{', '.join(IMPLEMENTATIONS)}, and defaults for {', '.join(DEFAULTS)}"
        )
    return IMPLEMENTATIONS[chosen]
