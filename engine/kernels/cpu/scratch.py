"""Scratch memory: buffers that are written and read within one call and reused by the next.

Buffers are returned unfilled; what a buffer held before must not be read.
"""

import math
from typing import Final

import torch
from torch import Tensor

_VIEWS_MAX: Final = 4096
"""The most shapes whose views are cached; a cached shape costs one look-up."""


class Scratch:
    """One buffer per use and dtype. It grows on demand; earlier views keep the old buffer.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an unfilled contiguous tensor, valid until the next call with the same use."""
        view = self._views.get((use, shape, dtype))
        if view is None:
            size = math.prod(shape)
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            view = self._buffer(use, size, dtype)[:size].view(shape)
            self._views[use, shape, dtype] = view
        return view

    def copy_of(self, use: str, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy in `dtype`, valid until the next call with the same use."""
        return self.take(use, tuple(matrix.shape), dtype).copy_(matrix)

    def transposed(self, use: str, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the transpose in `dtype`; a conversion is valid until the next of the same use."""
        if matrix.dtype == dtype:
            return matrix.T
        return self.copy_of(use, matrix, dtype).T

    def _buffer(self, use: str, size: int, dtype: torch.dtype) -> Tensor:
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < size:
            # Tensors created in inference mode can't be written outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[use, dtype] = torch.empty(size, dtype=dtype)
            # Views keep their memory alive; without them the outgrown buffer is freed.
            self._views.clear()
        return buffer
