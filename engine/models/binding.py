"""What a prepared model needs beside it to serve adapters: kernels, an arena, a batch's metadata.

What it is: the one place where the three are made and bound. What it is not: a holder of adapters
(`residency`). One rule: whoever serves a model, over a socket or in process, has it equipped here,
so that a configuration means the same everywhere.
"""

from typing import Any, NamedTuple

from engine.config import LoRAConfig
from engine.kernels import choose_kernels
from engine.layout import rank_parts_of
from engine.models.served_model import ServedModel
from engine.models.vision.mapping import IMAGE_PARTS, ImagePunicaWrapper
from engine.punica.side_stream import SecondStream
from engine.punica.wrapper import PunicaWrapper
from engine.residency.arena import Arena
from engine.residency.collective_copier import AgreedCopier
from engine.residency.copier import copier_for


class Equipment(NamedTuple):
    """`lora_config` has its dtype resolved."""

    arena: Arena
    punica: PunicaWrapper
    lora_config: LoRAConfig


def equip(model: ServedModel, lora_config: LoRAConfig, device_bytes_max: int) -> Equipment:
    """Make what the configuration asks for, and bind the model's layers to it.

    Raises `ValueError` for what this model's dtype, device or ranks can't do, and
    `DeviceOutOfMemory`.
    """
    lora_config.verify_with_device(model.device)
    config = lora_config.verify_with_model_config(model.model)
    parts = rank_parts_of(model.shapes)
    if config.max_lora_rank % parts:
        raise ValueError(
            f"with fully_sharded_loras, max_lora_rank {config.max_lora_rank} can't be shared "
            f"evenly by {parts} ranks"
        )
    kernels = choose_kernels(model.device.type, batch_invariant=config.batch_invariant)
    copier = copier_for(model.device)
    if not model.group.is_single:
        copier = AgreedCopier(copier, model.group)
    slots_max, dtype = config.max_loras, config.dtype
    arena = Arena(slots_max, model.shapes, device_bytes_max, dtype, model.device, copier)
    options: dict[str, Any] = {
        "specialize_active": config.specialize_active_lora,
        "beside": SecondStream(model.device) if config.dual_stream else None,
    }
    punica = PunicaWrapper(model.device, config.max_lora_rank, kernels, **options)
    image_punicas = {
        part: ImagePunicaWrapper(model.device, config.max_lora_rank, kernels, **options)
        for part in IMAGE_PARTS
        if config.enable_tower_connector_lora
    }
    model.bind(arena, punica, image_punicas)
    return Equipment(arena, punica, config)
