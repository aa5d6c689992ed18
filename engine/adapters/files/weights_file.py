"""The interface of weights files, value ranges, and the start of the fingerprint."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import torch
import xxhash

from loradock.engine.submatrix import WHOLE_TENSOR, Submatrix


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


Visitor = Callable[[torch.Tensor, int], None]
"""Receives values of a tensor, flat, and the index of the first of them in the tensor."""

Visitors = Mapping[str, Visitor]
"""The visitors of tensors, by name; all values of each are passed, in any number of parts."""

NO_VISITORS: Final[Visitors] = MappingProxyType({})


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

    def read(
        self, wanted: Wanted, *, is_checked: bool = False, visitors: Visitors = NO_VISITORS
    ) -> ReadTensors:
        """Return the wanted parts; unless the values are checked already, with their ranges.

        Of a tensor with a visitor but no wanted part, nothing is kept.
        """
        ...

    def read_all(
        self, wanted: Wanted, config: bytes, visitors: Visitors = NO_VISITORS
    ) -> tuple[ReadTensors, str]:
        """Return the wanted parts with the whole tensors' value ranges, and the fingerprint.

        No tensor is both wanted and visited.
        """
        ...


class TensorsInMemory:
    """Tensors that a program passes, which are read as those of a file and never copied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def read(
        self, wanted: Wanted, *, is_checked: bool = False, visitors: Visitors = NO_VISITORS
    ) -> ReadTensors:
        """Return the wanted parts; unless the values are checked already, with their ranges."""
        for name, visit in visitors.items():
            visit(self.tensors[name].detach().flatten().cpu(), 0)
        found = {
            name: self.tensors[name] if part == WHOLE_TENSOR else part.select(self.tensors[name])
            for name, part in wanted.items()
        }
        if is_checked:
            return ReadTensors(found, {})
        return ReadTensors(found, {name: value_range(one) for name, one in found.items()})


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
