"""The interface of weights files, value ranges, and the start of the fingerprint."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import torch
import xxhash

from engine.submatrix import Submatrix


class HasShape(Protocol):
    """A tensor, in memory or in a file."""

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """The tensor's shape."""
        ...


Tensors = Mapping[str, HasShape]


class ValueRange(NamedTuple):
    """A tensor's smallest and largest value; not finite if any value is not."""

    low: float
    high: float


def value_range(tensor: torch.Tensor) -> ValueRange:
    """Return the range of a floating tensor with at least one value; (NaN, NaN) if any is NaN."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    low, high = torch.aminmax(tensor)
    return ValueRange(low.item(), high.item())


_PREFIX: Final = b"loradock adapter 1\0"


Wanted = Mapping[str, Submatrix]
"""The tensors to read, by name, with the part of each."""


class ReadTensors(NamedTuple):
    """The parts of tensors that were read, and value ranges, by name."""

    tensors: dict[str, torch.Tensor]
    ranges: dict[str, ValueRange]


class WeightsFile(Protocol):
    """An adapter's weights file, of any format."""

    @property
    def tensors(self) -> Mapping[str, HasShape]:
        """All tensors of the file, by name."""
        ...

    def read(self, wanted: Wanted, *, is_checked: bool = False) -> ReadTensors:
        """Return the wanted parts; unless the values are checked already, with their ranges."""
        ...

    def read_all(self, wanted: Wanted, config: bytes) -> tuple[ReadTensors, str]:
        """Return the wanted parts with the whole tensors' value ranges, and the fingerprint."""
        ...


def start_fingerprint(config: bytes, file_bytes: int) -> xxhash.xxh3_128:
    """Return the digest of an adapter's fingerprint, up to the bytes of its weights file.

    A fingerprint is xxh3 of 128 bits, in hex, over a fixed prefix, the lengths of config and
    weights file (8 bytes each, little-endian), and the bytes of both. It distinguishes versions; it
    is not secure against deliberate collisions.
    """
    digest = xxhash.xxh3_128(_PREFIX)
    for length in (len(config), file_bytes):
        digest.update(length.to_bytes(8, "little"))
    digest.update(config)
    return digest
