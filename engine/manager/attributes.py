"""The attributes of a manager and its metrics, for reading. A call that fails is not counted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from loradock.engine.layers import BaseLayerWithLoRA
from loradock.engine.layers.experts import ExpertsWithLoRA
from loradock.engine.memory import allocated_bytes
from loradock.engine.models.binding import kernels_for
from loradock.engine.models.image_part import IMAGE_PARTS
from loradock.engine.punica.mapping import LoRAMapping, MappingType
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.messages.ids import GPU_SLOT

if TYPE_CHECKING:
    from loradock.controller.core.in_process import InProcessController
    from loradock.engine.config import LoRAConfig
    from loradock.engine.manager.in_process_engine import InProcessEngine

MEBIBYTE: Final = 1 << 20
"""The bytes of a MiB."""

Clock = Callable[[], float]
"""A monotonic clock, in seconds."""


@dataclass
class Durations:
    """The number of calls, and their durations: the sum, the longest and the last."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    last_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Record one call."""
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)
        self.last_s = seconds

    @property
    def average_s(self) -> float:
        """The average duration; 0 before the first call."""
        return self.total_s / self.count if self.count else 0.0

    @contextmanager
    def measure(self, clock: Clock) -> Iterator[None]:
        """Record the duration of the block, unless it raises."""
        start = clock()
        yield
        self.add(clock() - start)

    def as_dict(self) -> dict[str, float]:
        """Return the durations as `get_lora_metrics` reports them."""
        return {
            "count": self.count,
            "seconds": self.total_s,
            "longest_seconds": self.longest_s,
            "last_seconds": self.last_s,
        }


@dataclass
class ManagerMetrics:
    """The counters of one manager.

    `hits`: an adapter was in a slot when it was used; `misses`: it was not. `evictions`: adapters
    that the policy moved out of a slot or off the host. `switches`: of the active set. `loads`:
    adapters read from files.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    activations: Durations = field(default_factory=Durations)
    switches: Durations = field(default_factory=Durations)
    loads: Durations = field(default_factory=Durations)

    def as_dict(self) -> dict[str, object]:
        """Return the counters as `get_lora_metrics` reports them."""
        return {
            "avg_activation_time": self.activations.average_s,
            "avg_switching_time": self.switches.average_s,
            "activations": self.activations.as_dict(),
            "switches": self.switches.as_dict(),
            "loads": self.loads.as_dict(),
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
        }


class ManagerAttributes:
    """The attributes of vLLM's managers.

    `max_num_seqs`, `max_num_batched_tokens`, `vocab_size`: the bounds of a batch. `lora_config` has
    its dtype resolved. `vllm_config` is kept as it was passed; nothing is read from it.
    """

    adapter_type: ClassVar[str] = "LoRA"

    lora_config: "LoRAConfig"
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    vllm_config: object
    metrics: ManagerMetrics
    _core: "InProcessController"
    _engine: "InProcessEngine"

    def __len__(self) -> int:
        """Return the number of adapters on the host."""
        return len(self._engine.adapter_ids)

    @property
    def capacity(self) -> int:
        """The most adapters on the host (`max_cpu_loras`)."""
        return self.lora_config.max_cpu_loras or self.lora_slots

    @property
    def lora_slots(self) -> int:
        """The number of slots: the most adapters that one batch may name (`max_loras`)."""
        return self.lora_config.max_loras

    @property
    def adapter_slots(self) -> int:
        """The same as `lora_slots`."""
        return self.lora_slots

    @property
    def adapter_ids(self) -> set[int]:
        """The ids of all adapters on the host."""
        return set(self._engine.adapter_ids)

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The id of the adapter in each slot, None for an empty slot."""
        return self._engine.lora_index_to_id

    @property
    def device(self) -> torch.device:
        """The device of the model and of the slots."""
        return self._engine.residency.arena.data.device

    @property
    def modules(self) -> dict[str, BaseLayerWithLoRA]:
        """The wrapped layers by path."""
        return dict(self._engine.layers)

    @property
    def packed_modules(self) -> dict[str, list[str]]:
        """The paths of the modules that each packed layer replaces, by its own path."""
        return {
            name: [shape.name for shape in layer.module_shapes(name, 0) if not shape.is_optional]
            for name, layer in self._engine.layers.items()
            if len(layer.slice_shapes) > 1 and not isinstance(layer, ExpertsWithLoRA)
        }

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        """The last names of the modules in each packed layer, by its last name.

        For experts the projections of every expert: `experts.0.gate_proj` and so on.
        """
        found = {_last(name): list(map(_last, of)) for name, of in self.packed_modules.items()}
        for name, layer in self._engine.layers.items():
            if isinstance(layer, ExpertsWithLoRA):
                found[_last(name)] = _single_experts(_last(name), layer)
        return found

    @property
    def supported_lora_modules(self) -> list[str]:
        """The last names of the wrapped layers."""
        return list(dict.fromkeys(map(_last, self._engine.layers)))

    @property
    def punica_wrapper(self) -> PunicaWrapper:
        """The mapping of the language layers, which a model without images has alone."""
        return self._engine.punica_wrappers[MappingType.LANGUAGE]

    @property
    def punica_wrapper_mapping(self) -> dict[MappingType, PunicaWrapper]:
        """The mapping of each part of the model."""
        return dict(self._engine.punica_wrappers)

    @property
    def is_pooling_model(self) -> bool:
        """True if the model embeds or classifies."""
        return self._engine.is_pooling_model

    @property
    def supports_mm(self) -> bool:
        """True if the model reads images."""
        return self._engine.has_image_part

    @property
    def supports_tower_connector_lora(self) -> bool:
        """True if adapters apply to the layers that read images."""
        return any(part in self._engine.punica_wrappers for part in IMAGE_PARTS)

    def get_lora_metrics(self) -> dict[str, Any]:
        """Return counts and sizes of adapters, and the counters and durations of calls.

        Sizes are in bytes, `adapter_memory_mb` and `gpu_memory_usage` in MiB; durations in seconds.
        `utilization` is the part of the slots in use, `memory_efficiency` that of the arena's
        bytes, and `gpu_memory_usage` what this process has allocated on a CUDA device.
        """
        world, residency = self._core.world, self._engine.residency
        counts = ("count", "count_max", "size_bytes")
        sizes = ("host_bytes", "pinned_bytes", "device_bytes")
        adapters = [world.adapters[key] for key in residency.host_adapters]
        arena, active = residency.arena, sum(one.state == GPU_SLOT for one in adapters)
        host_bytes = sum(one.host_bytes + one.pinned_bytes for one in adapters)
        return {
            "adapters": {
                "registered": len(adapters),
                "active": active,
                "capacity": self.capacity,
                "utilization": active / self.lora_slots,
                "host_utilization": len(adapters) / self.capacity,
            },
            "memory": {
                "adapter_memory_mb": host_bytes / MEBIBYTE,
                "gpu_memory_usage": allocated_bytes(self.device) / MEBIBYTE,
                "memory_efficiency": 1 - arena.free_bytes / arena.capacity_bytes,
                "tiers": {name: _fields_of(tier, counts) for name, tier in world.tiers.items()},
                "adapters": {int(adapter.name): _fields_of(adapter, sizes) for adapter in adapters},
                "device": {"size_bytes": arena.capacity_bytes, "free_bytes": arena.free_bytes},
            },
            "performance": {
                **self.metrics.as_dict(),
                "punica_kernel_enabled": True,
                "punica_kernels": kernels_for(self.device),
            },
            "counters": {
                int(one.name): _fields_of(one.counters, one.counters.__struct_fields__)
                for one in adapters
            },
        }

    def _check_rows(self, mapping: LoRAMapping) -> None:
        """Raise `ValueError` for more rows than a batch may have; image parts have no limit."""
        rows_max = {
            "prompt_mapping": self.max_num_seqs,
            "index_mapping": self.max_num_batched_tokens,
        }
        is_bounded = mapping.type is MappingType.LANGUAGE
        for name, allowed in rows_max.items() if is_bounded else ():
            rows = len(getattr(mapping, name))
            if rows > allowed:
                raise ValueError(f"{name} has {rows} rows; this manager allows {allowed}")


def _fields_of(record: object, names: Sequence[str]) -> dict[str, Any]:
    """Return some attributes of a record by name."""
    return {name: getattr(record, name) for name in names}


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _single_experts(name: str, layer: ExpertsWithLoRA) -> list[str]:
    gate_and_up = ("gate_proj", "up_proj") if layer.whole.is_gated else ("up_proj",)
    return [
        f"{name}.{expert}.{projection}"
        for expert in range(layer.whole.experts)
        for projection in (*gate_and_up, "down_proj")
    ]
