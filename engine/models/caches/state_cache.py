"""Rows of a model with states of any kind: each is prefilled alone, and all are decoded together.

The states are those of the model's own cache classes. A row's columns end in the last column, so
attention needs the mask of a left-padded batch; other states need none.

Keys, values and an indexer's keys have a column per token. Convolution, recurrent and state-space
states have one value per row.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from loradock.engine.errors import ModelRefused
from loradock.engine.models.caches.row_cache import RowStates
from loradock.engine.models.library.names import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_WITH_WHOLE_WINDOW: Final[dict[type, Callable[[Any], Any]]] = {
    DynamicSlidingWindowLayer: lambda _: DynamicLayer(),
    LinearAttentionAndSlidingWindowAttentionLayer: lambda layer: (
        LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    ),
}
"""Layers that drop columns outside a window; rows of unlike lengths would drop other columns."""

_JOINABLE: Final = (
    *(DummyLayer, DynamicLayer, DynamicIndexedLayer),
    *(LinearAttentionLayer, LinearAttentionAndFullAttentionLayer),
)
"""The layers whose states are known; each exactly, because a subclass can have further states."""

_COLUMNS: Final = {"keys": -2, "values": -2, "indexer_keys": 1}
"""States with a column per token, and the dimension of the columns."""


def own_cache(config: Any) -> DynamicCache:
    """Return an empty cache with the layers of a model's configuration, without windows.

    Raises `ModelRefused` for a layer of an unknown kind.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_WITH_WHOLE_WINDOW.get(type(one), lambda x: x)(one) for one in cache.layers]
    for number, layer in enumerate(cache.layers):
        if type(layer) not in _JOINABLE:
            raise ModelRefused(
                f"layer {number} has the states of a {type(layer).__name__}, which are not known "
                "to be joinable by row"
            )
    return cache


def join_layers(layers: Sequence[Any]) -> Any:
    """Return one layer with the rows of all; the first one is changed and returned."""
    first = layers[0]
    for name, dimension in _COLUMNS.items():
        tensors = [getattr(layer, name, None) for layer in layers]
        if isinstance(tensors[0], Tensor):
            setattr(first, name, _join_columns(tensors, dimension))
    for name in ("conv_states", "recurrent_states"):
        states: dict[int, Tensor | None] = getattr(first, name, {})
        for key, state in states.items():
            if state is not None:
                states[key] = torch.cat([getattr(layer, name)[key] for layer in layers])
    return first


def copy_layer(layer: Any) -> Any:
    """Return a layer with the same tensors, which `take_rows` can change alone."""
    copied = copy(layer)
    for name in ("conv_states", "recurrent_states"):
        if hasattr(layer, name):
            setattr(copied, name, dict(getattr(layer, name)))
    return copied


def take_rows(layer: Any, rows: Tensor, padding: int) -> None:
    """Keep these rows of a layer, in place, without the first `padding` columns.

    rows: [rows] int64, on the layer's device.
    """
    for name, dimension in _COLUMNS.items():
        tensor = getattr(layer, name, None)
        if isinstance(tensor, Tensor):
            columns = tensor.shape[dimension] - padding
            kept = tensor.index_select(0, rows).narrow(dimension, padding, columns)
            setattr(layer, name, kept.contiguous())
    for name in ("conv_states", "recurrent_states"):
        states: dict[int, Tensor | None] = getattr(layer, name, {})
        for key, state in states.items():
            if state is not None:
                states[key] = state.index_select(0, rows)


def states_bytes(value: object) -> int:
    """Return the bytes of the tensors in a cache, in its layers, or in a container of these."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Cache | CacheLayerMixin):
        return states_bytes(vars(value))
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(states_bytes, value)) if isinstance(value, list | tuple) else 0


def _join_columns(tensors: Sequence[Any], dimension: int) -> Tensor:
    """Return the rows of all tensors, with zeros on the left of shorter tensors."""
    width = max(tensor.shape[dimension] for tensor in tensors)
    after = (tensors[0].ndim - 1 - dimension) if dimension >= 0 else -1 - dimension
    padded = [
        pad(tensor, (0, 0) * after + (width - tensor.shape[dimension], 0)) for tensor in tensors
    ]
    return torch.cat(padded)


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
        """True if the rows have one cache."""
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
