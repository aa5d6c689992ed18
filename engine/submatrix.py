"""Which numbers of a stored matrix are read: some of its rows, and some of its columns.

What it is: ranges, and the runs of bytes that they are. What it is not: a reader. One rule: no byte
beside a part is read for it, and bytes that lie together are one run.

Under tensor parallelism a rank keeps a part of most matrices. Rows of B lie together; of A's
columns each row has a run of its own, and there are no more of those than the adapter's rank (of
experts in one tensor, their ranks together); the rows that are dealt out are as many or fewer.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from torch import Tensor, cat


class Part(NamedTuple):
    """Rows, in the order in which they are kept, and columns of a matrix; None for all of them."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None

    def cut(self, matrix: Tensor) -> Tensor:
        """This part of a matrix, or of each of a stack, as a view where its rows lie together."""
        columns = slice(None) if self.columns is None else _slice(self.columns)
        if self.rows is None:
            return matrix[..., columns]
        pieces = [matrix[..., _slice(rows), columns] for rows in self.rows]
        return pieces[0] if len(pieces) == 1 else cat(pieces, dim=-2)

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What is left of a matrix of this shape; ValueError for what lies outside of it.

        A whole tensor of another number of dimensions keeps its shape.
        """
        if self == ALL:
            return shape
        height, width = shape
        columns = range(width) if self.columns is None else self.columns
        rows = (range(height),) if self.rows is None else self.rows
        if columns.step != 1 or not _is_within(columns, width):
            raise ValueError(f"columns {columns} of {width}; a range within them, without steps")
        if not all(_is_within(one, height) for one in rows):
            raise ValueError(f"rows {list(rows)} of {height}; ranges within them")
        return (sum(map(len, rows)), len(columns))


ALL: Final = Part()
"""All of a tensor."""


class Run(NamedTuple):
    """Bytes that lie together, counted from the matrix's first."""

    start: int
    size_bytes: int


def runs_of(part: Part, shape: tuple[int, ...], item_bytes: int) -> Iterator[Run]:
    """The bytes of a part of a row-major matrix, in the order in which it keeps them."""
    height, width = shape
    columns = range(width) if part.columns is None else part.columns
    pitch, size_bytes = width * item_bytes, len(columns) * item_bytes
    for rows in (range(height),) if part.rows is None else part.rows:
        if size_bytes == pitch and rows.step == 1:
            yield Run(rows.start * pitch, len(rows) * pitch)
        else:
            first = columns.start * item_bytes
            yield from (Run(row * pitch + first, size_bytes) for row in rows)


def _is_within(numbers: range, length: int) -> bool:
    return len(numbers) > 0 and numbers[0] >= 0 and numbers[0] <= numbers[-1] < length


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
