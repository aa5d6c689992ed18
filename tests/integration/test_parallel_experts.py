"""Experts compute the same outputs on one and two ranks, shared by columns or whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.models.loading import load_model
from loradock.engine.parallel import ParallelGroup
from tests.support.engine.parity_bench import PeftReference
from tests.support.models.expert_adapters import (
    GATE_UP,
    PER_EXPERT,
    fused_tensors,
    make_model,
    save_fused,
    save_per_expert,
    write,
)
from tests.support.models.expert_examples import (
    HIDDEN,
    IDENTITY_MODULES,
    INTER,
    MODULES,
    SERVED_FAMILIES,
    SPLIT_FAMILIES,
    TOP_K,
)
from tests.support.parallel import experts
from tests.support.parallel.experts import PROMPT, RANK_MAX, SCHEMES, SHARDED
from tests.support.parallel.ranks import Ranks

ERROR_MAX = 1e-5
SHARES = pytest.mark.parametrize("scheme", SCHEMES)
FORMATS = pytest.mark.parametrize("is_mixed", [False, True], ids=["3-D", "mixed"])


@SHARES
@FORMATS
@pytest.mark.parametrize("family", MODULES | IDENTITY_MODULES)
def test_two_ranks_compute_as_one(pair: Ranks, family: str, scheme: str, is_mixed: bool) -> None:
    for found in pair.run(experts.layer, family=family, scheme=scheme, is_mixed=is_mixed):
        assert max(found["errors"]) < ERROR_MAX
        assert found["left"] == 0
        if scheme == "tensor":
            assert sum(found["kept"]) < sum(found["every"])
        else:
            assert [2 * kept for kept in found["kept"]] == found["every"]


@FORMATS
@pytest.mark.parametrize("family", MODULES)
def test_ranks_exchange_alike_and_nothing_without_adapters(
    pair: Ranks, family: str, is_mixed: bool
) -> None:
    one, other = pair.run(experts.collectives, family=family, is_mixed=is_mixed)
    assert one == other
    tokens, pairs = 2, 2 * TOP_K
    final = ["sum", "torch.float32", tokens, HIDDEN]
    # Without mixed mode there are slices for gate and up together and for each of the two.
    slices = 1 if family == "nemotron_h" else 2 if is_mixed else 3
    gather = ["gather", "torch.float32", slices, pairs, RANK_MAX // 2]
    between = ["sum", "torch.float32", 1, pairs, RANK_MAX]
    assert one["base"] == one["nothing here"] == [0, [final]]
    assert one["up"] == one["down"] == [4, [gather, between, final]]


def adapters(family: str, is_mixed: bool, scheme: str, root: Path) -> None:
    """Save adapters below `root`, with PEFT's logits of each in `reference.safetensors`."""
    # With fully sharded adapters, two ranks must share every adapter's rank evenly.
    rank = 2 if scheme == SHARDED else 1
    models = save_fused(family, root / "adapters", rank)
    if is_mixed and family in PER_EXPERT:
        models["per_expert"] = save_per_expert(family, root / "adapters" / "per_expert", 2 + rank)
    reference = PeftReference(models)
    logits = [reference.logits(name, PROMPT) for name in (None, *sorted(models))]
    save_file({"logits": torch.stack(logits)}, root / "reference.safetensors")


@SHARES
@FORMATS
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_two_ranks_with_adapters_read_by_each_answer_as_one_and_as_peft(
    pair: Ranks, family: str, scheme: str, is_mixed: bool, tmp_path: Path
) -> None:
    adapters(family, is_mixed, scheme, tmp_path)
    arguments = {"family": family, "scheme": scheme, "is_mixed": is_mixed, "root": str(tmp_path)}
    wrapper = "FusedMoE" + ("" if is_mixed else "3D") + "With"
    for found in pair.run(experts.model, **arguments):
        assert found["error"] < ERROR_MAX
        assert max(found["errors"]) < ERROR_MAX
        assert wrapper + ("ShardedLoRA" if scheme == SHARDED else "LoRA") in found["kinds"]


DUMMIES = [(kind, scheme) for kind in ("qwen3_moe", "deepseek_v2") for scheme in SCHEMES] + [
    (kind, scheme)
    for kind in ("llama", "embed-qwen3", "classify-llama")
    for scheme in ("tensor", SHARDED)
]


@pytest.mark.parametrize(("kind", "scheme"), DUMMIES)
def test_a_dummy_adapter_runs_on_two_ranks(pair: Ranks, kind: str, scheme: str) -> None:
    has_experts = kind in SERVED_FAMILIES
    for is_mixed in (False, True)[: 1 + has_experts]:
        for found in pair.run(experts.dummy, kind=kind, scheme=scheme, is_mixed=is_mixed):
            assert found["rank"] == (RANK_MAX if scheme == SHARDED else RANK_MAX - 1)
            assert found["error"] < ERROR_MAX
            assert found["untouched"] == []
            assert (found["device_bytes"] == found["room_bytes"]) == (scheme == SHARDED)
            assert ("experts" in found["kinds"]) == has_experts


def test_a_rank_that_two_ranks_can_not_share_is_refused(pair: Ranks, tmp_path: Path) -> None:
    tensors = fused_tensors("model.layers.0.mlp.experts", HIDDEN, 2 * INTER, rank=3)
    write(tmp_path / "fused", tensors, {"r": 3, "target_parameters": [GATE_UP]})
    save_per_expert("qwen3_moe", tmp_path / "per_expert", 3)
    for errors in pair.run(experts.uneven, root=str(tmp_path)):
        assert len(errors) == 4
        assert all("has rank 3, which 2 ranks can't share evenly" in text for text in errors[:3])
        assert "mlp.experts.0.gate_proj" in errors[2]
        assert not any("without a tensor" in text for text in errors)
        assert "whole experts per rank" in errors[3]


def test_experts_that_can_not_be_shared_evenly_are_refused(pair: Ranks) -> None:
    for errors in pair.run(experts.refusals):
        assert len(errors) == 3
        assert "experts 3 can't be shared evenly by 2 ranks" in errors[0]
        assert "expert columns 3 can't be shared evenly by 2 ranks" in errors[1]
        assert "mlp.experts: experts 3 can't be shared evenly" in errors[2]


def test_whole_experts_and_fully_sharded_adapters_are_refused_together(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make_model("mixtral").save_pretrained(directory)
    config = EngineConfig(directory, device="cpu", expert_parallel=True)
    lora_config = LoRAConfig(fully_sharded_loras=True)
    with pytest.raises(ModelRefused, match="expert_parallel and fully_sharded_loras"):
        load_model(config, lora_config, ParallelGroup(0, 2))
