"""The manager with models that embed or classify."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from loradock.engine.adapters import LoRARequest
from loradock.engine.config import LoRAConfig
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.models.pooling_examples import (
    CLASSIFIERS,
    EMBEDDERS,
    VOCABULARY,
    PoolingExample,
    save_adapters,
)

TEXTS = ((5, 6, 7), (9, 8, 7), (40, 41, 42))
NAMES = (None, "wide", "narrow")
EXAMPLES = [*EMBEDDERS, *CLASSIFIERS]


def result(output: object) -> Tensor:
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def manager_of(example: PoolingExample) -> LRUCacheLoRAModelManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=2)
    return LRUCacheLoRAModelManager(example.make(), 4, 64, VOCABULARY, config, "cpu")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.make().__class__.__name__)
@torch.no_grad()
def test_a_batch_of_adapters_and_the_base_is_pefts(example: PoolingExample, tmp_path: Path) -> None:
    models = {None: example.make(), **save_adapters(example, tmp_path)}
    manager = manager_of(example)
    worker = LRUCacheWorkerLoRAManager(manager)
    requested = [
        LoRARequest(name, at, str(tmp_path / name)) for at, name in enumerate(NAMES) if name
    ]
    tokens = [at for at in range(len(NAMES)) for _ in TEXTS[at]]
    worker.set_active_adapters(requested, LoRAMapping(tokens, range(len(NAMES)), is_prefill=True))
    found = result(manager.model(input_ids=torch.tensor(TEXTS)))
    for row, name in enumerate(NAMES):
        alone = result(models[name](input_ids=torch.tensor(TEXTS[row : row + 1])))[0]
        assert relative_error(found[row], alone) < 1e-5, name
