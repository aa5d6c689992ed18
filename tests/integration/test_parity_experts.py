"""The engine's logits are PEFT's for every family of mixtures of experts, in mixed batches.

A batch contains rows of the base and of adapters of gate_up only, of down only, and of both with
attention and the router, at unequal ranks, and of adapters per expert, in both modes.
"""

from pathlib import Path

import pytest
import torch

from loradock.engine.config import LoRAConfig
from loradock.engine.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA, RouterWithLoRA
from loradock.engine.models.causal_model import CausalModel
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.parity_bench import ParityBench, PeftReference
from tests.support.models.expert_adapters import PER_EXPERT, make_model, save_fused, save_per_expert
from tests.support.models.expert_examples import SERVED_FAMILIES

pytest_plugins = ("tests.support.engine.engine_fixtures",)

ERROR_MAX = 1e-5
PROMPTS = ((3, 1, 44), (1, 2, 3, 4, 5, 6, 7, 8, 9), (20,))


def prepare(family: str, is_mixed: bool) -> CausalModel:
    config = LoRAConfig(max_lora_rank=16, max_loras=4, enable_mixed_moe_lora_format=is_mixed)
    return CausalModel(make_model(family), config)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["3-D", "mixed"])
@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_a_mixed_batch_matches_peft(family: str, is_mixed: bool, tmp_path: Path) -> None:
    models = save_fused(family, tmp_path)
    if family in PER_EXPERT:
        models["per_expert"] = save_per_expert(family, tmp_path / "per_expert")
    bench = ParityBench(prepare(family, is_mixed), tmp_path, len(models), 1 << 22)
    for slot, name in enumerate(models):
        bench.write(slot, name)
    reference = PeftReference(models)
    rows = [(name, prompt) for prompt in PROMPTS for name in (None, *models)]
    expected = torch.stack([reference.logits(*row) for row in rows])
    for row, found, wanted in zip(rows, bench.logits(rows), expected, strict=True):
        assert relative_error(found, wanted) < ERROR_MAX, row
    longest = expected[len(models) + 1 : 2 * len(models) + 2].double()
    assert (torch.pdist(longest) > 1e-2 * longest.norm(dim=1).max()).all(), "adapters are alike"


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_experts_and_routers_are_wrapped(family: str) -> None:
    layers = prepare(family, is_mixed=False).layers
    router = "router" if family == "gpt_oss" else "gate"
    assert isinstance(layers["model.layers.1.mlp.experts"], FusedMoE3DWithLoRA)
    assert isinstance(layers[f"model.layers.1.mlp.{router}"], RouterWithLoRA)
    mixed = prepare(family, is_mixed=True).layers
    assert isinstance(mixed["model.layers.1.mlp.experts"], FusedMoEWithLoRA)
    assert ("model.layers.0.mlp.experts" in mixed) is not family.startswith("deepseek")
