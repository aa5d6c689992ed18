"""The formats of weights files, by the end of the file's name, with their readers."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from loradock.engine.adapters.files.directory import OpenFile
from loradock.engine.adapters.files.safetensors_reader import SafetensorsFile
from loradock.engine.adapters.files.sharded_file import ShardedFile
from loradock.engine.adapters.files.tensorizer_stream import load_streamed
from loradock.engine.adapters.files.torch_pickle import load_pickled
from loradock.engine.adapters.files.weights_file import WeightsFile
from loradock.engine.adapters.files.weights_names import (
    PICKLED_NAMES,
    SAFETENSORS_SUFFIX,
    STREAMED_NAME,
)
from loradock.engine.adapters.files.whole_file import WholeFile
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterUnsound


def _pickled(file: OpenFile, bounds: AdapterBounds) -> WeightsFile:
    return WholeFile(file, load_pickled(file, bounds))


def _streamed(file: OpenFile, bounds: AdapterBounds) -> WeightsFile:
    return WholeFile(file, load_streamed(file, bounds))


class WeightsFormat(NamedTuple):
    """The end of a file's name and its reader."""

    suffix: str
    open: Callable[[OpenFile, AdapterBounds], WeightsFile]


WEIGHTS_FORMATS: Final = (
    WeightsFormat(SAFETENSORS_SUFFIX, SafetensorsFile),
    WeightsFormat(STREAMED_NAME, _streamed),
    *(WeightsFormat(name, _pickled) for name in PICKLED_NAMES),
)
"""The formats, each with a suffix of its own."""


def open_weights(files: Sequence[OpenFile], bounds: AdapterBounds) -> WeightsFile:
    """Return the reader for weights files, by their names; raises what the readers raise."""
    size_bytes = sum(file.size_bytes for file in files)
    if len(files) > 1 and size_bytes > bounds.weights_bytes_max:
        raise AdapterUnsound(
            f"the shards have {size_bytes} bytes; at most {bounds.weights_bytes_max} are read"
        )
    readers = [_open_one(file, bounds) for file in files]
    return readers[0] if len(readers) == 1 else ShardedFile(readers, [file.name for file in files])


def _open_one(file: OpenFile, bounds: AdapterBounds) -> WeightsFile:
    by_suffix = (one for one in WEIGHTS_FORMATS if file.name.endswith(one.suffix))
    return next(by_suffix).open(file, bounds)
