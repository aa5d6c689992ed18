"""Layers, batches and the clock for benchmarks of single operations on a GPU.

Operations are timed in a captured graph after the caches were flushed; the time of the flush is
subtracted.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels import choose_kernels
from loradock.engine.kernels.directory import SlotDirectory
from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.operands import Groups, LoRASlices
from loradock.engine.layout import ModuleKind, ModuleShape, slice_elements
from loradock.engine.punica import LoRAMapping, PunicaWrapper

DTYPE: Final = torch.bfloat16
FLUSH_BYTES: Final = 256 << 20
"""Several times the size of the largest L2 cache."""
ERROR_MAX: Final = 1e-2
"""The largest relative norm of the error of a result that is timed."""
REPEATS: Final = 20
ROUNDS: Final = 7


class Cell(NamedTuple):
    """One square layer and one batch: `tokens` rows divided among `adapters`, slot by slot.

    idle: the ranks of further slots, whose adapters no row uses.
    """

    tokens: int
    adapters: int
    ranks: tuple[int, ...]
    hidden: int
    idle: tuple[int, ...] = ()

    @property
    def rank_of(self) -> list[int]:
        """The rank of each slot with rows: `ranks` repeated."""
        return [self.ranks[slot % len(self.ranks)] for slot in range(self.adapters)]

    @property
    def resident(self) -> list[int]:
        """The rank of each slot."""
        return [*self.rank_of, *self.idle]

    @property
    def weight_bytes(self) -> int:
        """The bytes of A and B of the adapters with rows, each at its own rank."""
        return DTYPE.itemsize * sum(self.rank_of) * 2 * self.hidden

    @property
    def bytes_moved(self) -> int:
        """The least bytes that a linear operation moves: weights once, rows in, rows out twice."""
        return self.weight_bytes + DTYPE.itemsize * 3 * self.tokens * self.hidden


class ExpertsCell(NamedTuple):
    """One experts layer with two slices, and one batch whose tokens go to `top_k` experts each.

    Tokens are divided among `adapters`, slot by slot, and all slots have the same rank.
    """

    tokens: int
    adapters: int
    rank: int
    experts: int
    top_k: int
    hidden: int
    width: int


def layer_of(cell: Cell, device: torch.device) -> LoRASlices:
    """Return a layer whose slots hold random weights at the cell's ranks, contiguously."""
    shape = ModuleShape("layer", cell.hidden, cell.hidden, 0)
    directory = _random_directory(cell.resident, [shape], device)
    return LoRASlices(directory, (0,), cell.hidden, (cell.hidden,))


def experts_layer_of(cell: ExpertsCell, device: torch.device) -> LoRASlices:
    """Return an experts layer with random weights in each slot."""
    kind, ranks = ModuleKind.EXPERTS, [cell.rank] * cell.adapters
    shapes = [
        ModuleShape("", cell.hidden, cell.width, column, kind=kind, experts=cell.experts)
        for column in (0, 1)
    ]
    widths = (cell.width, cell.width)
    directory = _random_directory(ranks, shapes, device)
    return LoRASlices(directory, (0, 1), cell.hidden, widths, kind, cell.experts)


def _random_directory(
    ranks: Sequence[int], shapes: Sequence[ModuleShape], device: torch.device
) -> SlotDirectory:
    """Return a directory with a slot per rank, and random weights of all `shapes`."""
    sizes = [slice_elements(rank, shape, DTYPE) for rank in ranks for shape in shapes]
    data = torch.randn(sum(sizes), device=device, dtype=torch.float32).mul_(0.02).to(DTYPE)
    directory = SlotDirectory(data, len(ranks), len(shapes))
    columns, starts = torch.arange(len(shapes)), [0, *accumulate(sizes)]
    for slot, rank in enumerate(ranks):
        offsets = torch.tensor(starts[slot * len(shapes) : (slot + 1) * len(shapes)])
        directory.write(slot, columns, offsets, torch.full_like(columns, rank, dtype=torch.int32))
    return directory


def groups_of(cell: Cell, device: torch.device) -> Groups:
    """Return the batch's groups, as a Punica wrapper with these slots creates them."""
    punica = _mapped(cell.tokens, cell.adapters, cell.resident, device)
    if punica.groups is None:
        raise AssertionError("the wrapper has no groups after update_metadata")
    return punica.groups


def experts_groups_of(cell: ExpertsCell, device: torch.device) -> ExpertGroups:
    """Return the batch's pairs by slot and expert; each token's experts are random."""
    punica = _mapped(cell.tokens, cell.adapters, [cell.rank] * cell.adapters, device)
    draws = torch.rand(cell.tokens, cell.experts, generator=torch.Generator().manual_seed(0))
    chosen = draws.topk(cell.top_k).indices.to(device)
    groups = punica.group_experts(cell.tokens, lambda _: True, chosen, cell.experts)
    if groups is None:
        raise AssertionError("no groups although every slot has weights")
    return groups


def _mapped(
    tokens: int, adapters: int, resident: Sequence[int], device: torch.device
) -> PunicaWrapper:
    """Return a wrapper with a slot per rank of `resident`; the first `adapters` have rows."""
    punica = PunicaWrapper(device, max(resident), choose_kernels(device.type, "reference"))
    ids = [1 + row * adapters // tokens for row in range(tokens)]
    punica.update_metadata(LoRAMapping(ids, []), list(range(1, len(resident) + 1)))
    return punica


def check_close(name: object, found: Tensor, expected: Tensor) -> None:
    """Raise AssertionError if a result's error is larger than its dtype explains."""
    error = float((found - expected).norm() / expected.norm())
    if not error <= ERROR_MAX:
        raise AssertionError(f"{name}: the relative error is {error}, above {ERROR_MAX}")


def microseconds(work: Callable[[], object], flush: Tensor) -> float:
    """Return the time of `work` by graph replay with cold caches; the median of `ROUNDS`."""
    plain = _captured([flush.zero_] * REPEATS)
    timed = _captured([flush.zero_, work] * REPEATS)
    rounds = [_elapsed(timed) - _elapsed(plain) for _ in range(ROUNDS)]
    return median(rounds) / REPEATS


def copy_bytes_per_second() -> float:
    """Return the bytes that a large copy on the device moves, counting reads and writes."""
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
    """Return the duration of one replay in microseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
