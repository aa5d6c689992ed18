"""An adapter's directory and its files, found by name and opened so that nobody can replace them.

`adapter_model.safetensors` is preferred, then its shards (listed in an index file, or numbered), a
tensorizer stream, any other single safetensors file, and last a pickled file. Error texts for what
is missing suggest only paths that exist.

A file that changes while it is read, a link that leads elsewhere after it, and a file with a second
name (a hard link) are errors. Files are read and never mapped: a mapped file that shrinks would end
the process.

A file that is being written in place may look unchanged between two blocks, and its time counts in
ticks of some milliseconds. So files are read only once the last change is `QUIET_S` ago: a writer
that pauses for less than that is waited for or noticed, and any later change has another time.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

from loradock.engine.adapters.bounded_parsing import decode_object
from loradock.engine.adapters.problems import shown
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds
from loradock.engine.errors import (
    AdapterConfigRefused,
    AdapterNotFound,
    AdapterUnsound,
    Conflict,
    PathNotAllowed,
)
from loradock.processes.safe_open import NotAllowed, NotFound, SafeDirectory, is_link, is_present

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


QUIET_S: Final = 1.0
"""The time since the last change of files after which they are read, in seconds."""

_WRITE_ELSEWHERE: Final = "write files elsewhere, rename their directory, and load it again"


class OpenFile:
    """A regular file, opened for reading, with its status at that time."""

    def __init__(self, name: str, descriptor: int, directory: int) -> None:
        """`directory`: a descriptor of the directory that has the name."""
        self.name = name
        self._descriptor = descriptor
        self._directory = directory
        self._is_linked = is_link(name, directory)
        self._opened = os.fstat(descriptor)

    @property
    def size_bytes(self) -> int:
        """The file's size when it was opened."""
        return self._opened.st_size

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start`; raises `Conflict` if the file ends early."""
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[filled:]], start + filled)
            except OSError as error:
                raise AdapterNotFound(f"{self.name} can't be read: {error.strerror}") from error
            if not count:
                raise Conflict(f"{self.name} became shorter while it was read; {_WRITE_ELSEWHERE}")
            filled += count

    def read(self, start: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `start`; raises `Conflict` if the file ends early."""
        buffer = bytearray(size_bytes)
        self.read_into(memoryview(buffer), start)
        return bytes(buffer)

    @property
    def stamp(self) -> str:
        """Size and time of the last change; equal for all readers of the same file."""
        return f"{self._opened.st_size}@{self._opened.st_mtime_ns}"

    @property
    def changed_s(self) -> float:
        """The wall-clock time of the last change of content or name, when it was opened."""
        return max(self._opened.st_mtime, self._opened.st_ctime)

    @property
    def identity(self) -> tuple[int, ...]:
        """The file, its size, and the times of its last changes, when it was opened."""
        found = self._opened
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def check_unchanged(self) -> None:
        """Raise `Conflict` if the file was written to since it was opened."""
        now, then = os.fstat(self._descriptor), self._opened
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            then.st_size,
            then.st_mtime_ns,
            then.st_ctime_ns,
        ):
            raise Conflict(f"{self.name} was changed while it was read; {_WRITE_ELSEWHERE}")
        if self._is_linked and not self._is_target():
            raise Conflict(f"{self.name} links to another file now; load it again")

    def _is_target(self) -> bool:
        """Return whether the link still leads to this file; else two versions could be mixed.

        The links of a Kubernetes mount all change at one moment.
        """
        try:
            return os.path.samestat(os.stat(self.name, dir_fd=self._directory), self._opened)
        except OSError:
            return False


class AdapterFiles:
    """The open files of an adapter: its config, and its weights, in several files if sharded.

    `index`: the file that names the shards.
    """

    def __init__(
        self,
        config: OpenFile,
        weights: Sequence[OpenFile],
        index: OpenFile | None,
        directory: "_Directory",
    ) -> None:
        self._config = config
        self._directory = directory
        self.weights = tuple(weights)
        self._files = (config, *(() if index is None else (index,)), *self.weights)

    def other(self, name: str) -> OpenFile | None:
        """Open a file that is not needed for serving; None if there is none of this name.

        It is part of neither stamp nor identity.
        """
        return self._directory.file(name) if self._directory.has(name) else None

    def read_config(self, bounds: AdapterBounds) -> bytes:
        """Return the whole config; raises `AdapterConfigRefused` if it is too long."""
        size_bytes = self._config.size_bytes
        if size_bytes > bounds.config_bytes_max:
            raise AdapterConfigRefused(
                f"{CONFIG_NAME} has {size_bytes} bytes; at most {bounds.config_bytes_max} are read"
            )
        return self._config.read(0, size_bytes)

    @property
    def stamp(self) -> str:
        """The stamps of all files; equal for all readers of the same files."""
        return " ".join(file.stamp for file in self._files)

    @property
    def identity(self) -> tuple[tuple[int, ...], ...]:
        """The identities of all files."""
        return tuple(file.identity for file in self._files)

    @property
    def weights_bytes(self) -> int:
        """The size of all weights files."""
        return sum(file.size_bytes for file in self.weights)

    def check_unchanged(self) -> None:
        """Raise `Conflict` if one of the files was written to since it was opened."""
        for file in self._files:
            file.check_unchanged()

    def wait_until_quiet(self) -> None:
        """Wait until no file was written to for `QUIET_S`; raises `Conflict` if one is written.

        The wait is bounded, because the file system may have another clock.
        """
        age_s = time.time() - max(file.changed_s for file in self._files)
        if age_s < QUIET_S:
            time.sleep(min(QUIET_S, QUIET_S - age_s))
            self.check_unchanged()


@contextmanager
def open_adapter(
    path: str,
    roots: Sequence[Path],
    *,
    allow_pickled: bool = False,
    bounds: AdapterBounds = DEFAULT_BOUNDS,
) -> Iterator[AdapterFiles]:
    """Open the files of the adapter at `path`, absolute or relative to one of `roots`.

    The weights are safetensors, possibly sharded, else a tensorizer stream, else, with
    `allow_pickled`, a file of `torch.save`; see `weights_names`. Raises `PathNotAllowed` for a path
    that is not below a root, contains `..` or links out of the roots, `AdapterNotFound` if the
    directory or a file is missing, and `Conflict` for files that are being written.
    """
    with ExitStack() as stack:
        opened = _Directory(path, roots, stack)
        if not opened.has(CONFIG_NAME):
            raise AdapterNotFound(config_is_missing(path, opened.descriptor))
        config = opened.file(CONFIG_NAME)
        index, weights = _open_weights_files(path, opened, allow_pickled, bounds)
        files = AdapterFiles(config, weights, index, opened)
        files.wait_until_quiet()
        yield files


class _Directory:
    """An open directory of an adapter; `stack` closes it and its files."""

    def __init__(self, path: str, roots: Sequence[Path], stack: ExitStack) -> None:
        self._stack = stack
        with _as_engine_errors():
            self._opened = stack.enter_context(SafeDirectory(path, roots))
        self.descriptor = self._opened.descriptor

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name."""
        return self._opened.has(name)

    def file(self, name: str) -> OpenFile:
        """Open a file of the directory."""
        with _as_engine_errors():
            descriptor = self._opened.open(name)
        self._stack.callback(os.close, descriptor)
        return OpenFile(name, descriptor, self.descriptor)


@contextmanager
def _as_engine_errors() -> Iterator[None]:
    try:
        yield
    except NotAllowed as error:
        raise PathNotAllowed(str(error)) from error
    except NotFound as error:
        raise AdapterNotFound(str(error)) from error


def _open_weights_files(
    path: str, directory: _Directory, allow_pickled: bool, bounds: AdapterBounds
) -> tuple[OpenFile | None, list[OpenFile]]:
    """Open the weights files, and the index of several shards; raises `AdapterNotFound`."""
    names = weights_names(path, directory.descriptor, allow_pickled)
    index = None
    if names == [INDEX_NAME]:
        index = directory.file(INDEX_NAME)
        names = names_in_index(_read_index(index, bounds), bounds)
    return index, [directory.file(name) for name in names]


def _read_index(index: OpenFile, bounds: AdapterBounds) -> bytes:
    if index.size_bytes > bounds.header_bytes_max:
        raise AdapterUnsound(
            f"{INDEX_NAME} has {index.size_bytes} bytes; at most {bounds.header_bytes_max} are read"
        )
    return index.read(0, index.size_bytes)
