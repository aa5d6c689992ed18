"""Batches made ready from requests: files read, adapters brought into slots, the mapping set.

What it is: what a server's worker asks for at every step, on top of a manager. What it is not: a
keeper or a decider; the manager is. One rule: what a batch asks for is read, checked and found to
fit beside what is pinned before anything moves.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.adapters.lora_model import LoRARequest
from engine.config import DEFAULT_BOUNDS, AdapterBounds
from engine.manager.model_manager import LoRAModelManager
from engine.manager.request_reader import ReadAdapter, RequestReader, Source, by_id, check_named
from engine.punica.mapping import LoRAMapping


class WorkerLoRAManager:
    """Makes batches ready from requests: whoever a batch does not name leaves, unless pinned.

    `adapter_roots`: the directories that adapters may lie under; None takes any path, because who
    embeds this names the paths. `allow_pickled`: whether `.bin` and `.pt` files may be read, by
    weights-only unpickling.
    """

    def __init__(
        self,
        manager: LoRAModelManager,
        *,
        adapter_roots: Sequence[Path] | None = None,
        bounds: AdapterBounds = DEFAULT_BOUNDS,
        allow_pickled: bool = False,
    ) -> None:
        self.manager: Final = manager
        self._reader = RequestReader(manager.side, adapter_roots, bounds, allow_pickled)

    def add_adapter(self, request: LoRARequest) -> bool:
        """Read an adapter and bring it into a slot; False if it was there and needed no reading.

        With `load_inplace` it is read anew if its files are others than those that were read.
        Raises `Conflict` for an id that came from another path, `NoRoom`, and what reading raises.
        """
        wanted = {request.lora_int_id: request}
        read = self._read_stale(wanted)
        self._make_ready(wanted, read)
        return bool(read)

    def set_active_adapters(
        self, lora_requests: Collection[LoRARequest], mapping: LoRAMapping | None = None
    ) -> None:
        """Bring a batch's adapters into slots, all at once, and set its mapping.

        Raises `NoRoom` for more adapters than there are slots beside pinned ones, `NotResident` for
        a mapping that names others, `Conflict` for one id with two paths, and what reading raises.
        """
        with self.manager.books.switches.measure(self.manager.clock):
            wanted = by_id(lora_requests)
            if mapping is not None:
                check_named(mapping, wanted)
            read = self._read_stale(wanted)
            self._make_way(wanted)
            self._make_ready(wanted, read)
            if mapping is not None:
                self.manager.set_adapter_mapping(mapping)

    def default_request(self, modalities: Collection[str], lora_int_id: int) -> LoRARequest | None:
        """What a row asks for that names no adapter and brings these modalities ("image", ...).

        The adapter that `default_mm_loras` has for the one modality among them that has any, under
        this id; None where there is none, or more than one.
        """
        path = self.manager.lora_config.default_mm_lora(modalities)
        return None if path is None else LoRARequest(path, lora_int_id, path)

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter; False if it is not there."""
        return self.manager.remove_adapter(adapter_id)

    def remove_all_adapters(self) -> bool:
        """Forget every adapter; False if there was none."""
        return self.manager.remove_all_adapters()

    def pin_adapter(self, adapter_id: int) -> bool:
        """Exempt an adapter from every eviction, bringing it into a slot first; True."""
        return self.manager.pin_adapter(adapter_id)

    def list_adapters(self) -> set[int]:
        """Every adapter on the host."""
        return self.manager.adapter_ids

    def get_lora_metrics(self) -> dict[str, Any]:
        """The manager's metrics."""
        return self.manager.get_lora_metrics()

    def _make_way(self, wanted: Collection[int]) -> None:
        """Nobody is evicted by a policy here, so the batch says who leaves."""
        for adapter_id in sorted(self.list_adapters()):
            if adapter_id not in wanted and not self.manager.is_pinned(adapter_id):
                self.manager.remove_adapter(adapter_id)

    def _make_ready(self, wanted: Collection[int], read: Mapping[int, ReadAdapter]) -> None:
        """First those that are there, so that none of them leaves for one that is not.

        In the end all count as used, in the batch's order, whatever had to move for them.
        """
        self.manager.count_uses(wanted)
        known = [adapter_id for adapter_id in wanted if self.manager.find(adapter_id) is not None]
        for adapter_id in known:
            if adapter_id in read:
                self.manager.replace(adapter_id, *read[adapter_id])
        self.manager.activate_together(known)
        for adapter_id, adapter in read.items():
            if adapter_id not in known:
                self.manager.admit(adapter_id, *adapter, activate=True)
        self.manager.activate_together(wanted)
        self._reader.forget_all_but({self._source_of(a) for a in self.list_adapters()})

    def _read_stale(self, wanted: Mapping[int, LoRARequest]) -> dict[int, ReadAdapter]:
        """Read what is not there or has to be read anew, if all fits beside what is pinned."""
        sources = {adapter_id: self._source_of(adapter_id) for adapter_id in wanted}
        stale = [a for a, request in wanted.items() if self._reader.is_stale(request, sources[a])]
        known = dict.fromkeys(wanted, None)
        self.manager.check_room(known | dict.fromkeys(stale, 0))
        books, clock = self.manager.books, self.manager.clock
        read = {a: self._reader.read(wanted[a], books.loads, clock) for a in stale}
        self.manager.check_room(known | {a: r.loaded.blob_bytes for a, r in read.items()})
        return read

    def _source_of(self, adapter_id: int) -> Source | None:
        adapter = self.manager.find(adapter_id)
        return None if adapter is None else Source(adapter.path, adapter.fingerprint)


class LRUCacheWorkerLoRAManager(WorkerLoRAManager):
    """The same on an LRU manager: those that a batch does not name stay until room is needed."""

    def _make_way(self, _wanted: Collection[int]) -> None:
        """Who leaves is the policy's to say."""
