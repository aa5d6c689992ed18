"""Where the time of the load of `serve.*` goes: `python -m benchmarks.serve_profile`.

Prints the share of each kind of operation in the wall time of a run without adapters and of one
with them. What is left over is the time between operations: Python, and PyTorch's own calls.
"""

import argparse
import time
from collections import Counter
from typing import Final

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.serve_engine import ServedEngine, served_engine
from benchmarks.serve_load import ADAPTERS, RANK, SHAPE, SMALL, Prompt, Prompts, model_files

_KINDS: Final = {
    "products": ("::mm", "::addmm", "::bmm", "::baddbmm", "_linear_pointwise", "onednn"),
    "attention": ("scaled_dot_product",),
    "keys and values": ("index_copy_",),
}
"""Parts of the names of operations; all others are one kind."""
_OTHERS: Final = "other operations"
_BETWEEN: Final = "between operations"


def shares(engine: ServedEngine, prompts: list[Prompt]) -> dict[str, float]:
    """Return the share of each kind in the wall time of a run."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        started = time.perf_counter()
        engine.run(prompts)
        wall_us = (time.perf_counter() - started) * 1e6
    times = Counter[str]()
    for operation in profiled.key_averages():
        times[_kind_of(operation.key)] += operation.self_cpu_time_total
    times[_BETWEEN] = max(0.0, wall_us - times.total())
    return {kind: time_us / wall_us for kind, time_us in times.most_common()}


def _kind_of(name: str) -> str:
    found = (kind for kind, parts in _KINDS.items() if any(part in name for part in parts))
    return next(found, _OTHERS)


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description="Show where the time of a step goes.")
    parser.add_argument("--small", action="store_true", help="a small model, for a first look")
    shape = SMALL if parser.parse_args().small else SHAPE
    prompts = Prompts(shape.vocabulary)
    loads = {"base": [None], "8 adapters": list(range(ADAPTERS))}
    with model_files(shape) as root, served_engine(root, shape, RANK) as engine:
        found = {}
        for name, adapters in loads.items():
            engine.run(prompts.mixed(adapters))
            found[name] = shares(engine, prompts.mixed(adapters))
    table = Table("share of the time", *loads)
    for kind in found["base"]:
        table.add_row(kind, *(f"{one.get(kind, 0.0):.0%}" for one in found.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
