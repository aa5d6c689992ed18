"""A batch's rows, cut into what is computed together.

What it is: arithmetic on row numbers, once for each mapping. What it is not: a product. One rule:
there is a Python loop over groups, over long runs and over blocks, never over rows.

A group is *long* from as many rows on as make a product's time that of its numbers and not of its
call. A long group is cut into runs of rows that lie side by side, which are read and written where
they are. All short groups make blocks together.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.kernels.operands import Groups, Span

LONG_ROWS: Final = 32
"""From so many rows on a group is worth calls of its own."""
LONG_ROWS_BFLOAT16: Final = 128
"""The same for products in bfloat16: a call takes seven times as long, and the numbers half."""
BLOCK_ROWS: Final = 256
"""The most rows that are gathered, or converted, at once."""
PADDED_ROWS: Final = 16
"""With batch_invariant every product has exactly so many rows."""


class Run(NamedTuple):
    """Rows of one slot: `first` to `end` of the batch, or `rows` [n] int64 that lie apart."""

    slot: int
    first: int
    end: int
    rows: Tensor | None


class Part(NamedTuple):
    """`size` rows of one slot within a block, of which the first `real` are not padding."""

    slot: int
    size: int
    real: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows that are computed together, part by part.

    rows: [size] int64, the batch's row of each of the block's; None where these are `first` and
    those that follow. keep: [real rows] int64, the places in the block of rows that are not there
    as padding only; None where all are real. targets: `rows` without the padding.
    """

    parts: tuple[Part, ...]
    first: int
    rows: Tensor | None
    keep: Tensor | None = None
    targets: Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        """The rows of each part."""
        return [part.size for part in self.parts]

    @property
    def size(self) -> int:
        """All rows, padding included."""
        return sum(self.sizes)


class Cut(NamedTuple):
    """Runs and blocks that together hold every row of every group once."""

    runs: tuple[Run, ...]
    blocks: tuple[Block, ...]


class Piece(NamedTuple):
    """One slot's rows of the batch: those that are read, and those that are written."""

    slot: int
    reads: Tensor
    writes: Tensor


class Cutter:
    """What a batch is cut into, found once for each mapping and used by all layers.

    With `batch_invariant` every part has the same number of rows, so that a row's sums don't depend
    on how many there are beside it.
    """

    def __init__(self, batch_invariant: bool) -> None:
        self.batch_invariant = batch_invariant
        # A batch has two: its tokens', and its sampled rows'; layers may have two dtypes.
        self._known: deque[tuple[Groups, int, Cut]] = deque(maxlen=4)

    def __call__(self, groups: Groups, long_rows: int = LONG_ROWS) -> Cut:
        """Runs and blocks of `groups`, which is held and compared by identity: never mistaken.

        With `batch_invariant` no group is long.
        """
        for known, known_rows, found in self._known:
            if known is groups and (known_rows == long_rows or self.batch_invariant):
                return found
        made = padded(groups) if self.batch_invariant else cut(groups, long_rows)
        self._known.append((groups, long_rows, made))
        return made

    def product_rows(self, groups: Groups) -> int:
        """The most rows that one group's product has."""
        return PADDED_ROWS if self.batch_invariant else groups.longest

    def pieces(self, groups: Groups) -> list[Piece]:
        """The rows of `groups` slot by slot, for operations that take one slot at a time."""
        if self.batch_invariant:
            return [piece for block in self(groups).blocks for piece in _pieces(block)]
        return [
            Piece(span.slot, rows, rows)
            for span in groups.spans
            for rows in torch.split(groups.rows[span.start : span.end], BLOCK_ROWS)
        ]


def long_rows_of(computed: torch.dtype) -> int:
    """From how many rows on a group is long where products are made in the dtype `computed`."""
    return LONG_ROWS_BFLOAT16 if computed == torch.bfloat16 else LONG_ROWS


def cut(groups: Groups, long_rows: int = LONG_ROWS) -> Cut:
    """Groups of `long_rows` and more as runs, shorter ones as blocks."""
    long = [span for span in groups.spans if span.end - span.start >= long_rows]
    short = [span for span in groups.spans if span.end - span.start < long_rows]
    runs = tuple(run for span in long for run in _runs(groups, span))
    return Cut(runs, tuple(short_blocks(groups, short)))


def padded(groups: Groups) -> Cut:
    """Blocks of parts that have exactly `PADDED_ROWS` rows; a part's last row fills it up."""
    parts = [
        _part(span.slot, min(PADDED_ROWS, span.end - start))
        for span in groups.spans
        for start in range(span.start, span.end, PADDED_ROWS)
    ]
    blocks, start, parts_max = [], 0, BLOCK_ROWS // PADDED_ROWS
    for place in range(0, len(parts), parts_max):
        some = tuple(parts[place : place + parts_max])
        size = sum(part.size for part in some)
        blocks.append(_filled_up(some, groups.rows[start : start + size], PADDED_ROWS))
        start += size
    return Cut((), tuple(blocks))


def equal_parts(block: Block) -> Block:
    """The same rows, each part filled up to the rows of the largest."""
    width = max(block.sizes)
    return block if min(block.sizes) == width else _filled_up(block.parts, rows_of(block), width)


def rows_of(block: Block) -> Tensor:
    """The batch's row of each of the block's."""
    if block.rows is None:
        return torch.arange(block.first, block.first + block.size)
    return block.rows


def _pieces(block: Block) -> list[Piece]:
    rows = rows_of(block).split_with_sizes(block.sizes)
    return [
        Piece(part.slot, reads, reads[: part.real])
        for part, reads in zip(block.parts, rows, strict=True)
    ]


def _part(slot: int, size: int) -> Part:
    return Part(slot, size, size)


def _filled_up(parts: tuple[Part, ...], rows: Tensor, width: int) -> Block:
    """A block whose parts all have `width` rows, each part's last row as often as it takes."""
    counts = torch.tensor([part.size for part in parts])[:, None]
    starts = torch.cumsum(counts, 0) - counts
    places = torch.arange(width)
    sources = starts + torch.minimum(places, counts - 1)
    keep = (places < counts).flatten().nonzero().flatten()
    filled = tuple(part._replace(size=width) for part in parts)
    return Block(filled, 0, rows[sources.flatten()], keep, rows)


def _runs(groups: Groups, span: Span) -> list[Run]:
    """Runs of rows side by side where these are long on the average, else gathered rows."""
    rows = groups.rows[span.start : span.end]
    breaks = (rows[1:] - rows[:-1] != 1).nonzero().flatten() + 1
    if (len(breaks) + 1) * LONG_ROWS > len(rows):
        return [Run(span.slot, 0, 0, some) for some in torch.split(rows, BLOCK_ROWS)]
    edges = [0, *breaks.tolist(), len(rows)]
    sizes = (end - start for start, end in pairwise(edges))
    firsts = rows[edges[:-1]].tolist()
    return [
        Run(span.slot, first, first + size, None) for first, size in zip(firsts, sizes, strict=True)
    ]


def short_blocks(groups: Groups, spans: Sequence[Span]) -> list[Block]:
    """Whole groups, as many as `BLOCK_ROWS` takes, in each block."""
    blocks: list[Block] = []
    waiting: list[Span] = []
    size = 0
    for span in spans:
        count = span.end - span.start
        if waiting and size + count > BLOCK_ROWS:
            blocks.append(_short_block(groups, waiting))
            waiting, size = [], 0
        waiting.append(span)
        size += count
    return [*blocks, _short_block(groups, waiting)] if waiting else blocks


def _short_block(groups: Groups, spans: list[Span]) -> Block:
    start, end = spans[0].start, spans[-1].end
    size = sum(span.end - span.start for span in spans)
    rows = groups.rows[start:end]
    if size != end - start:
        rows = torch.cat([groups.rows[span.start : span.end] for span in spans])
    parts = tuple(_part(span.slot, span.end - span.start) for span in spans)
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + size)):
        return Block(parts, first, None)
    return Block(parts, 0, rows)
