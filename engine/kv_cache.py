"""The keys and values of the running rows, one left-padded batch.

What it is: joining, dropping and cropping rows of a cache that `transformers` fills. What it is
not: shared between rows; the same prompt under two adapters has two of everything. One rule: a
row's last token is in the last column, so its true length tells which columns are its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer


def left_padding_mask(lengths: Tensor, width: int) -> Tensor:
    """Which columns are a row's own: [rows, width] int64, 1 in the last `lengths[row]` columns."""
    columns = torch.arange(width, device=lengths.device)
    return (columns >= width - lengths[:, None]).long()


class RowCache:
    """A batch's cache and how many tokens of each row are in it.

    In `cache`, every layer's keys and values are [rows, heads, width, head_dim] with one width for
    all layers; the last `lengths[row]` columns are the row's own, the others are never read.
    `offsets`: how much further a row's next position is than its length, where images count for
    other than their tokens.
    """

    def __init__(self, lengths: Sequence[int], offsets: Sequence[int] = ()) -> None:
        """An empty cache for a first forward of rows that have `lengths` tokens."""
        self.cache = DynamicCache()
        self.lengths = list(lengths)
        self.offsets = list(offsets) or [0] * len(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def positions(self) -> list[int]:
        """The position of each row's next token."""
        return [length + more for length, more in zip(self.lengths, self.offsets, strict=True)]

    @property
    def width(self) -> int:
        """The columns of every layer: as many as the longest row's tokens, or more."""
        return next((layer.keys.shape[2] for layer in _filled(self.cache)), 0)

    def grow(self, tokens: int) -> None:
        """Count the tokens that the next forward brings to every row."""
        self.lengths = [length + tokens for length in self.lengths]

    def join(self, other: "RowCache") -> None:
        """Take the rows of `other` after the own ones; `other` is not to be used any more."""
        width = max(self.width, other.width)
        for mine, theirs in zip(_filled(self.cache), _filled(other.cache), strict=True):
            mine.keys = torch.cat([_widen(mine.keys, width), _widen(theirs.keys, width)])
            mine.values = torch.cat([_widen(mine.values, width), _widen(theirs.values, width)])
        self.lengths += other.lengths
        self.offsets += other.offsets

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, at least one, and the columns that are padding in all."""
        whole = list(rows) == list(range(len(self)))
        self.lengths = [self.lengths[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]
        padding = self.width - max(self.lengths)
        if whole and padding == 0:
            return
        for layer in _filled(self.cache):
            index = torch.tensor(rows, dtype=torch.int64, device=layer.keys.device)
            layer.keys = layer.keys[:, :, padding:].index_select(0, index)
            layer.values = layer.values[:, :, padding:].index_select(0, index)


def _filled(cache: DynamicCache) -> list[DynamicLayer]:
    """The layers that hold something; a layer that reads another's cache holds nothing."""
    return [layer for layer in cache.layers if layer.is_initialized]


def _widen(states: Tensor, width: int) -> Tensor:
    return pad(states, (0, 0, width - states.shape[2], 0))
