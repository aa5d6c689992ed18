"""A layer with adapters on a device, a batch over it, and the clock for one operation on it.

What it is: what `gpu_kernels` and `tune_kernels` share. What it is not: a figure. One rule: what is
timed runs in a graph, after the caches were flushed, and the flush's own time is taken off.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.directory import Edition, SlotDirectory
from engine.kernels import choose_kernels
from engine.kernels.operands import Directory, Groups, LoRASlices
from engine.layout import ModuleShape, slice_elements
from engine.punica import LoRAMapping, PunicaWrapper

DTYPE: Final = torch.bfloat16
FLUSH_BYTES: Final = 256 << 20
"""Some times the largest second-level cache."""
REPEATS: Final = 20
ROUNDS: Final = 7


class Cell(NamedTuple):
    """One square layer and one batch: `tokens` rows dealt out to `adapters`, slot by slot."""

    tokens: int
    adapters: int
    ranks: tuple[int, ...]
    hidden: int

    @property
    def rank_of(self) -> list[int]:
        """The rank in each slot: `ranks` over and over."""
        return [self.ranks[slot % len(self.ranks)] for slot in range(self.adapters)]

    @property
    def bytes_moved(self) -> int:
        """What one linear operation has to move: weights once, rows in, rows out twice."""
        weights = sum(self.rank_of) * 2 * self.hidden
        return DTYPE.itemsize * (weights + 3 * self.tokens * self.hidden)


def layer_of(cell: Cell, device: torch.device) -> LoRASlices:
    """A layer whose slots hold random weights at the cell's ranks, one behind the other."""
    shape = ModuleShape("layer", cell.hidden, cell.hidden, 0)
    sizes = [slice_elements(rank, shape, DTYPE) for rank in cell.rank_of]
    data = torch.randn(sum(sizes), device=device, dtype=torch.float32).mul_(0.02).to(DTYPE)
    table = SlotDirectory(cell.adapters, 1, device)
    for slot, rank in enumerate(cell.rank_of):
        start, column = torch.tensor([sum(sizes[:slot])]), torch.tensor([0])
        table.write(slot, column, start, torch.tensor([rank], dtype=torch.int32))
    tables = (table.offsets, table.ranks, table.host_offsets, table.host_ranks)
    return LoRASlices(Directory(data, *tables, Edition()), (0,), cell.hidden, (cell.hidden,))


def groups_of(cell: Cell, device: torch.device, rank_max: int) -> Groups:
    """The batch's groups as a Punica wrapper with these slots makes them."""
    punica = PunicaWrapper(device, rank_max, choose_kernels(device.type, "reference"))
    ids = [1 + row * cell.adapters // cell.tokens for row in range(cell.tokens)]
    punica.update_metadata(LoRAMapping(ids, []), list(range(1, cell.adapters + 1)))
    if punica.groups is None:
        raise AssertionError("a mapping was set")
    return punica.groups


def microseconds(work: Callable[[], object], flush: Tensor) -> float:
    """The time of `work` by graph replay with cold caches; the median of some rounds."""
    plain = _captured([flush.zero_] * REPEATS)
    timed = _captured([flush.zero_, work] * REPEATS)
    rounds = [_elapsed(timed) - _elapsed(plain) for _ in range(ROUNDS)]
    return median(rounds) / REPEATS


def copy_bytes_per_second() -> float:
    """What a large copy on the device moves, reading and writing counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graph = _captured([lambda: target.copy_(source)] * REPEATS)
    best = min(_elapsed(graph) for _ in range(ROUNDS))
    return 2 * len(source) * REPEATS / (best * 1e-6)


def _captured(works: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for work in works[:2]:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    graph.replay()
    return graph


def _elapsed(graph: torch.cuda.CUDAGraph) -> float:
    """One replay in microseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
