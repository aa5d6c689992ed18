"""Division of a batch's rows into blocks that are computed together, and access to their rows.

Python loops run over groups and blocks, never over rows. Rows of the base model are in no block:
they are neither read nor written.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import Groups, SlotSpan
from loradock.engine.layout import next_power_of_two

BLOCK_ROWS: Final = 256
"""The most rows that are gathered, or converted, at once."""
PADDED_ROWS: Final = 16
"""The rows of every product with `batch_invariant`."""
BATCHED_GROUPS_MIN: Final = 3
"""The least groups of one shape that are computed by a batched product."""
LONG_ROWS: Final = 32
LONG_ROWS_BFLOAT16: Final = 128
"""The threshold between the two strategies: groups of at least so many rows are looped over.

A call of a bfloat16 product takes seven times as long as one in float32, and its arithmetic half.
"""
_SIMILAR_ROWS: Final = 4
"""Groups of at most so many rows are padded to one size; larger ones to powers of two."""


class BlockPart(NamedTuple):
    """`size` rows of one slot within a block, of which the first `real_size` are not padding."""

    slot: int
    size: int
    real_size: int


class Block:
    """Rows that are computed together, one part per slot; `size` and `sizes`: with padding.

    rows: [size] int64, the batch's row of each row of the block; None if these are contiguous from
    `first` on. real_indices: [real rows] int64, the block's rows that are not padding; None without
    padding. real_rows: `rows` without the padding.
    """

    __slots__ = ("first", "parts", "real_indices", "real_rows", "rows", "size", "sizes")

    def __init__(
        self,
        parts: tuple[BlockPart, ...],
        first: int,
        rows: Tensor | None,
        real_indices: Tensor | None = None,
        real_rows: Tensor | None = None,
    ) -> None:
        self.parts, self.first, self.rows = parts, first, rows
        self.real_indices, self.real_rows = real_indices, real_rows
        self.sizes = [part.size for part in parts]
        self.size = sum(self.sizes)

    def read(self, x: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        """Return the block's rows of x [tokens, columns] in `dtype`: a view, or a scratch copy."""
        if self.rows is None:
            rows = x[self.first : self.first + self.size]
            return rows if x.dtype == dtype else scratch.copy_of("x", rows, dtype)
        if x.dtype != dtype:
            return scratch.copy_of("x", x.index_select(0, self.rows), dtype)
        shape = (self.size, x.shape[1])
        return torch.index_select(x, 0, self.rows, out=scratch.take("x", shape, dtype))

    def add(self, y: Tensor, delta: Tensor) -> None:
        """Compute `y[block's rows] += delta`; y: [tokens, columns], delta: [size, columns]."""
        if self.real_indices is not None:
            delta = torch.index_select(delta, 0, self.real_indices)
        if delta.dtype != y.dtype:
            delta = delta.to(y.dtype)
        if self.rows is None:
            y[self.first : self.first + self.size] += delta
        else:
            y.index_add_(0, self.rows if self.real_rows is None else self.real_rows, delta)


class Tiling(NamedTuple):
    """Blocks that together have every row once of the groups whose ranks are not all 0.

    `looped`: one product per part. `batched`: one product for all parts, which have the same ranks
    and equal sizes.
    """

    looped: tuple[Block, ...]
    batched: tuple[Block, ...] = ()


Ranks = tuple[tuple[int, ...], ...]
"""For each group of a batch, its adapter's rank in each slice of a layer; 0 if it lacks the slice.
"""


class SlotRows(NamedTuple):
    """One slot's rows of the batch: those that are read, and those that are written."""

    slot: int
    reads: Tensor
    writes: Tensor


class BatchTiler:
    """Tilings of the latest batch's groups, computed once and shared by layers with equal ranks.

    With `batch_invariant` every product has the same number of rows, so that a row's sums don't
    depend on the rest of the batch.
    """

    def __init__(self, batch_invariant: bool) -> None:
        self.batch_invariant = batch_invariant
        # A batch has two mappings: of tokens and of sampled rows.
        self._recent: list[tuple[Groups, dict[tuple[Ranks, bool, int], Tiling]]] = []

    def __call__(self, groups: Groups, ranks: Ranks, in_place: bool, long_rows: int) -> Tiling:
        """Return the tiling of `groups` for a layer with these ranks.

        `in_place`: contiguous rows are neither gathered nor converted, so there may be any number
        of them in a block.
        """
        tilings = self._tilings_of(groups)
        key = (ranks, in_place, long_rows)
        if key not in tilings:
            spans = [span for span, own in zip(groups.spans, ranks, strict=True) if any(own)]
            if self.batch_invariant:
                tilings[key] = Tiling(padded_blocks(groups, spans))
            else:
                tilings[key] = tile(groups, ranks, in_place, long_rows)
        return tilings[key]

    def _tilings_of(self, groups: Groups) -> dict[tuple[Ranks, bool, int], Tiling]:
        for known, tilings in self._recent:
            if known is groups:
                return tilings
        self._recent = [*self._recent[-1:], (groups, {})]
        return self._recent[-1][1]

    def product_rows(self, groups: Groups) -> int:
        """Return the most rows of any group's product."""
        return PADDED_ROWS if self.batch_invariant else groups.longest

    def slot_rows(self, groups: Groups) -> list[SlotRows]:
        """Return the rows of `groups` by slot, for operations that process one slot at a time."""
        if self.batch_invariant:
            blocks = padded_blocks(groups, groups.spans)
            return [rows for block in blocks for rows in _slot_rows(block)]
        return [
            SlotRows(span.slot, rows, rows)
            for span in groups.spans
            for rows in torch.split(groups.rows[span.start : span.end], BLOCK_ROWS)
        ]


def min_long_rows(dtype: torch.dtype) -> int:
    """Return the least rows of a long group if products are computed in `dtype`."""
    return LONG_ROWS_BFLOAT16 if dtype == torch.bfloat16 else LONG_ROWS


def tile(groups: Groups, ranks: Ranks, in_place: bool, long_rows: int) -> Tiling:
    """Divide a batch; short groups of equal ranks and similar sizes are batched."""
    long: list[SlotSpan] = []
    short: list[SlotSpan] = []
    classes: dict[tuple[object, ...], list[SlotSpan]] = defaultdict(list)
    for span, own in zip(groups.spans, ranks, strict=True):
        size = span.end - span.start
        if size >= long_rows:
            long.append(span)
        elif any(own):
            classes[own, max(_SIMILAR_ROWS, next_power_of_two(size))].append(span)
    batched: list[Block] = []
    for spans in classes.values():
        if len(spans) < BATCHED_GROUPS_MIN:
            short += spans
        else:
            batched += map(equal_parts, blocks_of(groups, spans))
    looped = [block for span in long for block in _blocks_of_long(groups, span, in_place)]
    return Tiling((*looped, *blocks_of(groups, sorted(short))), tuple(batched))


def padded_blocks(groups: Groups, spans: Sequence[SlotSpan]) -> tuple[Block, ...]:
    """Return blocks whose parts all have `PADDED_ROWS` rows; padding repeats a part's last row."""
    parts = [
        SlotSpan(span.slot, start, min(start + PADDED_ROWS, span.end))
        for span in spans
        for start in range(span.start, span.end, PADDED_ROWS)
    ]
    parts_max = BLOCK_ROWS // PADDED_ROWS
    return tuple(
        _padded_block(_parts_of(own), _rows_of(groups, own), PADDED_ROWS)
        for index in range(0, len(parts), parts_max)
        if (own := parts[index : index + parts_max])
    )


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


def blocks_of(groups: Groups, spans: Sequence[SlotSpan]) -> list[Block]:
    """Return blocks of whole groups, each filled up to `BLOCK_ROWS` rows."""
    blocks: list[list[SlotSpan]] = []
    size = BLOCK_ROWS
    for span in spans:
        count = span.end - span.start
        if size + count > BLOCK_ROWS:
            blocks.append([])
            size = 0
        blocks[-1].append(span)
        size += count
    return [_block_of(groups, own) for own in blocks]


def _block_of(groups: Groups, spans: Sequence[SlotSpan]) -> Block:
    rows, parts = _rows_of(groups, spans), _parts_of(spans)
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows))):
        return Block(parts, first, None)
    return Block(parts, 0, rows)


def _blocks_of_long(groups: Groups, span: SlotSpan, in_place: bool) -> list[Block]:
    """Return contiguous runs of rows if they are long on average, else gathered blocks."""
    rows = groups.rows[span.start : span.end]
    breaks = (rows[1:] - rows[:-1] != 1).nonzero().flatten() + 1
    if (len(breaks) + 1) * LONG_ROWS > len(rows):
        return [Block(_parts(span.slot, len(own)), 0, own) for own in torch.split(rows, BLOCK_ROWS)]
    edges = [0, *breaks.tolist(), len(rows)]
    firsts = rows[edges[:-1]].tolist()
    runs = [(first, b - a) for first, (a, b) in zip(firsts, pairwise(edges), strict=True)]
    rows_max = len(rows) if in_place else BLOCK_ROWS
    return [
        Block(_parts(span.slot, min(rows_max, first + size - start)), start, None)
        for first, size in runs
        for start in range(first, first + size, rows_max)
    ]


def _rows_of(groups: Groups, spans: Sequence[SlotSpan]) -> Tensor:
    return torch.cat([groups.rows[span.start : span.end] for span in spans])


def _parts_of(spans: Sequence[SlotSpan]) -> tuple[BlockPart, ...]:
    return tuple([part for span in spans for part in _parts(span.slot, span.end - span.start)])


def _parts(slot: int, size: int) -> tuple[BlockPart, ...]:
    return (BlockPart(slot, size, size),)


def _slot_rows(block: Block) -> list[SlotRows]:
    rows = block_rows(block).split_with_sizes(block.sizes)
    return [
        SlotRows(part.slot, reads, reads[: part.real_size])
        for part, reads in zip(block.parts, rows, strict=True)
    ]


def _padded_block(parts: tuple[BlockPart, ...], rows: Tensor, part_size: int) -> Block:
    """Return a block whose parts are padded to `part_size` rows by repeating their last row."""
    counts = torch.tensor([part.size for part in parts])[:, None]
    starts = torch.cumsum(counts, 0) - counts
    indices = torch.arange(part_size)
    sources = starts + torch.minimum(indices, counts - 1)
    real_indices = (indices < counts).flatten().nonzero().flatten()
    padded = tuple(part._replace(size=part_size) for part in parts)
    return Block(padded, 0, rows[sources.flatten()], real_indices, rows)
