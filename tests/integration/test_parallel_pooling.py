"""A model that embeds or classifies on two ranks computes what one rank and PEFT compute."""

from pathlib import Path

import pytest
import torch

from loradock.messages.errors import ErrorCode
from loradock.messages.views import PoolingTask
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.pooling_bench import ROWS, PeftReference, PoolingBench
from tests.support.models.pooling_examples import save_adapters
from tests.support.parallel import pooling
from tests.support.parallel.pooling import example_of
from tests.support.parallel.ranks import Ranks

ERROR_MAX = 1e-5
MODELS: list[tuple[PoolingTask, str]] = [
    *(("embed", name) for name in ("qwen3", "qwen3-moe", "eurobert")),
    *(("classify", name) for name in ("llama", "eurobert")),
]


@pytest.mark.parametrize("fully_sharded", [False, True], ids=["default", "fully-sharded"])
@pytest.mark.parametrize(("task", "name"), MODELS)
def test_two_ranks_compute_what_one_and_peft_compute(
    pair: Ranks, task: PoolingTask, name: str, fully_sharded: bool, tmp_path: Path
) -> None:
    example = example_of(task, name)
    # A classifier's adapters contain heads of their own, which every rank keeps whole.
    fields = {"task_type": "SEQ_CLS"} if task == "classify" else {}
    reference = PeftReference(example, save_adapters(example, tmp_path, **fields))
    whole = PoolingBench(example, task, tmp_path)
    pooled_by = whole.model.pooling if task == "embed" else None
    expected = torch.stack([reference.alone(*row, pooled_by) for row in ROWS])
    arguments = {"task": task, "name": name, "root": str(tmp_path), "fully_sharded": fully_sharded}
    for found in pair.run(pooling.vectors, **arguments):
        pooled = torch.tensor(found["pooled"])
        for row, one_rank, peft in zip(pooled, whole.pooled(), expected, strict=True):
            assert relative_error(row, one_rank) < ERROR_MAX
            assert relative_error(row, peft) < ERROR_MAX
        assert any("Sharded" in kind for kind in found["kinds"]) == fully_sharded
        assert found["kept"] < 1
        assert found["weights"] < sum(p.numel() for p in whole.model.model.parameters())


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_a_model_without_a_plan_is_refused(pair: Ranks, task: PoolingTask) -> None:
    for error in pair.run(pooling.refusal, task=task, name="bert"):
        assert "has no tensor-parallel plan for its layers; serve it on one rank" in error


@pytest.mark.parametrize("nan_rank", [0, 1])
def test_requests_end_alike_on_all_ranks_and_as_on_rank_0(
    pair: Ranks, nan_rank: int, tmp_path: Path
) -> None:
    save_adapters(example_of("embed", "qwen3"), tmp_path)
    end = ErrorCode.NOT_FINITE if nan_rank == 0 else ""
    for codes in pair.run(pooling.ends, root=str(tmp_path), nan_rank=nan_rank):
        assert codes == [end, end]
