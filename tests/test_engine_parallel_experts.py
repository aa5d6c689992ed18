"""World sizes 1 and 2 give the same outputs for experts, shared by columns or by experts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig, LoRAConfig
from engine.errors import ModelRefused
from engine.model import load_model
from engine.parallel import ParallelGroup
from tests.expert_adapters import PER_EXPERT, make_model, save_fused, save_per_expert
from tests.expert_examples import MODULES
from tests.ranks import Ranks, ranks

ERROR_MAX = 1e-5
SHARES = pytest.mark.parametrize("by_expert", [False, True], ids=["tensor", "expert"])
FORMATS = pytest.mark.parametrize("is_mixed", [False, True], ids=["3-D", "mixed"])


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with ranks("tests.parallel_experts") as started:
        yield started


@SHARES
@FORMATS
@pytest.mark.parametrize("family", MODULES)
def test_two_ranks_compute_as_one(
    pair: Ranks, family: str, by_expert: bool, is_mixed: bool
) -> None:
    for found in pair.run("layer", family=family, by_expert=by_expert, is_mixed=is_mixed):
        assert max(found["errors"]) < ERROR_MAX
        assert found["kept"] < found["every"]
        assert found["left"] == 0


@SHARES
@FORMATS
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_two_ranks_answer_as_one_with_what_each_read(
    pair: Ranks, family: str, by_expert: bool, is_mixed: bool, tmp_path: Path
) -> None:
    save_fused(family, tmp_path)
    if is_mixed:
        assert family in PER_EXPERT
        save_per_expert(family, tmp_path / "per_expert")
    given = {"family": family, "by_expert": by_expert, "is_mixed": is_mixed, "root": str(tmp_path)}
    assert max(found["error"] for found in pair.run("model", **given)) < ERROR_MAX


def test_what_can_not_be_shared_evenly_is_refused(pair: Ranks) -> None:
    for said in pair.run("refusals"):
        assert len(said) == 3
        assert "experts 3 can't be shared evenly by 2 ranks" in said[0]
        assert "expert columns 3 can't be shared evenly by 2 ranks" in said[1]
        assert "mlp.experts: experts 3 can't be shared evenly" in said[2]


def test_whole_experts_and_fully_sharded_adapters_are_refused_together(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make_model("mixtral").save_pretrained(directory)
    config = EngineConfig(directory, device="cpu", expert_parallel=True)
    lora_config = LoRAConfig(fully_sharded_loras=True)
    with pytest.raises(ModelRefused, match="expert_parallel and fully_sharded_loras"):
        load_model(config, lora_config, ParallelGroup(0, 2))
