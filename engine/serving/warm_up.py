"""Compilation of every LoRA kernel that serving can launch, before the first request.

A kernel is compiled for the regime of a batch and for each layer's sizes, so the model runs one
small batch for each regime. Its rows use adapters in empty slots, whose deltas are nothing.
"""

import time
from typing import Final

import structlog
import torch

from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.punica.mapping import LoRAMapping
from loradock.engine.punica.wrapper import PunicaWrapper

_log = structlog.get_logger()

TOKENS_MAX: Final = 8192
"""The tokens of the largest step; a regime that begins above it is compiled at its first use."""


def warm_up(
    model: CausalModel | PoolingModel, punica: PunicaWrapper, max_loras: int, max_num_seqs: int
) -> None:
    """Run the model once for each regime, if the kernels are compiled."""
    batches = punica.batches_to_compile(TOKENS_MAX, max_loras)
    before = time.monotonic()
    for tokens, adapters in batches:
        width = 1 if tokens <= max_num_seqs else min(tokens, model.max_model_len)
        _run(model, punica, (-(-tokens // width), width), adapters, max_loras)
    if batches:
        took_s = round(time.monotonic() - before, 3)
        _log.info(
            "the kernels are compiled", batches=len(batches), fused=model.fused, took_s=took_s
        )


def _run(
    model: CausalModel | PoolingModel,
    punica: PunicaWrapper,
    shape: tuple[int, int],
    adapters: int,
    max_loras: int,
) -> None:
    """Run prompts of zeros [rows, columns]; neighbours use different adapters."""
    rows, columns = shape
    ids = [1 + row % adapters for row in range(rows)]
    tokens = [id_ for id_ in ids for _ in range(columns)]
    residents = [*range(1, adapters + 1), *[None] * (max_loras - adapters)]
    punica.update_metadata(LoRAMapping(tokens, ids, columns > 1), residents)
    if isinstance(model, PoolingModel):
        model.forward([[0] * columns] * rows)
        return
    cache = BatchKVCache([0] * rows)
    cache.lengths = [columns] * rows
    model.forward(torch.zeros(rows, columns, dtype=torch.int64), cache)
