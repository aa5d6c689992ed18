"""Memory that is written and read within one call, kept for the next.

What it is: one growing buffer for each use. What it is not: a place for results. One rule: what a
buffer held before is never read, so buffers are handed out unfilled.
"""

import math

import torch
from torch import Tensor


class Scratch:
    """Buffers by the name of their use; a buffer that has to grow leaves older views as they are.

    Not for two threads at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An unfilled contiguous tensor; the next one of the same use lies over it."""
        size = math.prod(shape)
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < size:
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[use, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)
