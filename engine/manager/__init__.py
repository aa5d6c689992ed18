"""LoRA managers for a program that holds its model itself; these names are stable."""

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.manager.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from engine.manager.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

__all__ = [
    "LRUCacheLoRAModelManager",
    "LRUCacheWorkerLoRAManager",
    "LoRAModelManager",
    "WorkerLoRAManager",
    "create_lora_manager",
]


def create_lora_manager(  # noqa: PLR0913, PLR0917 - the signature of vLLM
    model: PreTrainedModel,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    lora_config: LoRAConfig,
    device: torch.device | str,
    lora_manager_cls: type[LoRAModelManager] = LoRAModelManager,
    **options: Any,
) -> LoRAModelManager:
    """Return a manager of class `lora_manager_cls`; `options` are passed to its constructor."""
    return lora_manager_cls(
        model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, device, **options
    )
