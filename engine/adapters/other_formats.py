"""Weights files of formats that are read whole: of `torch.save`, and of tensorizer.

Only plain tensors under printable ASCII names are accepted.

Only this module calls `torch.load`, if an operator allows it, which may then build nothing but
tensors. The format: a zip archive of one pickle, which names the tensors, and one entry per
storage. Its declared sizes are checked before anything is unpickled. Compressed entries and the
format of before 2020, which is not an archive, are refused, because their unpacked size has no
bound. An archive whose end differs from that of `torch.save` is refused too: zip readers differ in
the directory that they would use, so the checked content might not be the loaded one.

The package tensorizer, if it is installed, reads bytes in memory, never from a network. The sizes
that a stream declares are checked against its own size before any tensor is read.
"""

import struct
import zipfile
from collections.abc import Mapping
from io import BytesIO
from typing import Final

import torch

from loradock.engine.adapters.problems import shown
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterNotFound, AdapterUnsound, EngineError

_OTHER_ENTRIES_MAX: Final = 16
"""Largest number of entries other than storages."""

_END: Final = struct.Struct("<4s36xQQ4s4xQ4x4s16xH")
"""The end of an archive: signature, directory size and start; signature, offset of the first of
these; signature, comment length."""


def load_pickled(name: str, raw: bytes, bounds: AdapterBounds) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.bin` or `.pt` file with this name and these bytes.

    Raises `AdapterUnsound` for a file that exceeds a bound or contains anything but plain tensors.
    """
    _check_archive(name, raw, bounds)
    try:
        content = torch.load(BytesIO(raw), map_location="cpu", weights_only=True)
    except (MemoryError, EngineError):
        raise
    # A file can make the unpickler raise any exception, one of them without an importable name.
    except Exception as error:
        raise AdapterUnsound(
            f"{name} contains more than tensors, or is damaged: {str(error)[:200]!a}"
        ) from None
    if not isinstance(content, Mapping):
        raise AdapterUnsound(f"{name} must contain a dict of tensors, got {type(content).__name__}")
    return _plain_tensors(content, name, bounds)


def _check_archive(name: str, raw: bytes, bounds: AdapterBounds) -> None:
    try:
        with zipfile.ZipFile(BytesIO(raw)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise AdapterUnsound(
            f"{name} is not an archive of torch.save ({error}); save the adapter as safetensors"
        ) from None
    if len(entries) > bounds.tensors_max + _OTHER_ENTRIES_MAX:
        raise AdapterUnsound(
            f"{name} has {len(entries)} entries; at most {bounds.tensors_max} tensors are read"
        )
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise AdapterUnsound(
                f"{name} has {shown(entry.filename)} compressed; save it uncompressed"
            )
        if entry.filename.endswith(".pkl") and entry.file_size > bounds.header_bytes_max:
            raise AdapterUnsound(
                f"{name} has a pickle of {entry.file_size} bytes; at most "
                f"{bounds.header_bytes_max} are read"
            )
    total = sum(entry.file_size for entry in entries)
    if total > len(raw):
        raise AdapterUnsound(f"{name} has {len(raw)} bytes, its entries {total}; they overlap")
    _check_end(name, raw)


def _check_end(name: str, raw: bytes) -> None:
    """Raise `AdapterUnsound` unless every zip reader finds the same directory."""
    start = max(0, len(raw) - _END.size)
    end = _END.unpack(raw[start:].rjust(_END.size))
    first, directory_bytes, directory_start, second, first_start, third, comment = end
    if (
        (first, second, third) != (b"PK\6\6", b"PK\6\7", b"PK\5\6")
        or directory_start + directory_bytes != start
        or (first_start, comment) != (start, 0)
    ):
        raise AdapterUnsound(
            f"{name} does not end like an archive of torch.save; save the adapter again, "
            "preferably as safetensors"
        )


def load_streamed(name: str, raw: bytes, bounds: AdapterBounds) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.tensors` file with this name and these bytes.

    Raises `AdapterNotFound` if tensorizer is not installed, and `AdapterUnsound` for a file that
    exceeds a bound or contains anything but plain tensors.
    """
    try:
        # An optional package that is slow to import, so only such a file imports it.
        from tensorizer import TensorDeserializer  # noqa: PLC0415
    except ImportError:
        raise AdapterNotFound(
            f"{name} needs a package that is not installed: install loradock[tensorizer], or save "
            "the adapter as safetensors"
        ) from None
    try:
        with TensorDeserializer(
            BytesIO(raw), device="cpu", lazy_load=True, num_readers=1
        ) as content:
            _check_declared_sizes(
                name, len(raw), len(content.keys()), content.total_tensor_bytes, bounds
            )
            tensors = dict(content.items())
    except EngineError:
        raise
    # A damaged file makes the package raise nearly any exception. Headers that declare a huge size
    # end in MemoryError, before anything is allocated.
    except Exception as error:
        raise AdapterUnsound(f"{name} can't be read: {str(error)[:200]!a}") from None
    return _plain_tensors(tensors, name, bounds)


def _check_declared_sizes(
    name: str, size_bytes: int, count: int, total_bytes: int, bounds: AdapterBounds
) -> None:
    if count > bounds.tensors_max:
        raise AdapterUnsound(f"{name} has {count} tensors; at most {bounds.tensors_max} are read")
    if total_bytes > size_bytes:
        raise AdapterUnsound(
            f"{name} is cut off or damaged ({total_bytes} bytes declared, {size_bytes} there): "
            "copy it again"
        )


def _plain_tensors(
    content: Mapping[object, object], file: str, bounds: AdapterBounds
) -> dict[str, torch.Tensor]:
    """Return a library's tensors by name; raises `AdapterUnsound` for any other content."""
    return {_name(name, file, bounds): _tensor(name, tensor) for name, tensor in content.items()}


def _name(name: object, file: str, bounds: AdapterBounds) -> str:
    is_name = isinstance(name, str) and name.isascii() and name.isprintable()
    if not is_name or len(str(name)) > bounds.name_characters_max:
        raise AdapterUnsound(
            f"{file} has a tensor named {shown(name)}; printable ASCII, at most "
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
            f"{shown(name)} must be a dense CPU tensor with values, got {type(tensor).__name__}"
        )
    return tensor.detach()
