"""The runs that compile kernels before the first request: of every kind of model, every regime."""

from typing import Any

import pytest
import torch
from torch import Tensor

from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.gpu.operations import TritonOperations
from loradock.engine.kernels.gpu.tile_configs import experts_regime_of
from loradock.engine.kernels.operands import Groups
from loradock.engine.layers.experts import ExpertsWithLoRA
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.serving import warm_up as warming
from loradock.engine.serving.warm_up import warm_up
from tests.support.models.causal_configs import build_model
from tests.support.models.common_fields import POSITIONS

RANK_MAX, MAX_LORAS = 8, 2
REFERENCE, OPERATIONS = choose_kernels("cpu", "reference"), TritonOperations(False)

BATCHINGS = {"qwen3": "padded", "lfm2": "together", "mamba2": "together", "mamba": "single"}


def prepared(model_type: str, **kernels: Any) -> tuple[CausalModel, PunicaWrapper]:
    """Return a model and its wrapper, whose kernels are the reference's but for `kernels`."""
    config = LoRAConfig(max_lora_rank=RANK_MAX, max_loras=MAX_LORAS)
    model = CausalModel(build_model(model_type), config, max_model_len=POSITIONS)
    arena = Arena(MAX_LORAS, model.shapes, 1 << 20, torch.float32, model.device)
    all_kernels = REFERENCE._replace(variant_of=OPERATIONS.variant_of, **kernels)
    punica = PunicaWrapper(model.device, RANK_MAX, all_kernels)
    model.bind(arena, punica)
    return model, punica


@pytest.mark.parametrize("model_type", BATCHINGS)
def test_every_regime_is_launched_however_the_models_rows_are_run(model_type: str) -> None:
    """The reference computes, in place of kernels that are compiled for a regime."""
    launched = set()

    def linear(y: Any, x: Any, slices: Any, groups: Groups) -> None:
        launched.add(OPERATIONS.variant_of(groups.bounds))
        REFERENCE.linear(y, x, slices, groups)

    model, punica = prepared(model_type, linear=linear)
    assert model.batching == BATCHINGS[model_type]
    batches = punica.batches_to_compile(POSITIONS, MAX_LORAS)
    variants = {
        OPERATIONS.variant_of(punica.grouper.bounds_of(*batch, MAX_LORAS)) for batch in batches
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


def test_both_regimes_of_experts_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bounds are of pairs: the second begins at other numbers of tokens than that of rows."""
    monkeypatch.setattr(warming, "TOKENS_MAX", 256)
    launched = set()

    def experts(ys: Any, x: Any, slices: Any, groups: ExpertGroups) -> None:
        launched.add(experts_regime_of(groups.bounds))
        REFERENCE.experts(ys, x, slices, groups)

    model, punica = prepared("qwen3_moe", experts=experts)
    for layer in model.layers.values():
        if isinstance(layer, ExpertsWithLoRA):
            # Without weights nothing is launched on a CPU.
            by_name = {one.name.rpartition(".")[2]: one for one in layer.slice_shapes}
            shapes = [by_name[f"{name}_proj"] for name in ("gate", "down", "up")]
            a = [torch.zeros(one.experts, 1, one.in_features) for one in shapes]
            layer.set_lora(0, a, [torch.zeros(one.experts, one.out_features, 1) for one in shapes])
    warm_up(model, punica, MAX_LORAS, max_num_seqs=16)
    assert launched == {"decode", "prefill"}
