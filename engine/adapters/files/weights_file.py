"""The protocol of a reader of adapter weights, value ranges and the fingerprint."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import torch
import xxhash

from engine.submatrix import Part


class HasShape(Protocol):
    """A tensor, in memory or still in its file."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""
        ...


Tensors = Mapping[str, HasShape]


class ValueRange(NamedTuple):
    """A tensor's smallest and largest value; NaN or infinite where any value is."""

    low: float
    high: float


def value_range(tensor: torch.Tensor) -> ValueRange:
    """The range of a floating tensor with at least one value; NaN is both ends of any range."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    low, high = torch.aminmax(tensor)
    return ValueRange(low.item(), high.item())


_DOMAIN: Final = b"loradock adapter 1\0"


Wanted = Mapping[str, Part]
"""The tensors to read, by name, and which part of each."""


class ReadTensors(NamedTuple):
    """What was read: each tensor's part, and its smallest and largest value."""

    tensors: dict[str, torch.Tensor]
    ranges: dict[str, ValueRange]


class Weights(Protocol):
    """An adapter's weights file, whatever its format."""

    @property
    def tensors(self) -> Mapping[str, HasShape]:
        """Every tensor of the file."""
        ...

    def read(self, wanted: Wanted) -> ReadTensors:
        """The parts that are wanted."""
        ...

    def read_all(self, wanted: Wanted, config: bytes) -> tuple[ReadTensors, str]:
        """The parts that are wanted, whole tensors judged, and the adapter's fingerprint."""
        ...


def start_fingerprint(config: bytes, file_bytes: int) -> xxhash.xxh3_128:
    """The digest of an adapter before its weights file's bytes.

    A fingerprint is xxh3 of 128 bits, in hex, over a fixed word, the config's and the weights
    file's length (8 bytes each, little-endian), and both files' bytes. It tells versions apart; it
    is no proof against somebody who makes two files meet in it.
    """
    digest = xxhash.xxh3_128(_DOMAIN)
    for length in (len(config), file_bytes):
        digest.update(length.to_bytes(8, "little"))
    digest.update(config)
    return digest
