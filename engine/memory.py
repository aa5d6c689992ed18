"""Allocation of memory: pageable on the host, and aligned on the device."""

import ctypes
import math
import sys
from typing import Final

import torch

from loradock.engine.errors import DeviceOutOfMemory, HostOutOfMemory
from loradock.engine.layout import ALIGNMENT_BYTES

HUGE_PAGE_BYTES: Final = 2 << 20
_HUGE_PAGES_MIN: Final = 2
_MADV_HUGEPAGE: Final = 14


def allocate_host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised host tensor; raises `HostOutOfMemory`.

    Large memory is in huge pages if the system has them: the first access to 84 MB in
    small ones took eight times as long as a copy of the same bytes, and twice with huge ones.
    """
    try:
        tensor = torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        raise HostOutOfMemory(
            f"{math.prod(shape) * dtype.itemsize} bytes of pageable host memory can't be allocated "
            f"({str(error)[:200]}); remove an adapter"
        ) from error
    if sys.platform == "linux":
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


def allocate_device(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised uint8 memory that starts at a multiple of 128 bytes.

    Raises `DeviceOutOfMemory`, with the option to lower.
    """
    try:
        allocated = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise DeviceOutOfMemory(
            f"{device} can't provide {size_bytes} bytes ({error}); lower device_bytes_max"
        ) from error
    start = -allocated.data_ptr() % ALIGNMENT_BYTES
    return allocated[start : start + size_bytes]


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that this process has allocated on a CUDA device; 0 on another one."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
