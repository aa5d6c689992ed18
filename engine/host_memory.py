"""Allocation of host memory, pageable or page-locked."""

import math

import torch

from engine.errors import HostOutOfMemory


def allocate_host(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Return an uninitialised host tensor, page-locked if `pin`; raises `HostOutOfMemory`."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    except RuntimeError as error:
        kind = "page-locked" if pin else "pageable"
        raise HostOutOfMemory(
            f"{math.prod(shape) * dtype.itemsize} bytes of {kind} host memory can't be allocated "
            f"({str(error)[:200]}); remove an adapter"
        ) from error
