"""Allocation of host memory, pageable or page-locked."""

import ctypes
import math
import sys
from typing import Final

import torch

from loradock.engine.errors import HostOutOfMemory

HUGE_PAGE_BYTES: Final = 2 << 20
_HUGE_PAGES_MIN: Final = 2
_MADV_HUGEPAGE: Final = 14


def allocate_host(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Return an uninitialised host tensor, page-locked if `pin`; raises `HostOutOfMemory`.

    Large pageable memory is in huge pages where the system has them: the first access to 84 MB in
    small ones took eight times as long as a copy of the same bytes, and twice with huge ones.
    """
    try:
        tensor = torch.empty(shape, dtype=dtype, pin_memory=pin)
    except RuntimeError as error:
        kind = "page-locked" if pin else "pageable"
        raise HostOutOfMemory(
            f"{math.prod(shape) * dtype.itemsize} bytes of {kind} host memory can't be allocated "
            f"({str(error)[:200]}); remove an adapter"
        ) from error
    if not pin and sys.platform == "linux":
        _advise_huge_pages(tensor)
    return tensor


def _advise_huge_pages(tensor: torch.Tensor) -> None:
    """Request huge pages within a tensor's memory; the memory around it is left as it is."""
    start = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end - start >= _HUGE_PAGES_MIN * HUGE_PAGE_BYTES:
        # A system without huge pages refuses, and the memory is as usable as before.
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)


_LIBC: Final = ctypes.CDLL(None)
