"""Adapters, from untrusted files or tensors to weights that fit this model."""

from loradock.engine.adapters.experts import MoEEPLoadSpec
from loradock.engine.adapters.layer_weights import LoRALayerWeights, PackedLoRALayerWeights
from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel, get_lora_id
from loradock.engine.adapters.lora_request import LoRARequest, get_adapter_absolute_path
from loradock.engine.adapters.peft_config import PEFTHelper
from loradock.engine.adapters.reader import read_adapter
from loradock.engine.adapters.target import WeightsMapper

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
