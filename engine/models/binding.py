"""The arena and batch metadata of a model that serves adapters, made and bound in one place.

The engine process and the in-process manager both call `bind_lora`, so that one configuration has
the same meaning in both.
"""

from collections import Counter
from typing import Any, Final, NamedTuple

import torch

from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import DEFAULTS, choose_kernels
from loradock.engine.layout import rank_parts_max
from loradock.engine.models.fusing import fuse
from loradock.engine.models.image_part import IMAGE_PARTS, ImagePunicaWrapper
from loradock.engine.models.served_model import ServedModel
from loradock.engine.punica.side_stream import SideStream
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.copier import CollectiveCopier, copier_for

PACKED_BYTES_MIN: Final = 64 << 20
"""The least bytes of weights that are packed: smaller models stay in the processor's caches."""


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
    kernels = choose_kernels(model.device.type, batch_invariant=config.batch_invariant)
    copier = copier_for(model.device)
    if not model.group.is_trivial:
        copier = CollectiveCopier(copier, model.group)
    max_loras, dtype = config.max_loras, config.dtype
    arena = Arena(max_loras, model.shapes, device_bytes_max, dtype, model.device, copier)
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
    if kernels.fused is not None:
        model.fused = fuse(model.model, kernels.fused)
    if not config.batch_invariant and _packs_weights(model):
        _pack_weights(model)
    return BoundRuntime(arena, punica, config)


def _packs_weights(model: ServedModel) -> bool:
    """Return whether rank 0's part of the model is large enough.

    Ranks that chose by their own parts would round differently what all of them compute, and
    routers could choose other experts on one rank than on the next.
    """
    is_large = sum(tensor.nbytes for tensor in model.model.parameters()) >= PACKED_BYTES_MIN
    return bool(model.group.broadcast_bytes(b"packed" if is_large else b""))


def _pack_weights(model: ServedModel) -> None:
    """Pack the weights of the base layers' products, for a processor that gains from it.

    A weight that several layers read, as a head that is tied to the embedding does, stays.
    """
    readers = Counter(
        id(parameter)
        for module in model.model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    for layer in model.layers.values():
        layer.pack_weights(lambda weight: readers[id(weight)] > 1)


def kernels_for(device: torch.device) -> str:
    """Return the name of the kernels that `bind_lora` chooses on a device."""
    return DEFAULTS[device.type]
