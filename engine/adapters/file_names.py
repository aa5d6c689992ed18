"""The files of an adapter, found by name in its open directory.

`adapter_model.safetensors` is preferred, then its shards (listed in an index file, or numbered), a
tensorizer stream, any other single safetensors file, and last a pickled file. Error texts for what
is missing suggest only paths that exist.
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from loradock.engine.adapters.bounded_json import decode_object
from loradock.engine.adapters.problems import shown
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterNotFound, AdapterUnsound
from loradock.processes.safe_open import is_present

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
STREAMED_NAME: Final = "adapter_model.tensors"
PICKLED_NAMES: Final = ("adapter_model.bin", "adapter_model.pt")
INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFETENSORS_SUFFIX: Final = ".safetensors"

_SHARD: Final = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors\Z")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors\Z")
_SHARDS_MAX: Final = 256

WHOLE_MODEL: Final = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files of a whole model, which are no adapter's."""

_SNAPSHOTS: Final = "snapshots"
"""The directory of Hugging Face's cache that has a directory for each revision of a repository."""

_ENTRIES_MAX: Final = 1000
_SUGGESTIONS_MAX: Final = 3


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
        raise AdapterNotFound(
            f"{shown(path)} has {CONFIG_NAME} but no {WEIGHTS_NAME}; copy it, or save the adapter "
            "again"
        )
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
    """Return numbered shards in order; raises `AdapterNotFound` unless the set is complete."""
    numbers = [match.groups() for name in shards if (match := _SHARD.match(name))]
    totals = {total for _, total in numbers}
    expected = int(min(totals))
    found = sorted(int(number) for number, _ in numbers)
    if len(totals) > 1 or found != list(range(1, expected + 1)) or expected > _SHARDS_MAX:
        raise AdapterNotFound(
            f"{shown(path)} has the shards {', '.join(sorted(shards)[:4])}; all of one set, from 1 "
            f"to {expected}, are needed: copy those that are missing"
        )
    return sorted(shards)


def config_is_missing(path: str, directory: int) -> str:
    """Return the text for a directory, open as `directory`, that has no `CONFIG_NAME`."""
    weights = next((name for name in WHOLE_MODEL if is_present(name, directory)), None)
    if weights and is_present("config.json", directory):
        return (
            f"{shown(path)} has config.json and {weights}: a whole model, not an adapter; save the "
            "adapter before merge_and_unload(), or serve the directory with --model"
        )
    others = sorted(_subdirectories_with_config(directory), key=lambda name: (len(name), name))
    others = others or sorted(_snapshots_with_config(directory))
    if others:
        paths = " or ".join(
            shown(f"{path.rstrip('/')}/{name}") for name in others[-_SUGGESTIONS_MAX:]
        )
        has = (
            "a directory below it has one"
            if len(others) == 1
            else f"{len(others)} directories below it have one"
        )
        return f"{shown(path)} has no {CONFIG_NAME}, but {has}: use the path {paths}"
    if is_present(WEIGHTS_NAME, directory):
        return (
            f"{shown(path)} has {WEIGHTS_NAME} but no {CONFIG_NAME}; copy it too, or save the "
            "adapter again"
        )
    if not os.listdir(directory):
        return f"{shown(path)} is an empty directory; copy {CONFIG_NAME} and {WEIGHTS_NAME} into it"
    return f"{shown(path)} has no {CONFIG_NAME}; save the adapter with PEFT's save_pretrained()"


def _subdirectories_with_config(directory: int) -> Iterator[str]:
    """Yield the subdirectories, among the first `_ENTRIES_MAX` entries, that hold an adapter."""
    try:
        with os.scandir(directory) as entries:
            for entry in islice(entries, _ENTRIES_MAX):
                is_directory = entry.is_dir(follow_symlinks=False)
                if is_directory and is_present(f"{entry.name}/{CONFIG_NAME}", directory):
                    yield entry.name
    except OSError:
        return


def _snapshots_with_config(directory: int) -> Iterator[str]:
    """Yield the revisions that hold an adapter, if this is a repository in Hugging Face's cache."""
    try:
        snapshots = os.open(
            _SNAPSHOTS,
            os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
            dir_fd=directory,
        )
    except OSError:
        return
    try:
        yield from (f"{_SNAPSHOTS}/{name}" for name in _subdirectories_with_config(snapshots))
    finally:
        os.close(snapshots)
