"""LoRA arithmetic: the table of implementations, and the choice for a device.

Every implementation of an operation has the reference's signature and passes its tests.
"""

from collections.abc import Callable
from typing import Final

from loradock.engine.kernels.cpu import cpu_kernels
from loradock.engine.kernels.interface import Kernels
from loradock.engine.kernels.reference import reference_kernels

__all__ = ["DEFAULTS", "IMPLEMENTATIONS", "Kernels", "choose_kernels"]


def triton_kernels(batch_invariant: bool) -> Kernels:
    """Create the Triton kernels; Triton is imported here because it may not be installed."""
    from loradock.engine.kernels.gpu.operations import triton_kernels as make  # noqa: PLC0415

    return make(batch_invariant)


IMPLEMENTATIONS: Final[dict[str, Callable[[bool], Kernels]]] = {
    "reference": reference_kernels,
    "cpu": cpu_kernels,
    "triton": triton_kernels,
}
"""Implementation name -> function that creates its kernels from `batch_invariant`."""

DEFAULTS: Final[dict[str, str]] = {"cpu": "cpu", "cuda": "triton"}
"""Device type -> default implementation."""


def choose_kernels(device_type: str, name: str = "auto", batch_invariant: bool = False) -> Kernels:
    """Create kernels of the implementation `name`; "auto" selects the device's default.

    With `batch_invariant` the bits of a row's result do not depend on the other rows of its batch.
    The returned kernels own their scratch memory, so each thread that runs forward passes needs its
    own. Raises ValueError for an unknown implementation or device type.
    """
    chosen = DEFAULTS.get(device_type) if name == "auto" else name
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(
            f"no kernels {name!r} for device type {device_type!r}; implementations are "
            f"{', '.join(IMPLEMENTATIONS)}, and {', '.join(DEFAULTS)} have a default"
        )
    return IMPLEMENTATIONS[chosen](batch_invariant)
