"""Page-locked host memory for blobs: one region that is registered at start, in extents.

PyTorch's own rounds each size up to a power of two and never returns it to the system, so that
a budget in bytes says little, and its first use of each size makes a call to the driver.
"""

import ctypes
import mmap
import weakref
from collections import deque
from itertools import count
from threading import Lock
from typing import Any

import structlog
import torch
from torch import Tensor

from loradock.engine.errors import HostOutOfMemory
from loradock.engine.layout import ALIGNMENT_BYTES
from loradock.engine.residency.extents import Extents

_log = structlog.get_logger()


class PinnedMemory:
    """A region of `region_bytes` that threads allocate from; 0 registers each allocation alone.

    An allocation ends when its tensor and all views of it do. If the region has no hole for an
    allocation, which is logged, it is registered alone, and returned to the system at its end.
    Raises `HostOutOfMemory`.
    """

    def __init__(self, region_bytes: int) -> None:
        region_bytes -= region_bytes % ALIGNMENT_BYTES
        self._region = _Registered(region_bytes) if region_bytes else None
        self._extents = Extents(region_bytes)
        self._owners = count()
        # A finalizer can run in any place of any thread, so it only adds here.
        self._ended: deque[int] = deque()
        self._lock = Lock()

    @property
    def free_bytes(self) -> int:
        """The bytes of the region that are not allocated."""
        with self._lock:
            self._free_ended()
            return self._extents.free_bytes

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised 1-D tensor that starts at a multiple of 128 bytes."""
        size_bytes = elements * dtype.itemsize
        taken = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not taken:
            return torch.empty(0, dtype=dtype)
        with self._lock:
            self._free_ended()
            owner = next(self._owners)
            extent = self._extents.allocate(owner, taken) if self._region else None
            free_bytes = self._extents.free_bytes
        if extent is None or self._region is None:
            if self._region is not None:
                _log.info(
                    "the page-locked region has no hole for an adapter; its memory is separate",
                    bytes=taken,
                    free_bytes=free_bytes,
                )
            buffer = _Registered(taken).part(0, size_bytes)
        else:
            buffer = self._region.part(extent.start_bytes, size_bytes)
            weakref.finalize(buffer, self._ended.append, owner)
        return torch.frombuffer(buffer, dtype=dtype)

    def _free_ended(self) -> None:
        while self._ended:
            self._extents.free(self._ended.popleft())


class _Registered:
    """Memory that is page-locked as long as this object, or a part of it, exists."""

    def __init__(self, size_bytes: int) -> None:
        try:
            self._memory = mmap.mmap(-1, size_bytes)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            _check(torch.cuda.cudart().cudaHostRegister(self._address, size_bytes, 0))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            raise HostOutOfMemory(
                f"{size_bytes} bytes of page-locked host memory can't be allocated "
                f"({str(error)[:200]}); lower pinned_bytes_max"
            ) from error
        weakref.finalize(self, _unregister, self._address)

    def part(self, start: int, size_bytes: int) -> "ctypes.Array[ctypes.c_uint8]":
        """Return bytes of it; they keep all of it alive."""
        part = (ctypes.c_uint8 * size_bytes).from_buffer(self._memory, start)
        part.owner = self  # type: ignore[attr-defined]
        return part


def _check(code: Any) -> None:
    """Raise RuntimeError for an error of the CUDA runtime."""
    if int(code):
        raise RuntimeError(f"cudaHostRegister returned {int(code)}")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
