"""Adapters with random weights that PEFT makes and saves."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

_A_OR_B: Final = re.compile(r"lora_(embedding_)?[AB]\.\w+(\.weight)?$")


def save_adapter(
    model: nn.Module,
    directory: Path,
    seed: int,
    *,
    train: Callable[[Tensor], object] | None = None,
    save: Mapping[str, Any] | None = None,
    **fields: Any,
) -> PeftModel:
    """Save an adapter with random A and B; return PEFT's model, which has `model`'s modules.

    `train`: changes each other trained parameter in place. `save`: arguments of `save_pretrained`.
    `fields`: those of the config.
    """
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(init_lora_weights=False, **fields)).eval()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if train is not None and parameter.requires_grad and not _A_OR_B.search(name):
                train(parameter)
    # The random values leave the base unchanged, which is also the meaning of `True`.
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(directory, **save or {})
    return peft.requires_grad_(False)
