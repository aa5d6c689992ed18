"""A model split over two ranks by its own plan answers as whole, or is refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loradock.engine.parallel import ParallelGroup
from tests.support.engine.engine_examples import relative_error
from tests.support.models.expert_adapters import make_model
from tests.support.models.peft_adapters import save_adapter
from tests.support.parallel import models
from tests.support.parallel.models import TOKENS, build
from tests.support.parallel.ranks import Ranks
from tests.support.parallel.sharding import shard_model

ERROR_MAX = 1e-5
MODELS = [
    *("llama", "llama-one-kv-head", "llama-tied", "qwen2", "qwen3", "gemma", "gemma3"),
    *("olmo2", "phi3", "gpt-neox"),
]
OTHERS = {
    # Rows with recurrent states.
    "qwen3_5_text": False,
    "olmo_hybrid": True,
    "bamba": False,
    "lfm2": True,
    # Experts that return their input.
    "longcat_flash": True,
}
"""Whether their adapters are fully sharded."""

REFUSED = {
    "gpt2": "has no tensor-parallel plan",
    "llama-three-heads": "3 heads can't be shared evenly by 2 ranks",
    "llama-odd-mlp": "out_features 49 can't be shared evenly by 2 ranks",
}


@pytest.mark.parametrize("fully_sharded", [False, True], ids=["default", "fully-sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_answer_as_one(pair: Ranks, name: str, fully_sharded: bool) -> None:
    found = pair.run(models.same_logits, name=name, fully_sharded=fully_sharded)
    assert max(rank["error"] for rank in found) < ERROR_MAX
    for rank in found:
        kinds = rank["kinds"]
        assert any("Sharded" in kind for kind in kinds) == fully_sharded
        assert any(kind.startswith("Row") for kind in kinds), kinds
        assert rank["kept"] < 1
        assert rank["tied"] == (name in {"llama-tied", "gemma", "gemma3"})


@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_answer_as_one_for_other_layers(pair: Ranks, name: str) -> None:
    found = pair.run(models.same_logits, name=name, fully_sharded=OTHERS[name])
    assert max(rank["error"] for rank in found) < ERROR_MAX
    assert all(rank["kept"] < 1 for rank in found)


def by_peft(directory: Path, name: str, **fields: Any) -> Tensor:
    """Save an adapter with random weights; return PEFT's logits with it."""
    fields = {"r": 4, "target_modules": ["q_proj"]} | fields
    save, train = {"save_embedding_layers": True}, torch.nn.init.normal_
    model = save_adapter(build(name), directory, 1, train=train, save=save, **fields)
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS])).logits.flatten()


TOKEN_ROWS = {"trainable_token_indices": [66, 3, 40]}


@pytest.mark.parametrize("fields", [{}, TOKEN_ROWS], ids=["copies", "tokens"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma"])
def test_two_ranks_compare_copies_and_serve_trained_tokens(
    pair: Ranks, name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    expected = by_peft(tmp_path, name, **fields)
    for logits in pair.run(models.with_adapter, name=name, directory=str(tmp_path)):
        assert relative_error(torch.tensor(logits), expected) < ERROR_MAX


@pytest.mark.parametrize("row", [0, 66])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma"])
def test_one_other_value_of_a_rank_refuses_a_copy(
    pair: Ranks, name: str, row: int, tmp_path: Path
) -> None:
    by_peft(tmp_path, name)
    path = tmp_path / "adapter_model.safetensors"
    weights = load_file(path)
    weights["base_model.model.lm_head.weight"][row, 7] += 1
    save_file(weights, path)
    errors = pair.run(models.with_adapter, name=name, directory=str(tmp_path))
    text = "base_model.model.lm_head.weight differs from this model's lm_head"
    assert any(text in error for error in errors), errors
    assert all(isinstance(error, str) for error in errors)


SAVED = {
    "llama": lambda: build("llama"),
    # Biases that one rank adds, and a head of keys and values that both have.
    "llama-one-kv-head": lambda: build("llama-one-kv-head"),
    "llama-tied": lambda: build("llama-tied"),
    # Its embedding is scaled, so that each rank holds it whole, and its head reads rows of it.
    "gemma": lambda: build("gemma"),
    # Experts are saved one by one and stacked when they are read.
    "mixtral": lambda: make_model("mixtral"),
    # Their layout is observed before their weights are read.
    "longcat_flash": lambda: build("longcat_flash"),
    "longcat_flash-by-expert": lambda: build("longcat_flash"),
    "qwen3_moe-by-expert": lambda: make_model("qwen3_moe"),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_rank_reads_its_own_part_once(pair: Ranks, name: str, tmp_path: Path) -> None:
    model = SAVED[name]()
    # Several files with an index.
    model.save_pretrained(tmp_path, max_shard_size="20KB" if name == "llama" else "5GB")
    found = pair.run(models.read_in_parts, directory=str(tmp_path), by_expert="by-expert" in name)
    with torch.inference_mode():
        expected = model(input_ids=torch.arange(3, 9)[None], use_cache=False).logits.flatten()
    saved = sum({one.data_ptr(): one.nbytes for one in model.parameters()}.values())
    for rank in found:
        assert rank["missing"] == []
        assert rank["kind"] == type(model).__name__
        assert rank["read"] == rank["held"] < saved
        assert relative_error(torch.tensor(rank["logits"]), expected) < ERROR_MAX
    assert found[0]["logits"] == found[1]["logits"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_can_not_be_split_is_refused(pair: Ranks, name: str) -> None:
    for error in pair.run(models.refusal, name=name):
        assert REFUSED[name] in error


def test_a_plan_that_changes_the_output_is_refused(pair: Ranks) -> None:
    for error in pair.run(models.wrong_plan):
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
