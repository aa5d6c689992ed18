"""The weights files of an adapter, found by name in its open directory.

`adapter_model.safetensors` is preferred, then its shards (listed in an index file, or numbered), a
tensorizer stream, any other single safetensors file, and last a pickled file.
"""

import os
import re
from collections.abc import Sequence
from itertools import islice
from typing import Final

from loradock.engine.adapters.files.bounded_json import decode_object
from loradock.engine.adapters.files.missing_files import (
    WEIGHTS_NAME,
    WHOLE_MODEL,
    is_present,
    weights_are_missing,
)
from loradock.engine.adapters.files.problems import shown
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterNotFound, AdapterUnsound

STREAMED_NAME: Final = "adapter_model.tensors"
PICKLED_NAMES: Final = ("adapter_model.bin", "adapter_model.pt")
INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFETENSORS_SUFFIX: Final = ".safetensors"

_SHARD: Final = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors\Z")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors\Z")
_SHARDS_MAX: Final = 256
_ENTRIES_MAX: Final = 1000


def weights_names(path: str, directory: int, allow_pickled: bool) -> list[str]:
    """Return the names of the weights files, several for shards; raises `AdapterNotFound`.

    `[INDEX_NAME]` stands for the shards that the index file lists, which has to be read for them.
    """
    if is_present(WEIGHTS_NAME, directory):
        return [WEIGHTS_NAME]
    if is_present(INDEX_NAME, directory):
        return [INDEX_NAME]
    names = _safetensors_names(directory)
    shards = [name for name in names if _SHARD.match(name)]
    if shards:
        return _checked_shards(path, shards)
    if is_present(STREAMED_NAME, directory):
        return [STREAMED_NAME]
    if len(names) > 1:
        raise AdapterNotFound(
            f"{shown(path)} has {len(names)} safetensors files, "
            f"{', '.join(map(shown, names[:4]))}, and none is named {WEIGHTS_NAME}; rename the "
            "adapter's"
        )
    pickled = [name for name in PICKLED_NAMES if not names and is_present(name, directory)]
    if pickled and not allow_pickled:
        raise AdapterNotFound(
            f"{shown(path)} has {pickled[0]} but no {WEIGHTS_NAME}; pickled weights are not read: "
            "save the adapter as safetensors, or allow them (--allow-pickled-weights of the "
            "engine, allow_pickled=True in a program)"
        )
    if not names and not pickled:
        raise AdapterNotFound(weights_are_missing(path))
    return (names or pickled)[:1]


def names_in_index(raw: bytes, bounds: AdapterBounds) -> list[str]:
    """Return the shards that an index file lists; raises `AdapterUnsound`."""
    try:
        index = decode_object(raw, 4 * bounds.tensors_max, bounds.json_depth_max)
    except ValueError as error:
        raise AdapterUnsound(f"{INDEX_NAME} is malformed: {error}") from None
    shards = index.get("weight_map")
    names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
    if not 0 < len(names) <= _SHARDS_MAX or not all(map(_FILE_NAME.match, names)):
        raise AdapterUnsound(
            f"{INDEX_NAME} lists the files {shown(names)}; 1 to {_SHARDS_MAX} names of safetensors "
            "files in the same directory are needed"
        )
    return names


def _safetensors_names(directory: int) -> list[str]:
    """Return the safetensors files that may be an adapter's, among the first entries, sorted."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in islice(entries, _ENTRIES_MAX)]
    return sorted(name for name in names if _FILE_NAME.match(name) and name not in WHOLE_MODEL)


def _checked_shards(path: str, shards: Sequence[str]) -> list[str]:
    """Return numbered shards in order; raises `AdapterNotFound` unless there is each of one set."""
    numbers = [match.groups() for name in shards if (match := _SHARD.match(name))]
    totals = {total for _, total in numbers}
    expected = int(min(totals))
    found = sorted(int(number) for number, _ in numbers)
    if len(totals) > 1 or found != list(range(1, expected + 1)) or expected > _SHARDS_MAX:
        raise AdapterNotFound(
            f"{shown(path)} has the shards {', '.join(sorted(shards)[:4])}; all of one set, from 1 "
            f"to {expected}, are needed: copy the missing ones"
        )
    return sorted(shards)
