"""Division of a batch's rows into runs and blocks that are computed together.

The division depends on the mapping alone and is computed once for it. Python loops run over groups,
long runs and blocks, never over rows.

A group is *long* if it has enough rows that the time of a product depends on its size rather than
on the call. A long group is divided into runs of contiguous rows, which are read and written in
place. All short groups share blocks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.operands import Groups, SlotSpan

LONG_ROWS: Final = 32
"""The least rows of a long group."""
LONG_ROWS_BFLOAT16: Final = 128
"""The same for products in bfloat16: a call takes seven times as long, and the arithmetic half."""
BLOCK_ROWS: Final = 256
"""The most rows that are gathered, or converted, at once."""
PADDED_ROWS: Final = 16
"""The rows of every product with `batch_invariant`."""


class RowRun(NamedTuple):
    """Rows of one slot: `first` to `end` of the batch, or `rows` [n] int64 where not contiguous."""

    slot: int
    first: int
    end: int
    rows: Tensor | None

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.end - self.first if self.rows is None else len(self.rows)


class BlockPart(NamedTuple):
    """`size` rows of one slot within a block, of which the first `real_size` are not padding."""

    slot: int
    size: int
    real_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows that are computed together, one part per slot.

    rows: [size] int64, the batch's row of each row of the block; None where these are contiguous
    from `first` on. real_indices: [real rows] int64, the block's rows that are not padding; None
    without padding. real_rows: `rows` without the padding.
    """

    parts: tuple[BlockPart, ...]
    first: int
    rows: Tensor | None
    real_indices: Tensor | None = None
    real_rows: Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        """The rows of each part, padding included."""
        return [part.size for part in self.parts]

    @property
    def size(self) -> int:
        """The rows of all parts, padding included."""
        return sum(self.sizes)


class Tiling(NamedTuple):
    """Runs and blocks that together contain every row of every group once."""

    runs: tuple[RowRun, ...]
    blocks: tuple[Block, ...]


class SlotRows(NamedTuple):
    """One slot's rows of the batch: those that are read, and those that are written."""

    slot: int
    reads: Tensor
    writes: Tensor


class BatchTiler:
    """Tilings of recent batches, computed once per mapping and shared by all layers.

    With `batch_invariant` every part has the same number of rows, so that a row's sums don't depend
    on the rest of the batch.
    """

    def __init__(self, batch_invariant: bool) -> None:
        self.batch_invariant = batch_invariant
        # A batch has two mappings, of tokens and of sampled rows, and layers may have two dtypes.
        self._tilings: deque[tuple[Groups, int, Tiling]] = deque(maxlen=4)

    def __call__(self, groups: Groups, long_rows: int = LONG_ROWS) -> Tiling:
        """Return the tiling of `groups`, which is stored and compared by identity.

        With `batch_invariant` no group is long.
        """
        for known, known_rows, tiling in self._tilings:
            if known is groups and (known_rows == long_rows or self.batch_invariant):
                return tiling
        tiling = tile_padded(groups) if self.batch_invariant else tile_by_length(groups, long_rows)
        self._tilings.append((groups, long_rows, tiling))
        return tiling

    def product_rows(self, groups: Groups) -> int:
        """Return the most rows of any group's product."""
        return PADDED_ROWS if self.batch_invariant else groups.longest

    def slot_rows(self, groups: Groups) -> list[SlotRows]:
        """Return the rows of `groups` by slot, for operations that process one slot at a time."""
        if self.batch_invariant:
            return [rows for block in self(groups).blocks for rows in _slot_rows(block)]
        return [
            SlotRows(span.slot, rows, rows)
            for span in groups.spans
            for rows in torch.split(groups.rows[span.start : span.end], BLOCK_ROWS)
        ]


def min_long_rows(dtype: torch.dtype) -> int:
    """Return the least rows of a long group where products are computed in `dtype`."""
    return LONG_ROWS_BFLOAT16 if dtype == torch.bfloat16 else LONG_ROWS


def tile_by_length(groups: Groups, long_rows: int = LONG_ROWS) -> Tiling:
    """Return runs for groups of at least `long_rows` rows, and blocks for shorter ones."""
    long = [span for span in groups.spans if span.end - span.start >= long_rows]
    short = [span for span in groups.spans if span.end - span.start < long_rows]
    runs = tuple(run for span in long for run in _row_runs(groups, span))
    return Tiling(runs, tuple(blocks_of_short_groups(groups, short)))


def tile_padded(groups: Groups) -> Tiling:
    """Return blocks whose parts all have `PADDED_ROWS` rows; padding repeats a part's last row."""
    parts = [
        _unpadded_part(span.slot, min(PADDED_ROWS, span.end - start))
        for span in groups.spans
        for start in range(span.start, span.end, PADDED_ROWS)
    ]
    blocks, start, parts_max = [], 0, BLOCK_ROWS // PADDED_ROWS
    for index in range(0, len(parts), parts_max):
        block_parts = tuple(parts[index : index + parts_max])
        size = sum(part.size for part in block_parts)
        blocks.append(_padded_block(block_parts, groups.rows[start : start + size], PADDED_ROWS))
        start += size
    return Tiling((), tuple(blocks))


def equal_parts(block: Block) -> Block:
    """Return a block of the same rows whose parts are all padded to the size of the largest."""
    size = max(block.sizes)
    if min(block.sizes) == size:
        return block
    return _padded_block(block.parts, block_rows(block), size)


def block_rows(block: Block) -> Tensor:
    """Return the batch's row of each row of the block."""
    if block.rows is None:
        return torch.arange(block.first, block.first + block.size)
    return block.rows


def _slot_rows(block: Block) -> list[SlotRows]:
    rows = block_rows(block).split_with_sizes(block.sizes)
    return [
        SlotRows(part.slot, reads, reads[: part.real_size])
        for part, reads in zip(block.parts, rows, strict=True)
    ]


def _unpadded_part(slot: int, size: int) -> BlockPart:
    return BlockPart(slot, size, size)


def _padded_block(parts: tuple[BlockPart, ...], rows: Tensor, part_size: int) -> Block:
    """Return a block whose parts are padded to `part_size` rows by repeating their last row."""
    counts = torch.tensor([part.size for part in parts])[:, None]
    starts = torch.cumsum(counts, 0) - counts
    indices = torch.arange(part_size)
    sources = starts + torch.minimum(indices, counts - 1)
    real_indices = (indices < counts).flatten().nonzero().flatten()
    padded = tuple(part._replace(size=part_size) for part in parts)
    return Block(padded, 0, rows[sources.flatten()], real_indices, rows)


def _row_runs(groups: Groups, span: SlotSpan) -> list[RowRun]:
    """Return contiguous runs if they are long on average, else gathered blocks of rows."""
    rows = groups.rows[span.start : span.end]
    breaks = (rows[1:] - rows[:-1] != 1).nonzero().flatten() + 1
    if (len(breaks) + 1) * LONG_ROWS > len(rows):
        return [RowRun(span.slot, 0, 0, gathered) for gathered in torch.split(rows, BLOCK_ROWS)]
    edges = [0, *breaks.tolist(), len(rows)]
    sizes = (end - start for start, end in pairwise(edges))
    firsts = rows[edges[:-1]].tolist()
    return [
        RowRun(span.slot, first, first + size, None)
        for first, size in zip(firsts, sizes, strict=True)
    ]


def blocks_of_short_groups(groups: Groups, spans: Sequence[SlotSpan]) -> list[Block]:
    """Return blocks of whole groups, each filled up to `BLOCK_ROWS` rows."""
    blocks: list[Block] = []
    pending: list[SlotSpan] = []
    size = 0
    for span in spans:
        count = span.end - span.start
        if pending and size + count > BLOCK_ROWS:
            blocks.append(_block_of_spans(groups, pending))
            pending, size = [], 0
        pending.append(span)
        size += count
    return [*blocks, _block_of_spans(groups, pending)] if pending else blocks


def _block_of_spans(groups: Groups, spans: list[SlotSpan]) -> Block:
    start, end = spans[0].start, spans[-1].end
    size = sum(span.end - span.start for span in spans)
    rows = groups.rows[start:end]
    if size != end - start:
        rows = torch.cat([groups.rows[span.start : span.end] for span in spans])
    parts = tuple(_unpadded_part(span.slot, span.end - span.start) for span in spans)
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + size)):
        return Block(parts, first, None)
    return Block(parts, 0, rows)
