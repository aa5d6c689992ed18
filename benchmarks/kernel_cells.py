"""One linear layer and one batch on a CPU, and the ways to make its delta.

What it is: the cells of the group `kernels`, and the works that are timed in them. What it is not:
a clock or a figure. One rule: all works of a cell read the same weights and the same rows.

A cell's batch is a prefill from 128 tokens on, where an adapter's rows lie side by side, and below
that a decode, whose rows change adapter from each to the next.
"""

from itertools import product
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.rounds import Work
from engine.kernels import choose_kernels
from engine.kernels.cpu.blocks import short_blocks
from engine.kernels.cpu.costs import Choice
from engine.kernels.cpu.dense import Dense
from engine.kernels.cpu.gathered import Gathered
from engine.kernels.cpu.grouped import Grouped
from engine.kernels.cpu.layer_block import computation_dtypes, layer_block
from engine.kernels.cpu.scratch import Scratch
from engine.kernels.directory import SlotDirectory
from engine.kernels.operands import Directory, Groups, LoRASlices
from engine.layout import aligned_elements
from engine.punica import LoRAMapping, PunicaWrapper

HIDDEN: Final = (1024, 4096)
RANKS: Final = (16, 64)
TOKENS: Final = (1, 16, 128, 512)
ADAPTERS: Final = (1, 8, 32)
DTYPES: Final = (torch.float32, torch.bfloat16)
PREFILL_TOKENS: Final = 128

WAYS: Final = ("grouped", "grouped float32", "dense", "gathered")
"""The strategies by the names that tables give them; the second is bfloat16's alone."""


class Cell(NamedTuple):
    """One layer and one batch."""

    dtype: torch.dtype
    hidden: int
    rank: int
    tokens: int
    adapters: int

    @property
    def text(self) -> str:
        """What a figure says of where it was found."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.tokens} tokens, {self.adapters} adapters of rank {self.rank}, "
            f"hidden {self.hidden}, {dtype}"
        )

    @property
    def is_prefill(self) -> bool:
        """Whether each adapter's rows lie side by side."""
        return self.tokens >= PREFILL_TOKENS

    @property
    def is_for_delta(self) -> bool:
        """Whether the aim against the layer's own product is for this cell."""
        return (self.hidden, self.rank, self.adapters) == (4096, 16, 8)

    @property
    def is_for_invariant(self) -> bool:
        """Whether it is told here what batch_invariant costs."""
        return (self.rank, self.adapters) == (16, 8)


def cells() -> list[Cell]:
    """Every cell in which each adapter has a row."""
    found = map(Cell._make, product(DTYPES, HIDDEN, RANKS, TOKENS, ADAPTERS))
    return [cell for cell in found if cell.adapters <= cell.tokens]


class Bench:
    """A cell's operands, in memory of their own; all works but `gemm` add the delta to `y`."""

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(0)
        self._cell = cell
        self._a, self._b, self._layer = _lay_out(cell)
        self._x = torch.randn(cell.tokens, cell.hidden).to(cell.dtype)
        self.y = torch.randn(cell.tokens, cell.hidden).to(cell.dtype)
        self._base = torch.randn(cell.hidden, cell.hidden).to(cell.dtype)
        self._slots = _slots(cell)
        self._groups = _groups(self._slots, cell.adapters)

    def gemm(self) -> Tensor:
        """The layer's own product."""
        return torch.nn.functional.linear(self._x, self._base)

    def chosen(self, batch_invariant: bool = False) -> Work:
        """The delta as the engine adds it."""
        y, x, layer, groups = self.y, self._x, self._layer, self._groups
        linear = choose_kernels("cpu", "cpu", batch_invariant).linear
        return lambda: linear(y, x, layer, groups, 1.0)

    def ways(self) -> dict[str, Work]:
        """Every strategy in every dtype that it could be chosen in, for the whole batch."""
        dtypes = computation_dtypes(self._x.dtype, self._layer.directory.data.dtype)
        choices = {
            "grouped": (Grouped, dtypes[0]),
            "dense": (Dense, dtypes[0]),
            "gathered": (Gathered, dtypes[0]),
        }
        if len(dtypes) > 1:
            choices["grouped float32"] = (Grouped, dtypes[1])
        return {name: self._way(choice) for name, choice in choices.items()}

    def copies(self) -> None:
        """The yardstick: each token's own copy of its adapter's A and B, and batched products.

        It is what `einsum("bi,bri->br", x, a[slots])` becomes, the published form, and faster than
        with tokens as column vectors. The copies are new memory in each call, as indexing makes it.
        """
        self._add(self._a[self._slots], self._b[self._slots])

    def copies_kept(self) -> Work:
        """The same into memory that is kept, which spares it the pages' first touch."""
        sizes = (self._a[:1], self._b[:1])
        a, b = (one.new_empty(self._cell.tokens, *one.shape[1:]) for one in sizes)

        def work() -> None:
            torch.index_select(self._a, 0, self._slots, out=a)
            torch.index_select(self._b, 0, self._slots, out=b)
            self._add(a, b)

        return work

    def _add(self, a: Tensor, b: Tensor) -> None:
        """Add each token's delta by its own A and B: [tokens, rank, in], [tokens, out, rank]."""
        self.y += torch.bmm(torch.bmm(self._x[:, None], a.mT), b.mT)[:, 0]

    def bare(self) -> dict[str, Work]:
        """The fewest calls of PyTorch that make a prefill's delta, with nothing around them.

        No checks, no look-up, results into memory that is there. Groups are equal and lie side by
        side, so rows and outputs are used where they are.
        """
        a, b = list(self._a), list(self._b)
        shape = (self._cell.adapters, -1, self._cell.hidden)
        x, y = self._x.view(shape), self.y.view(shape)
        stacked_a, stacked_b = torch.empty_like(self._a), torch.empty_like(self._b)
        shrunk = x.new_empty(*x.shape[:2], self._cell.rank)
        groups = [*zip(x, a, b, shrunk, y, strict=True)]
        turned = [(rows, a.T, b.T, mid, out) for rows, a, b, mid, out in groups]

        def batched() -> None:
            torch.bmm(x, torch.stack(a, out=stacked_a).mT, out=shrunk)
            y.baddbmm_(shrunk, torch.stack(b, out=stacked_b).mT)

        def looped() -> None:
            for rows, a_turned, b_turned, mid, out in turned:
                out.addmm_(torch.mm(rows, a_turned, out=mid), b_turned)

        return {"bare batched": batched, "bare looped": looped}

    def _way(self, choice: Choice) -> Work:
        strategy, dtype = choice
        y, x, groups = self.y, self._x, self._groups
        found = (
            layer_block(self._layer, block, x.dtype) for block in short_blocks(groups, groups.spans)
        )
        plans = [strategy(layer, dtype, Scratch()) for layer in found if layer is not None]

        def work() -> None:
            for plan in plans:
                plan.run(y, x, 1.0)

        return work


def _slots(cell: Cell) -> Tensor:
    """Each row's slot."""
    rows = torch.arange(cell.tokens)
    return rows * cell.adapters // cell.tokens if cell.is_prefill else rows % cell.adapters


def _groups(slots: Tensor, adapters: int) -> Groups:
    punica = PunicaWrapper(torch.device("cpu"), max(RANKS), choose_kernels("cpu"))
    punica.update_metadata(LoRAMapping(slots + 1, []), range(1, adapters + 1))
    assert punica.groups is not None
    return punica.groups


def _lay_out(cell: Cell) -> tuple[Tensor, Tensor, LoRASlices]:
    """The same weights stacked, and in an arena."""
    shape = (cell.adapters, cell.rank, cell.hidden)
    a = torch.randn(shape).to(cell.dtype)
    b = torch.randn(cell.adapters, cell.hidden, cell.rank).to(cell.dtype)
    size = aligned_elements(cell.rank * cell.hidden, cell.dtype)
    data = torch.empty(2 * size * cell.adapters, dtype=cell.dtype)
    data.view(cell.adapters, 2, size)[:, 0] = a.flatten(1)
    data.view(cell.adapters, 2, size)[:, 1] = b.flatten(1)
    table = SlotDirectory(cell.adapters, 1, torch.device("cpu"))
    for slot in range(cell.adapters):
        offset = torch.tensor([2 * size * slot])
        rank = torch.tensor([cell.rank], dtype=torch.int32)
        table.write(slot, torch.tensor([0]), offset, rank)
    directory = Directory(
        *(data, table.offsets, table.ranks),
        *(table.host_offsets, table.host_ranks, table.edition),
    )
    return a, b, LoRASlices(directory, (0,), cell.hidden, (cell.hidden,))
