"""Weights that were saved with tensorizer, where its package is installed.

What it is: the one place that uses that package, over a file that we opened. What it is not: a
reader from networks, which the package could be too. One rule: what the file claims to hold is
bounded by its own size before any tensor is read.
"""

import torch

from engine.adapters.files.directory import OpenFile
from engine.adapters.files.whole_file import buffered, check_size, plain_tensors
from engine.config import AdapterBounds
from engine.errors import AdapterNotFound, AdapterUnsound, EngineError


def load_streamed(file: OpenFile, bounds: AdapterBounds) -> dict[str, torch.Tensor]:
    """The tensors of a `.tensors` file.

    Raises `AdapterNotFound` where the package is not there, and `AdapterUnsound` for a file that
    passes a bound, or holds anything but plain tensors.
    """
    check_size(file, bounds)
    try:
        # An extra, and one that takes long to import: only who has such a file waits for it.
        from tensorizer import TensorDeserializer  # noqa: PLC0415
    except ImportError:
        raise AdapterNotFound(
            f"there is {file.name}, which needs a package: install loradock[tensorizer], or save "
            "the adapter as safetensors"
        ) from None
    try:
        with TensorDeserializer(
            buffered(file), device="cpu", lazy_load=True, num_readers=1
        ) as content:
            _check_claims(file, len(content.keys()), content.total_tensor_bytes, bounds)
            tensors = dict(content.items())
    except EngineError:
        raise
    # A damaged file makes the package raise nearly any kind; claims of endless headers end in
    # MemoryError, before anything was allocated for them.
    except Exception as error:
        raise AdapterUnsound(f"{file.name} can't be read: {str(error)[:200]!a}") from None
    return plain_tensors(tensors, file, bounds)


def _check_claims(file: OpenFile, count: int, total_bytes: int, bounds: AdapterBounds) -> None:
    if count > bounds.tensors_max:
        raise AdapterUnsound(
            f"{file.name} names {count} tensors; at most {bounds.tensors_max} are read"
        )
    if total_bytes > file.size_bytes:
        raise AdapterUnsound(
            f"{file.name} has {file.size_bytes} bytes, its tensors {total_bytes}; it is damaged"
        )
