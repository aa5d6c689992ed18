"""The life cycle in one process: a model and its adapters, for a program that holds them itself.

What it is: the manager's calls, each turned into requests to the controller's core, whose commands
an `InProcessEngine` does at once. What it is not: a second controller; what may be done, who leaves
and in which order is the core's to say. One rule: what is refused has moved nothing.

All methods are called by one thread, between two forward passes. There is no log and no socket;
what ends with the process is gone.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Final

import torch
from transformers import PreTrainedModel

from controller.core.context import Refusal
from controller.core.in_process import LocalController
from controller.core.limits import Limits
from controller.core.world import Adapter
from engine.adapters.dummy import dummy_adapter, warmup_rank
from engine.adapters.in_memory import check_handed
from engine.adapters.lora_model import LoRAModel
from engine.adapters.reader import LoadedAdapter
from engine.config import LoRAConfig
from engine.errors import EngineError, NoRoom, error_of
from engine.layout import rank_parts_of
from engine.manager.in_process_engine import InProcessEngine
from engine.manager.metrics import Books, Clock
from engine.models.vision.encoder import ImageTensors
from engine.punica.mapping import LoRAMapping, MappingType
from messages import events, requests
from messages.ids import EVICTED, GPU_SLOT

_UNBOUNDED: Final = 1 << 50
"""Host memory is bounded by the number of adapters, as `max_cpu_loras` says."""


class LoRAModelManager:
    """A model and its adapters; nobody leaves unless asked to: what finds no room is L001.

    `model` is the prepared model, called as `transformers` calls it; its layers are wrapped in
    place, and it is moved to `device`. A batch has at most `max_num_batched_tokens` tokens and
    `max_num_seqs` sampled rows, and its ids lie below `vocab_size`. `device_bytes_max` None gives
    the arena room for `max_loras` adapters of the highest rank. Raises `ValueError`, `ModelRefused`
    for a model that can't be served, `DeviceOutOfMemory`.
    """

    policy: ClassVar[str] = "none"

    def __init__(  # noqa: PLR0913 - a signature that people know
        self,
        model: PreTrainedModel,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        lora_config: LoRAConfig,
        device: torch.device | str,
        *,
        device_bytes_max: int | None = None,
        clock: Clock = time.perf_counter,
        checked: bool = False,
    ) -> None:
        """`checked` verifies every invariant after every call; for tests, and when in doubt."""
        self._rows_max = {"prompt_mapping": max_num_seqs, "index_mapping": max_num_batched_tokens}
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        _check_positive(sizes | {"vocab_size": vocab_size})
        self._engine = engine = InProcessEngine(model, lora_config, device, device_bytes_max)
        if vocab_size > engine.vocab_size:
            raise ValueError(
                f"vocab_size is {vocab_size}; the model embeds {engine.vocab_size} tokens"
            )
        self.model: Final = engine.model
        self.side: Final = engine.side
        self.lora_config: Final = engine.lora_config
        self.books: Final = Books()
        self.clock: Final = clock
        self._handed_over = 0
        self._sent_away: dict[str, None] = {}
        limits = Limits(
            slots_max=self.lora_slots,
            host_adapters_max=self.capacity,
            host_bytes_max=_UNBOUNDED,
            pinned_bytes_max=_UNBOUNDED,
            device_bytes_max=engine.residency.arena.capacity_bytes,
            answers_max=1,
        )
        self._core = LocalController(
            limits, self.policy, engine.execute, self._observe, checked=checked
        )
        self._core.attach(engine.inventory())

    def __len__(self) -> int:
        """How many adapters are on the host."""
        return len(self._engine.adapter_ids)

    @property
    def capacity(self) -> int:
        """How many adapters may be on the host (`max_cpu_loras`)."""
        return self.lora_config.max_cpu_loras or self.lora_slots

    @property
    def lora_slots(self) -> int:
        """How many adapters one batch may name (`max_loras`)."""
        return self.lora_config.max_loras

    @property
    def adapter_slots(self) -> int:
        """The same as `lora_slots`."""
        return self.lora_slots

    @property
    def adapter_ids(self) -> set[int]:
        """Every adapter on the host."""
        return set(self._engine.adapter_ids)

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """Who is in each slot; None where nobody is."""
        return self._engine.lora_index_to_id

    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Check an adapter and copy it to the host; False if its id is there already.

        An id that is there counts as used, whatever the weights. Nothing of `adapter` is referenced
        afterwards. Raises `AdapterDoesNotFit`, `NotFinite`, `ValueError` for an id that is no
        integer, and `NoRoom` where the host is full and nobody may leave.
        """
        _check_positive({"id": adapter.id})
        if self.find(adapter.id) is not None:
            self._ask(requests.StageAdapter, adapter.id)
            return False
        self._handed_over += 1
        fingerprint = f"handed over {self._handed_over}"
        loaded = check_handed(adapter, self.side, fingerprint)
        self.admit(adapter.id, loaded)
        return True

    def activate_adapter(self, adapter_id: int) -> bool:
        """Bring an adapter into a slot; False if it is in one already.

        Raises `UnknownAdapter`, and `NoRoom` where no slot is free and nobody may leave.
        """
        was_active = self.is_active(adapter_id)
        self.count_uses([adapter_id])
        with nullcontext() if was_active else self.books.activations.measure(self.clock):
            self._ask(requests.ActivateAdapter, adapter_id)
        return not was_active

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Take an adapter out of its slot, and end its pin; False if it is in none."""
        if not self.is_active(adapter_id):
            return False
        self.unpin_adapter(adapter_id)
        self._ask(requests.DeactivateAdapter, adapter_id)
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter, a pinned one too, and all it takes; False if it is not there."""
        if self.find(adapter_id) is None:
            return False
        self._ask(requests.RemoveAdapter, adapter_id, force=True)
        return True

    def remove_all_adapters(self) -> bool:
        """Forget every adapter, pinned ones too; False if there was none."""
        removed = [self.remove_adapter(adapter_id) for adapter_id in self._engine.adapter_ids]
        return bool(removed)

    def remove_oldest_adapter(self) -> bool:
        """Forget the least recently used adapter that is not pinned; False if there is none."""
        oldest = self._core.oldest()
        return oldest is not None and self.remove_adapter(int(oldest))

    def pin_adapter(self, adapter_id: int) -> bool:
        """Exempt an adapter from every eviction, bringing it into a slot first; True.

        Raises `UnknownAdapter`, and `NoRoom` where no slot can come free.
        """
        self.count_uses([adapter_id])
        self._ask(requests.HoldAdapter, adapter_id)
        return True

    def unpin_adapter(self, adapter_id: int) -> bool:
        """End a pin; the adapter stays where it is. False if there was none."""
        if not self.is_pinned(adapter_id):
            return False
        self._ask(requests.ReleaseAdapter, adapter_id)
        return True

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Every adapter on the host by id, as `get_adapter` gives it, in the order of arrival."""
        held = self._engine.residency.held
        return {int(held[key].source.adapter): self._engine.weights_of(key) for key in held}

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """An adapter as it is kept: in the arena's dtype, scaling folded into B; None if unknown.

        Its tensors are the host's own memory: read them, and write to a copy.
        """
        adapter = self.find(adapter_id)
        return None if adapter is None else self._engine.weights_of(adapter.id)

    def is_active(self, adapter_id: int) -> bool:
        """Whether an adapter is in a slot."""
        adapter = self.find(adapter_id)
        return adapter is not None and adapter.state == GPU_SLOT

    def is_pinned(self, adapter_id: int) -> bool:
        """Whether an adapter is exempt from eviction."""
        adapter = self.find(adapter_id)
        return adapter is not None and adapter.held

    def set_adapter_mapping(self, mapping: LoRAMapping) -> bool:
        """Say which adapter each row of the next forwards uses; False where nothing changed.

        It is for the part of the model that its type says, and holds there until the next one,
        follows its adapters when they move to other slots, and fails forwards that run that part
        (L007) while one of them is in none. Raises `NotResident` for an id without a slot,
        `ValueError` for more rows than this manager was made for, or for a part whose layers are
        not wrapped; then the last one goes on. Mappings of tower and connector are bounded by the
        images alone; `image_mappings` makes them.
        """
        is_bounded = mapping.type is MappingType.LANGUAGE
        for name, rows_max in self._rows_max.items() if is_bounded else ():
            rows = len(getattr(mapping, name))
            if rows > rows_max:
                raise ValueError(f"{name} has {rows} rows; this manager takes {rows_max}")
        return self._engine.set_mapping(mapping)

    def image_mappings(self, adapter_ids: Sequence[int], media: ImageTensors) -> list[LoRAMapping]:
        """The tower's and the connector's mapping for a forward with these images.

        `adapter_ids`: one an image (of tiles: one for each entry of the first axis), 0 for the
        base. `media`: `pixel_values` and what else the model's forward takes of images. Empty
        without `enable_tower_connector_lora`; raises ValueError where the two don't agree.
        """
        return self._engine.image_mapper.mappings(adapter_ids, media)

    def create_dummy_lora(self, lora_id: int, rank: int) -> LoRAModel:
        """An adapter that takes all the room of its rank and adds nothing, to warm up with."""
        modules = tuple(self.side.modules.values())
        return dummy_adapter(lora_id, rank, modules, self._engine.heads)

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """The rank to warm up with: `default_rank`, raised where fully sharded adapters need it.

        Raises `ValueError` where that passes `max_lora_rank`.
        """
        group_size = rank_parts_of(self.side.modules.values())
        return warmup_rank(default_rank, self.lora_config.max_lora_rank, group_size)

    def get_lora_metrics(self) -> dict[str, Any]:
        """How many adapters there are, what they take, and how long things took."""
        world, residency = self._core.world, self._engine.residency
        counts = ("count", "count_max", "size_bytes")
        sizes = ("host_bytes", "pinned_bytes", "device_bytes")
        held = [world.adapters[key] for key in residency.held]
        arena = residency.arena
        return {
            "adapters": {
                "registered": len(held),
                "active": sum(adapter.state == GPU_SLOT for adapter in held),
                "capacity": self.capacity,
                "utilization": len(held) / self.capacity,
            },
            "memory": {
                "tiers": {name: _told(tier, counts) for name, tier in world.tiers.items()},
                "adapters": {int(adapter.name): _told(adapter, sizes) for adapter in held},
                "device": {"size_bytes": arena.capacity_bytes, "free_bytes": arena.free_bytes},
            },
            "performance": self.books.told(),
        }

    def close(self) -> None:
        """Wait for copies that run, and end their thread."""
        self._engine.close()

    def find(self, adapter_id: int) -> Adapter | None:
        """The core's record of an adapter, for reading only; None if it is not there."""
        return self._core.find(str(adapter_id))

    def admit(
        self, adapter_id: int, loaded: LoadedAdapter, path: str = "", *, activate: bool = False
    ) -> None:
        """Keep a checked adapter under an id that is free; nothing is kept where it finds no room.

        With `activate`, bring it into a slot too.
        """
        kind = requests.ActivateAdapter if activate else requests.StageAdapter
        try:
            with self._engine.offering(loaded):
                self._ask(kind, adapter_id, path)
        except EngineError:
            self.remove_adapter(adapter_id)
            raise

    def replace(self, adapter_id: int, loaded: LoadedAdapter, path: str) -> None:
        """Keep a checked adapter in another's stead, in a slot or pinned as that one was."""
        was_active, was_pinned = self.is_active(adapter_id), self.is_pinned(adapter_id)
        self.remove_adapter(adapter_id)
        self.admit(adapter_id, loaded, path, activate=was_active)
        if was_pinned:
            self.pin_adapter(adapter_id)

    def activate_together(self, adapter_ids: Collection[int]) -> None:
        """Bring adapters that are there into slots at once, none at another's cost."""
        if adapter_ids:
            self._do(requests.ActivateBatch, tuple(map(str, adapter_ids)))

    def check_room(self, sizes: Mapping[int, int | None]) -> None:
        """Raise `NoRoom` unless all of these can be in slots at once, beside what is pinned.

        None as a size takes that of the adapter that is there.
        """
        named = {str(adapter_id): size_bytes for adapter_id, size_bytes in sizes.items()}
        never = self._core.why_never_together(named)
        if never is not None:
            raise NoRoom(never)

    def count_uses(self, adapter_ids: Iterable[int]) -> None:
        """Book that adapters are wanted in slots, and whether they are there."""
        for adapter_id in adapter_ids:
            is_active = self.is_active(adapter_id)
            self.books.hits += is_active
            self.books.misses += not is_active

    def _ask(self, kind: type, adapter_id: int, *fields: Any, **named: Any) -> None:
        self._do(kind, str(adapter_id), *fields, **named)

    def _do(self, kind: type, *fields: Any, **named: Any) -> None:
        """Have the core do a request, and follow up on what it moved."""
        self._sent_away.clear()
        try:
            self._core.ask(kind, *fields, **named)
        except Refusal as refusal:
            raise error_of(refusal.code, refusal.message) from None
        finally:
            if kind not in (requests.DeactivateAdapter, requests.RemoveAdapter):
                self.books.evictions += len(self._sent_away)
            self._forget_evicted()
            self._engine.follow_slots()

    def _observe(self, event: events.Event) -> None:
        if isinstance(event, events.AdapterDeactivated | events.AdapterEvicted):
            self._sent_away[event.adapter] = None

    def _forget_evicted(self) -> None:
        """What was evicted could be had again from its giver alone: its id is free."""
        for name in tuple(self._sent_away):
            adapter = self._core.find(name)
            if adapter is not None and adapter.state == EVICTED:
                self._core.ask(requests.RemoveAdapter, name)


class LRUCacheLoRAModelManager(LoRAModelManager):
    """A manager in which whoever was not used for longest leaves for others, unless pinned."""

    policy: ClassVar[str] = "lru"


def _check_positive(sizes: Mapping[str, int]) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; an integer of at least 1")


def _told(record: object, names: Sequence[str]) -> dict[str, int]:
    return {name: getattr(record, name) for name in names}
