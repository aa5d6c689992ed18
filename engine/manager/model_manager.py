"""The life cycle in one process: a model and its adapters, for a program that holds them itself.

Each call becomes requests to the controller's core, which decides what is allowed and what is
evicted; an `InProcessEngine` completes its commands at once. A refused call has changed nothing.

vLLM's name for a hold is a pin: `pin_adapter`, `unpin_adapter` and `is_pinned` set, end and query
the hold of an adapter, which exempts it from eviction. Page-locked ("pinned") memory is unrelated.

All methods are called by one thread, between two forward passes. There is no log and no socket;
the state ends with the process.
"""

import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Final

import structlog
import torch
from torch import nn

from loradock.controller.core.context import Refusal
from loradock.controller.core.in_process import InProcessController
from loradock.controller.core.limits import Limits
from loradock.controller.core.world import Adapter
from loradock.engine.adapters.in_memory import check_in_memory, dummy_adapter, warmup_rank
from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import (
    DeviceOutOfMemory,
    EngineError,
    LoradockError,
    NoFreeSlot,
    NoRoom,
    NotRegistered,
    error_of,
)
from loradock.engine.layout import rank_parts_max
from loradock.engine.manager.attributes import Clock, ManagerAttributes, ManagerMetrics
from loradock.engine.manager.in_process_engine import InProcessEngine
from loradock.engine.manager.model_checks import check_kind, warn_when_saved
from loradock.engine.models.image_part import ImageTensors
from loradock.engine.punica.mapping import LoRAMapping
from loradock.messages import events, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import EVICTED, GPU_SLOT

_log = structlog.get_logger()

_UNBOUNDED: Final = 1 << 50
"""Host memory is bounded by the number of adapters (`max_cpu_loras`) instead of bytes."""

_NO_HOST_PLACE: Final = "No free adapter slots"
_NO_SLOT: Final = "No free lora slots"
"""Beginnings that vLLM documents for the same causes, and that programs search for."""


class ReadAdapter(LoRAModel):
    """An adapter that was read from the files in `path` and checked against a manager's model.

    Its weights are those of `loaded`, which for sharded modules are this process's part.
    """

    def __init__(self, adapter_id: int, loaded: LoadedAdapter, path: str) -> None:
        model = loaded.model
        super().__init__(adapter_id, model.rank, model.loras, model.is_3d_lora_weight)
        self.loaded: Final = loaded
        self.path: Final = path


class LoRAModelManager(ManagerAttributes):
    """A model and its adapters, without eviction: `NoRoom` (L001) if host or slots are full.

    `model` is moved to `device` and its layers are wrapped in place; it is then called as before.
    A text model of `transformers` is tried out first and its projections are packed; any other
    module is taken as it is (`PlainModel`). A batch has at most `max_num_batched_tokens` tokens and
    `max_num_seqs` sampled rows, with ids below `vocab_size`. `device_bytes_max`: None for an arena
    of `max_loras` adapters of the highest rank. `vllm_config` is kept and not read. Raises
    `ValueError`, `ModelRefused` for a model that can't be served, `DeviceOutOfMemory`.
    """

    policy: ClassVar[str] = "none"

    def __init__(  # noqa: PLR0913, PLR0917 - the signature of vLLM
        self,
        model: nn.Module,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        lora_config: LoRAConfig,
        device: torch.device | str,
        vllm_config: object = None,
        *,
        device_bytes_max: int | None = None,
        clock: Clock = time.perf_counter,
        checked: bool = False,
    ) -> None:
        """`checked` verifies the core's invariants after every call; raises `InvariantError`."""
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        _check_positive(sizes | {"vocab_size": vocab_size})
        self._engine = engine = InProcessEngine(model, lora_config, device, device_bytes_max)
        if 0 < engine.vocab_size < vocab_size:
            raise ValueError(
                f"vocab_size is {vocab_size}; the model embeds {engine.vocab_size} tokens"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.vllm_config = vllm_config
        self.model: Final = engine.model
        self.adapter_target: Final = engine.adapter_target
        self.lora_config = engine.lora_config
        self.metrics = ManagerMetrics()
        self.clock: Final = clock
        self._added_count = 0
        self._closed = False
        self._displaced: dict[str, None] = {}
        limits = Limits(
            max_loras=self.lora_slots,
            max_cpu_loras=self.capacity,
            host_bytes_max=_UNBOUNDED,
            pinned_bytes_max=_UNBOUNDED,
            device_bytes_max=engine.residency.arena.capacity_bytes,
            answers_max=1,
        )
        self._core = InProcessController(
            limits, self.policy, engine.execute, self._observe, checked=checked
        )
        self._core.attach(engine.inventory())
        # A second manager over the same layers is refused because of this.
        self.model.lora_manager = self
        warn_when_saved(self.model)

    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Check an adapter and copy it to the host; False if its id is on the host already.

        Then the id counts as used, and the weights are ignored. Nothing of `adapter` is referenced
        afterwards. A worker manager adds the adapters that it has read and checked by this method
        too, so a subclass sees every adapter here. Raises `AdapterDoesNotFit`, `NotFinite`,
        `ValueError` for an id that is no positive integer, and `NoRoom` if the host is full and no
        adapter may be evicted.
        """
        check_kind("adapter", adapter, LoRAModel, "; a worker manager adds a LoRARequest")
        _check_positive({"id": adapter.id})
        if self.find(adapter.id) is not None:
            self._request_for(requests.StageAdapter, adapter.id)
            return False
        if isinstance(adapter, ReadAdapter):
            self._admit(adapter.id, adapter.loaded, adapter.path)
            return True
        self._added_count += 1
        fingerprint = f"added {self._added_count}"
        self._admit(adapter.id, check_in_memory(adapter, self.adapter_target, fingerprint))
        return True

    def activate_adapter(self, lora_id: int) -> bool:
        """Move an adapter into a slot; False if it is in one already.

        Raises `UnknownAdapter`, and `NoFreeSlot` if no slot is free and no adapter may be evicted.
        """
        was_active = self.is_active(lora_id)
        self.count_uses([lora_id])
        with nullcontext() if was_active else self.metrics.activations.measure(self.clock):
            self._request_slot(requests.ActivateAdapter, lora_id)
        return not was_active

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Remove an adapter from its slot, and end its hold; False if it is in none.

        Warns if there is a hold to end.
        """
        if not self.is_active(adapter_id):
            return False
        if self.unpin_adapter(adapter_id):
            warnings.warn(
                f"adapter {adapter_id} was pinned; deactivating it has ended that", stacklevel=2
            )
        self._request_for(requests.DeactivateAdapter, adapter_id)
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Remove an adapter from slot and host, even a held one; False if it is not on the host."""
        if self.find(adapter_id) is None:
            return False
        self._request_for(requests.RemoveAdapter, adapter_id, force=True)
        return True

    def remove_all_adapters(self) -> bool:
        """Remove all adapters, held ones too; False if there was none."""
        removed = [self.remove_adapter(adapter_id) for adapter_id in self._engine.adapter_ids]
        return bool(removed)

    def remove_oldest_adapter(self) -> bool:
        """Remove the least recently used adapter that is not held; False if there is no adapter.

        Raises `NoRoom`, a `RuntimeError`, if all adapters are held.
        """
        oldest = self._core.least_recently_used()
        if oldest is not None:
            return self.remove_adapter(int(oldest))
        if self.adapter_ids:
            raise NoRoom(
                f"all {len(self)} adapters are pinned, so none can be removed for others; call "
                "unpin_adapter, or remove_adapter with an id"
            )
        return False

    def pin_adapter(self, lora_id: int) -> bool:
        """Hold an adapter: move it into a slot, and exempt it from eviction. True.

        Raises `NotRegistered`, and `NoFreeSlot` if no slot is free and no adapter may be evicted.
        """
        self.count_uses([lora_id])
        self._request_slot(requests.HoldAdapter, lora_id)
        return True

    def unpin_adapter(self, adapter_id: int) -> bool:
        """End the hold of an adapter, which stays where it is; False if it had none."""
        if not self.is_pinned(adapter_id):
            return False
        self._request_for(requests.ReleaseAdapter, adapter_id)
        return True

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Return all adapters on the host by id, as `get_adapter` does, in the order of arrival."""
        adapters = self._engine.residency.host_adapters
        return {int(adapters[key].source.adapter): self._engine.weights_of(key) for key in adapters}

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """Return an adapter in the arena's dtype, with the scaling folded into B; None if unknown.

        Its tensors are views of the stored weights: read them, and write to a copy.
        """
        adapter = self.find(adapter_id)
        return None if adapter is None else self._engine.weights_of(adapter.id)

    def is_active(self, adapter_id: int) -> bool:
        """Return whether an adapter is in a slot."""
        adapter = self.find(adapter_id)
        return adapter is not None and adapter.state == GPU_SLOT

    def is_pinned(self, adapter_id: int) -> bool:
        """Return whether an adapter is held."""
        adapter = self.find(adapter_id)
        return adapter is not None and adapter.held

    def set_adapter_mapping(self, mapping: LoRAMapping) -> bool:
        """Set the adapter of each row of the next forwards; False if nothing changed.

        The mapping applies to the part of the model in `mapping.type` until the next one for that
        part. It follows its adapters to other slots; while one of them is in no slot, forwards of
        that part fail (L007). Raises `NotResident` for an id without a slot, and `ValueError` for
        more rows than this manager was made for, or for a part whose layers are not wrapped; then
        the last mapping stays. Mappings of tower and connector have no row limit; `image_mappings`
        makes them.
        """
        self._check_open()
        check_kind("mapping", mapping, LoRAMapping)
        self._check_rows(mapping)
        return self._engine.set_mapping(mapping)

    def image_mappings(self, adapter_ids: Sequence[int], images: ImageTensors) -> list[LoRAMapping]:
        """Return the mappings of tower and connector for a forward with these images.

        `adapter_ids`: one per image (with tiles: one per entry of the first axis), 0 for the base
        model. `images`: `pixel_values` and the other image arguments of the model's forward. Empty
        without `enable_tower_connector_lora`. Raises `ValueError` if their numbers differ.
        """
        return self._engine.image_mapper.mappings(adapter_ids, images)

    def create_dummy_lora(
        self,
        lora_id: int,
        rank: int,
        embedding_modules: Mapping[str, str] | None = None,  # noqa: ARG002 - vLLM's, see below
    ) -> LoRAModel:
        """Return an adapter for warming up, of full size for `rank`, that changes no output.

        `embedding_modules` has no effect: which layers are embeddings follows from the layers.
        """
        modules = tuple(self.adapter_target.modules.values())
        return dummy_adapter(lora_id, rank, modules, self._engine.heads)

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """Return the rank to warm up with: `default_rank`, or what full sharding raises it to.

        Raises `ValueError` if that is above `max_lora_rank`.
        """
        group_size = rank_parts_max(self.adapter_target.modules.values())
        return warmup_rank(default_rank, self.lora_config.max_lora_rank, group_size)

    def close(self) -> None:
        """Wait for running copies, and end their thread; no adapter moves after that."""
        self._closed = True
        self._engine.close()

    def find(self, adapter_id: int) -> Adapter | None:
        """Return the core's record of an adapter, for reading only; None if it is unknown."""
        return self._core.find(str(adapter_id))

    def _admit(self, adapter_id: int, loaded: LoadedAdapter, path: str = "") -> None:
        """Stage a checked adapter under a free id; raises `NoRoom`, and then it is unknown."""
        if loaded.warnings:
            found = list(loaded.warnings)
            _log.warning("an adapter has warnings", adapter=adapter_id, warnings=found)
        self._engine.sources[str(adapter_id)] = loaded
        try:
            self._request_for(requests.StageAdapter, adapter_id, path)
        except EngineError:
            self.remove_adapter(adapter_id)
            raise
        finally:
            self._engine.forget_source(str(adapter_id))

    def activate_together(self, adapter_ids: Collection[int]) -> None:
        """Move adapters from the host into slots, without evicting any of them."""
        if adapter_ids:
            self._request(requests.ActivateBatch, tuple(map(str, adapter_ids)))

    def check_capacity(self, sizes: Mapping[int, int | None]) -> None:
        """Raise `NoRoom` unless all these adapters fit into slots, next to the held ones.

        Raises `DeviceOutOfMemory` if one of them is larger than the arena.

        `sizes`: blob bytes by id; None for the size of the adapter that is on the host.
        """
        named = {str(adapter_id): size_bytes for adapter_id, size_bytes in sizes.items()}
        shortage = self._core.permanent_shortage_of_batch(named)
        if shortage is not None:
            known = [size_bytes or 0 for size_bytes in sizes.values()]
            capacity_bytes = self._engine.residency.arena.capacity_bytes
            raise _batch_error(shortage, known, self.lora_slots, capacity_bytes)

    def count_uses(self, adapter_ids: Iterable[int]) -> None:
        """Count for each adapter whether it is in a slot (a hit) or not (a miss)."""
        for adapter_id in adapter_ids:
            is_active = self.is_active(adapter_id)
            self.metrics.hits += is_active
            self.metrics.misses += not is_active

    def _request_slot(self, kind: type, adapter_id: int) -> None:
        """Send a request for a slot of one adapter; raises `NoFreeSlot` if there is none."""
        try:
            self._request_for(kind, adapter_id)
        except NoRoom as error:
            raise NoFreeSlot(error.message) from None

    def _request_for(self, kind: type, adapter_id: int, *fields: Any, **named: Any) -> None:
        self._request(kind, str(adapter_id), *fields, **named)

    def _request(
        self, kind: type, adapters: str | tuple[str, ...], *rest: Any, **named: Any
    ) -> None:
        """Send a request to the core, then forget evicted adapters and update the mappings."""
        self._check_open()
        self._displaced.clear()
        names = (adapters,) if isinstance(adapters, str) else adapters
        undone: set[str] = set()
        try:
            self._core.request(kind, adapters, *rest, **named)
        except Refusal as refusal:
            # What was loaded for this request alone has left again, which is no eviction.
            undone.update(names)
            raise _error_of_refusal(refusal, self._core, kind, names) from None
        finally:
            if kind not in (requests.DeactivateAdapter, requests.RemoveAdapter):
                self.metrics.evictions += len(self._displaced.keys() - undone)
            self._forget_evicted()
            self._engine.refresh_mappings()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "the manager is closed; load the model again and make a new manager over it"
            )

    def _observe(self, event: events.Event) -> None:
        if isinstance(event, events.AdapterDeactivated | events.AdapterEvicted):
            self._displaced[event.adapter] = None

    def _forget_evicted(self) -> None:
        """Remove evicted adapters from the core: only the caller still has their weights."""
        for name in tuple(self._displaced):
            adapter = self._core.find(name)
            if adapter is not None and adapter.state == EVICTED:
                self._core.request(requests.RemoveAdapter, name)


class LRUCacheLoRAModelManager(LoRAModelManager):
    """A manager that evicts the least recently used adapter that is not held."""

    policy: ClassVar[str] = "lru"


def _check_positive(sizes: Mapping[str, int]) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _error_of_refusal(
    refusal: Refusal, core: InProcessController, kind: type, names: Sequence[str]
) -> LoradockError:
    """Return the error for a refused request of class `kind` about the adapters `names`."""
    if refusal.code is ErrorCode.UNKNOWN_ADAPTER and kind is requests.HoldAdapter:
        return NotRegistered(f"Pinning failed. LoRA {names[0]} is not registered. Add it first")
    if refusal.code is not ErrorCode.NO_ROOM:
        return error_of(refusal.code, refusal.message)
    host = core.world.tiers["host"]
    is_on_host = all(core.find(name) is not None for name in names)
    is_for_host = kind is requests.StageAdapter or not is_on_host
    missing = _NO_HOST_PLACE if is_for_host and host.count >= host.count_max else _NO_SLOT
    return NoRoom(f"{missing}: {refusal.message}")


def _batch_error(
    shortage: str, sizes_bytes: Sequence[int], slots: int, device_bytes: int
) -> EngineError:
    """Return the error for a batch of adapters of these sizes, in `slots` slots of `device_bytes`.

    `shortage` is the core's text.
    """
    largest = max(sizes_bytes, default=0)
    if largest > device_bytes:
        return DeviceOutOfMemory(
            f"an adapter needs {largest} bytes of device memory, the arena has {device_bytes}; "
            "raise device_bytes_max or serve a smaller adapter"
        )
    if len(sizes_bytes) > slots:
        return NoRoom(
            f"{_NO_SLOT}: number of requested LoRAs ({len(sizes_bytes)}) is greater than the "
            f"number of LoRA slots ({slots}); {shortage}"
        )
    return NoRoom(f"{_NO_SLOT}: {shortage}")
