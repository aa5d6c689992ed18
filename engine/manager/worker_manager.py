"""Preparation of batches from requests: read files, move adapters into slots, set the mapping.

The adapters of a batch are read, checked, and found to fit next to the held ones before any
adapter moves. A request means the files of its path: an id that was loaded from another path is a
conflict.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from loradock.engine.adapters.lora_request import LoRARequest, tensorizer_directory
from loradock.engine.adapters.problems import shown
from loradock.engine.adapters.reader import read_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.errors import AdapterNotFound, Conflict, EngineError, NotResident
from loradock.engine.manager.attributes import Clock, Durations
from loradock.engine.manager.model_checks import check_kind
from loradock.engine.manager.model_manager import LoRAModelManager, ReadAdapter
from loradock.engine.punica.mapping import BASE, LoRAMapping

FileStamps = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size, mtime and ctime of each file; they change when a file is replaced."""


class AdapterSource(NamedTuple):
    """The origin of an adapter on the host; `path` is its id if it was added from memory."""

    path: str
    fingerprint: str


class WorkerLoRAManager:
    """Prepares batches from requests; removes adapters that a batch does not name, unless held.

    `adapter_roots`: the directories in which adapters must be; None allows any path, because the
    program that embeds this chooses the paths. `allow_pickled`: whether `.bin` and `.pt` files may
    be read, by weights-only unpickling.
    """

    def __init__(
        self,
        manager: LoRAModelManager,
        *,
        adapter_roots: Sequence[Path] | None = None,
        allow_pickled: bool = False,
    ) -> None:
        check_kind("manager", manager, LoRAModelManager, "; create_lora_manager makes one")
        self.manager: Final = manager
        self._reader = RequestReader(manager.adapter_target, adapter_roots, allow_pickled)

    def add_adapter(self, adapter_request: LoRARequest) -> bool:
        """Read an adapter and move it into a slot; False if its files did not have to be read.

        With `load_inplace` it is read again if its files have changed. Raises `Conflict` for an id
        that was loaded from another path, `NoRoom`, and the errors of reading.
        """
        wanted = requests_by_id([adapter_request])
        read = self._read_stale(wanted)
        self._activate(wanted, read)
        return bool(read)

    def set_active_adapters(
        self, requests: Collection[LoRARequest | None], mapping: LoRAMapping | None = None
    ) -> None:
        """Move all of a batch's adapters into slots, and set its mapping.

        A request that is None is one of the base model. Raises `NoRoom` for more adapters than
        slots without a held adapter, `NotResident` for a mapping that names other adapters,
        `Conflict` for one id with two paths, and the errors of reading.
        """
        with self.manager.metrics.switches.measure(self.manager.clock):
            wanted = requests_by_id(requests)
            if mapping is not None:
                check_mapped_ids(mapping, wanted)
            read = self._read_stale(wanted)
            self._remove_others(wanted)
            self._activate(wanted, read)
            if mapping is not None:
                self.manager.set_adapter_mapping(mapping)

    def default_request(
        self, modalities: Collection[str], lora_int_id: int | None = None
    ) -> LoRARequest | None:
        """Return the request for a row without an adapter that contains these modalities.

        It names the adapter of `default_mm_loras` for the only one of `modalities` ("image", ...)
        that has a default; None if none of them or several have one. Its name is the modality.
        `lora_int_id` None: that of `default_mm_lora_ids`.
        """
        config = self.manager.lora_config
        path, ids = config.default_mm_lora(modalities), config.default_mm_lora_ids
        if path is None:
            return None
        (modality,) = ids.keys() & set(modalities)
        return LoRARequest(modality, lora_int_id or ids[modality], path)

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        """Put an adapter for warming up on the host, under a request's id; False if it is there.

        No file is read.
        """
        adapter_id = lora_request.lora_int_id
        if adapter_id in self.list_adapters():
            return False
        return self.manager.add_adapter(self.manager.create_dummy_lora(adapter_id, rank))

    def remove_adapter(self, adapter_id: int) -> bool:
        """Remove an adapter, even a held one; False if it is not on the host."""
        return self.manager.remove_adapter(adapter_id)

    def remove_all_adapters(self) -> bool:
        """Remove all adapters, held ones too; False if there was none."""
        return self.manager.remove_all_adapters()

    def remove_oldest_adapter(self) -> bool:
        """Remove the least recently used adapter that is not held; False if there is no adapter.

        Raises `NoRoom` if all adapters are held.
        """
        return self.manager.remove_oldest_adapter()

    def pin_adapter(self, adapter_id: int) -> bool:
        """Hold an adapter: move it into a slot, and exempt it from eviction. True."""
        return self.manager.pin_adapter(adapter_id)

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """Return the rank to warm up with; see the manager's method."""
        return self.manager.get_dummy_lora_warmup_rank(default_rank)

    def supports_tower_connector_lora(self) -> bool:
        """Return whether the model reads images and adapters apply to the layers that do."""
        return self.manager.supports_mm and self.manager.supports_tower_connector_lora

    def list_adapters(self) -> set[int]:
        """Return the ids of all adapters on the host."""
        return self.manager.adapter_ids

    def get_lora_metrics(self) -> dict[str, Any]:
        """Return the metrics of the manager."""
        return self.manager.get_lora_metrics()

    def _remove_others(self, wanted: Collection[int]) -> None:
        """Remove the adapters that the batch does not name, because no policy evicts here."""
        for adapter_id in sorted(self.list_adapters()):
            if adapter_id not in wanted and not self.manager.is_pinned(adapter_id):
                self.manager.remove_adapter(adapter_id)

    def _activate(self, wanted: Collection[int], read: Mapping[int, ReadAdapter]) -> None:
        """Move the batch's adapters into slots, by the manager's own methods.

        Those in slots come first, then those on the host, then those just read: each counts as
        used, so an adapter of the batch is the last to be evicted for another one of it. At the end
        all count as used, in the batch's order.
        """
        known = [adapter_id for adapter_id in wanted if self.manager.find(adapter_id) is not None]
        for adapter_id in sorted(known, key=self.manager.is_active, reverse=True):
            if adapter_id in read:
                self._replace(read[adapter_id])
            else:
                self.manager.activate_adapter(adapter_id)
        for adapter_id, adapter in read.items():
            if adapter_id not in known:
                self._add(adapter)
        self.manager.activate_together(wanted)
        self._reader.forget_all_but({self._source_of(a) for a in self.list_adapters()})

    def _add(self, adapter: ReadAdapter) -> None:
        """Add an adapter and move it into a slot; if there is none, it does not stay either."""
        self.manager.add_adapter(adapter)
        try:
            self.manager.activate_adapter(adapter.id)
        except EngineError:
            self.manager.remove_adapter(adapter.id)
            raise

    def _replace(self, adapter: ReadAdapter) -> None:
        """Replace the adapter of the same id, which stays held if it was."""
        was_held = self.manager.is_pinned(adapter.id)
        self.manager.remove_adapter(adapter.id)
        self._add(adapter)
        if was_held:
            self.manager.pin_adapter(adapter.id)

    def _read_stale(self, wanted: Mapping[int, LoRARequest]) -> dict[int, ReadAdapter]:
        """Read the adapters that are missing or have changed, if all fit next to the held ones."""
        sources = {adapter_id: self._source_of(adapter_id) for adapter_id in wanted}
        stale = [a for a, request in wanted.items() if self._reader.is_stale(request, sources[a])]
        known = dict.fromkeys(wanted, None)
        self.manager.check_capacity(known | dict.fromkeys(stale, 0))
        loads, clock = self.manager.metrics.loads, self.manager.clock
        read = {a: self._reader.read(wanted[a], loads, clock) for a in stale}
        self.manager.check_capacity(known | {a: r.loaded.blob_bytes for a, r in read.items()})
        return read

    def _source_of(self, adapter_id: int) -> AdapterSource | None:
        adapter = self.manager.find(adapter_id)
        return None if adapter is None else AdapterSource(adapter.path, adapter.fingerprint)


class LRUCacheWorkerLoRAManager(WorkerLoRAManager):
    """The same for an LRU manager: adapters that a batch does not name stay until evicted."""

    def _remove_others(self, _wanted: Collection[int]) -> None:
        """Remove none; the policy evicts as needed."""


class RequestReader:
    """Reads the adapters that requests name, and remembers the stamps of their files.

    `roots`: the directories in which adapters must be, also those that links lead to; None allows
    any path. `allow_pickled`: see `loradock.engine.adapters.directory.open_adapter`.
    """

    def __init__(
        self,
        adapter_target: AdapterTarget,
        roots: Sequence[Path] | None,
        allow_pickled: bool,
    ) -> None:
        self._adapter_target = adapter_target
        self._roots = roots
        self._allow_pickled = allow_pickled
        # By source, so that stamps never apply to an adapter with the same id from elsewhere.
        self._stamps: dict[AdapterSource, FileStamps] = {}

    def is_stale(self, request: LoRARequest, source: AdapterSource | None) -> bool:
        """Return whether a request's files have to be read; raises `Conflict` for another path.

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
