"""Layers with adapters on a device, batches over them, and the clock for one operation on it.

What it is: what `gpu_kernels` and `tune_kernels` share. What it is not: a figure. One rule: what is
timed runs in a graph, after the caches were flushed, and the flush's own time is taken off.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.kernels import choose_kernels
from engine.kernels.directory import Edition, SlotDirectory
from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.operands import Directory, Groups, LoRASlices
from engine.layout import ModuleKind, ModuleShape, slice_elements
from engine.punica import LoRAMapping, PunicaWrapper

DTYPE: Final = torch.bfloat16
FLUSH_BYTES: Final = 256 << 20
"""Some times the largest second-level cache."""
ERROR_MAX: Final = 1e-2
"""The relative norm of the error that a result may have before it is timed."""
REPEATS: Final = 20
ROUNDS: Final = 7


class Cell(NamedTuple):
    """One square layer and one batch: `tokens` rows dealt out to `adapters`, slot by slot.

    idle: the ranks of further slots, which hold adapters that no row uses.
    """

    tokens: int
    adapters: int
    ranks: tuple[int, ...]
    hidden: int
    idle: tuple[int, ...] = ()

    @property
    def rank_of(self) -> list[int]:
        """The rank in each slot that has rows: `ranks` over and over."""
        return [self.ranks[slot % len(self.ranks)] for slot in range(self.adapters)]

    @property
    def resident(self) -> list[int]:
        """The rank in each slot."""
        return [*self.rank_of, *self.idle]

    @property
    def weight_bytes(self) -> int:
        """A and B of the adapters that have rows, each at its own rank."""
        return DTYPE.itemsize * sum(self.rank_of) * 2 * self.hidden

    @property
    def bytes_moved(self) -> int:
        """What one linear operation has to move: weights once, rows in, rows out twice."""
        return self.weight_bytes + DTYPE.itemsize * 3 * self.tokens * self.hidden


class ExpertsCell(NamedTuple):
    """One experts layer with two slices, and one batch whose every token goes to `top_k` experts.

    Tokens are dealt out to `adapters`, slot by slot, and all slots have one rank.
    """

    tokens: int
    adapters: int
    rank: int
    experts: int
    top_k: int
    hidden: int
    width: int


def layer_of(cell: Cell, device: torch.device) -> LoRASlices:
    """A layer whose slots hold random weights at the cell's ranks, one behind the other."""
    shape = ModuleShape("layer", cell.hidden, cell.hidden, 0)
    return LoRASlices(_filled(cell.resident, [shape], device), (0,), cell.hidden, (cell.hidden,))


def experts_layer_of(cell: ExpertsCell, device: torch.device) -> LoRASlices:
    """An experts layer with random weights in each slot."""
    kind, ranks = ModuleKind.EXPERTS, [cell.rank] * cell.adapters
    shapes = [
        ModuleShape("", cell.hidden, cell.width, column, kind=kind, experts=cell.experts)
        for column in (0, 1)
    ]
    widths = (cell.width, cell.width)
    directory = _filled(ranks, shapes, device)
    return LoRASlices(directory, (0, 1), cell.hidden, widths, kind, cell.experts)


def _filled(ranks: Sequence[int], shapes: Sequence[ModuleShape], device: torch.device) -> Directory:
    """A slot for each of `ranks`, with random weights of all of `shapes`."""
    sizes = [slice_elements(rank, shape, DTYPE) for rank in ranks for shape in shapes]
    data = torch.randn(sum(sizes), device=device, dtype=torch.float32).mul_(0.02).to(DTYPE)
    table = SlotDirectory(len(ranks), len(shapes), device)
    columns, starts = torch.arange(len(shapes)), [0, *accumulate(sizes)]
    for slot, rank in enumerate(ranks):
        own = torch.tensor(starts[slot * len(shapes) : (slot + 1) * len(shapes)])
        table.write(slot, columns, own, torch.full_like(columns, rank, dtype=torch.int32))
    tables = (table.offsets, table.ranks, table.host_offsets, table.host_ranks)
    return Directory(data, *tables, Edition())


def groups_of(cell: Cell, device: torch.device) -> Groups:
    """The batch's groups as a Punica wrapper with these slots makes them."""
    punica = _mapped(cell.tokens, cell.adapters, cell.resident, device)
    if punica.groups is None:
        raise AssertionError("a mapping was set")
    return punica.groups


def experts_groups_of(cell: ExpertsCell, device: torch.device) -> ExpertGroups:
    """The batch's pairs by slot and expert; each token's experts are drawn by chance."""
    punica = _mapped(cell.tokens, cell.adapters, [cell.rank] * cell.adapters, device)
    draws = torch.rand(cell.tokens, cell.experts, generator=torch.Generator().manual_seed(0))
    chosen = draws.topk(cell.top_k).indices.to(device)
    groups = punica.group_experts(cell.tokens, lambda _: True, chosen, cell.experts)
    if groups is None:
        raise AssertionError("every slot has weights")
    return groups


def _mapped(
    tokens: int, adapters: int, resident: Sequence[int], device: torch.device
) -> PunicaWrapper:
    """A wrapper with a slot for each of `resident`, the ranks; the first `adapters` have rows."""
    punica = PunicaWrapper(device, max(resident), choose_kernels(device.type, "reference"))
    ids = [1 + row * adapters // tokens for row in range(tokens)]
    punica.update_metadata(LoRAMapping(ids, []), list(range(1, len(resident) + 1)))
    return punica


def same(what: object, found: Tensor, expected: Tensor) -> None:
    """Raise AssertionError where a result is further from the reference than its dtype excuses."""
    error = float((found - expected).norm() / expected.norm())
    if not error <= ERROR_MAX:
        raise AssertionError(f"{what}: an error of {error}")


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
