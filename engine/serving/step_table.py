"""The numbers of each step that the device reads, sent by one copy that the host does not await."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from loradock.engine.punica.grouping import DeviceBuffer

_PAD = torch.zeros(1, dtype=torch.int64)


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
        """Return the parts on the device; each is 1-D int64, or of another dtype of 8 bytes.

        Each starts at a multiple of 16 bytes: kernels are compiled for one alignment.
        """
        padded = [
            word for part in parts for word in (part.view(torch.int64), _PAD[: len(part) % 2])
        ]
        ends = [*accumulate([words + words % 2 for words in map(len, parts)], initial=0)]
        if self._buffer is None:
            if ends[-1] > len(self._host):
                with torch.inference_mode(False):
                    self._host = torch.zeros(2 * ends[-1], dtype=torch.int64)
            sent = host = self._host[: ends[-1]]
            torch.cat(padded, out=host)
        else:
            torch.cat(padded, out=self._buffer.next_host_buffer(ends[-1]))
            sent = self._buffer.send(ends[-1])
        return [
            sent[begin : begin + len(part)].view(part.dtype)
            for part, begin in zip(parts, ends, strict=False)
        ]
