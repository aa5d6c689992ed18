"""A model, adapters and expected logits for the manager's tests.

The adapters differ in rank, scaling and modules, and exist in memory and as files. The expected
logits are computed by plain PyTorch, without the engine's code.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from loradock.engine.adapters import LoRALayerWeights, LoRAModel
from loradock.engine.config import LoRAConfig
from loradock.engine.manager import LoRAModelManager, LRUCacheLoRAModelManager, create_lora_manager
from loradock.engine.punica import LoRAMapping

VOCABULARY = 31
PROMPT = (3, 1, 4, 1, 5)
ERROR_MAX = 1e-5
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    tie_word_embeddings=False,
    initializer_range=0.3,
)
LAYER = "model.layers.0."
CLASSES = (LoRAModelManager, LRUCacheLoRAModelManager)
ATTENTION = [f"{LAYER}self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")]


@dataclass(frozen=True)
class Content:
    """The weights of one adapter, generated from its seed."""

    seed: int
    rank: int
    alpha: float
    modules: tuple[str, ...]

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B by module, as PEFT saves them."""
        generator = torch.Generator().manual_seed(self.seed)
        widths = {
            name: module.weight.shape
            for name, module in base().named_modules()
            if name in self.modules
        }
        return {
            name: (
                torch.randn(self.rank, widths[name][1], generator=generator) / 2,
                torch.randn(widths[name][0], self.rank, generator=generator) / 2,
            )
            for name in self.modules
        }

    def model(self, adapter_id: int) -> LoRAModel:
        """Return the adapter as a model in memory."""
        loras = {
            name: LoRALayerWeights(name, self.rank, self.alpha, a, b)
            for name, (a, b) in self.pairs().items()
        }
        return LoRAModel(adapter_id, self.rank, loras)

    def save(self, directory: Path) -> Path:
        """Write the adapter's files."""
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": [name.rpartition(".")[2] for name in self.modules],
            "bias": "none",
        }
        tensors = {
            f"base_model.model.{name}.lora_{letter}.weight": tensor
            for name, pair in self.pairs().items()
            for letter, tensor in zip("AB", pair, strict=True)
        }
        # Under another name first, as files that may be in use are replaced.
        save_file(tensors, directory / "new")
        (directory / "new").rename(directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text(json.dumps(config))
        return directory


CONTENTS = (
    Content(11, 4, 8, (*ATTENTION, *MLP)),
    Content(12, 1, 3, tuple(ATTENTION)),
    Content(13, 8, 4, tuple(MLP)),
    Content(14, 3, 6, (ATTENTION[3], MLP[1])),
)


@cache
def base() -> LlamaForCausalLM:
    """Return the base model, whose layers are never wrapped."""
    torch.manual_seed(5)
    return LlamaForCausalLM(CONFIG).eval()


@cache
@torch.no_grad()
def logits_of(content: Content | None) -> Tensor:
    """Return the prompt's logits of the base model with the delta added to its weights."""
    model = LlamaForCausalLM(CONFIG).eval()
    model.load_state_dict(base().state_dict())
    if content is not None:
        for name, (a, b) in content.pairs().items():
            model.get_submodule(name).weight += content.scaling * (b @ a)
    return model(torch.tensor([PROMPT])).logits[0]


def make_manager(
    cls: type[LoRAModelManager],
    slots: int = 2,
    capacity: int = 3,
    lora_dtype: str = "auto",
    **options: object,
) -> LoRAModelManager:
    """Return a manager of a copy of the base model."""
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(base().state_dict())
    config = LoRAConfig(8, slots, False, capacity, lora_dtype)
    return create_lora_manager(
        model, 16, 256, VOCABULARY, config, None, "cpu", cls, checked=True, **options
    )


def mapping_of(*adapter_ids: int) -> LoRAMapping:
    """Return the mapping of a batch in which each id has one row, with the prompt."""
    index = [adapter_id for adapter_id in adapter_ids for _ in PROMPT]
    return LoRAMapping(index, adapter_ids, is_prefill=True)


class RefilledBuffers:
    """Mappings from one pair of int64 buffers that are reused for each, as servers do."""

    def __init__(self, kind: Callable[[int], Any], rows_max: int) -> None:
        self._index = kind(rows_max * len(PROMPT))
        self._prompts = kind(rows_max)

    def mapping_of(self, *adapter_ids: int) -> LoRAMapping:
        """Return the same as the function of this name."""
        index, prompts = self._index[: len(adapter_ids) * len(PROMPT)], self._prompts
        for row, adapter_id in enumerate(adapter_ids):
            prompts[row] = adapter_id
            index[row * len(PROMPT) : (row + 1) * len(PROMPT)] = adapter_id
        return LoRAMapping(index, prompts[: len(adapter_ids)], is_prefill=True)


@torch.no_grad()
def forward(manager: LoRAModelManager, rows: int) -> Tensor:
    """Return the prompt's logits in `rows` rows, [rows, tokens, vocabulary]."""
    return manager.model(torch.tensor([PROMPT] * rows)).logits


def check_rows(manager: LoRAModelManager, contents: Mapping[int, Content], *ids: int) -> None:
    """Assert that each row of the current mapping has the logits of its adapter's content."""
    for adapter_id, found in zip(ids, forward(manager, len(ids)), strict=True):
        expected = logits_of(contents[adapter_id] if adapter_id else None)
        error = float((found - expected).norm() / expected.norm())
        assert error < ERROR_MAX, f"rows of adapter {adapter_id} are off by {error:.1e}"


def manager_state(manager: LoRAModelManager) -> object:
    """Return everything that a refused call must not change."""
    pinned = [adapter_id for adapter_id in manager.adapter_ids if manager.is_pinned(adapter_id)]
    memory = manager.get_lora_metrics()["memory"]
    return manager.adapter_ids, manager.lora_index_to_id, pinned, memory


def full_manager(
    cls: type[LoRAModelManager], slots: int = 2, capacity: int = 2
) -> LoRAModelManager:
    """Return a manager with adapters 1 to `capacity`, of which the first `slots` are in slots."""
    manager = make_manager(cls, slots, capacity)
    for adapter_id in range(1, capacity + 1):
        manager.add_adapter(CONTENTS[adapter_id - 1].model(adapter_id))
        if adapter_id <= slots:
            manager.activate_adapter(adapter_id)
    return manager
