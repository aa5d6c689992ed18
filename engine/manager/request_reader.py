"""Reading of the adapters that requests name.

A request means the files of its path: an id that was loaded from another path is a conflict.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.adapters.lora_request import LoRARequest, tensorizer_directory
from loradock.engine.adapters.problems import shown
from loradock.engine.adapters.reader import read_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import AdapterNotFound, Conflict, NotResident
from loradock.engine.manager.metrics import Clock, Durations
from loradock.engine.manager.model_checks import check_kind
from loradock.engine.punica.mapping import BASE, LoRAMapping

FileStamps = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size, mtime and ctime of each file; they change when a file is replaced."""


class AdapterSource(NamedTuple):
    """The origin of an adapter on the host; `path` is its id if it was added from memory."""

    path: str
    fingerprint: str


class ReadAdapter(LoRAModel):
    """An adapter that was read from the files in `path` and checked against a manager's model.

    Its weights are those of `loaded`, which for sharded modules are this process's part.
    """

    def __init__(self, adapter_id: int, loaded: LoadedAdapter, path: str) -> None:
        model = loaded.model
        super().__init__(adapter_id, model.rank, model.loras, model.is_3d_lora_weight)
        self.loaded: Final = loaded
        self.path: Final = path


class RequestReader:
    """Reads the adapters that requests name, and remembers the stamps of their files.

    `roots`: the directories in which adapters must be, also those that links lead to; None allows
    any path. `allow_pickled`: see `loradock.engine.adapters.directory.open_adapter`.
    """

    def __init__(
        self,
        adapter_target: AdapterTarget,
        roots: Sequence[Path] | None,
        bounds: AdapterBounds,
        allow_pickled: bool,
    ) -> None:
        self._adapter_target = adapter_target
        self._roots = roots
        self._bounds = bounds
        self._allow_pickled = allow_pickled
        # By source, so that stamps never apply to an adapter with the same id from elsewhere.
        self._stamps: dict[AdapterSource, FileStamps] = {}

    def is_stale(self, request: LoRARequest, source: AdapterSource | None) -> bool:
        """Whether the files of a request have to be read; raises `Conflict` for another path.

        `source`: of the adapter with the request's id, None for none. With `load_inplace` they are
        read if the path or the files are not those that were read.
        """
        if source is None:
            return True
        path = path_of(request)
        if request.load_inplace:
            return path != source.path or self._stamps.get(source) != _file_stamps_of(path)
        if path not in ("", source.path):
            raise Conflict(
                f"adapter {request.lora_int_id} ({request.lora_name!r}) was loaded from "
                f"{source.path!r}, not {path!r}; use another lora_int_id, or load_inplace to "
                "replace it"
            )
        return False

    def read(self, request: LoRARequest, loads: Durations, clock: Clock) -> ReadAdapter:
        """Read and check the files of a request; raises the errors of `read_adapter`."""
        path = path_of(request)
        if not path:
            raise AdapterNotFound(
                f"adapter {request.lora_int_id} ({request.lora_name!r}) is not on the host and "
                "its request has no lora_path"
            )
        roots = [Path("/")] if self._roots is None else self._roots
        # Before reading, so that files that change meanwhile are read again at the next request.
        stamps = _file_stamps_of(path)
        with loads.measure(clock):
            loaded = read_adapter(
                path,
                roots,
                self._adapter_target,
                self._bounds,
                request.lora_name,
                allow_pickled=self._allow_pickled,
                is_3d_lora_weight=request.is_3d_lora_weight,
            )
        self._stamps[AdapterSource(path, loaded.fingerprint)] = stamps
        return ReadAdapter(request.lora_int_id, loaded, path)

    def forget_all_but(self, sources: Collection[AdapterSource | None]) -> None:
        """Forget the file stamps of all sources but these."""
        self._stamps = {s: stamps for s, stamps in self._stamps.items() if s in sources}


def requests_by_id(lora_requests: Iterable[LoRARequest | None]) -> dict[int, LoRARequest]:
    """Return a batch's requests by id, without those of the base model, which are None.

    Raises `Conflict` for one id with two paths.
    """
    wanted: dict[int, LoRARequest] = {}
    for request in lora_requests:
        if request is None:
            continue
        check_kind("request", request, LoRARequest, "; a manager adds a LoRAModel")
        other = wanted.setdefault(request.lora_int_id, request)
        if path_of(other) != path_of(request):
            raise Conflict(
                f"lora_int_id {request.lora_int_id} is {other.lora_path!r} and "
                f"{request.lora_path!r} in one batch; give each adapter an id of its own"
            )
    return wanted


def check_mapped_ids(mapping: LoRAMapping, wanted: Collection[int]) -> None:
    """Raise `NotResident` for a mapping that names adapters that are not in `wanted`."""
    rows = (*mapping.index_mapping.tolist(), *mapping.prompt_mapping.tolist())
    others = sorted(set(rows).difference(wanted, {BASE}))
    if others:
        raise NotResident(
            f"the mapping names adapters {others}, which the batch does not; the batch names "
            f"{sorted(wanted)}"
        )


def path_of(request: LoRARequest) -> str:
    """Return the absolute path of a request; empty if it has none."""
    if not request.lora_path and not request.tensorizer_config_dict:
        return ""
    return tensorizer_directory(request.lora_path, request.tensorizer_config_dict)


def _file_stamps_of(path: str) -> FileStamps:
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, _status_of(entry)) for entry in entries]
    except FileNotFoundError as error:
        raise AdapterNotFound(f"there is no directory {shown(path)}") from error
    except (OSError, ValueError) as error:
        raise AdapterNotFound(f"{shown(path)} can't be listed: {error}") from error
    return tuple(
        sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
    )


def _status_of(entry: "os.DirEntry[str]") -> os.stat_result:
    """Return the status of a file, or of a link that leads nowhere."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return entry.stat(follow_symlinks=False)
