"""Error texts for a directory or file that is missing; they suggest only paths that exist."""

import os
from collections.abc import Iterator
from itertools import islice
from typing import Final

from loradock.engine.adapters.files.problems import shown

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"

WHOLE_MODEL: Final = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files of a whole model, which are no adapter's."""

_SNAPSHOTS: Final = "snapshots"
"""The directory of Hugging Face's cache that has a directory for each revision of a repository."""

_ENTRIES_MAX: Final = 1000
_SUGGESTIONS_MAX: Final = 3


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


def weights_are_missing(path: str) -> str:
    """Return the text for a directory with a config but without weights."""
    return (
        f"{shown(path)} has {CONFIG_NAME} but no {WEIGHTS_NAME}; copy it, or save the adapter again"
    )


def is_present(name: str, directory: int) -> bool:
    """Whether an open directory has an entry of this name, of any type."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


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
