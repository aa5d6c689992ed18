"""Adapters, from untrusted files or tensors to weights that fit this model."""

from engine.adapters.expert_stacks import MoEEPLoadSpec
from engine.adapters.layer_weights import LoRALayerWeights, PackedLoRALayerWeights
from engine.adapters.lora_model import LoadedAdapter, LoRAModel, get_lora_id
from engine.adapters.lora_request import LoRARequest, get_adapter_absolute_path
from engine.adapters.peft_config import PEFTHelper
from engine.adapters.reader import read_adapter
from engine.adapters.weights_mapper import WeightsMapper

__all__ = [
    "LoRALayerWeights",
    "LoRAModel",
    "LoRARequest",
    "LoadedAdapter",
    "MoEEPLoadSpec",
    "PEFTHelper",
    "PackedLoRALayerWeights",
    "WeightsMapper",
    "get_adapter_absolute_path",
    "get_lora_id",
    "read_adapter",
]
