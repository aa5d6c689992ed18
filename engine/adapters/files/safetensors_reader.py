"""The bytes of a weights file: into memory, into the fingerprint, and judged.

What it is: one pass over the file, a tensor at a time while it is in the processor's cache. What it
is not: a check of shapes; what is wanted was found to fit before. One rule: every byte of the file
is in the fingerprint, also those of tensors that nobody wants, and nothing is read that is neither
wanted nor fingerprinted.
"""

from typing import Final

import torch
import xxhash

from engine.adapters.files.directory import OpenFile
from engine.adapters.files.safetensors_header import (
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    parse_header,
)
from engine.adapters.files.weights_file import (
    ReadTensors,
    Wanted,
    start_fingerprint,
    value_range,
)
from engine.config import AdapterBounds
from engine.errors import AdapterUnsound
from engine.host_memory import allocate_host
from engine.submatrix import ALL, Part, runs_of

_CHUNK_BYTES: Final = 1 << 20


class WeightsReader:
    """A safetensors file: its header first, its tensors after they were found to fit.

    Raises `AdapterUnsound` for a file that passes a bound or contradicts the format.
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

    def read(self, wanted: Wanted) -> ReadTensors:
        """The parts that are wanted, and their ranges; no other byte is read.

        For a process that need not fingerprint, because another one does.
        """
        found = ReadTensors({}, {})
        for stored in self._stored:
            if stored.name in wanted:
                tensor, _ = self._read_part(stored, wanted[stored.name])
                found.tensors[stored.name] = tensor
                found.ranges[stored.name] = value_range(tensor)
        return found

    def read_all(self, wanted: Wanted, config: bytes) -> tuple[ReadTensors, str]:
        """The parts that are wanted, the ranges of the whole tensors, and the fingerprint."""
        digest = start_fingerprint(config, self._file.size_bytes)
        digest.update(self._head)
        found = ReadTensors({}, {})
        for stored in self._stored:
            part = wanted.get(stored.name)
            if part is None:
                self._pass_over(stored, digest)
            else:
                whole, raw = self._read_part(stored, ALL)
                digest.update(raw)
                found.ranges[stored.name] = value_range(whole)
                # A part gets memory of its own, so that the rest of the whole is given back.
                found.tensors[stored.name] = whole if part == ALL else part.cut(whole).clone()
        return found, digest.hexdigest()

    def _read_part(self, stored: StoredTensor, part: Part) -> tuple[torch.Tensor, memoryview]:
        """A part of a tensor, and its bytes."""
        tensor = allocate_host(part.shape_in(stored.shape), stored.dtype, pin=False)
        raw: memoryview = tensor.view(torch.uint8).numpy().data.cast("B")
        if part == ALL:
            self._file.read_into(raw, stored.start)
            return tensor, raw
        filled = 0
        for start, size_bytes in runs_of(part, stored.shape, stored.dtype.itemsize):
            self._file.read_into(raw[filled : filled + size_bytes], stored.start + start)
            filled += size_bytes
        return tensor, raw

    def _pass_over(self, stored: StoredTensor, digest: xxhash.xxh3_128) -> None:
        end = stored.start + stored.size_bytes
        for start in range(stored.start, end, _CHUNK_BYTES):
            digest.update(self._file.read(start, min(_CHUNK_BYTES, end - start)))
