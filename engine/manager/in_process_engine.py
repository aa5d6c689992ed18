"""The engine's side of a manager: a model, its adapters' residency, and the mapping that is set.

What it is: the same `Residency` that an engine process has, whose commands are done at once, to
their end. What it is not: a decider; the manager has the core for that. One rule: a row never meets
another adapter's weights: a mapping that outlives its slots fails the next forward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.adapters.dummy import OwnWeights
from engine.adapters.lora_model import LoRAModel
from engine.adapters.reader import LoadedAdapter
from engine.config import LoRAConfig
from engine.errors import NotResident, UnknownAdapter
from engine.jobs import InlineJobs
from engine.layers import ClassificationHeadWithLoRA
from engine.layout import ModuleKind, ModuleShape, blob_bytes
from engine.models.binding import equip
from engine.models.loading import prepare_loaded
from engine.models.vision.mapping import IMAGE_PARTS
from engine.punica.mapping import LoRAMapping, MappingType
from engine.residency.residency import Residency
from engine.residency.staging import unpack
from messages import commands, reports
from messages.ids import AdapterId


class InProcessEngine:
    """A model that is prepared where it is, and the adapters of one manager.

    `side`: what adapters have to fit. An adapter's name is its id for people; the core's own number
    for it is its key here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora_config: LoRAConfig,
        device: torch.device | str,
        device_bytes_max: int | None,
    ) -> None:
        prepared = prepare_loaded(model.to(device), lora_config)
        config = lora_config.verify_with_model_config(prepared.model)
        if device_bytes_max is None:
            device_bytes_max = config.max_loras * highest_bytes(prepared.shapes, config)
        arena, punica, self.lora_config = equip(prepared, config, device_bytes_max)
        self.image_mapper: Final = prepared.image_mapper
        self._punicas = {MappingType.LANGUAGE: punica, **self.image_mapper.punicas}
        self._layers = prepared.layers
        self.model: Final = prepared.model
        self.vocab_size: Final = prepared.vocab_size
        self.side: Final = prepared.side(self.lora_config)
        self._offer: LoadedAdapter | None = None
        self._mappings: dict[MappingType, LoRAMapping] = {}
        self._homeless: dict[MappingType, NotResident] = {}
        self._told: list[reports.OperationReport] = []
        self.residency: Final = Residency(
            arena,
            prepared.shapes,
            self._take_offer,
            InlineJobs(),
            self._told.append,
            pins=prepared.device.type == "cuda",
        )
        self.model.register_forward_pre_hook(self._checking(MappingType.LANGUAGE))
        if prepared.image_part is not None:
            check = self._checking(*IMAGE_PARTS)
            prepared.image_part.encoder.register_forward_pre_hook(check)

    @property
    def adapter_ids(self) -> list[int]:
        """Every adapter on the host, in the order of arrival."""
        return [int(held.source.adapter) for held in self.residency.held.values()]

    @property
    def heads(self) -> dict[str, OwnWeights]:
        """What every classification head computes with where no adapter brings one."""
        return {
            name: layer.own_weights()
            for name, layer in self._layers.items()
            if isinstance(layer, ClassificationHeadWithLoRA)
        }

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """Who is in each slot; None where nobody is."""
        held = self.residency.held
        return [
            None if resident is None else int(held[resident].source.adapter)
            for resident in self.residency.residents
        ]

    def weights_of(self, key: AdapterId) -> LoRAModel:
        """An adapter as it is kept; its tensors are the host's own memory."""
        held = self.residency.held[key]
        if isinstance(held.weights, LoRAModel):
            return held.weights
        return unpack(held.weights, tuple(self.side.modules.values()), int(held.source.adapter))

    @contextmanager
    def offering(self, loaded: LoadedAdapter) -> Iterator[None]:
        """Give `loaded` to whoever is loaded in this block."""
        self._offer = loaded
        try:
            yield
        finally:
            self._offer = None

    def execute(self, command: commands.Command) -> list[reports.LoggedReport]:
        """Do a command to its end; what there is to report."""
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
                raise RuntimeError(f"{type(command).__name__} is nothing that a manager asks for")
        self.residency.do(command)
        self.residency.collect(wait=True)
        told: list[reports.LoggedReport] = [*self._told]
        self._told.clear()
        return told

    def inventory(self) -> reports.EngineInventory:
        """What is held, and what can be."""
        return reports.EngineInventory(
            engine_id="in process",
            pid=0,
            model="",
            slots_max=len(self.residency.residents),
            device_bytes_max=self.residency.arena.capacity_bytes,
            adapters=self.residency.inventory(),
        )

    def set_mapping(self, mapping: LoRAMapping) -> bool:
        """Have the next forwards use it in its part of the model; False where nothing changed.

        Raises `NotResident`, and `ValueError` for a part whose layers are not wrapped.
        """
        if mapping.type not in self._punicas:
            raise ValueError(
                f"a mapping for a {mapping.type.value}, where nothing is wrapped; that takes an "
                "image-text model and enable_tower_connector_lora"
            )
        changed = self._punicas[mapping.type].update_metadata(mapping, self.lora_index_to_id)
        self._mappings[mapping.type] = mapping
        self._homeless.pop(mapping.type, None)
        return changed

    def follow_slots(self) -> None:
        """Have the mappings that are set mean the same adapters, wherever they are now."""
        for part, mapping in self._mappings.items():
            punica = self._punicas[part]
            try:
                punica.update_metadata(mapping, self.lora_index_to_id)
                self._homeless.pop(part, None)
            except NotResident as error:
                self._homeless[part] = error
                # Who calls a layer by itself passes by the hooks; it has nobody's weights then.
                nothing = LoRAMapping([], [], type=part)
                punica.update_metadata(nothing, self.lora_index_to_id)

    def close(self) -> None:
        """Wait for copies that run, and end their thread."""
        self.residency.close()

    def _checking(self, *parts: MappingType) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """What fails a forward whose mapping outlived its slots, in one of these parts."""

        def check(_model: nn.Module, _arguments: tuple[Any, ...]) -> None:
            for part in parts:
                if part in self._homeless:
                    raise NotResident(f"{self._homeless[part]}, or set another mapping")

        return check

    def _take_offer(self, command: commands.CheckAdapter | commands.LoadWeights) -> LoadedAdapter:
        if self._offer is None:
            raise UnknownAdapter(f"adapter {command.adapter} is not on the host; add it first")
        return self._offer


def highest_bytes(shapes: Sequence[ModuleShape], lora_config: LoRAConfig) -> int:
    """What an adapter of the highest rank on every module takes on the device."""
    ranks = {
        shape.name: 1 if shape.kind is ModuleKind.HEAD else lora_config.max_lora_rank
        for shape in shapes
    }
    return blob_bytes(ranks, shapes, lora_config.dtype)
