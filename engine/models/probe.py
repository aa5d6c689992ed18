"""Whether a model can be served in batches at all: asked of the model itself, by running it.

What it is: a handful of tiny forwards when the engine starts. What it is not: a list of model
names. One rule: only what was seen counts; a layer is mapped if it saw every token of the batch
in the batch's order, siblings are packed if they were given one tensor, and a cache is batched if
padded rows answer as they do alone.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import FOREIGN_FAILURES, ModelRefused
from engine.models.kv_cache import RowCache
from engine.models.vision.media import Media, offsets_of

Forward = Callable[[Tensor, RowCache, Sequence[Media | None]], Tensor]
"""`PreparedModel.forward`."""

Prompts = Sequence[Sequence[int]]

PooledForward = Callable[[Prompts], Tensor]
"""`PooledModel.forward`."""


ERRORS_MAX: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""The relative norm by which a padded row may differ from the row alone."""

ERROR_MAX_HALF: Final = 0.1
"""The same for 16-bit models, whose rounding alone differs by a few hundredths."""

_ROUNDING: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_ROUNDING_HALF: Final = 0.02
"""The relative norm up to which what a token became is the same; encoders differ by tenths."""

_SHORT: Final = 7
_LONG: Final = 16


class RowShapes(NamedTuple):
    """The shapes that an input's rows may have, in a prefill of the probe and in a decode step."""

    prefill: frozenset[tuple[int, ...]]
    decode: frozenset[tuple[int, ...]]


EVERY_TOKEN: Final = RowShapes(frozenset({(2, _LONG), (2 * _LONG,)}), frozenset({(2, 1), (2,)}))
"""What a layer sees that is mapped token by token."""

SAMPLED_ROWS: Final = RowShapes(EVERY_TOKEN.prefill | EVERY_TOKEN.decode, EVERY_TOKEN.decode)
"""What a head sees: the last token of each row, or every token where the model can't choose."""


class Trial(NamedTuple):
    """How a model is tried: two batches of some prompts, the second with one token a row.

    `run` takes prompts and a token, and gives both batches' results, [2, rows, width]. `batch` says
    what the model is asked to run with, `rows` what a layer of its body may be given.
    """

    run: Callable[[Prompts, int], Tensor]
    batch: str
    rows: RowShapes


class Call(NamedTuple):
    """One input of a layer: its shape, and the tensor with what was in it then, whole or told
    by a few numbers of each row."""

    shape: tuple[int, ...]
    tensor: Tensor | None = None
    values: Tensor | None = None


class Sightings:
    """What each layer was given while the probe ran."""

    def __init__(self, names: Collection[str]) -> None:
        self.calls: dict[str, list[Call]] = {name: [] for name in names}

    def saw_all(self, name: str, rows: RowShapes) -> bool:
        """Whether every call saw all rows; a layer that is used twice is called twice a forward."""
        shapes = [call.shape for call in self.calls[name]]
        half = len(shapes) // 2
        prefill, decode = set(shapes[:half]), set(shapes[half:])
        return half > 0 and prefill <= rows.prefill and decode <= rows.decode

    def share_inputs(self, names: Sequence[str]) -> bool:
        """Whether these layers were always given one tensor, unchanged from the first to the last.

        Only for layers that the probe was asked to remember.
        """
        return share_inputs([self.calls[name] for name in names])


def watch_layers(
    trial: Trial,
    layers: Mapping[str, nn.Module],
    vocab_size: int,
    remembered: Collection[str] = (),
) -> Sightings:
    """Run the model for two steps, batched and row by row, and tell what its layers were given.

    The inputs of `remembered` layers are kept, for `share_inputs`. Raises `ModelRefused` where the
    model can't be batched.
    """
    tokens = [(7 * place + 3) % vocab_size for place in range(_LONG + 1)]
    prompts = [tokens[:_SHORT], tokens[1:]]
    with _watch(layers, frozenset(remembered)) as seen:
        try:
            together = trial.run(prompts, tokens[0])
        except FOREIGN_FAILURES as error:
            raise ModelRefused(
                f"the model does not run with {trial.batch}: {type(error).__name__}: {error}"
            ) from error
    # All at once: of a classifier with one label a row is one number, which may be nearly zero.
    alone = [trial.run([prompt], tokens[0])[:, 0] for prompt in prompts]
    compare(together, torch.stack(alone, dim=1))
    return seen


def generation_trial(forward: Forward) -> Trial:
    """A prefill and a decode step."""
    batch = (
        "a left-padded batch and a plain key/value cache (state-space and encoder models do not)"
    )
    return Trial(partial(two_steps, forward), batch, EVERY_TOKEN)


def pooling_trial(forward: PooledForward, dtype: torch.dtype) -> Trial:
    """Two forwards; a layer of the body may also see one row a prompt, as a pooler does.

    `dtype` is the model's own, by whose rounding its float32 results are judged.
    """

    def run(prompts: Prompts, token: int) -> Tensor:
        return torch.stack([forward(prompts), forward([[token]] * len(prompts))]).to(dtype)

    return Trial(run, "a right-padded batch (encoder-decoder models do not)", SAMPLED_ROWS)


def sees_what_follows(states: PooledForward, vocab_size: int) -> bool:
    """Whether what a text's tokens become depends on the tokens after them.

    `states` gives those of each token, [rows, tokens, width]. Two texts that begin alike are asked
    about; the first token, which many models look at whatever it is, does not count. Where experts
    are chosen what follows changes how tokens are grouped, and so their rounding, but no more.
    Raises `ModelRefused` where the model does not run.
    """
    begin = [(7 * place + 3) % vocab_size for place in range(_SHORT)]
    ends = ([(step * place + 5) % vocab_size for place in range(_SHORT)] for step in (7, 11))
    try:
        one, other = (states([begin + end])[0, 1:_SHORT] for end in ends)
    except FOREIGN_FAILURES as error:
        raise ModelRefused(f"the model does not run: {type(error).__name__}: {error}") from error
    return _difference(one, other) > _ROUNDING.get(one.dtype, _ROUNDING_HALF)


def two_steps(
    forward: Forward, prompts: Prompts, next_token: int, media: Sequence[Media | None] = ()
) -> Tensor:
    """Logits after a prefill and after one decode step, [2, rows, vocabulary]."""
    width = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    rows = RowCache([len(prompt) for prompt in prompts], offsets_of(media))
    first = forward(padded, rows, media)
    _check_cache(rows, width)
    rows.grow(1)
    second = forward(torch.full((len(prompts), 1), next_token), rows, ())
    _check_cache(rows, width + 1)
    return torch.stack([first, second])


def _check_cache(rows: RowCache, width: int) -> None:
    for number, layer in enumerate(rows.layers):
        shape = () if layer.keys is None else tuple(layer.keys.shape)
        if len(shape) != 4 or shape[0] != len(rows) or shape[2] != width:
            raise ModelRefused(
                f"layer {number} caches {shape}; only keys and values of "
                f"[rows, heads, tokens, head_dim] can be batched, here ({len(rows)}, ?, {width}, ?)"
            )
    if not rows.layers:
        raise ModelRefused("the model fills no key/value cache; generation would start over")


def compare(padded: Tensor, alone: Tensor) -> None:
    """Raise `ModelRefused` where a row of a batch answers otherwise than alone."""
    allowed = ERRORS_MAX.get(alone.dtype, ERROR_MAX_HALF)
    error = _difference(padded, alone)
    if not error <= allowed:
        raise ModelRefused(
            f"a padded row answers otherwise than alone (relative norm {error:.1e}, "
            f"at most {allowed:.0e}); the model can't be batched"
        )


def share_inputs(calls: Sequence[Sequence[Call]]) -> bool:
    """Whether layers with these calls were always given one tensor, unchanged meanwhile."""
    if len({len(own) for own in calls}) != 1 or not calls[0]:
        return False
    return all(_is_one_input(together) for together in zip(*calls, strict=True))


def _difference(found: Tensor, expected: Tensor) -> float:
    """The relative norm of the difference."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _is_one_input(calls: Sequence[Call]) -> bool:
    first = calls[0]
    return all(
        call.tensor is first.tensor is not None
        and call.values is not None
        and first.values is not None
        and torch.equal(call.values, first.values)
        for call in calls
    )


@contextmanager
def _watch(layers: Mapping[str, nn.Module], remembered: frozenset[str]) -> Iterator[Sightings]:
    """Collect every layer's inputs: tokens are seen whole, activations but for the last dimension.

    Layers that are called without a tensor have seen nothing.
    """
    seen = Sightings(layers.keys())

    def collect(name: str, layer: nn.Module, x: Tensor) -> None:
        shape = tuple(x.shape if isinstance(layer, nn.Embedding) else x.shape[:-1])
        kept = (x, x.clone()) if name in remembered else ()
        seen.calls[name].append(Call(shape, *kept))

    with telling_inputs(layers, collect):
        yield seen


@contextmanager
def telling_inputs(
    layers: Mapping[str, nn.Module], tell: Callable[[str, nn.Module, Tensor], None]
) -> Iterator[None]:
    """Call `tell` with every layer's name, itself and its first input, where that is a tensor."""

    def before(name: str, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            tell(name, layer, arguments[0])

    hooks = [
        layer.register_forward_pre_hook(partial(before, name)) for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
