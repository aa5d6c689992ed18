"""Caches of a batch's rows: what all have, and those of rows that are prefilled one by one.

`StateCache` decodes its rows together, with the states of the model's own cache classes: a row's
columns end in the last column, so attention needs the mask of a left-padded batch, and other states
need none. `SingleRows` runs each row alone, as the model's own `generate` does; what a row keeps
between two tokens is the model's business: a cache of any kind, under any name, attributes of its
modules, or nothing, and then all its tokens are computed again.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from loradock.engine.errors import ModelRefused
from loradock.engine.models.library.generation import next_inputs, state_after
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
    PreTrainedModel,
)


class RowCache(ABC):
    """The states of a batch's rows, row by row in its order, and each row's number of tokens.

    `lengths`: the tokens of each row, with the tokens of the next forward. `offsets`: the position
    of a row's next token minus its length. `prompt_lengths`: the tokens of each row's prompt, of
    which a forward can process a part; the first lengths, unless they are set.
    """

    def __init__(self, lengths: Sequence[int], offsets: Sequence[int] = ()) -> None:
        self.lengths = list(lengths)
        self.offsets = list(offsets) or [0] * len(self.lengths)
        self.prompt_lengths = list(lengths)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    @property
    def positions(self) -> list[int]:
        """The position of each row's next token."""
        pairs = zip(self.lengths, self.offsets, strict=True)
        return [length + offset for length, offset in pairs]

    def grow(self, tokens: int) -> None:
        """Count `tokens` new tokens of every row, which the next forward writes."""
        self.lengths = [length + tokens for length in self.lengths]

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of columns that forwards were given."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """The bytes of all rows in memory."""

    @abstractmethod
    def join(self, other: Self) -> None:
        """Append the rows of `other`, which must not be used afterwards."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""

    @abstractmethod
    def take(self, row: int) -> Self:
        """Remove a row and return it in a separate cache, which can `join` again."""

    def _join_counts(self, other: Self) -> None:
        self.lengths += other.lengths
        self.offsets += other.offsets
        self.prompt_lengths += other.prompt_lengths

    def _keep_counts(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]
        self.prompt_lengths = [self.prompt_lengths[row] for row in rows]


class RowStates(RowCache):
    """Base class of caches whose rows are prefilled one by one, without padding.

    `done`: the tokens of each row that a forward has processed. `width` counts columns, in which
    shorter rows have padding on the left. `_rows`: the states of each row.
    """

    def __init__(
        self, lengths: Sequence[int], offsets: Sequence[int], new_row: Callable[[], Any]
    ) -> None:
        super().__init__(lengths, offsets)
        self.done = [0] * len(self.lengths)
        self._columns = 0
        self._rows = [new_row() for _ in self.lengths]

    @property
    def width(self) -> int:
        """The number of columns that forwards were given, or that the longest row needs."""
        return max([self._columns, *self.done])

    @property
    def size_bytes(self) -> int:
        """The bytes of all rows' states."""
        return states_bytes(self._rows)

    @property
    def new_tokens(self) -> list[int]:
        """The tokens of each row that the next forward processes."""
        return [length - done for length, done in zip(self.lengths, self.done, strict=True)]

    def finish(self, columns: int) -> None:
        """Count a forward of `columns` columns, which has processed every new token."""
        self._columns += columns
        self.done = list(self.lengths)

    def copy_states(self, row: int) -> Any:
        """Return a copy of a row's states, while the row is prefilled."""
        return deepcopy(self._rows[row])

    def restore(self, row: int, states: Any, tokens: int) -> None:
        """Let a row without tokens begin with a copy of states of this number of tokens."""
        self._rows[row] = deepcopy(states)
        self.lengths[row] = self.done[row] = tokens

    def join(self, other: Self) -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        self._rows += other._rows
        self._join_counts(other)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self._rows = [self._rows[row] for row in rows]
        self._keep_counts(rows)

    def take(self, row: int) -> Self:
        """Remove a row and return it in a separate cache, which can `join` again."""
        taken = copy(self)
        taken.keep([row])
        self.keep([other for other in range(len(self)) if other != row])
        return taken

    def _join_counts(self, other: Self) -> None:
        super()._join_counts(other)
        self.done += other.done
        self._columns = 0

    def _keep_counts(self, rows: Sequence[int]) -> None:
        super()._keep_counts(rows)
        self.done = [self.done[row] for row in rows]
        self._columns = 0


def states_bytes(value: object) -> int:
    """Return the bytes of the tensors in states of any kind."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Cache | CacheLayerMixin | _SingleRow):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(states_bytes, value)) if isinstance(value, list | tuple) else 0


_WITH_WHOLE_WINDOW: Final[dict[type, Callable[[Any], Any]]] = {
    DynamicSlidingWindowLayer: lambda _: DynamicLayer(),
    LinearAttentionAndSlidingWindowAttentionLayer: lambda layer: (
        LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    ),
}
"""Layers that drop columns outside a window; rows of different lengths would drop other columns."""

_JOINABLE: Final = (
    *(DummyLayer, DynamicLayer, DynamicIndexedLayer),
    *(LinearAttentionLayer, LinearAttentionAndFullAttentionLayer),
)
"""The layers whose states are known; each exactly, because a subclass can have further states."""

_COLUMNS: Final = {"keys": -2, "values": -2, "indexer_keys": 1}
"""States with a column per token, and the dimension of the columns."""

_WHOLE: Final = ("conv_states", "recurrent_states")
"""Convolution, recurrent and state-space states by number: one value per row."""


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
    for name in _WHOLE:
        states: dict[int, Tensor | None] = getattr(first, name, {})
        for key, state in states.items():
            if state is not None:
                states[key] = torch.cat([getattr(layer, name)[key] for layer in layers])
    return first


def take_rows(layer: Any, rows: Sequence[int], padding: int) -> Any:
    """Return a layer with these rows of a layer, without the first `padding` columns."""
    taken = copy(layer)
    index = torch.tensor(list(rows), device=getattr(layer, "device", None))
    for name, dimension in _COLUMNS.items():
        tensor = getattr(layer, name, None)
        if isinstance(tensor, Tensor):
            columns = tensor.shape[dimension] - padding
            kept = tensor.index_select(0, index).narrow(dimension, padding, columns)
            setattr(taken, name, kept.contiguous())
    for name in _WHOLE:
        states: dict[int, Tensor | None] | None = getattr(layer, name, None)
        if states is not None:
            own = {
                key: state if state is None else state.index_select(0, index)
                for key, state in states.items()
            }
            setattr(taken, name, own)
    return taken


def _join_columns(tensors: Sequence[Any], dimension: int) -> Tensor:
    """Return the rows of all tensors, with zeros on the left of shorter tensors."""
    width = max(tensor.shape[dimension] for tensor in tensors)
    after = (tensors[0].ndim - 1 - dimension) if dimension >= 0 else -1 - dimension
    padded = [
        pad(tensor, (0, 0) * after + (width - tensor.shape[dimension], 0)) for tensor in tensors
    ]
    return torch.cat(padded)


class StateCache(RowStates):
    """The caches of single rows while they are prefilled, and one cache from the first step on."""

    def __init__(
        self, config: Any, lengths: Sequence[int] = (), offsets: Sequence[int] = ()
    ) -> None:
        super().__init__(lengths, offsets, lambda: own_cache(config))
        self._together: DynamicCache | None = None

    def single(self, row: int) -> DynamicCache:
        """Return the cache of one row, before the rows were decoded together."""
        return self._rows[row]

    @property
    def size_bytes(self) -> int:
        """The bytes of all rows' states."""
        return states_bytes((self._rows, self._together))

    @property
    def is_together(self) -> bool:
        """True if the rows have one cache, so that the next forward is a step of all of them."""
        return self._together is not None

    def together(self) -> DynamicCache:
        """Return the cache of all rows, of which there is at least one."""
        if self._together is None:
            self._together = _joined(self._rows)
            self._rows = []
        return self._together

    def grow(self, tokens: int) -> None:
        """Count `tokens` new tokens of every row, which are decoded together."""
        super().grow(tokens)
        if len(self):
            self.together()

    def join(self, other: Self) -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        if len(other):
            added = other.together()
            self._together = _joined([self.together(), added]) if len(self) else added
            self._join_counts(other)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the columns that are then padding in every row."""
        is_whole = list(rows) == list(range(len(self)))
        if self._together is None:
            super().keep(rows)
            return
        before = max(self.done, default=0)
        self._keep_counts(rows)
        if not rows:
            self._together = None
        elif not is_whole:
            together = copy(self._together)
            padding = before - max(self.done)
            together.layers = [take_rows(layer, rows, padding) for layer in together.layers]
            self._together = together


def _joined(caches: Sequence[DynamicCache]) -> DynamicCache:
    first = caches[0]
    if len(caches) > 1:
        pairs = zip(*(cache.layers for cache in caches), strict=True)
        first.layers = [join_layers(layers) for layers in pairs]
    return first


ModuleValues = tuple[Any, ...]
"""The value of each state; None before a first forward pass."""


class ModuleState(NamedTuple):
    """An attribute `name` of `module` that a forward pass sets to a tensor.

    It belongs to the text that was computed last, so rows that take turns each need a copy.
    """

    module: nn.Module
    name: str


def find_module_states(model: nn.Module) -> tuple[ModuleState, ...]:
    """Return the attributes that a forward pass with a cache sets, and clear them."""
    before = {
        (module, name): value for module in model.modules() for name, value in vars(module).items()
    }
    ids = torch.arange(3, device=next(model.parameters()).device)[None]
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    with torch.inference_mode():
        model(ids, **({"use_cache": True} if has_cache else {}))
    states = tuple(
        ModuleState(module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value is not before.get((module, name))
    )
    _write_states(states, ())
    return states


def _write_states(states: Sequence[ModuleState], values: ModuleValues) -> None:
    """Set the values of a row before its forward pass; without values the values of a new row."""
    for state, value in zip(states, values or [None] * len(states), strict=True):
        setattr(state.module, state.name, value)


@dataclass
class _SingleRow:
    """One row: its tokens, and what the model keeps for it: by argument, and in its modules."""

    tokens: list[int] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    modules: ModuleValues = ()


class SingleRows(RowStates):
    """The states of rows that are never computed together."""

    def __init__(
        self,
        lengths: Sequence[int] = (),
        offsets: Sequence[int] = (),
        with_positions: bool = False,
        module_states: Sequence[ModuleState] = (),
        with_states: bool = True,
    ) -> None:
        """`with_positions`: the model accepts `position_ids`. `module_states`: of the model.

        `with_states` False: nothing is kept but the tokens, and all are computed at each step.
        """
        super().__init__(lengths, offsets, _SingleRow)
        self._with_states = with_states
        self._module_states = module_states
        self._with_positions = with_positions

    def forward(self, model: PreTrainedModel, row: int, tokens: Tensor) -> Tensor:
        """Return logits, [1, columns, vocabulary], of which the last columns are of the new tokens.

        tokens: [new] int64. A model without states has columns for all tokens.
        """
        one, device = self._rows[row], model.device
        one.tokens += tokens.tolist()
        inputs = next_inputs(
            model,
            torch.tensor([one.tokens], device=device),
            one.state,
            len(tokens) if one.state else None,
            with_positions=self._with_positions,
        )
        _write_states(self._module_states, one.modules)
        output = model(**inputs, return_dict=True)
        one.modules = tuple(getattr(state.module, state.name) for state in self._module_states)
        one.state = state_after(model, output) if self._with_states else {}
        logits: Tensor = output.logits
        return logits
