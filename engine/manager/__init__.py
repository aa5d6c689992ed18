"""LoRA managers for a program that holds its model itself; these names are stable."""

from typing import Any

import torch
from torch import nn

from loradock.engine.config import LoRAConfig
from loradock.engine.manager.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from loradock.engine.manager.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

__all__ = [
    "LRUCacheLoRAModelManager",
    "LRUCacheWorkerLoRAManager",
    "LoRAModelManager",
    "WorkerLoRAManager",
    "create_lora_manager",
]


def create_lora_manager(  # noqa: PLR0913, PLR0917 - the signature of vLLM
    model: nn.Module,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    lora_config: LoRAConfig,
    vllm_config: object = None,
    device: torch.device | str = "cpu",
    lora_manager_cls: type[LoRAModelManager] = LoRAModelManager,
    **options: Any,
) -> LoRAModelManager:
    """Return a manager of class `lora_manager_cls`; `options` are passed to its constructor.

    The order is vLLM's, in which `vllm_config`, which may be None, comes before `device`. Raises
    `TypeError` for a device in its place.
    """
    if isinstance(vllm_config, torch.device | str):
        raise TypeError(f"vllm_config is {vllm_config!r}; pass the device as device=")
    sizes = (max_num_seqs, max_num_batched_tokens, vocab_size)
    return lora_manager_cls(model, *sizes, lora_config, device, vllm_config, **options)
