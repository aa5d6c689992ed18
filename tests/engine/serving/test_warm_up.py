"""The runs that compile kernels before the first request: of every kind of model, every regime."""

from typing import Any

import pytest
import torch
from torch import Tensor

from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.kernels.gpu.operations import TritonOperations
from loradock.engine.kernels.operands import Groups
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.serving.warm_up import warm_up
from tests.support.models.causal_configs import build_model
from tests.support.models.common_fields import POSITIONS

RANK_MAX, MAX_LORAS = 8, 2

BATCHINGS = {"qwen3": "padded", "lfm2": "together", "mamba2": "together", "mamba": "single"}


@pytest.mark.parametrize("model_type", BATCHINGS)
def test_every_regime_is_launched_however_the_models_rows_are_run(model_type: str) -> None:
    """The reference computes, in place of kernels that are compiled for a regime."""
    reference, operations = choose_kernels("cpu", "reference"), TritonOperations(False)
    launched = set()

    def linear(y: Any, x: Any, slices: Any, groups: Groups, scale: float) -> None:
        launched.add(operations.variant_of(groups.bounds))
        reference.linear(y, x, slices, groups, scale)

    config = LoRAConfig(max_lora_rank=RANK_MAX, max_loras=MAX_LORAS)
    model = CausalModel(build_model(model_type), config, max_model_len=POSITIONS)
    assert model.batching == BATCHINGS[model_type]
    arena = Arena(MAX_LORAS, model.shapes, 1 << 20, torch.float32, model.device)
    kernels = reference._replace(linear=linear, variant_of=operations.variant_of)
    punica = PunicaWrapper(model.device, RANK_MAX, kernels)
    model.bind(arena, punica)
    batches = punica.batches_to_compile(POSITIONS, MAX_LORAS)
    variants = {
        operations.variant_of(punica.grouper.bounds_of(*batch, MAX_LORAS)) for batch in batches
    }
    assert len(variants) == len(batches) > 2
    together, forward = [], model.forward

    def record(tokens: Tensor, cache: Any) -> Tensor:
        together.append(len(cache) > 1 and getattr(cache, "is_together", False))
        return forward(tokens, cache)

    model.forward = record
    warm_up(model, punica, MAX_LORAS, max_num_seqs=16)
    assert launched >= variants
    assert any(together) == (model.batching == "together")
