"""The formats of weights files, by file name, with their readers.

The first file that is present is used. A pickled file is read only where it is allowed.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from engine.adapters.files.directory import PICKLED_NAMES, STREAMED_NAME, OpenFile
from engine.adapters.files.missing_files import WEIGHTS_NAME
from engine.adapters.files.safetensors_reader import SafetensorsFile
from engine.adapters.files.tensorizer_stream import load_streamed
from engine.adapters.files.torch_pickle import load_pickled
from engine.adapters.files.weights_file import WeightsFile
from engine.adapters.files.whole_file import WholeFile
from engine.config import AdapterBounds


def _pickled(file: OpenFile, bounds: AdapterBounds) -> WeightsFile:
    return WholeFile(file, load_pickled(file, bounds))


def _streamed(file: OpenFile, bounds: AdapterBounds) -> WeightsFile:
    return WholeFile(file, load_streamed(file, bounds))


class WeightsFormat(NamedTuple):
    """A file name and its reader."""

    name: str
    open: Callable[[OpenFile, AdapterBounds], WeightsFile]


WEIGHTS_FORMATS: Final = (
    WeightsFormat(WEIGHTS_NAME, SafetensorsFile),
    WeightsFormat(STREAMED_NAME, _streamed),
    *(WeightsFormat(name, _pickled) for name in PICKLED_NAMES),
)
"""Formats in order of preference."""


def open_weights(file: OpenFile, bounds: AdapterBounds) -> WeightsFile:
    """Return the reader for a weights file, by its name; raises what the reader raises."""
    return next(one for one in WEIGHTS_FORMATS if one.name == file.name).open(file, bounds)
