"""The bytes of a weights file, each read once: into memory, into the fingerprint, and judged.

What it is: one pass over the file, a tensor at a time while it is in the processor's cache. What it
is not: a check of shapes; what is wanted was found to fit before. One rule: every byte of the file
is in the fingerprint, also those of tensors that nobody wants.
"""

from collections.abc import Collection
from typing import Final

import torch
import xxhash

from engine.adapter_files import OpenFile
from engine.config import AdapterBounds
from engine.errors import AdapterUnsound
from engine.host_memory import allocate_host
from engine.tensor_file import LENGTH_BYTES, StoredTensor, header_length, parse_header
from engine.values import ValueRange, value_range

_DOMAIN: Final = b"loradock adapter 1\0"
_CHUNK_BYTES: Final = 1 << 20


class WeightsReader:
    """One weights file: its header first, its tensors after they were found to fit.

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

    def read(
        self, wanted: Collection[str], config: bytes
    ) -> tuple[dict[str, torch.Tensor], dict[str, ValueRange], str]:
        """The tensors that are wanted, their ranges, and the adapter's fingerprint.

        The fingerprint is xxh3 of 128 bits, in hex, over a fixed word, the config's and the weights
        file's length (8 bytes each, little-endian), and both files' bytes. It tells versions apart;
        it is no proof against somebody who makes two files meet in it.
        """
        digest = xxhash.xxh3_128(_DOMAIN)
        for length in (len(config), self._file.size_bytes):
            digest.update(length.to_bytes(8, "little"))
        digest.update(config)
        digest.update(self._head)
        kept: dict[str, torch.Tensor] = {}
        ranges: dict[str, ValueRange] = {}
        for stored in self._stored:
            if stored.name in wanted:
                kept[stored.name] = self._keep(stored, digest)
                ranges[stored.name] = value_range(kept[stored.name])
            else:
                self._pass_over(stored, digest)
        return kept, ranges, digest.hexdigest()

    def _keep(self, stored: StoredTensor, digest: xxhash.xxh3_128) -> torch.Tensor:
        tensor = allocate_host(stored.shape, stored.dtype, pin=False)
        buffer = tensor.view(torch.uint8).numpy().data.cast("B")
        self._file.read_into(buffer, stored.start)
        digest.update(buffer)
        return tensor

    def _pass_over(self, stored: StoredTensor, digest: xxhash.xxh3_128) -> None:
        end = stored.start + stored.size_bytes
        for start in range(stored.start, end, _CHUNK_BYTES):
            digest.update(self._file.read(start, min(_CHUNK_BYTES, end - start)))
