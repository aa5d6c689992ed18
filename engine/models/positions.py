"""The longest context of a model, and rotary embeddings whose frequencies depend on a row's length.

A position scheme that extends a trained length by a factor has the product as its context. llama3
states the extended length itself, and a factor that is larger than what it extends.

With longrope a model has one set of frequencies up to a trained length and another set beyond it;
with dynamic scaling each length beyond has a separate set. `transformers` derives the length from
the largest position of a forward pass, so one long row would change all rows of its batch. Here
each token has the length of the forward pass in which the model's own `generate` computes it: that
of the prompt, or for a generated token the number of tokens up to itself.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.models.library.generation import cache_argument
from loradock.engine.models.library.names import DynamicCache, PreTrainedModel

_CONTEXT_FIELDS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("context_length", "model_max_length", "max_sequence_length"),
)
"""The fields of configurations that state the longest context, in order of preference."""

_TRAINED_LENGTH: Final = "original_max_position_embeddings"

_EXTENDED: Final = ("yarn", "longrope", "dynamic")
"""The types of rotary embeddings that extend a trained length by their factor."""

CONTEXT_TOKENS_DEFAULT: Final = 8192
"""The longest context of a model that states none, as with ALiBi, unless one is configured."""


def longest_context(config: Any, configured: int) -> int:
    """Return the most tokens of one row; `configured` 0 selects the model's own."""
    text_config = config.get_text_config(decoder=True)
    stated = [getattr(text_config, name, None) for name in _CONTEXT_FIELDS]
    positions = next((one for one in stated if isinstance(one, int) and one > 0), 0)
    extended = [_extended(one, positions) for one in rope_parameters(text_config)]
    limits = (max([positions, *extended]), configured)
    # Position schemes without a table, such as ALiBi or a recurrent state, have no length.
    return min((limit for limit in limits if limit > 0), default=CONTEXT_TOKENS_DEFAULT)


def rope_parameters(text_config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of the rotary embeddings: of all layers, or of each type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    return [parameters, *(one for one in parameters.values() if isinstance(one, Mapping))]


def _extended(rope: Mapping[str, Any], stated: int) -> int:
    factor = rope.get("factor")
    if rope.get("rope_type") not in _EXTENDED or not factor:
        return 0
    # "dynamic" extends the stated length, regardless of a trained one.
    trained = stated if rope["rope_type"] == "dynamic" else rope.get(_TRAINED_LENGTH, stated)
    return int(trained * factor)


_LONGROPE: Final = "longrope"
_DYNAMIC: Final = "dynamic"


class _Scale(NamedTuple):
    """The dependence of a kind of layer on lengths: only lengths beyond `limit` change anything."""

    kind: str
    limit: int


class RowLengths:
    """The lengths that the rotary embeddings of a model are given, and what depends on them.

    `limit`: the longest row that has the frequencies of short rows; 0 if lengths change nothing.
    `restarts`: whether `generate` computes a row again from its first token once it exceeds
    `limit`, so that all its keys have the frequencies of long rows.
    """

    def __init__(self, scales: Sequence[_Scale], restarts: bool) -> None:
        self.limit: Final = min((scale.limit for scale in scales), default=0)
        self.restarts: Final = restarts
        self._is_dynamic = any(scale.kind == _DYNAMIC for scale in scales)
        # Lengths of prompts, [rows, 1], [1, tokens] or 0 if all tokens are generated; None
        # outside of a forward pass.
        self.floors: Tensor | int | None = None
        self.longest: int | None = None

    def prompt_length(self, prompt: int, tokens: int) -> int:
        """Return the length of the pass that computes a row's first tokens.

        prompt: the tokens of its prompt. tokens: the tokens of the row so far.
        """
        if self.restarts and prompt <= self.limit < tokens:
            return self.limit + 1
        return prompt

    def key_of(self, prompt: int) -> bytes:
        """Return what the keys of a prompt's first tokens depend on, apart from these tokens."""
        if prompt <= self.limit or not self.limit:
            return b""
        return b"%d" % prompt if self._is_dynamic else b"long"

    @contextmanager
    def of(
        self, prompts: Sequence[Sequence[int]] | None, longest: int | None, device: torch.device
    ) -> Iterator[None]:
        """Use these lengths within the context.

        prompts: the length of each row's prompt as one column, or one row with the length for each
        token of a packed pass; None if all tokens are generated. longest: the most tokens of a row;
        None if it is known to the device alone.
        """
        if self.limit:
            self.floors = 0 if prompts is None else torch.tensor(prompts, device=device)
            self.longest = longest
        try:
            yield
        finally:
            self.floors = self.longest = None


class LengthScaledRotary(nn.Module):
    """A model's own rotary embedding, called for each length that occurs in a batch.

    A call with one more position, of the last token of a row with this length, makes it choose
    the frequencies; the result of that position is dropped.
    """

    def __init__(
        self, inner: nn.Module, scales: Mapping[str | None, _Scale], lengths: RowLengths
    ) -> None:
        super().__init__()
        self.inner = inner
        self._scales = scales
        self._lengths = lengths

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model's own module if this one has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return what the model's own module returns: tensors of [rows, tokens, ...].

        x: its dtype and device are those of the result. position_ids: [rows, tokens] int64.
        """

        def compute(positions: Tensor) -> Any:
            named = {} if layer_type is None else {"layer_type": layer_type}
            return self.inner(x, positions, **named)

        floors, scale = self._lengths.floors, self._scales.get(layer_type)
        if scale is None or floors is None or position_ids.ndim != 2:
            return compute(position_ids)
        if isinstance(floors, Tensor) and floors.shape[0] > position_ids.shape[0]:
            position_ids = position_ids.expand(floors.shape[0], -1)
        lengths = (position_ids + 1).clamp(min=floors)
        longest = self._lengths.longest
        is_short = longest is not None and longest <= scale.limit
        if scale.kind == _LONGROPE:
            return (
                compute(position_ids)
                if is_short
                else _longrope(compute, scale, position_ids, lengths)
            )
        if is_short:
            return _dynamic_at(compute, position_ids, 0)
        return _dynamic(compute, scale, position_ids, lengths)


def scale_by_length(model: PreTrainedModel) -> RowLengths:
    """Replace rotary embeddings that depend on lengths, in place; return what they are given."""
    found: dict[str, tuple[nn.Module, dict[str | None, _Scale]]] = {}
    for path, module in model.named_modules():
        scales = _scales_of(module)
        if scales:
            found[path] = module, scales
    every = [scale for _, scales in found.values() for scale in scales.values()]
    longropes = [scale.limit for scale in every if scale.kind == _LONGROPE]
    lengths = RowLengths(every, bool(longropes) and _restarts_after(model, min(longropes)))
    for path, (module, scales) in found.items():
        model.set_submodule(path, LengthScaledRotary(module, scales, lengths))
    return lengths


def _scales_of(module: nn.Module) -> dict[str | None, _Scale]:
    """Return how a rotary embedding depends on lengths, by type of layer; None is the only type."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None or "position_ids" not in inspect.signature(module.forward).parameters:
        return {}
    by_type = kinds if isinstance(kinds, Mapping) else {None: kinds}
    config: Any = module.config
    scales: dict[str | None, _Scale] = {}
    for layer_type, kind in by_type.items():
        if kind == _LONGROPE:
            rope = config.rope_parameters
            rope = rope if layer_type is None else rope[layer_type]
            scales[layer_type] = _Scale(_LONGROPE, rope["original_max_position_embeddings"])
        elif _DYNAMIC in kind:
            limit: Any = module.original_max_seq_len
            scales[layer_type] = _Scale(_DYNAMIC, limit)
    return scales


def _longrope(
    compute: Callable[[Tensor], Any], scale: _Scale, positions: Tensor, lengths: Tensor
) -> Any:
    """Return the result of each set of frequencies where it applies; nothing is read back."""
    limit = scale.limit
    short = compute(positions.clamp(max=limit - 1))
    long = _at(compute, positions, limit)
    is_long = lengths > limit
    return _combined(short, long, lambda a, b: torch.where(_like(is_long, a), b, a))


def _dynamic(
    compute: Callable[[Tensor], Any], scale: _Scale, positions: Tensor, lengths: Tensor
) -> Any:
    """Return the result for each token with the frequencies of its length."""
    lengths = lengths.clamp(min=scale.limit)
    found: Any = None
    for length in torch.unique(lengths).tolist():
        is_own = lengths == length
        own = _dynamic_at(compute, positions[is_own][None], length - 1)

        def put(into: Tensor, part: Tensor, is_own: Tensor = is_own) -> Tensor:
            into[is_own] = part[0]
            return into

        if found is None:
            found = _combined(own, own, lambda a, _: a.new_empty(*positions.shape, *a.shape[2:]))
        found = _combined(found, own, put)
    return found


def _dynamic_at(compute: Callable[[Tensor], Any], positions: Tensor, last: int) -> Any:
    """Return the result with the frequencies of rows whose last position is `last`.

    The module keeps the frequencies of the longest row so far until a short one resets it.
    """
    compute(positions.new_zeros(1, 1))
    return _at(compute, positions, last) if last else compute(positions)


def _at(compute: Callable[[Tensor], Any], positions: Tensor, last: int) -> Any:
    """Return the result of `positions` in a pass that also has the position `last`."""
    column = torch.full_like(positions[:, :1], last)
    found = compute(torch.cat([positions, column], dim=1))
    return _combined(found, found, lambda a, _: a[:, :-1])


def _combined(first: Any, second: Any, combine: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Combine two results of a rotary embedding: tensors, or tuples of tensors."""
    if isinstance(first, Tensor):
        return combine(first, second)
    return tuple(combine(one, other) for one, other in zip(first, second, strict=True))


def _like(mask: Tensor, result: Tensor) -> Tensor:
    """Return a mask of [rows, tokens] with the dimensions of a result."""
    return mask.view(*mask.shape, *(1 for _ in range(result.ndim - 2)))


class _CacheOf(DynamicCache):  # type: ignore[misc]
    """A cache that states a number of tokens, for a model that requests nothing else."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens."""
        del layer_idx
        return self._tokens


def _restarts_after(model: PreTrainedModel, limit: int) -> bool:
    """Return whether `generate` drops the cache of a row when its length first exceeds `limit`."""
    name = cache_argument(model)
    ids = torch.zeros(1, limit + 1, dtype=torch.int64, device=model.device)
    try:
        inputs = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=1,
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            **{name: _CacheOf(limit)},
        )
    except MODEL_CODE_ERRORS:
        return False
    return inputs.get(name) is None
