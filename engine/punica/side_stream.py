"""Concurrent execution of the base output and the LoRA delta, on a second CUDA stream."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Concurrent(Protocol):
    """Runs two independent computations concurrently."""

    def run(
        self, base: Callable[[], Tensor], product: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return both results; `product` must not write anything that `base` reads or writes."""


class SideStream:
    """Runs `product` on a second stream, concurrently with `base` on the current one; CUDA only.

    Fork and join are device events, so both become part of a graph that is being captured.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"a side stream needs a CUDA device, not {device}")
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(
        self, base: Callable[[], Tensor], product: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return both results; later work on the current stream is ordered after both."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            delta = product()
        y = base()
        current.wait_stream(self._stream)
        # It was allocated on the side stream, and is last read on this one.
        delta.record_stream(current)
        return y, delta
