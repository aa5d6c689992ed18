"""The numbers of each step that the device reads, sent by one copy that the host does not await."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from loradock.engine.punica.grouping import DeviceBuffer


class StepTable:
    """Memory for `words` numbers of 8 bytes on the device, which each `send` overwrites.

    A `send` is ordered after the launches before it. Results of an earlier one have the numbers of
    the latest. The memory moves only if more than `words` numbers are sent: `identity` identifies
    it, so that captured launches, which read one place, are captured again.
    """

    def __init__(self, device: torch.device, words: int) -> None:
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._host = torch.zeros(words, dtype=torch.int64)
        self._buffer = DeviceBuffer(device, words) if device.type == "cuda" else None

    @property
    def identity(self) -> object:
        """An object that is replaced when the memory moves."""
        return self._host if self._buffer is None else self._buffer.identity

    def send(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts on the device; each is 1-D int64, or of another dtype of 8 bytes."""
        flat = [part.view(torch.int64) for part in parts]
        ends = [*accumulate(map(len, flat), initial=0)]
        if self._buffer is None:
            if ends[-1] > len(self._host):
                with torch.inference_mode(False):
                    self._host = torch.zeros(2 * ends[-1], dtype=torch.int64)
            sent = host = self._host[: ends[-1]]
            torch.cat(flat, out=host)
        else:
            torch.cat(flat, out=self._buffer.next_host_buffer(ends[-1]))
            sent = self._buffer.send(ends[-1])
        return [
            sent[begin:end].view(part.dtype)
            for part, (begin, end) in zip(parts, pairwise(ends), strict=True)
        ]
