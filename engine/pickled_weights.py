"""Weights that were saved with `torch.save`, where somebody allowed them.

What it is: the one place that calls `torch.load`, with tensors as the only thing that it may build.
What it is not: a reader by slices; the format has none, so a part is cut from what was read. One
rule: the archive's own sizes are bounded before anything of it is unpickled, and what comes out is
plain tensors by name, or nothing.

The format: a zip archive of one pickle, which names tensors, and one entry a storage. Entries that
are compressed, and the format of before 2020, which is no archive, are refused: what they unpack to
could not be bounded.
"""

import io
import zipfile
from collections.abc import Mapping
from typing import Final

import torch

from engine.adapter_files import PICKLED_NAMES, OpenFile
from engine.config import AdapterBounds
from engine.errors import AdapterUnsound, EngineError
from engine.parts import Part
from engine.problems import shown
from engine.values import value_range
from engine.weights_reader import ReadTensors, Wanted, Weights, WeightsReader, start_fingerprint

_CHUNK_BYTES: Final = 1 << 20
_OTHER_ENTRIES_MAX: Final = 16
"""How many entries an archive has beside its storages."""


def open_weights(file: OpenFile, bounds: AdapterBounds) -> Weights:
    """The reader of a weights file, by its name; raises what the reader raises."""
    return (PickledWeights if file.name in PICKLED_NAMES else WeightsReader)(file, bounds)


class PickledWeights:
    """A `.bin` or `.pt` file; all of its tensors are in memory once it is made.

    Raises `AdapterUnsound` for a file that passes a bound, or holds anything but plain tensors.
    """

    def __init__(self, file: OpenFile, bounds: AdapterBounds) -> None:
        if file.size_bytes > bounds.weights_bytes_max:
            raise AdapterUnsound(
                f"{file.name} has {file.size_bytes} bytes; at most {bounds.weights_bytes_max} are "
                "read"
            )
        self._file = file
        _check_archive(file, bounds)
        self.tensors = _load(file, bounds)

    def read(self, wanted: Wanted) -> ReadTensors:
        """The parts that are wanted, and their ranges."""
        found = ReadTensors({}, {})
        for name, part in wanted.items():
            tensor = _cut(self.tensors[name], part)
            found.tensors[name], found.ranges[name] = tensor, value_range(tensor)
        return found

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


def _check_archive(file: OpenFile, bounds: AdapterBounds) -> None:
    try:
        with zipfile.ZipFile(_buffered(file)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeDecodeError) as error:
        raise AdapterUnsound(
            f"{file.name} is no archive of torch.save's ({error}); save the adapter as safetensors"
        ) from None
    if len(entries) > bounds.tensors_max + _OTHER_ENTRIES_MAX:
        raise AdapterUnsound(
            f"{file.name} has {len(entries)} entries; at most {bounds.tensors_max} tensors are read"
        )
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise AdapterUnsound(f"{file.name} has {shown(entry.filename)} compressed; save plain")
        is_pickle = entry.filename.endswith(".pkl")
        if is_pickle and entry.file_size > bounds.header_bytes_max:
            raise AdapterUnsound(
                f"{file.name} has a pickle of {entry.file_size} bytes; at most "
                f"{bounds.header_bytes_max} are read"
            )
    total = sum(entry.file_size for entry in entries)
    if total > file.size_bytes:
        raise AdapterUnsound(
            f"{file.name} has {file.size_bytes} bytes, its entries {total}; they overlap"
        )


def _load(file: OpenFile, bounds: AdapterBounds) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(_buffered(file), map_location="cpu", weights_only=True)
    except (MemoryError, EngineError):
        raise
    # A file can make the unpickler raise any kind, one of which has no name that may be imported.
    except Exception as error:
        raise AdapterUnsound(
            f"{file.name} holds more than tensors, or is damaged: {str(error)[:200]!a}"
        ) from None
    if not isinstance(content, Mapping):
        raise AdapterUnsound(f"{file.name} holds a {type(content).__name__}; tensors by name only")
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
    whole = part == Part()
    return (tensor if whole else part.cut(tensor)).clone(memory_format=torch.contiguous_format)


def _buffered(file: OpenFile) -> io.BufferedReader:
    return io.BufferedReader(_View(file))
