"""Weights files of formats that are read whole: common parts of their readers.

Such a format is a function from an open file to its tensors. Only plain tensors under printable
ASCII names are accepted.
"""

import io
from collections.abc import Mapping
from typing import Final

import torch

from loradock.engine.adapters.files.directory import OpenFile
from loradock.engine.adapters.files.problems import shown
from loradock.engine.adapters.files.weights_file import (
    NO_VISITORS,
    ReadTensors,
    Visitors,
    Wanted,
    start_fingerprint,
    value_range,
)
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterUnsound
from loradock.engine.submatrix import WHOLE_TENSOR, Submatrix

_CHUNK_BYTES: Final = 1 << 20


class WholeFile:
    """A weights file whose tensors are all in memory."""

    def __init__(self, file: OpenFile, tensors: Mapping[str, torch.Tensor]) -> None:
        self._file = file
        self.tensors = tensors

    def read(
        self, wanted: Wanted, *, is_checked: bool = False, visitors: Visitors = NO_VISITORS
    ) -> ReadTensors:
        """Return the wanted parts; unless the values are checked already, with their ranges."""
        for name, visit in visitors.items():
            visit(self.tensors[name].flatten(), 0)
        tensors = {name: _copied(self.tensors[name], part) for name, part in wanted.items()}
        if is_checked:
            return ReadTensors(tensors, {})
        return ReadTensors(tensors, {name: value_range(one) for name, one in tensors.items()})

    def read_all(
        self, wanted: Wanted, config: bytes, visitors: Visitors = NO_VISITORS
    ) -> tuple[ReadTensors, str]:
        """Return the wanted parts with the whole tensors' value ranges, and the fingerprint."""
        digest = start_fingerprint(config, self._file.size_bytes)
        for start in range(0, self._file.size_bytes, _CHUNK_BYTES):
            size_bytes = min(_CHUNK_BYTES, self._file.size_bytes - start)
            digest.update(self._file.read(start, size_bytes))
        tensors = self.read(wanted, is_checked=True, visitors=visitors).tensors
        ranges = {name: value_range(self.tensors[name]) for name in wanted}
        return ReadTensors(tensors, ranges), digest.hexdigest()


class _Stream(io.RawIOBase):
    """An `OpenFile` as a stream of the standard library."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; return it."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}
        self._position = max(0, bases[whence] + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` as far as the file reaches; return the number of bytes."""
        count = min(len(buffer), max(0, self._file.size_bytes - self._position))
        self._file.read_into(memoryview(buffer).cast("B")[:count], self._position)
        self._position += count
        return count


def buffered(file: OpenFile) -> io.BufferedReader:
    """Return the open file as a stream, for a library that reads from one."""
    return io.BufferedReader(_Stream(file))


def check_size(file: OpenFile, bounds: AdapterBounds) -> None:
    """Raise `AdapterUnsound` for a file over the size bound."""
    if file.size_bytes > bounds.weights_bytes_max:
        raise AdapterUnsound(
            f"{file.name} has {file.size_bytes} bytes; at most {bounds.weights_bytes_max} are read"
        )


def plain_tensors(
    content: Mapping[object, object], file: OpenFile, bounds: AdapterBounds
) -> dict[str, torch.Tensor]:
    """Return a library's tensors by name; raises `AdapterUnsound` for any other content."""
    return {_name(name, file, bounds): _tensor(name, tensor) for name, tensor in content.items()}


def _name(name: object, file: OpenFile, bounds: AdapterBounds) -> str:
    is_name = isinstance(name, str) and name.isascii() and name.isprintable()
    if not is_name or len(str(name)) > bounds.name_characters_max:
        raise AdapterUnsound(
            f"{file.name} has a tensor named {shown(name)}; printable ASCII, at most "
            f"{bounds.name_characters_max} characters"
        )
    return str(name)


def _tensor(name: object, tensor: object) -> torch.Tensor:
    is_plain = (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and tensor.numel() > 0
    )
    if not is_plain or not isinstance(tensor, torch.Tensor):
        raise AdapterUnsound(
            f"{shown(name)} is a {type(tensor).__name__}; a dense CPU tensor with values is needed"
        )
    return tensor.detach()


def _copied(tensor: torch.Tensor, part: Submatrix) -> torch.Tensor:
    """Return a copy of the part, because tensors of one file may share memory."""
    selected = tensor if part == WHOLE_TENSOR else part.select(tensor)
    return selected.clone(memory_format=torch.contiguous_format)
