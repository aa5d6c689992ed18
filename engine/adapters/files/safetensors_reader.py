"""A safetensors file, read in one pass into memory, the fingerprint and the value ranges.

Each tensor is read, digested and checked while it is in the processor's cache. The fingerprint
covers every byte of the file, also tensors that are not wanted. Without a fingerprint only the
wanted parts are read.
"""

from collections.abc import Iterator
from typing import Final

import torch

from loradock.engine.adapters.files.directory import OpenFile
from loradock.engine.adapters.files.safetensors_header import (
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    parse_header,
)
from loradock.engine.adapters.files.weights_file import (
    NO_VISITORS,
    ReadTensors,
    Visitor,
    Visitors,
    Wanted,
    start_fingerprint,
    value_range,
)
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterUnsound
from loradock.engine.host_memory import allocate_host
from loradock.engine.submatrix import WHOLE_TENSOR, Submatrix, byte_ranges_of

_CHUNK_BYTES: Final = 1 << 20


class SafetensorsFile:
    """A safetensors file, whose header is read at once and whose tensors are read later.

    Raises `AdapterUnsound` for a file that exceeds a bound or contradicts the format.
    """

    def __init__(self, file: OpenFile, bounds: AdapterBounds) -> None:
        if file.size_bytes > bounds.weights_bytes_max:
            raise AdapterUnsound(
                f"{file.name} has {file.size_bytes} bytes; at most {bounds.weights_bytes_max} are "
                "read"
            )
        self._file = file
        prefix = file.read(0, min(LENGTH_BYTES, file.size_bytes))
        header = file.read(LENGTH_BYTES, header_length(prefix, file.size_bytes, bounds))
        self._head = prefix + header
        self._stored = parse_header(header, file.size_bytes, bounds)
        self.tensors = {tensor.name: tensor for tensor in self._stored}

    def read(
        self, wanted: Wanted, *, is_checked: bool = False, visitors: Visitors = NO_VISITORS
    ) -> ReadTensors:
        """Return the wanted parts; unless the values are checked already, with their ranges.

        No other byte is read, except of visited tensors.
        """
        found = ReadTensors({}, {})
        for stored in self._stored:
            if stored.name in wanted:
                tensor, _ = self._read_part(stored, wanted[stored.name])
                found.tensors[stored.name] = tensor
                if not is_checked:
                    found.ranges[stored.name] = value_range(tensor)
            elif stored.name in visitors:
                for start, chunk in self._chunks(stored):
                    _visit(visitors[stored.name], stored, start, chunk)
        return found

    def read_all(
        self, wanted: Wanted, config: bytes, visitors: Visitors = NO_VISITORS
    ) -> tuple[ReadTensors, str]:
        """Return the wanted parts with the whole tensors' value ranges, and the fingerprint."""
        digest = start_fingerprint(config, self._file.size_bytes)
        digest.update(self._head)
        found = ReadTensors({}, {})
        for stored in self._stored:
            part = wanted.get(stored.name)
            if part is None:
                for start, chunk in self._chunks(stored):
                    digest.update(chunk)
                    if stored.name in visitors:
                        _visit(visitors[stored.name], stored, start, chunk)
            else:
                whole, raw = self._read_part(stored, WHOLE_TENSOR)
                digest.update(raw)
                found.ranges[stored.name] = value_range(whole)
                # A part is copied, so that the memory of the whole tensor is freed.
                found.tensors[stored.name] = (
                    whole if part == WHOLE_TENSOR else part.select(whole).clone()
                )
        return found, digest.hexdigest()

    def _read_part(self, stored: StoredTensor, part: Submatrix) -> tuple[torch.Tensor, memoryview]:
        """Read a part of a tensor; return it, and its bytes."""
        tensor = allocate_host(part.shape_in(stored.shape), stored.dtype, pin=False)
        raw: memoryview = tensor.view(torch.uint8).numpy().data.cast("B")
        if part == WHOLE_TENSOR:
            self._file.read_into(raw, stored.start)
            return tensor, raw
        filled = 0
        for start, size_bytes in byte_ranges_of(part, stored.shape, stored.dtype.itemsize):
            self._file.read_into(raw[filled : filled + size_bytes], stored.start + start)
            filled += size_bytes
        return tensor, raw

    def _chunks(self, stored: StoredTensor) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes of a tensor, and where in it they start."""
        for start in range(0, stored.size_bytes, _CHUNK_BYTES):
            size_bytes = min(_CHUNK_BYTES, stored.size_bytes - start)
            yield start, self._file.read(stored.start + start, size_bytes)


def _visit(visit: Visitor, stored: StoredTensor, start: int, chunk: bytes) -> None:
    """Pass a chunk's values; a chunk has whole ones, because its size is a power of two."""
    values = torch.frombuffer(bytearray(chunk), dtype=stored.dtype)
    visit(values, start // stored.dtype.itemsize)
