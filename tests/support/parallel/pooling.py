"""What two ranks are asked about models that embed or classify: the vectors of one, and their end.

What it is: cases for `tests.support.parallel.ranks`. What it is not: a comparison; a case tells what its rank found.
One rule: a model is split before anything else is done with it, as when an engine starts.
"""

from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.inference.admission import Slots
from engine.inference.pooler import Pooler
from engine.models.sharding import shard_model
from engine.parallel import ParallelGroup
from messages.commands import StartPooling
from messages.reports import OperationFailed, PoolingEnded, Report
from messages.requests import PoolingTask
from tests.support.engine.pooling_bench import Bench
from tests.support.models.pooling_examples import CLASSIFIERS, EMBEDDERS, TEXTS, PoolingExample
from tests.support.parallel.ranks import serve


def example_of(task: PoolingTask, name: str) -> PoolingExample:
    examples = EMBEDDERS if task == "embed" else CLASSIFIERS
    return next(example for example in examples if example.name == name)


def vectors(
    group: ParallelGroup, task: PoolingTask, name: str, root: str, fully_sharded: bool
) -> dict[str, Any]:
    """Every text with every adapter, pooled by a model that is split over the ranks."""
    example = example_of(task, name)
    bench = Bench(example, task, Path(root), group=group, fully_sharded_loras=fully_sharded)
    shapes = bench.model.shapes
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


def ends(group: ParallelGroup, root: str, unsound_rank: int) -> list[str]:
    """How two requests end, the first with NaN among its numbers on one rank alone."""
    bench = Bench(example_of("embed", "qwen3"), "embed", Path(root), group=group)
    bench.model.group = group
    results = bench.model.results

    def spoilt(pooled: torch.Tensor) -> torch.Tensor:
        made = results(pooled).clone()
        made[0, 3] = torch.nan if group.rank == unsound_rank else 1.0
        return made

    bench.model.results = spoilt
    told: list[Report] = []
    config = EngineConfig(Path(), max_num_seqs=len(TEXTS))
    pooler = Pooler(bench.model, bench.punica, Slots(bench.arena, [1, 2]), config, told.append)
    pooler.start(StartPooling(1, "first", 1, 0, 1, "embed", TEXTS))
    pooler.step()
    pooler.start(StartPooling(2, "second", 2, 1, 1, "embed", TEXTS))
    pooler.step()
    ended = [one for one in told if isinstance(one, PoolingEnded | OperationFailed)]
    return [getattr(one, "code", "") for one in ended]


CASES = {case.__name__: case for case in (vectors, refusal, ends)}

if __name__ == "__main__":
    serve(CASES)
