"""Compilation of every LoRA kernel that serving can launch, before the first request.

A kernel is compiled for the regime of a batch and for each layer's sizes, so the model runs one
small batch for each regime. Its rows use adapters in empty slots, whose deltas are nothing.
"""

import time
from collections.abc import Iterator
from typing import Final

import structlog
import torch

from loradock.engine.models.causal_model import CausalModel
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
    batches = punica.batches_to_compile(TOKENS_MAX, max_loras, has_experts=model.has_experts)
    before = time.monotonic()
    for tokens, adapters in batches:
        for shape in _shapes_of(model, tokens, max_num_seqs):
            _run(model, punica, shape, adapters, max_loras)
    if batches:
        took_s = round(time.monotonic() - before, 3)
        _log.info(
            "the kernels are compiled", batches=len(batches), fused=model.fused, took_s=took_s
        )


def _shapes_of(
    model: CausalModel | PoolingModel, tokens: int, max_num_seqs: int
) -> Iterator[tuple[int, int]]:
    """Yield the batches [rows, columns] in which a model computes this number of tokens at once."""
    columns = min(tokens, model.max_model_len)
    if isinstance(model, PoolingModel) or model.batching == "padded":
        columns = 1 if tokens <= max_num_seqs else columns
        yield -(-tokens // columns), columns
        return
    # A prompt is run alone.
    yield 1, columns
    if model.batching == "together" and tokens <= max_num_seqs:
        yield tokens, 1


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
    cache, zeros = model.new_cache([columns] * rows), torch.zeros(shape, dtype=torch.int64)
    model.forward(zeros, cache)
    if model.batching == "together" and columns == 1:
        # The first tokens of rows are computed one by one, and those after them together.
        cache.grow(1)
        model.forward(zeros, cache)
