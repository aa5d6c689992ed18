"""The header of a safetensors file: its tensors and their positions.

A parsed header guarantees that the tensors' bytes are in the file, that they follow each other
without gaps or overlaps, and that each tensor has the number of bytes that its shape needs.

The format: the header's length (8 bytes, little-endian); the header (JSON: name to dtype, shape and
[start, end), counted from the header's end); the bytes. Beyond the format's rules, repeated names,
empty tensors, and names that are long or not printable ASCII are refused. The library `safetensors`
is not used, because it maps the file: a mapped file that shrinks would end the process.
"""

import math
import re
from typing import Any, Final, NamedTuple

import torch

from loradock.engine.adapters.bounded_parsing import decode_object
from loradock.engine.adapters.problems import shown
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterUnsound

LENGTH_BYTES: Final = 8

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAME: Final = re.compile(r"[\x21-\x7e]+\Z")
_METADATA: Final = "__metadata__"
_LFS_POINTER: Final = b"version "
"""The first bytes of a text that Git LFS has in place of a large file."""
_LENGTH_MAX: Final = 1 << 48
_VALUES_PER_TENSOR: Final = 10
_METADATA_VALUES_MAX: Final = 1 << 16


class StoredTensor(NamedTuple):
    """One tensor of the file; `start` is its first byte, counted from the file's start."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size_bytes: int


def header_length(prefix: bytes, file_bytes: int, bounds: AdapterBounds) -> int:
    """Return the header's length from the file's first 8 bytes; raises `AdapterUnsound`."""
    length = int.from_bytes(prefix, "little")
    if prefix == _LFS_POINTER:
        raise AdapterUnsound(
            "the weights file is a pointer of Git LFS, without the weights: `git lfs pull` in the "
            "repository replaces it"
        )
    if len(prefix) < LENGTH_BYTES or length > file_bytes - LENGTH_BYTES:
        raise AdapterUnsound(
            f"the weights file is cut off ({length + LENGTH_BYTES} bytes declared for its header, "
            f"{file_bytes} there) or is not a safetensors file: copy or save it again"
        )
    if length > bounds.header_bytes_max:
        raise AdapterUnsound(
            f"the weights file's header has {length} bytes; at most {bounds.header_bytes_max} are "
            "read"
        )
    return length


def parse_header(header: bytes, file_bytes: int, bounds: AdapterBounds) -> list[StoredTensor]:
    """Return the file's tensors in the order of their bytes; raises `AdapterUnsound`."""
    try:
        if header[:1] != b"{":
            raise ValueError(f"it starts with {header[:1]!r}, not with {{")
        # Before it is decoded; a header that writes the word otherwise is bounded by its values.
        _check_count(header.count(b'"data_offsets"'), bounds)
        values_max = _VALUES_PER_TENSOR * bounds.tensors_max + _METADATA_VALUES_MAX
        entries = decode_object(header, values_max, bounds.json_depth_max)
        _check_metadata(entries.pop(_METADATA, {}))
        _check_count(len(entries), bounds)
        data_start = LENGTH_BYTES + len(header)
        tensors = [_tensor(name, entry, data_start, bounds) for name, entry in entries.items()]
        tensors.sort(key=lambda tensor: tensor.start)
        _check_contiguous(tensors, data_start, file_bytes)
    except AdapterUnsound:
        # A file that is cut off has a sound header.
        raise
    except ValueError as error:
        raise AdapterUnsound(f"the weights file's header is malformed: {error}") from None
    return tensors


def _check_count(tensors: int, bounds: AdapterBounds) -> None:
    if tensors > bounds.tensors_max:
        raise ValueError(
            f"it names {tensors} tensors; at most {bounds.tensors_max} are read for this model"
        )


def _tensor(name: str, entry: Any, data_start: int, bounds: AdapterBounds) -> StoredTensor:
    if len(name) > bounds.name_characters_max or not _NAME.match(name):
        raise ValueError(
            f"{shown(name)} is not a tensor name; printable ASCII without spaces, at most "
            f"{bounds.name_characters_max} characters"
        )
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} must have dtype, shape and data_offsets, got {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {shown(dtype)}; one of {', '.join(_DTYPES)}")
    if not _are_lengths(shape) or 0 in shape or len(shape) > 8:
        raise ValueError(f"{name} has shape {shown(shape)}; up to 8 lengths of at least 1")
    if not _are_lengths(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{name} must have data_offsets of a start and an end, got {shown(offsets)}"
        )
    start, end = offsets
    size_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - start != size_bytes:
        raise ValueError(
            f"{name} {shown(shape)} of {dtype} needs {size_bytes} bytes, its data_offsets "
            f"{shown(offsets)} cover another number"
        )
    return StoredTensor(name, _DTYPES[dtype], tuple(shape), data_start + start, size_bytes)


def _are_lengths(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _LENGTH_MAX for value in values
    )


def _check_contiguous(tensors: list[StoredTensor], data_start: int, file_bytes: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.start != end:
            raise ValueError(
                f"{tensor.name} starts at byte {tensor.start}, but the bytes before it end at "
                f"{end}; tensors must follow each other"
            )
        end += tensor.size_bytes
    if end > file_bytes:
        raise AdapterUnsound(
            f"the weights file is cut off ({end} bytes declared, {file_bytes} there): copy it again"
        )
    if end < file_bytes:
        raise ValueError(f"its tensors end at byte {end}, the file has {file_bytes}; save it again")


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError(
            f"{_METADATA} must be an object with strings as values, got {shown(metadata)}"
        )
