"""The engine of a manager: a model, its adapters' residency, and the mappings that are set.

It has the same `Residency` as an engine process, but completes each command at once. A row never
uses another adapter's weights: once an adapter of a mapping has left its slot, forwards fail.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from loradock.engine.adapters.in_memory import HeadWeights
from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import NotResident, UnknownAdapter
from loradock.engine.jobs import InlineJobs
from loradock.engine.layers import ClassificationHeadWithLoRA
from loradock.engine.layout import ModuleKind, ModuleShape, blob_bytes, columns_of_one_adapter
from loradock.engine.manager.model_checks import check_kind, check_model, keep_uncompiled
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.held_model import prepare_loaded
from loradock.engine.models.image_part import IMAGE_PARTS
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.punica.mapping import LoRAMapping, MappingType
from loradock.engine.residency.pinned import PinnedMemory
from loradock.engine.residency.residency import Residency
from loradock.engine.residency.staging import unpack
from loradock.messages import commands, reports
from loradock.messages.ids import AdapterId


class InProcessEngine:
    """A model, prepared in place, and the adapters of one manager.

    The core knows an adapter by its name, which is the manager's id as text, and by a number of its
    own, which is the key here. `sources`: the checked adapters that commands may load, by name; the
    manager keeps each there while it is being loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        lora_config: LoRAConfig,
        device: torch.device | str,
        device_bytes_max: int | None,
    ) -> None:
        check_model(model)
        check_kind("lora_config", lora_config, LoRAConfig)
        prepared = prepare_loaded(model.to(device), lora_config)
        config = lora_config.resolved_for(prepared)
        if device_bytes_max is None:
            device_bytes_max = config.max_loras * blob_bytes_max(prepared.shapes, config)
        arena, punica, self.lora_config = bind_lora(prepared, config, device_bytes_max)
        self.image_mapper: Final = prepared.image_mapper
        self.punica_wrappers: Final = {MappingType.LANGUAGE: punica, **self.image_mapper.punicas}
        self.layers: Final = prepared.layers
        self.is_pooling_model: Final = isinstance(prepared, PoolingModel)
        self.has_image_part: Final = prepared.image_part is not None
        self.model: Final = prepared.model
        keep_uncompiled(self.model)
        self.vocab_size: Final = prepared.vocab_size
        self.adapter_target: Final = prepared.adapter_target(self.lora_config)
        self.sources: Final[dict[str, LoadedAdapter]] = {}
        self._mappings: dict[MappingType, LoRAMapping] = {}
        self._stale_mappings: dict[MappingType, NotResident] = {}
        self._reports: list[reports.OperationReport] = []
        self.residency: Final = Residency(
            arena,
            prepared.shapes,
            self._read_source,
            InlineJobs(),
            self._reports.append,
            # The program decides how many adapters it keeps, so no region is reserved.
            pinned=PinnedMemory(0) if prepared.device.type == "cuda" else None,
        )
        self.model.register_forward_pre_hook(self._mapping_check(MappingType.LANGUAGE))
        self.model.register_forward_pre_hook(_check_call, with_kwargs=True)
        if prepared.image_part is not None:
            check = self._mapping_check(*IMAGE_PARTS)
            prepared.image_part.encoder.register_forward_pre_hook(check)

    @property
    def adapter_ids(self) -> list[int]:
        """The ids of all adapters on the host, in the order of arrival."""
        return [int(found.source.adapter) for found in self.residency.host_adapters.values()]

    @property
    def heads(self) -> dict[str, HeadWeights]:
        """The base weights of every classification head, used if an adapter contains none."""
        return {
            name: layer.base_head()
            for name, layer in self.layers.items()
            if isinstance(layer, ClassificationHeadWithLoRA)
        }

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The id of the adapter in each slot, None for an empty slot."""
        adapters = self.residency.host_adapters
        return [
            None if resident is None else int(adapters[resident].source.adapter)
            for resident in self.residency.residents
        ]

    def weights_of(self, key: AdapterId) -> LoRAModel:
        """Return an adapter as it is stored; its tensors are views of that memory."""
        adapter = self.residency.host_adapters[key]
        if isinstance(adapter.weights, LoRAModel):
            return adapter.weights
        modules = tuple(self.adapter_target.modules.values())
        return unpack(adapter.weights, modules, int(adapter.source.adapter))

    def execute(self, command: commands.Command) -> list[reports.LoggedReport]:
        """Complete a command; return its reports."""
        match command:
            case commands.RequestInventory():
                return [self.inventory()]
            case (
                commands.StartGeneration()
                | commands.StartPooling()
                | commands.StopGeneration()
                | commands.ResendTokens()
                | commands.ControllerBeat()
            ):
                raise RuntimeError(f"{type(command).__name__} is no command of a manager")
        self.residency.execute(command)
        self.residency.collect(wait=True)
        collected: list[reports.LoggedReport] = [*self._reports]
        self._reports.clear()
        return collected

    def inventory(self) -> reports.EngineInventory:
        """Return the adapters and the capacity, as an engine process reports them."""
        return reports.EngineInventory(
            engine_id="in process",
            pid=0,
            model="",
            max_loras=len(self.residency.residents),
            device_bytes_max=self.residency.arena.capacity_bytes,
            adapters=self.residency.inventory(),
        )

    def set_mapping(self, mapping: LoRAMapping) -> bool:
        """Set the mapping of the next forwards in its part of the model; False if unchanged.

        Raises `NotResident`, and `ValueError` for a part whose layers are not wrapped.
        """
        if mapping.type not in self.punica_wrappers:
            raise ValueError(
                f"the mapping is for a {mapping.type.value}, which has no wrapped layers; that "
                "takes an image-text model and enable_tower_connector_lora"
            )
        punica = self.punica_wrappers[mapping.type]
        changed = punica.update_metadata(mapping, self.lora_index_to_id)
        self._mappings[mapping.type] = mapping
        self._stale_mappings.pop(mapping.type, None)
        return changed

    def refresh_mappings(self) -> None:
        """Update the mappings that are set to the slots that their adapters have now."""
        for part, mapping in self._mappings.items():
            punica = self.punica_wrappers[part]
            try:
                punica.update_metadata(mapping, self.lora_index_to_id)
                self._stale_mappings.pop(part, None)
            except NotResident as error:
                self._stale_mappings[part] = error
                # A layer that is called directly bypasses the hooks; then it uses no adapter.
                nothing = LoRAMapping([], [], type=part)
                punica.update_metadata(nothing, self.lora_index_to_id)

    def forget_source(self, name: str) -> None:
        """Forget a checked adapter that commands could load, also if no load has taken it."""
        del self.sources[name]
        self.residency.checked.clear()

    def close(self) -> None:
        """Wait for running copies, and end their thread."""
        self.residency.close()

    def _mapping_check(self, *parts: MappingType) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return a hook that fails a forward if the mapping of one of these parts is stale."""

        def check(_model: nn.Module, _arguments: tuple[Any, ...]) -> None:
            for part in parts:
                if part in self._stale_mappings:
                    raise NotResident(f"{self._stale_mappings[part]}, or set another mapping")

        return check

    def _read_source(self, command: commands.CheckAdapter | commands.LoadWeights) -> LoadedAdapter:
        if command.adapter not in self.sources:
            raise UnknownAdapter(f"adapter {command.adapter} is not on the host; add it first")
        return self.sources[command.adapter]


def _check_call(model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Fail a forward of which gradients are wanted, or that autocast would round."""
    tensors = (one for one in (*inputs, *named.values()) if isinstance(one, Tensor))
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        raise ValueError(
            "an input requires gradients, and wrapped layers compute none; call the model under "
            "torch.no_grad()"
        )
    first = next(model.parameters())
    if not torch.is_autocast_enabled(first.device.type):
        return
    dtype = torch.get_autocast_dtype(first.device.type)
    if dtype != first.dtype:
        raise ValueError(
            f"autocast to {dtype} is on, and the model is {first.dtype}; load the model in the "
            "dtype that it is to compute in"
        )


def blob_bytes_max(shapes: Sequence[ModuleShape], lora_config: LoRAConfig) -> int:
    """Return the device bytes of an adapter with the highest rank on every module."""
    ranks = {
        shape.name: 1 if shape.kind is ModuleKind.HEAD else lora_config.max_lora_rank
        for shape in columns_of_one_adapter(shapes)
    }
    return blob_bytes(ranks, shapes, lora_config.dtype)
