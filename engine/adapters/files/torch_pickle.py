"""Weights that were saved with `torch.save`, if they are allowed.

Only this module calls `torch.load`, which may then build nothing but tensors. The archive's
declared sizes are checked before anything is unpickled.

The format: a zip archive of one pickle, which names the tensors, and one entry per storage.
Compressed entries and the format of before 2020, which is not an archive, are refused, because
their unpacked size has no bound. An archive whose end differs from that of `torch.save` is refused
too: zip readers differ in the directory that they would use, so the checked content might not be
the loaded one.
"""

import struct
import zipfile
from collections.abc import Mapping
from typing import Final

import torch

from loradock.engine.adapters.files.directory import OpenFile
from loradock.engine.adapters.files.problems import shown
from loradock.engine.adapters.files.whole_file import buffered, check_size, plain_tensors
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterUnsound, EngineError

_OTHER_ENTRIES_MAX: Final = 16
"""Largest number of entries other than storages."""

_END: Final = struct.Struct("<4s36xQQ4s4xQ4x4s16xH")
"""The end of an archive: signature, directory size and start; signature, offset of the first of
these; signature, comment length."""


def load_pickled(file: OpenFile, bounds: AdapterBounds) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.bin` or `.pt` file.

    Raises `AdapterUnsound` for a file that exceeds a bound or contains anything but plain tensors.
    """
    check_size(file, bounds)
    _check_archive(file, bounds)
    try:
        content = torch.load(buffered(file), map_location="cpu", weights_only=True)
    except (MemoryError, EngineError):
        raise
    # A file can make the unpickler raise any exception, one of them without an importable name.
    except Exception as error:
        raise AdapterUnsound(
            f"{file.name} contains more than tensors, or is damaged: {str(error)[:200]!a}"
        ) from None
    if not isinstance(content, Mapping):
        raise AdapterUnsound(
            f"{file.name} contains a {type(content).__name__}; a dict of tensors is needed"
        )
    return plain_tensors(content, file, bounds)


def _check_archive(file: OpenFile, bounds: AdapterBounds) -> None:
    try:
        with zipfile.ZipFile(buffered(file)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise AdapterUnsound(
            f"{file.name} is not an archive of torch.save ({error}); save the adapter as "
            "safetensors"
        ) from None
    if len(entries) > bounds.tensors_max + _OTHER_ENTRIES_MAX:
        raise AdapterUnsound(
            f"{file.name} has {len(entries)} entries; at most {bounds.tensors_max} tensors are read"
        )
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise AdapterUnsound(
                f"{file.name} has {shown(entry.filename)} compressed; save it uncompressed"
            )
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
    _check_end(file)


def _check_end(file: OpenFile) -> None:
    """Raise `AdapterUnsound` unless every zip reader finds the same directory."""
    start = max(0, file.size_bytes - _END.size)
    end = _END.unpack(file.read(start, file.size_bytes - start).rjust(_END.size))
    first, directory_bytes, directory_start, second, first_start, third, comment = end
    if (
        (first, second, third) != (b"PK\6\6", b"PK\6\7", b"PK\5\6")
        or directory_start + directory_bytes != start
        or (first_start, comment) != (start, 0)
    ):
        raise AdapterUnsound(
            f"{file.name} does not end like an archive of torch.save; save the adapter again, "
            "preferably as safetensors"
        )
