"""Vectors and classifications are PEFT's, for encoders and decoders, in mixed batches."""

from pathlib import Path

import pytest
import torch

from loradock.engine.config import LoRAConfig
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.models.saved_settings import Pooling, PoolingOptions
from loradock.messages.views import PoolingTask
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.pooling_bench import ROWS, PeftReference, PoolingBench
from tests.support.models.pooling_examples import (
    CLASSIFIERS,
    EMBEDDERS,
    PoolingExample,
    save_adapters,
)

ERROR_MAX = 1e-5
EXAMPLES = [("embed", example) for example in EMBEDDERS] + [
    ("classify", example) for example in CLASSIFIERS
]


@pytest.mark.parametrize(("task", "example"), EXAMPLES, ids=lambda one: getattr(one, "name", one))
def test_each_row_of_a_mixed_batch_matches_peft(
    task: PoolingTask, example: PoolingExample, tmp_path: Path
) -> None:
    reference = PeftReference(example, save_adapters(example, tmp_path))
    bench = PoolingBench(example, task, tmp_path)
    pooling = bench.model.pooling if task == "embed" else None
    for (name, text), found in zip(ROWS, bench.pooled(), strict=True):
        expected = reference.alone(name, text, pooling)
        assert relative_error(found, expected) < ERROR_MAX, (name, text)
        if name is not None:
            base = reference.alone(None, text, pooling)
            assert relative_error(base, expected) > 0.01, (name, text)


@pytest.mark.parametrize("example", CLASSIFIERS, ids=lambda example: example.name)
def test_an_adapters_head_is_used_only_for_its_own_rows(
    example: PoolingExample, tmp_path: Path
) -> None:
    reference = PeftReference(example, save_adapters(example, tmp_path, task_type="SEQ_CLS"))
    bench = PoolingBench(example, "classify", tmp_path)
    for row, found in zip(ROWS, bench.pooled(), strict=True):
        assert relative_error(found, reference.alone(*row)) < ERROR_MAX, row


@pytest.mark.parametrize("pooling", Pooling)
def test_every_pooling_is_what_its_name_specifies(pooling: Pooling, tmp_path: Path) -> None:
    reference = PeftReference(EMBEDDERS[0], save_adapters(EMBEDDERS[0], tmp_path))
    bench = PoolingBench(EMBEDDERS[0], "embed", tmp_path, PoolingOptions(pooling))
    for row, found in zip(ROWS, bench.pooled(), strict=True):
        assert relative_error(found, reference.alone(*row, pooling)) < ERROR_MAX, row


DECODERS = {"qwen3", "qwen3-moe"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_decoder_pools_its_last_token_and_an_encoder_the_mean(dtype: torch.dtype) -> None:
    for example in EMBEDDERS:
        found = PoolingModel(example.make().to(dtype), LoRAConfig()).pooling
        assert found is (Pooling.LAST if example.name in DECODERS else Pooling.MEAN), example.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_probe_of_a_classifier_allows_the_rounding_of_its_dtype(dtype: torch.dtype) -> None:
    for example in CLASSIFIERS:
        assert PoolingModel(example.make().to(dtype), LoRAConfig(), task="classify").labels
