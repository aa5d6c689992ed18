"""LoRA in a program of one's own: the managers, under the names by which they are known.

What it is: the way in for people who embed. What it is not: code of its own; `model_manager` keeps
adapters, `worker_manager` makes batches ready from requests. One rule: these names stay.
"""

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


def create_lora_manager(  # noqa: PLR0913, PLR0917 - a signature that people know
    model: PreTrainedModel,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    lora_config: LoRAConfig,
    device: torch.device | str,
    lora_manager_cls: type[LoRAModelManager] = LoRAModelManager,
    **options: Any,
) -> LoRAModelManager:
    """A manager of this class; `options` as its constructor takes them."""
    return lora_manager_cls(
        model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, device, **options
    )
