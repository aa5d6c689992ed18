"""Memory on the device, aligned and with an error that names the option to lower."""

import torch

from loradock.engine.errors import DeviceOutOfMemory
from loradock.engine.layout import ALIGNMENT_BYTES


def allocate_device(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised uint8 memory that starts at a multiple of 128 bytes.

    Raises `DeviceOutOfMemory`.
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
