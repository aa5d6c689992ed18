"""The arena and batch metadata of a model that serves adapters, made and bound in one place.

The engine process and the in-process manager both call `bind_lora`, so that one configuration has
the same meaning in both.
"""

from typing import Any, NamedTuple

import torch

from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import (
    CALIBRATED_BYTES_MIN,
    DEFAULTS,
    Calibration,
    calibration,
    choose_kernels,
    decode_calibration,
    encode_calibration,
    fastest_linear,
    fastest_ways,
)
from loradock.engine.kernels.interface import Kernels
from loradock.engine.layout import rank_parts_max
from loradock.engine.models.quantization import is_quantized
from loradock.engine.models.served_model import ServedModel
from loradock.engine.models.vision.mapping import IMAGE_PARTS, ImagePunicaWrapper
from loradock.engine.punica.side_stream import SideStream
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.copier import CollectiveCopier, copier_for


class BoundRuntime(NamedTuple):
    """The arena and metadata that a model's layers are bound to.

    `lora_config` has its dtype resolved.
    """

    arena: Arena
    punica: PunicaWrapper
    lora_config: LoRAConfig


def bind_lora(model: ServedModel, lora_config: LoRAConfig, device_bytes_max: int) -> BoundRuntime:
    """Make the arena and wrappers that the configuration specifies, and bind the model's layers.

    Raises `ValueError` for settings that this model's dtype, device or ranks do not allow, and
    `DeviceOutOfMemory`.
    """
    lora_config.verify_with_device(model.device)
    config = lora_config.resolved_for(model)
    ranks = rank_parts_max(model.shapes)
    if config.max_lora_rank % ranks:
        raise ValueError(
            f"with fully_sharded_loras, max_lora_rank {config.max_lora_rank} can't be shared "
            f"evenly by {ranks} ranks; set a multiple of {ranks}"
        )
    kernels = _kernels_of(model, config)
    copier = copier_for(model.device)
    if not model.group.is_trivial:
        copier = CollectiveCopier(copier, model.group)
    slots_max, dtype = config.max_loras, config.dtype
    arena = Arena(slots_max, model.shapes, device_bytes_max, dtype, model.device, copier)
    options: dict[str, Any] = {
        "has_saved_layers": arena.has_saved_layers,
        "specialize_active": config.specialize_active_lora,
        "concurrent": SideStream(model.device) if config.dual_stream else None,
    }
    punica = PunicaWrapper(model.device, config.max_lora_rank, kernels, **options)
    image_punicas = {
        part: ImagePunicaWrapper(model.device, config.max_lora_rank, kernels, **options)
        for part in IMAGE_PARTS
        if config.enable_tower_connector_lora
    }
    model.bind(arena, punica, image_punicas)
    return BoundRuntime(arena, punica, config)


def _kernels_of(model: ServedModel, config: LoRAConfig) -> Kernels:
    """Return the kernels of a device, calibrated for this machine where it pays."""
    device = model.device.type
    is_calibrated = device == "cpu" and not config.batch_invariant
    measured = _calibration_of_all_ranks(model) if is_calibrated else None
    if measured is None:
        return choose_kernels(device, batch_invariant=config.batch_invariant)
    kernels = choose_kernels(device, costs=measured.costs)
    if is_quantized(model.model):
        return kernels
    return kernels._replace(base_linear=fastest_linear(fastest_ways(measured.products.float32)))


def _calibration_of_all_ranks(model: ServedModel) -> Calibration | None:
    """Return the constants of rank 0; None for a small model.

    Ranks that chose by their own would round differently what all of them compute, and routers
    could choose other experts on one rank than on the next.
    """
    weight_bytes = sum(tensor.nbytes for tensor in model.model.parameters())
    is_measured = model.group.is_leader and weight_bytes >= CALIBRATED_BYTES_MIN
    data = model.group.broadcast_bytes(encode_calibration(calibration()) if is_measured else b"")
    return decode_calibration(data) if data else None


def kernels_for(device: torch.device) -> str:
    """Return the name of the kernels that `bind_lora` chooses on a device."""
    return DEFAULTS[device.type]
