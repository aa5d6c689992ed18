"""Cases for two ranks about models that embed or classify: their vectors, and how requests end.

A model is split before anything else is done with it, as in an engine.
"""

from pathlib import Path
from typing import Any

import torch

from loradock.engine.config import EngineConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.layout import columns_of_one_adapter
from loradock.engine.parallel import ParallelGroup
from loradock.engine.serving.pooling import PoolingScheduler
from loradock.engine.serving.queue import SlotTable
from loradock.messages.commands import StartPooling
from loradock.messages.reports import OperationFailed, PoolingEnded, Report
from loradock.messages.views import PoolingTask
from tests.support.engine.pooling_bench import PoolingBench
from tests.support.models.pooling_examples import CLASSIFIERS, EMBEDDERS, TEXTS, PoolingExample
from tests.support.parallel.sharding import shard_model


def example_of(task: PoolingTask, name: str) -> PoolingExample:
    examples = EMBEDDERS if task == "embed" else CLASSIFIERS
    return next(example for example in examples if example.name == name)


def vectors(
    group: ParallelGroup, task: PoolingTask, name: str, root: str, fully_sharded: bool
) -> dict[str, Any]:
    """Return every text with every adapter, pooled by a model that is split over the ranks."""
    example = example_of(task, name)
    bench = PoolingBench(example, task, Path(root), group=group, fully_sharded_loras=fully_sharded)
    shapes = columns_of_one_adapter(bench.model.shapes)
    return {
        "pooled": bench.pooled().tolist(),
        "kinds": sorted({type(layer).__name__ for layer in bench.model.layers.values()}),
        "weights": sum(parameter.numel() for parameter in bench.model.model.parameters()),
        "kept": sum(shape.b_shape(2)[0] for shape in shapes) / sum(s.out_features for s in shapes),
    }


def refusal(group: ParallelGroup, task: PoolingTask, name: str) -> str:
    try:
        shard_model(example_of(task, name).make(), group, torch.device("cpu"))
    except ModelRefused as error:
        return str(error)
    return "not refused"


def ends(group: ParallelGroup, root: str, nan_rank: int) -> list[str]:
    """Return how two requests end, the first with NaN among its numbers on one rank only."""
    bench = PoolingBench(example_of("embed", "qwen3"), "embed", Path(root), group=group)
    bench.model.group = group
    results = bench.model.results

    def with_nan(pooled: torch.Tensor) -> torch.Tensor:
        vectors = results(pooled).clone()
        vectors[0, 3] = torch.nan if group.rank == nan_rank else 1.0
        return vectors

    bench.model.results = with_nan
    reports: list[Report] = []
    config = EngineConfig(Path(), max_num_seqs=len(TEXTS))
    pooler = PoolingScheduler(
        bench.model, bench.punica, SlotTable(bench.arena, [1, 2]), config, reports.append
    )
    pooler.start(StartPooling(1, "first", 1, 0, 1, "embed", TEXTS))
    pooler.step()
    pooler.start(StartPooling(2, "second", 2, 1, 1, "embed", TEXTS))
    pooler.step()
    ended = [one for one in reports if isinstance(one, PoolingEnded | OperationFailed)]
    return [getattr(one, "code", "") for one in ended]
