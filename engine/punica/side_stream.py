"""Two things done side by side: a second CUDA stream, forked from the current one and joined.

What it is: order between streams. What it is not: arithmetic. One rule: who called continues on the
stream that it was on, behind both.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Beside(Protocol):
    """Runs two things that don't need each other."""

    def run(
        self, base: Callable[[], Tensor], product: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What both return; `product` may write nothing that `base` reads or writes."""


class SecondStream:
    """`product` on a stream of its own, beside `base` on the current one; CUDA only.

    Fork and join are events on the device, so both become part of a graph that is being captured.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"a second stream on {device}; streams are CUDA's")
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(
        self, base: Callable[[], Tensor], product: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What both return, in the order of the current stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            delta = product()
        y = base()
        current.wait_stream(self._stream)
        # It was allocated on the other stream, and this one reads it last.
        delta.record_stream(current)
        return y, delta
