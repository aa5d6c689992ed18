"""Rows of a model with states of any kind: each is prefilled alone, and all are decoded together.

The states are those of the model's own cache classes. A row's columns end in the last column, so
attention needs the mask of a left-padded batch; other states need none.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from loradock.engine.models.caches.layer_states import (
    copy_layer,
    join_layers,
    own_cache,
    states_bytes,
    take_rows,
)
from loradock.engine.models.caches.row_cache import RowStates
from loradock.engine.models.library.caches import DynamicCache


class StateCache(RowStates):
    """The caches of single rows until they are decoded together, and one cache from then on."""

    def __init__(
        self, config: Any, lengths: Sequence[int] = (), offsets: Sequence[int] = ()
    ) -> None:
        super().__init__(lengths, offsets)
        self._config = config
        self._single = [own_cache(config) for _ in self.lengths]
        self._together: DynamicCache | None = None

    def single(self, row: int) -> DynamicCache:
        """Return the cache of one row, before the rows were decoded together."""
        return self._single[row]

    @property
    def size_bytes(self) -> int:
        """The bytes of all rows' states."""
        return states_bytes((self._single, self._together))

    @property
    def is_together(self) -> bool:
        """Whether the rows have one cache."""
        return self._together is not None

    def together(self) -> DynamicCache:
        """Return the cache of all rows."""
        if self._together is None:
            self._together = _joined(self._single)
            self._single = []
        return self._together

    def join(self, other: "StateCache") -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        if not len(other):
            return
        added = other.together()
        self._together = _joined([self.together(), added]) if len(self) else added
        self._single = []
        self._join_counts(other)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the columns that are then padding in every row."""
        is_whole = list(rows) == list(range(len(self)))
        before = max(self.done, default=0)
        self._keep_counts(rows)
        if not rows:
            self._together, self._single = None, []
        elif self._together is None:
            self._single = [self._single[row] for row in rows]
        elif not is_whole:
            padding = before - max(self.done)
            for layer in self._together.layers:
                device = _device_of(layer)
                if device is not None:
                    take_rows(layer, torch.tensor(list(rows), device=device), padding)

    def take(self, row: int) -> "StateCache":
        """Remove a row and return it in a cache of its own."""
        taken = copy(self)
        if self._together is not None:
            taken._together = _copied(self._together)
        taken.keep([row])
        self.keep([other for other in range(len(self)) if other != row])
        return taken


def _copied(cache: DynamicCache) -> DynamicCache:
    """Return a cache with the same tensors, of which rows can be dropped alone."""
    copied = copy(cache)
    copied.layers = [copy_layer(layer) for layer in cache.layers]
    return copied


def _joined(caches: Sequence[DynamicCache]) -> DynamicCache:
    first = caches[0]
    if len(caches) > 1:
        pairs = zip(*(cache.layers for cache in caches), strict=True)
        first.layers = [join_layers(layers) for layers in pairs]
    return first


def _device_of(layer: Any) -> torch.device | None:
    device: torch.device | None = getattr(layer, "device", None)
    return device
