"""The cells of the group `kernels`: one linear layer and batch on a CPU, and the timed works.

All works of a cell read the same weights and rows. A batch of 128 tokens and more is a prefill, in
which an adapter's rows are contiguous. Below that it is a decode step, in which the adapter changes
with every row.
"""

from collections.abc import Sequence
from itertools import product
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.rounds import Work
from loradock.engine.kernels import choose_kernels
from loradock.engine.kernels.cpu.batched import Batched
from loradock.engine.kernels.cpu.blocks import blocks_of, equal_parts
from loradock.engine.kernels.cpu.dtypes import native_dtype
from loradock.engine.kernels.cpu.looped import Looped
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.directory import SlotDirectory
from loradock.engine.kernels.operands import Groups, LoRASlices
from loradock.engine.layout import aligned_elements
from loradock.engine.punica import LoRAMapping, PunicaWrapper

HIDDEN: Final = (1024, 4096)
RANKS: Final = (16, 64)
TOKENS: Final = (1, 16, 128, 512)
ADAPTERS: Final = (1, 8, 32)
DTYPES: Final = (torch.float32, torch.bfloat16)
PREFILL_TOKENS: Final = 128

STRATEGIES: Final = ("looped", "looped float32", "batched")
"""The strategies by their names in tables; the second is for bfloat16 only."""


class Cell(NamedTuple):
    """One layer and one batch."""

    dtype: torch.dtype
    hidden: int
    rank: int
    tokens: int
    adapters: int

    @property
    def text(self) -> str:
        """The description of the cell in a figure."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.tokens} tokens, {self.adapters} adapters of rank {self.rank}, "
            f"hidden {self.hidden}, {dtype}"
        )

    @property
    def is_prefill(self) -> bool:
        """Whether each adapter's rows are contiguous."""
        return self.tokens >= PREFILL_TOKENS

    @property
    def has_gemm_target(self) -> bool:
        """Whether the target against the base layer's product applies to this cell."""
        return (self.hidden, self.rank, self.adapters) == (4096, 16, 8)

    @property
    def measures_invariant(self) -> bool:
        """Whether the cost of `batch_invariant` is measured in this cell."""
        return (self.rank, self.adapters) == (16, 8)


def cells() -> list[Cell]:
    """Return every cell in which each adapter has a row."""
    all_cells = map(Cell._make, product(DTYPES, HIDDEN, RANKS, TOKENS, ADAPTERS))
    return [cell for cell in all_cells if cell.adapters <= cell.tokens]


class Bench:
    """A cell's operands in new memory; all works except `gemm` add the delta to `y`."""

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
        """Compute the base layer's own product."""
        return torch.nn.functional.linear(self._x, self._base)

    def chosen(self, batch_invariant: bool = False) -> Work:
        """Return the work that adds the delta as the engine does."""
        y, x, layer, groups = self.y, self._x, self._layer, self._groups
        plan = choose_kernels("cpu", "cpu", batch_invariant).plan_linear
        assert plan is not None
        planned = plan(y, x, layer, groups)
        return lambda: planned.run(y, x)

    def strategies(self) -> dict[str, Work]:
        """Return both strategies over the whole batch, the first in every dtype that it can use."""
        y, x, layer = self.y, self._x, self._layer
        native, scratch = native_dtype(x.dtype, layer.directory.data.dtype), Scratch()
        blocks = blocks_of(self._groups, self._groups.spans)

        def run(strategies: Sequence[Looped | Batched]) -> Work:
            def work() -> None:
                for strategy in strategies:
                    strategy.run(y, x)

            return work

        dtypes = {"looped": native, "looped float32": torch.float32}
        if native == torch.float32:
            del dtypes["looped float32"]
        works = {
            name: run([Looped(block, layer, x.dtype, dtype, scratch) for block in blocks])
            for name, dtype in dtypes.items()
        }
        equal = [equal_parts(block) for block in blocks]
        return works | {"batched": run([Batched(one, layer, native, scratch) for one in equal])}

    def copies(self) -> None:
        """Add the delta with a copy of A and B per token, and batched products: the yardstick.

        This is what `einsum("bi,bri->br", x, a[slots])`, the published form, becomes, and is faster
        than with tokens as column vectors. The copies are new memory in each call, as indexing
        allocates it.
        """
        self._add(self._a[self._slots], self._b[self._slots])

    def copies_kept(self) -> Work:
        """Return the same work with reused memory, which avoids the first access of new pages."""
        sizes = (self._a[:1], self._b[:1])
        a, b = (one.new_empty(self._cell.tokens, *one.shape[1:]) for one in sizes)

        def work() -> None:
            torch.index_select(self._a, 0, self._slots, out=a)
            torch.index_select(self._b, 0, self._slots, out=b)
            self._add(a, b)

        return work

    def _add(self, a: Tensor, b: Tensor) -> None:
        """Add each token's delta by its own A [tokens, rank, in] and B [tokens, out, rank]."""
        self.y += torch.bmm(torch.bmm(self._x[:, None], a.mT), b.mT)[:, 0]

    def bare(self) -> dict[str, Work]:
        """Return the fewest PyTorch calls that compute a prefill's delta, without anything else.

        There are no checks and no look-ups, and results are written to existing memory. Groups are
        equal and contiguous, so rows and outputs are used in place.
        """
        a, b = list(self._a), list(self._b)
        shape = (self._cell.adapters, -1, self._cell.hidden)
        x, y = self._x.view(shape), self.y.view(shape)
        stacked_a, stacked_b = torch.empty_like(self._a), torch.empty_like(self._b)
        shrunk = x.new_empty(*x.shape[:2], self._cell.rank)
        groups = [*zip(x, a, b, shrunk, y, strict=True)]
        transposed = [(rows, a.T, b.T, mid, out) for rows, a, b, mid, out in groups]

        def batched() -> None:
            torch.bmm(x, torch.stack(a, out=stacked_a).mT, out=shrunk)
            y.baddbmm_(shrunk, torch.stack(b, out=stacked_b).mT)

        def looped() -> None:
            for rows, a_t, b_t, mid, out in transposed:
                out.addmm_(torch.mm(rows, a_t, out=mid), b_t)

        return {"bare batched": batched, "bare looped": looped}


def _slots(cell: Cell) -> Tensor:
    """Return each row's slot."""
    rows = torch.arange(cell.tokens)
    return rows * cell.adapters // cell.tokens if cell.is_prefill else rows % cell.adapters


def _groups(slots: Tensor, adapters: int) -> Groups:
    punica = PunicaWrapper(torch.device("cpu"), max(RANKS), choose_kernels("cpu"))
    punica.update_metadata(LoRAMapping(slots + 1, []), range(1, adapters + 1))
    assert punica.groups is not None
    return punica.groups


def _lay_out(cell: Cell) -> tuple[Tensor, Tensor, LoRASlices]:
    """Return the same weights stacked, and in an arena."""
    shape = (cell.adapters, cell.rank, cell.hidden)
    a = torch.randn(shape).to(cell.dtype)
    b = torch.randn(cell.adapters, cell.hidden, cell.rank).to(cell.dtype)
    size = aligned_elements(cell.rank * cell.hidden, cell.dtype)
    data = torch.empty(2 * size * cell.adapters, dtype=cell.dtype)
    data.view(cell.adapters, 2, size)[:, 0] = a.flatten(1)
    data.view(cell.adapters, 2, size)[:, 1] = b.flatten(1)
    directory = SlotDirectory(data, cell.adapters, 1)
    for slot in range(cell.adapters):
        offset = torch.tensor([2 * size * slot])
        rank = torch.tensor([cell.rank], dtype=torch.int32)
        directory.write(slot, torch.tensor([0]), offset, rank)
    return a, b, LoRASlices(directory, (0,), cell.hidden, (cell.hidden,))
