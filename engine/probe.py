"""Whether a model can be served in batches at all: asked of the model itself, by running it.

What it is: a handful of tiny forwards when the engine starts. What it is not: a list of model
names. One rule: only what was seen counts; a layer is mapped if it saw every token of the batch
in the batch's order, and a cache is batched if padded rows answer as they do alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from engine.errors import ModelRefused
from engine.kv_cache import RowCache

Forward = Callable[[Tensor, RowCache], Tensor]
"""`PreparedModel.forward`."""

ERRORS_MAX: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""The relative norm by which a padded row may differ from the row alone."""

ERROR_MAX_HALF: Final = 0.1
"""The same for 16-bit models, whose rounding alone differs by a few hundredths."""

_SHORT: Final = 7
_LONG: Final = 16
_PREFILL_SHAPES: Final = {(2, _LONG), (2 * _LONG,)}
_DECODE_SHAPES: Final = {(2, 1), (2,)}
"""What a mapped layer's input looks like, but for its last dimension: prefill, then decode."""


def find_unmapped_layers(
    forward: Forward, layers: Mapping[str, nn.Module], vocab_size: int
) -> list[str]:
    """The names of those `layers` that don't see every token of a batch in its order.

    Such a layer (an expert that gets some tokens, a tower, a weight that is read directly) can't
    be served with the batch's mapping. Raises `ModelRefused` where the model can't be batched.
    """
    tokens = [(7 * place + 3) % vocab_size for place in range(_LONG + 1)]
    prompts = [tokens[:_SHORT], tokens[1:]]
    with _watch(layers) as seen:
        try:
            together = _two_steps(forward, prompts, tokens[0])
        except _FAILURES as error:
            raise ModelRefused(
                "the model does not run with a left-padded batch and a plain key/value cache "
                f"(state-space and encoder models do not): {type(error).__name__}: {error}"
            ) from error
    for row, prompt in enumerate(prompts):
        _compare(together[:, row], _two_steps(forward, [prompt], tokens[0])[:, 0])
    return [name for name in layers if not _is_mapped(seen[name])]


_FAILURES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What foreign model code raises where it is called in a way it does not support."""


def _two_steps(forward: Forward, prompts: Sequence[Sequence[int]], next_token: int) -> Tensor:
    """Logits after a prefill and after one decode step, [2, rows, vocabulary]."""
    width = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    rows = RowCache([len(prompt) for prompt in prompts])
    first = forward(padded, rows)
    _check_cache(rows, width)
    rows.grow(1)
    second = forward(torch.full((len(prompts), 1), next_token), rows)
    _check_cache(rows, width + 1)
    return torch.stack([first, second])


def _check_cache(rows: RowCache, width: int) -> None:
    filled = [layer for layer in rows.cache.layers if layer.is_initialized]
    for number, layer in enumerate(filled):
        shape = tuple(layer.keys.shape) if isinstance(layer, DynamicLayer) else ()
        if len(shape) != 4 or shape[0] != len(rows) or shape[2] != width:
            raise ModelRefused(
                f"layer {number} caches {shape or type(layer).__name__}; only keys and values of "
                f"[rows, heads, tokens, head_dim] can be batched, here ({len(rows)}, ?, {width}, ?)"
            )
    if not filled:
        raise ModelRefused("the model fills no key/value cache; generation would start over")


def _compare(padded: Tensor, alone: Tensor) -> None:
    allowed = ERRORS_MAX.get(alone.dtype, ERROR_MAX_HALF)
    error = float((padded.double() - alone.double()).norm() / alone.double().norm())
    if not error <= allowed:
        raise ModelRefused(
            f"a left-padded row answers otherwise than alone (relative norm {error:.1e}, "
            f"at most {allowed:.0e}); the model can't be batched"
        )


def _is_mapped(seen: Sequence[tuple[int, ...]]) -> bool:
    """Whether every call saw all tokens; a layer that is used twice is called twice a forward."""
    calls = len(seen) // 2
    prefill, decode = set(seen[:calls]), set(seen[calls:])
    return calls > 0 and prefill <= _PREFILL_SHAPES and decode <= _DECODE_SHAPES


@contextmanager
def _watch(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Collect the leading dimensions of every input of every layer."""
    seen: dict[str, list[tuple[int, ...]]] = {name: [] for name in layers}

    def collector(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def collect(_layer: nn.Module, arguments: tuple[Any, ...]) -> None:
            seen[name].append(tuple(arguments[0].shape[:-1]))

        return collect

    hooks = [layer.register_forward_pre_hook(collector(name)) for name, layer in layers.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
