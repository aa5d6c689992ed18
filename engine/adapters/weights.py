"""The tensors of an adapter's weights files, of any format, or of a program.

A safetensors file is read in one pass into memory, the fingerprint and the value ranges: each
tensor is digested and measured while it is in the processor's cache. No byte is read twice. The
fingerprint covers every byte, also of tensors that are not wanted; without one only the wanted
parts are read.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

import torch
import xxhash

from loradock.engine.adapters.directory import SAFETENSORS_SUFFIX, STREAMED_NAME, OpenFile
from loradock.engine.adapters.other_formats import load_pickled, load_streamed
from loradock.engine.adapters.problems import shown
from loradock.engine.adapters.safetensors_header import (
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    parse_header,
)
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterUnsound
from loradock.engine.memory import allocate_host
from loradock.engine.submatrix import WHOLE_TENSOR, Submatrix, byte_ranges_of

_PREFIX: Final = b"loradock adapter 1\0"
_CHUNK_BYTES: Final = 1 << 20


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


Wanted = Mapping[str, Submatrix]
"""The tensors to read, by name, with the part of each."""

Inspector = Callable[[torch.Tensor], bool]
"""Receives a tensor whole, on the CPU, and returns whether it is wanted too."""

Inspectors = Mapping[str, Inspector]
"""The inspectors of tensors that are not among the wanted, by name."""


class AskedTensor(NamedTuple):
    """The part of a tensor that is wanted, or None, and its inspector, or None."""

    part: Submatrix | None
    inspector: Inspector | None


@dataclass(frozen=True)
class TensorQuery:
    """The parts of tensors to read, and the inspectors of others.

    With the adapter's `config` the fingerprint is computed, so every byte is read. Value ranges are
    those of whole tensors then, else of the parts; they are left out unless `measures`.
    """

    wanted: Wanted
    inspectors: Inspectors = field(default_factory=dict)
    config: bytes | None = None
    measures: bool = True

    def of(self, name: str) -> AskedTensor | None:
        """Return what is asked of a tensor; None if it is neither wanted nor inspected."""
        asked = AskedTensor(self.wanted.get(name), self.inspectors.get(name))
        return None if asked == (None, None) else asked

    def reads_whole(self, asked: AskedTensor) -> bool:
        """Return whether all of a tensor is read, and not only its wanted part."""
        return self.config is not None or asked.part is None

    def within(self, tensors: Tensors) -> "TensorQuery":
        """Return the query for some of the tensors."""
        wanted = {name: part for name, part in self.wanted.items() if name in tensors}
        inspectors = {name: one for name, one in self.inspectors.items() if name in tensors}
        return replace(self, wanted=wanted, inspectors=inspectors)

    def start_fingerprint(self, file_bytes: int) -> xxhash.xxh3_128 | None:
        """Return the digest of a file's fingerprint up to its bytes; None if none is computed.

        A fingerprint is xxh3 of 128 bits, in hex, over a fixed prefix, the lengths of config and
        weights file (8 bytes each, little-endian), and the bytes of both. It distinguishes
        versions; it is not secure against deliberate collisions.
        """
        if self.config is None:
            return None
        digest = xxhash.xxh3_128(_PREFIX)
        for length in (len(self.config), file_bytes):
            digest.update(length.to_bytes(8, "little"))
        digest.update(self.config)
        return digest


class ReadTensors(NamedTuple):
    """The parts of tensors that were read, and value ranges, by name; and the fingerprint."""

    tensors: dict[str, torch.Tensor]
    ranges: dict[str, ValueRange]
    fingerprint: str = ""


class WeightsFile(Protocol):
    """An adapter's weights file, of any format."""

    @property
    def tensors(self) -> Mapping[str, HasShape]:
        """All tensors of the file, by name."""
        ...

    def read(self, query: TensorQuery) -> ReadTensors:
        """Return what the query asks for; inspected tensors only if they turn out to be wanted."""
        ...


def open_weights(files: Sequence[OpenFile], bounds: AdapterBounds) -> WeightsFile:
    """Return the reader for weights files, by their names; raises what the readers raise."""
    size_bytes = sum(file.size_bytes for file in files)
    if size_bytes > bounds.weights_bytes_max:
        name = files[0].name if len(files) == 1 else "the shards together"
        raise AdapterUnsound(
            f"{name}: {size_bytes} bytes; at most {bounds.weights_bytes_max} are read"
        )
    readers: list[WeightsFile] = []
    for file in files:
        readers.append(_open_file(file, bounds))
        left = bounds.tensors_max - len(readers[-1].tensors)
        bounds = replace(bounds, tensors_max=max(1, left))
    return readers[0] if len(readers) == 1 else ShardedFile(readers, [file.name for file in files])


def _open_file(file: OpenFile, bounds: AdapterBounds) -> WeightsFile:
    if file.name.endswith(SAFETENSORS_SUFFIX):
        return SafetensorsFile(file, bounds)
    load = load_streamed if file.name == STREAMED_NAME else load_pickled
    raw = file.read(0, file.size_bytes)
    return WholeFile(load(file.name, raw, bounds), raw)


class SafetensorsFile:
    """A safetensors file, whose header is read at once and whose tensors are read later.

    Raises `AdapterUnsound` for a file that exceeds a bound or contradicts the format.
    """

    def __init__(self, file: OpenFile, bounds: AdapterBounds) -> None:
        self._file = file
        prefix = file.read(0, min(LENGTH_BYTES, file.size_bytes))
        header = file.read(LENGTH_BYTES, header_length(prefix, file.size_bytes, bounds))
        self._start = prefix + header
        self._stored = parse_header(header, file.size_bytes, bounds)
        self.tensors = {tensor.name: tensor for tensor in self._stored}

    def read(self, query: TensorQuery) -> ReadTensors:
        """Read tensor after tensor; see `WeightsFile`."""
        found = ReadTensors({}, {})
        digest = query.start_fingerprint(self._file.size_bytes)
        if digest is not None:
            digest.update(self._start)
        for stored in self._stored:
            asked = query.of(stored.name)
            if asked is not None:
                is_whole = query.reads_whole(asked)
                tensor, raw = self._read_part(stored, None if is_whole else asked.part)
                if digest is not None:
                    digest.update(raw)
                _add(found, stored.name, tensor, asked, query)
            elif digest is not None:
                for chunk in self._chunks(stored):
                    digest.update(chunk)
        return found if digest is None else found._replace(fingerprint=digest.hexdigest())

    def _read_part(
        self, stored: StoredTensor, part: Submatrix | None
    ) -> tuple[torch.Tensor, memoryview]:
        """Read a part of a tensor, None for all of it; return it, and its bytes."""
        part = part or WHOLE_TENSOR
        tensor = allocate_host(part.shape_in(stored.shape), stored.dtype)
        raw: memoryview = tensor.view(torch.uint8).numpy().data.cast("B")
        if part == WHOLE_TENSOR:
            self._file.read_into(raw, stored.start)
            return tensor, raw
        filled = 0
        for start, size_bytes in byte_ranges_of(part, stored.shape, stored.dtype.itemsize):
            self._file.read_into(raw[filled : filled + size_bytes], stored.start + start)
            filled += size_bytes
        return tensor, raw

    def _chunks(self, stored: StoredTensor) -> Iterator[bytes]:
        """Yield the bytes of a tensor."""
        for start in range(0, stored.size_bytes, _CHUNK_BYTES):
            size_bytes = min(_CHUNK_BYTES, stored.size_bytes - start)
            yield self._file.read(stored.start + start, size_bytes)


class WholeFile:
    """A weights file of a format that is read whole: its tensors, and its bytes `raw`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], raw: bytes) -> None:
        self.tensors = tensors
        self._raw = raw

    def read(self, query: TensorQuery) -> ReadTensors:
        """Copy parts of the tensors, because several may share memory; see `WeightsFile`."""
        found = ReadTensors({}, {})
        for name, tensor in self.tensors.items():
            asked = query.of(name)
            if asked is not None:
                is_whole = query.reads_whole(asked)
                selected = tensor if is_whole or asked.part is None else asked.part.select(tensor)
                copied = selected.clone(memory_format=torch.contiguous_format)
                _add(found, name, copied, asked, query)
        digest = query.start_fingerprint(len(self._raw))
        if digest is None:
            return found
        digest.update(self._raw)
        return found._replace(fingerprint=digest.hexdigest())


def _add(
    found: ReadTensors, name: str, tensor: torch.Tensor, asked: AskedTensor, query: TensorQuery
) -> None:
    """Add the wanted part of a tensor, which has been read whole or as that part."""
    part, inspector = asked
    if inspector is not None and not inspector(tensor) and part is None:
        return
    if query.measures:
        found.ranges[name] = value_range(tensor)
    if part is not None and part != WHOLE_TENSOR and query.reads_whole(asked):
        # A copy, so that the memory of the whole tensor is freed.
        tensor = part.select(tensor).clone()
    found.tensors[name] = tensor


class ShardedFile:
    """Weights files that are read as a single file; `names` are theirs, for error texts.

    Each tensor is in one shard. The fingerprint is that of all shards' fingerprints, in the order
    of their names. Raises `AdapterUnsound` for a tensor that is in two shards.
    """

    def __init__(self, shards: Sequence[WeightsFile], names: Sequence[str]) -> None:
        self._shards: Final = tuple(shards)
        tensors: dict[str, HasShape] = {}
        for shard, name in zip(shards, names, strict=True):
            twice = next((one for one in shard.tensors if one in tensors), None)
            if twice is not None:
                raise AdapterUnsound(f"{shown(twice)} is in {name} and in another shard")
            tensors |= shard.tensors
        self.tensors: Mapping[str, HasShape] = tensors

    def read(self, query: TensorQuery) -> ReadTensors:
        """Read shard after shard; see `WeightsFile`."""
        found, fingerprints = ReadTensors({}, {}), ""
        for shard in self._shards:
            read = shard.read(query.within(shard.tensors))
            found.tensors.update(read.tensors)
            found.ranges.update(read.ranges)
            fingerprints += read.fingerprint
        if query.config is None:
            return found
        return found._replace(fingerprint=xxhash.xxh3_128_hexdigest(fingerprints.encode()))


def read_in_memory(
    tensors: Mapping[str, torch.Tensor], wanted: Collection[str], inspectors: Inspectors
) -> ReadTensors:
    """Return a program's tensors as those of a file, with ranges; they are never copied."""
    found = ReadTensors({}, {})
    for name, tensor in tensors.items():
        inspector = inspectors.get(name)
        if name in wanted or (inspector is not None and inspector(tensor.detach().cpu())):
            found.tensors[name], found.ranges[name] = tensor, value_range(tensor)
    return found
