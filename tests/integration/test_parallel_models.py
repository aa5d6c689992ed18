"""A model split over two ranks by its own plan answers as whole, or is refused with the reason."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.models.sharding import shard_model
from engine.parallel import ParallelGroup
from tests.support.parallel.models import build
from tests.support.parallel.ranks import Ranks, ranks

ERROR_MAX = 1e-5
MODELS = [
    *("llama", "llama-one-kv-head", "llama-tied", "qwen2", "qwen3", "gemma", "gemma3"),
    *("olmo2", "phi3", "gpt-neox"),
]
REFUSED = {
    "gpt2": "has no tensor-parallel plan",
    "diffllama": "has no tensor-parallel plan for its layers",
    "llama-three-heads": "3 heads can't be shared evenly by 2 ranks",
    "llama-odd-mlp": "out_features 49 can't be shared evenly by 2 ranks",
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with ranks("tests.support.parallel.models") as started:
        yield started


@pytest.mark.parametrize("fully_sharded", [False, True], ids=["default", "fully-sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_answer_as_one(pair: Ranks, name: str, fully_sharded: bool) -> None:
    found = pair.run("same_logits", name=name, fully_sharded=fully_sharded)
    assert max(rank["error"] for rank in found) < ERROR_MAX
    for rank in found:
        kinds = rank["kinds"]
        assert any("Sharded" in kind for kind in kinds) == fully_sharded
        assert any(kind.startswith("Row") for kind in kinds), kinds
        assert rank["kept"] < 1
        assert rank["tied"] == (name in {"llama-tied", "gemma", "gemma3"})


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_can_not_be_split_is_refused(pair: Ranks, name: str) -> None:
    for error in pair.run("refusal", name=name):
        assert REFUSED[name] in error


def test_a_plan_that_changes_the_output_is_refused(pair: Ranks) -> None:
    for error in pair.run("wrong_plan"):
        assert "results differ from the whole model's" in error


class RecordingGroup(ParallelGroup):
    """A group of one that records its collectives."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "calls", [])

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("sum")
        return x

    def wait_for_all(self) -> None:
        self.calls.append("wait")


def test_nothing_is_summed_before_rank_0_has_run_the_whole_model() -> None:
    group = RecordingGroup()
    shard_model(build("llama"), group, torch.device("cpu"))
    assert group.calls[0] == "wait"
    assert "sum" in group.calls
