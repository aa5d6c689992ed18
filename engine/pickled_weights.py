"""Weights that were saved with `torch.save`, where somebody allowed them.

What it is: the one place that calls `torch.load`, with tensors as the only thing that it may build.
What it is not: a reader by slices; the format has none. One rule: the archive's own sizes are
bounded before anything of it is unpickled.

The format: a zip archive of one pickle, which names tensors, and one entry a storage. Entries that
are compressed, and the format of before 2020, which is no archive, are refused: what they unpack to
could not be bounded.
"""

import zipfile
from collections.abc import Mapping
from typing import Final

import torch

from engine.adapter_files import OpenFile
from engine.config import AdapterBounds
from engine.errors import AdapterUnsound, EngineError
from engine.problems import shown
from engine.whole_weights import buffered, check_size, plain_tensors

_OTHER_ENTRIES_MAX: Final = 16
"""How many entries an archive has beside its storages."""


def load_pickled(file: OpenFile, bounds: AdapterBounds) -> dict[str, torch.Tensor]:
    """The tensors of a `.bin` or `.pt` file.

    Raises `AdapterUnsound` for a file that passes a bound, or holds anything but plain tensors.
    """
    check_size(file, bounds)
    _check_archive(file, bounds)
    try:
        content = torch.load(buffered(file), map_location="cpu", weights_only=True)
    except (MemoryError, EngineError):
        raise
    # A file can make the unpickler raise any kind, one of which has no name that may be imported.
    except Exception as error:
        raise AdapterUnsound(
            f"{file.name} holds more than tensors, or is damaged: {str(error)[:200]!a}"
        ) from None
    if not isinstance(content, Mapping):
        raise AdapterUnsound(f"{file.name} holds a {type(content).__name__}; tensors by name only")
    return plain_tensors(content, file, bounds)


def _check_archive(file: OpenFile, bounds: AdapterBounds) -> None:
    try:
        with zipfile.ZipFile(buffered(file)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
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
