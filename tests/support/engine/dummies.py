"""Models of every kind for dummy adapters, and a run of one with a dummy in a slot.

A model that is divided among ranks is divided before its manager is created, as in an engine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from loradock.engine.config import LoRAConfig
from loradock.engine.layout import columns_of_one_adapter
from loradock.engine.manager import LRUCacheLoRAModelManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.models.expert_adapters import make_model
from tests.support.models.expert_examples import SERVED_FAMILIES
from tests.support.models.pooling_examples import CLASSIFIERS, EMBEDDERS
from tests.support.parallel import models

RANK_MAX = 8
TEXTS = ((5, 6, 7, 8), (9, 8, 7, 6), (40, 41, 42, 43))
OF_ROW = (7, 0, 7)
"""The adapter of each row: the dummy, the base model, the dummy."""

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: models.build("llama"),
    **{family: (lambda family=family: make_model(family)) for family in SERVED_FAMILIES},
    **{f"embed-{example.name}": example.make for example in EMBEDDERS},
    **{f"classify-{example.name}": example.make for example in CLASSIFIERS},
}


@torch.no_grad()
def run_dummy(model: PreTrainedModel, config: LoRAConfig, default_rank: int) -> dict[str, Any]:
    """Run a dummy in a slot next to the base model; return its output's error, and its sizes."""
    tokens = torch.tensor(TEXTS)
    before = output_of(model, tokens).clone()
    manager = LRUCacheLoRAModelManager(model, len(TEXTS), tokens.numel(), 64, config, "cpu")
    rank = manager.get_dummy_lora_warmup_rank(default_rank)
    dummy = manager.create_dummy_lora(7, rank)
    manager.add_adapter(dummy)
    manager.activate_adapter(7)
    ids = torch.tensor(OF_ROW)
    mapping = LoRAMapping(ids.repeat_interleave(tokens.shape[1]), ids, is_prefill=True)
    manager.set_adapter_mapping(mapping)
    after = output_of(manager.model, tokens)
    memory = manager.get_lora_metrics()["memory"]
    fillable = columns_of_one_adapter(manager.adapter_target.modules.values())
    found = {
        "rank": rank,
        "error": relative_error(after, before),
        "untouched": sorted({shape.name for shape in fillable} - dummy.loras.keys()),
        "kinds": sorted({lora.kind.value for lora in dummy.loras.values()}),
        "device_bytes": memory["adapters"][7]["device_bytes"],
        "room_bytes": memory["device"]["size_bytes"],
    }
    manager.close()
    return found


def output_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    output: Any = model(input_ids=tokens)
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits
