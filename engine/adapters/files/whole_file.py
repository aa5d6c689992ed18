"""Weights in formats that have no slices: all of a file's tensors, and then parts of them.

What it is: what such formats share; each is a function from an open file to its tensors. What it is
not: a format. One rule: what comes out of a file is plain tensors by plain names, or nothing.
"""

import io
from collections.abc import Mapping
from typing import Final

import torch

from engine.adapters.files.directory import OpenFile
from engine.adapters.files.problems import shown
from engine.adapters.files.weights_file import ReadTensors, Wanted, start_fingerprint, value_range
from engine.config import AdapterBounds
from engine.errors import AdapterUnsound
from engine.submatrix import ALL, Part

_CHUNK_BYTES: Final = 1 << 20


class WholeWeights:
    """A file whose tensors are all in memory."""

    def __init__(self, file: OpenFile, tensors: Mapping[str, torch.Tensor]) -> None:
        self._file = file
        self.tensors = tensors

    def read(self, wanted: Wanted) -> ReadTensors:
        """The parts that are wanted, and their ranges."""
        tensors = {name: _cut(self.tensors[name], part) for name, part in wanted.items()}
        ranges = {name: value_range(tensor) for name, tensor in tensors.items()}
        return ReadTensors(tensors, ranges)

    def read_all(self, wanted: Wanted, config: bytes) -> tuple[ReadTensors, str]:
        """The parts that are wanted, the ranges of the whole tensors, and the fingerprint."""
        digest = start_fingerprint(config, self._file.size_bytes)
        for start in range(0, self._file.size_bytes, _CHUNK_BYTES):
            size_bytes = min(_CHUNK_BYTES, self._file.size_bytes - start)
            digest.update(self._file.read(start, size_bytes))
        tensors = {name: _cut(self.tensors[name], part) for name, part in wanted.items()}
        ranges = {name: value_range(self.tensors[name]) for name in wanted}
        return ReadTensors(tensors, ranges), digest.hexdigest()


class _View(io.RawIOBase):
    """An open file as the standard library's readers want it, with a position of its own."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; answers with it."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}
        self._position = max(0, bases[whence] + offset)
        return self._position

    def tell(self) -> int:
        """Where it is."""
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill as much of `buffer` as the file still has; answers with how much that is."""
        count = min(len(buffer), max(0, self._file.size_bytes - self._position))
        self._file.read_into(memoryview(buffer).cast("B")[:count], self._position)
        self._position += count
        return count


def buffered(file: OpenFile) -> io.BufferedReader:
    """The file for a library that wants to read by itself; nothing is opened again."""
    return io.BufferedReader(_View(file))


def check_size(file: OpenFile, bounds: AdapterBounds) -> None:
    """Raise `AdapterUnsound` for a file that is too large to be read."""
    if file.size_bytes > bounds.weights_bytes_max:
        raise AdapterUnsound(
            f"{file.name} has {file.size_bytes} bytes; at most {bounds.weights_bytes_max} are read"
        )


def plain_tensors(
    content: Mapping[object, object], file: OpenFile, bounds: AdapterBounds
) -> dict[str, torch.Tensor]:
    """What a library found in a file; raises `AdapterUnsound` for all but tensors by name."""
    return {_name(name, file, bounds): _tensor(name, tensor) for name, tensor in content.items()}


def _name(name: object, file: OpenFile, bounds: AdapterBounds) -> str:
    is_name = isinstance(name, str) and name.isascii() and name.isprintable()
    if not is_name or len(str(name)) > bounds.name_characters_max:
        raise AdapterUnsound(
            f"{file.name} calls a tensor {shown(name)}; plain ASCII, at most "
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
            f"{shown(name)} is a {type(tensor).__name__}; a plain tensor is needed"
        )
    return tensor.detach()


def _cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The part in memory of its own: tensors of one file may share theirs."""
    found = tensor if part == ALL else part.cut(tensor)
    return found.clone(memory_format=torch.contiguous_format)
