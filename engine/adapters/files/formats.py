"""Which file of an adapter holds its weights, and who reads it.

What it is: one table. What it is not: a reader. One rule: the first file that is there is the one,
and a format that has to be allowed is never read unasked.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from engine.adapters.files.directory import PICKLED_NAMES, STREAMED_NAME, WEIGHTS_NAME, OpenFile
from engine.adapters.files.safetensors_reader import WeightsReader
from engine.adapters.files.tensorizer_stream import load_streamed
from engine.adapters.files.torch_pickle import load_pickled
from engine.adapters.files.weights_file import Weights
from engine.adapters.files.whole_file import WholeWeights
from engine.config import AdapterBounds


def _pickled(file: OpenFile, bounds: AdapterBounds) -> Weights:
    return WholeWeights(file, load_pickled(file, bounds))


def _streamed(file: OpenFile, bounds: AdapterBounds) -> Weights:
    return WholeWeights(file, load_streamed(file, bounds))


class Format(NamedTuple):
    """A file's name, its reader, and what a reader of the documentation should know."""

    name: str
    open: Callable[[OpenFile, AdapterBounds], Weights]
    told: str


FORMATS: Final = (
    Format(WEIGHTS_NAME, WeightsReader, "read by slices, a rank its own"),
    Format(STREAMED_NAME, _streamed, "with the extra `loradock[tensorizer]`"),
    *(
        Format(name, _pickled, "with `--allow-pickled-weights`; tensors only")
        for name in PICKLED_NAMES
    ),
)
"""In order of preference."""


def open_weights(file: OpenFile, bounds: AdapterBounds) -> Weights:
    """The reader of a weights file, by its name; raises what the reader raises."""
    return next(one for one in FORMATS if one.name == file.name).open(file, bounds)
