"""Memory that is written and read within one call, kept for the next.

What it is: one growing buffer for each use. What it is not: a place for results. One rule: what a
buffer held before is never read, so buffers are handed out unfilled.
"""

import math
from typing import Final

import torch
from torch import Tensor

_VIEWS_MAX: Final = 4096
"""How many shapes are remembered; a shape that comes again costs one look-up."""


class Scratch:
    """Buffers by the name of their use; a buffer that has to grow leaves older views as they are.

    Not for two threads at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An unfilled contiguous tensor; the next one of the same use lies over it."""
        view = self._views.get((use, shape, dtype))
        if view is None:
            size = math.prod(shape)
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            view = self._buffer(use, size, dtype)[:size].view(shape)
            self._views[use, shape, dtype] = view
        return view

    def _buffer(self, use: str, size: int, dtype: torch.dtype) -> Tensor:
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < size:
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[use, dtype] = torch.empty(size, dtype=dtype)
            # Views keep the memory that they show; what was outgrown is given back.
            self._views.clear()
        return buffer
