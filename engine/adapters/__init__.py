"""Adapters, from untrusted files or tensors to weights that fit this model."""

from engine.adapters.expert_stacks import MoEEPLoadSpec
from engine.adapters.lora_model import (
    LoRALayerWeights,
    LoRAModel,
    LoRARequest,
    PackedLoRALayerWeights,
)
from engine.adapters.peft_config import PEFTHelper
from engine.adapters.reader import LoadedAdapter, read_adapter

__all__ = [
    "LoRALayerWeights",
    "LoRAModel",
    "LoRARequest",
    "LoadedAdapter",
    "MoEEPLoadSpec",
    "PEFTHelper",
    "PackedLoRALayerWeights",
    "read_adapter",
]
