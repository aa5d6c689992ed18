"""Weights that were saved with tensorizer, if its package is installed.

The package reads a file that is already open, never from a network. The sizes that the file
declares are checked against its own size before any tensor is read.
"""

import torch

from loradock.engine.adapters.files.directory import OpenFile
from loradock.engine.adapters.files.whole_file import buffered, check_size, plain_tensors
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterNotFound, AdapterUnsound, EngineError


def load_streamed(file: OpenFile, bounds: AdapterBounds) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.tensors` file.

    Raises `AdapterNotFound` if the package is not installed, and `AdapterUnsound` for a file that
    exceeds a bound or contains anything but plain tensors.
    """
    check_size(file, bounds)
    try:
        # An optional package that is slow to import, so only such a file imports it.
        from tensorizer import TensorDeserializer  # noqa: PLC0415
    except ImportError:
        raise AdapterNotFound(
            f"{file.name} needs a package that is not installed: install loradock[tensorizer], or "
            "save the adapter as safetensors"
        ) from None
    try:
        with TensorDeserializer(
            buffered(file), device="cpu", lazy_load=True, num_readers=1
        ) as content:
            _check_declared_sizes(file, len(content.keys()), content.total_tensor_bytes, bounds)
            tensors = dict(content.items())
    except EngineError:
        raise
    # A damaged file makes the package raise nearly any exception. Headers that declare a huge size
    # end in MemoryError, before anything is allocated.
    except Exception as error:
        raise AdapterUnsound(f"{file.name} can't be read: {str(error)[:200]!a}") from None
    return plain_tensors(tensors, file, bounds)


def _check_declared_sizes(
    file: OpenFile, count: int, total_bytes: int, bounds: AdapterBounds
) -> None:
    if count > bounds.tensors_max:
        raise AdapterUnsound(
            f"{file.name} has {count} tensors; at most {bounds.tensors_max} are read"
        )
    if total_bytes > file.size_bytes:
        raise AdapterUnsound(
            f"{file.name} is cut off or damaged ({total_bytes} bytes declared, "
            f"{file.size_bytes} there): copy it again"
        )
