"""The arithmetic of LoRA, one operation a file, and the one table that chooses implementations.

What it is: kernels over (arena, offsets, ranks) and a batch's groups. What it is not: a place
that knows adapters, requests or messages. One rule: every implementation of an operation has the
reference's signature and passes the reference's tests.
"""

from collections.abc import Callable
from typing import Final

from engine.kernels.cpu import cpu_kernels
from engine.kernels.interface import Kernels
from engine.kernels.reference import reference_kernels

__all__ = ["DEFAULTS", "IMPLEMENTATIONS", "Kernels", "choose_kernels"]


def triton_kernels(batch_invariant: bool) -> Kernels:
    """The Triton kernels; Triton itself is imported here, for where it may be missing."""
    from engine.kernels.gpu.operations import triton_kernels as make  # noqa: PLC0415

    return make(batch_invariant)


IMPLEMENTATIONS: Final[dict[str, Callable[[bool], Kernels]]] = {
    "reference": reference_kernels,
    "cpu": cpu_kernels,
    "triton": triton_kernels,
}
"""Name -> a maker of kernels; its argument is `batch_invariant`."""

DEFAULTS: Final[dict[str, str]] = {"cpu": "cpu", "cuda": "triton"}
"""The implementation for each type of device."""


def choose_kernels(device_type: str, name: str = "auto", batch_invariant: bool = False) -> Kernels:
    """New kernels of the implementation called `name`; "auto" takes the device's own.

    With `batch_invariant` a row gets the same bits whatever else is in its batch. Scratch memory is
    the returned tuple's own, so each thread that runs forward passes needs one for itself. Raises
    ValueError for a name or a device that is not in the tables.
    """
    chosen = DEFAULTS.get(device_type) if name == "auto" else name
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(
            f"kernels {name!r} on device type {device_type!r}; there are "
            f"{', '.join(IMPLEMENTATIONS)}, and defaults for {', '.join(DEFAULTS)}"
        )
    return IMPLEMENTATIONS[chosen](batch_invariant)
