"""Some rows and columns of a stored matrix, and the byte ranges that they occupy.

Under tensor parallelism a rank keeps a part of most matrices. No byte outside a submatrix is read
for it, and adjacent bytes are one range. Rows of B are adjacent. Columns of A need one range per
row, so at most as many as the adapter's rank (for experts in one tensor: the sum of their ranks).
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from torch import Tensor, cat


class Submatrix(NamedTuple):
    """Rows, in the order in which they are kept, and columns of a matrix; None: all of them."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None

    def select(self, matrix: Tensor) -> Tensor:
        """Return the submatrix of a matrix or of each of a stack: a view if `rows` is one range."""
        columns = slice(None) if self.columns is None else _slice(self.columns)
        if self.rows is None:
            return matrix[..., columns]
        pieces = [matrix[..., _slice(rows), columns] for rows in self.rows]
        return pieces[0] if len(pieces) == 1 else cat(pieces, dim=-2)

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the submatrix's shape in a matrix of `shape`; ValueError if it is not inside.

        `WHOLE_TENSOR` accepts a tensor of any number of dimensions.
        """
        if self == WHOLE_TENSOR:
            return shape
        height, width = shape
        columns = range(width) if self.columns is None else self.columns
        rows = (range(height),) if self.rows is None else self.rows
        if columns.step != 1 or not _is_within(columns, width):
            raise ValueError(f"columns are {columns} of {width}; a range within them, of step 1")
        if not all(_is_within(one, height) for one in rows):
            raise ValueError(f"rows are {list(rows)} of {height}; ranges within them are allowed")
        return (sum(map(len, rows)), len(columns))


WHOLE_TENSOR: Final = Submatrix()
"""All of a tensor."""


class ByteRange(NamedTuple):
    """Adjacent bytes, counted from the first byte of the matrix."""

    start: int
    size_bytes: int


def byte_ranges_of(
    submatrix: Submatrix, shape: tuple[int, ...], item_bytes: int
) -> Iterator[ByteRange]:
    """Yield the bytes of a submatrix of a row-major matrix, in the order in which it keeps them."""
    height, width = shape
    columns = range(width) if submatrix.columns is None else submatrix.columns
    row_bytes, size_bytes = width * item_bytes, len(columns) * item_bytes
    for rows in (range(height),) if submatrix.rows is None else submatrix.rows:
        if size_bytes == row_bytes and rows.step == 1:
            yield ByteRange(rows.start * row_bytes, len(rows) * row_bytes)
        else:
            first = columns.start * item_bytes
            yield from (ByteRange(row * row_bytes + first, size_bytes) for row in rows)


def _is_within(numbers: range, length: int) -> bool:
    return len(numbers) > 0 and numbers[0] >= 0 and numbers[0] <= numbers[-1] < length


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
