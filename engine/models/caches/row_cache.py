"""The interface of a batch's rows in memory, for layers of any kind."""

from collections.abc import Sequence
from typing import Protocol, Self


class RowCache(Protocol):
    """The states of a batch's rows, row by row in its order, and each row's number of tokens.

    `lengths`: the tokens of each row, those of the next forward included. `offsets`: the position
    of a row's next token minus its length. `prompt_lengths`: the tokens of each row's prompt, of
    which a forward may process a part; those that a cache is made with, unless they are set.
    """

    lengths: list[int]
    offsets: list[int]
    prompt_lengths: list[int]

    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    def width(self) -> int:
        """The number of columns that a forward has been given."""

    @property
    def positions(self) -> list[int]:
        """The position of each row's next token."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all rows in memory."""

    def grow(self, tokens: int) -> None:
        """Count `tokens` new tokens of every row, which the next forward writes."""

    def join(self, other: Self) -> None:
        """Append the rows of `other`, which must not be used afterwards."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""

    def take(self, row: int) -> Self:
        """Remove a row and return it in a cache of its own, which can `join` again."""


class RowStates:
    """Base class of caches whose rows are prefilled one by one, without padding.

    `done`: the tokens of each row that a forward has processed. `width` counts columns, in which
    shorter rows have padding on the left.
    """

    def __init__(self, lengths: Sequence[int], offsets: Sequence[int] = ()) -> None:
        self.lengths = list(lengths)
        self.offsets = list(offsets) or [0] * len(self.lengths)
        self.prompt_lengths = list(lengths)
        self.done = [0] * len(self.lengths)
        self._columns = 0

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """The number of columns that forwards were given, or that the longest row needs."""
        return max([self._columns, *self.done])

    @property
    def positions(self) -> list[int]:
        """The position of each row's next token."""
        pairs = zip(self.lengths, self.offsets, strict=True)
        return [length + offset for length, offset in pairs]

    @property
    def new_tokens(self) -> list[int]:
        """The tokens of each row that the next forward processes."""
        return [length - done for length, done in zip(self.lengths, self.done, strict=True)]

    def grow(self, tokens: int) -> None:
        """Count `tokens` new tokens of every row, which the next forward processes."""
        self.lengths = [length + tokens for length in self.lengths]

    def finish(self, columns: int) -> None:
        """Count a forward of `columns` columns, which has processed every new token."""
        self._columns += columns
        self.done = list(self.lengths)

    def _join_counts(self, other: "RowStates") -> None:
        self.lengths += other.lengths
        self.offsets += other.offsets
        self.prompt_lengths += other.prompt_lengths
        self.done += other.done
        self._columns = 0

    def _keep_counts(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]
        self.prompt_lengths = [self.prompt_lengths[row] for row in rows]
        self.done = [self.done[row] for row in rows]
        self._columns = 0
