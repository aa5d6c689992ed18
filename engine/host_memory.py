"""Memory on the host, pageable or page-locked.

What it is: the one call that takes it. What it is not: a budget; that is the controller's. One
rule: a host that has no more is an error that a client can be told, not the end of the engine.
"""

import math

import torch

from engine.errors import HostOutOfMemory


def allocate_host(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """An uninitialised host tensor, page-locked where `pin` says so; raises `HostOutOfMemory`."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    except RuntimeError as error:
        kind = "page-locked" if pin else "pageable"
        raise HostOutOfMemory(
            f"the host can't give {math.prod(shape) * dtype.itemsize} bytes of {kind} memory "
            f"({str(error)[:200]}); drop an adapter"
        ) from error
