"""Embeddings and classifications are PEFT's: for encoders and decoders, in mixed batches."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from engine.adapters import read_adapter
from engine.arena import Arena
from engine.config import LoRAConfig
from engine.kernels import choose_kernels
from engine.pooled_model import PooledModel
from engine.pooling_options import NOTHING_SAID, Pooling, PoolingOptions
from engine.punica import PunicaWrapper
from engine.staging import stage
from messages.requests import PoolingTask
from tests.engine_examples import relative_error
from tests.pooling_examples import (
    ADAPTERS,
    CLASSIFIERS,
    EMBEDDERS,
    TEXTS,
    PoolingExample,
    save_adapters,
)

ERROR_MAX = 1e-5
NAMES = tuple(ADAPTERS)
EXAMPLES = [("embed", example) for example in EMBEDDERS] + [
    ("classify", example) for example in CLASSIFIERS
]


class Bench:
    """A pooled model whose slot `n` has the n-th adapter, as id n + 1; beside it PEFT's models."""

    def __init__(
        self,
        example: PoolingExample,
        task: PoolingTask,
        root: Path,
        options: PoolingOptions = NOTHING_SAID,
        **fields: object,
    ) -> None:
        self.yardsticks = save_adapters(example, root, **fields)
        self.base = example.make()
        config = LoRAConfig(max_lora_rank=8, max_loras=len(NAMES), lora_dtype="float32")
        self.model = PooledModel(example.make(), config, task=task, options=options)
        shapes = self.model.shapes
        self.arena = Arena(len(NAMES), shapes, 1 << 20, torch.float32, "cpu")
        self.arena.data.fill_(torch.nan)
        self.punica = PunicaWrapper(self.model.device, 8, choose_kernels("cpu"))
        self.model.bind(self.arena, self.punica)
        for slot, name in enumerate(NAMES):
            loaded = read_adapter(name, [root], {shape.name: shape for shape in shapes}, config)
            self.arena.begin_write(slot, 1, stage(loaded.model, shapes, torch.float32, False))
            self.arena.finish_write(slot)

    def pooled(self, rows: list[tuple[str | None, tuple[int, ...]]]) -> Tensor:
        """All rows in one batch."""
        ids = [0 if name is None else NAMES.index(name) + 1 for name, _ in rows]
        prompts = [tokens for _, tokens in rows]
        self.punica.update_metadata(self.model.mapping(prompts, ids), [1, 2])
        return self.model.forward(prompts)

    @torch.no_grad()
    def expected(self, name: str | None, tokens: tuple[int, ...]) -> Tensor:
        """The same row alone through PEFT."""
        model: PeftModel | torch.nn.Module = self.yardsticks[name] if name else self.base
        output = model(input_ids=torch.tensor([tokens]))
        if self.model.task == "classify":
            return output.logits[0]
        states = output.last_hidden_state[0]
        match self.model.pooling:
            case Pooling.MEAN:
                return states.mean(0)
            case Pooling.CLS:
                return states[0]
            case Pooling.LAST:
                return states[-1]


@pytest.mark.parametrize(("task", "example"), EXAMPLES, ids=lambda one: getattr(one, "name", one))
def test_a_mixed_batch_is_pefts_row_by_row(
    task: PoolingTask, example: PoolingExample, tmp_path: Path
) -> None:
    bench = Bench(example, task, tmp_path)
    rows = [(name, text) for text in TEXTS for name in (None, *NAMES)]
    for row, found in zip(rows, bench.pooled(rows), strict=True):
        expected = bench.expected(*row)
        assert relative_error(found, expected) < ERROR_MAX, row
        if row[0] is not None:
            assert relative_error(bench.expected(None, row[1]), expected) > 0.01, row


@pytest.mark.parametrize("example", CLASSIFIERS, ids=lambda example: example.name)
def test_a_head_that_an_adapter_brings_is_its_own_rows_alone(
    example: PoolingExample, tmp_path: Path
) -> None:
    bench = Bench(example, "classify", tmp_path, task_type="SEQ_CLS")
    rows = [(name, text) for text in TEXTS for name in (None, *NAMES)]
    for row, found in zip(rows, bench.pooled(rows), strict=True):
        assert relative_error(found, bench.expected(*row)) < ERROR_MAX, row


@pytest.mark.parametrize("pooling", Pooling)
def test_every_pooling_is_what_its_name_says(pooling: Pooling, tmp_path: Path) -> None:
    bench = Bench(EMBEDDERS[0], "embed", tmp_path, PoolingOptions(pooling))
    rows = [(name, text) for text in TEXTS for name in (None, *NAMES)]
    for row, found in zip(rows, bench.pooled(rows), strict=True):
        assert relative_error(found, bench.expected(*row)) < ERROR_MAX, row


def test_a_decoder_pools_its_last_token_and_an_encoder_the_mean() -> None:
    config = LoRAConfig()
    found = {example.name: PooledModel(example.make(), config).pooling for example in EMBEDDERS}
    assert found == {"bert": Pooling.MEAN, "roberta": Pooling.MEAN, "qwen3": Pooling.LAST}
