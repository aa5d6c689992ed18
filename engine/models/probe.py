"""A probe of whether a model can be served in batches: a few tiny forwards when the engine starts.

Only observations count, never a model's name. A layer is mapped if it received every token of the
batch in the batch's order; siblings are packed if they received one tensor; a cache is batched if
padded rows answer as they do alone.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import MODEL_CODE_ERRORS, ModelNotRun, ModelRefused
from engine.models.caches.row_cache import RowCache
from engine.models.kv_cache import BatchKVCache
from engine.models.vision.image_inputs import ImageInputs, position_offsets

Forward = Callable[[Tensor, Any, Sequence[ImageInputs | None]], Tensor]
"""The signature of `CausalModel.forward`, whose second argument is a `RowCache`."""

MakeCache = Callable[[Sequence[int], Sequence[int]], RowCache]
"""Makes the cache of rows with these lengths and offsets."""

WholeForward = Callable[[Sequence[int]], Tensor]
"""Returns the logits after a text, [1 or tokens, vocabulary], from one forward without a cache."""

Prompts = Sequence[Sequence[int]]

PoolingForward = Callable[[Prompts], Tensor]
"""The signature of `PoolingModel.forward`."""


ERRORS_MAX: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""The relative norm by which a padded row may differ from the same row alone."""

ERROR_MAX_HALF: Final = 0.1
"""The same for 16-bit models, where rounding alone causes a few hundredths."""

_ROUNDING: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_ROUNDING_HALF: Final = 0.02
"""The relative norm up to which a token's states count as equal; encoders differ by tenths."""

_SHORT: Final = 7
_LONG: Final = 16
_ROWS: Final = 2
_STEPS: Final = 4


class RowShapes(NamedTuple):
    """The shapes that a layer's input rows may have, in the probe's prefill and decode step.

    `alone`: the tokens of prompts that are run alone; empty if all are run together.
    """

    prefill: frozenset[tuple[int, ...]]
    decode: frozenset[tuple[int, ...]]
    alone: frozenset[int] = frozenset()

    def is_alone(self, shape: tuple[int, ...]) -> bool:
        """Whether an input can be that of a row which is run alone."""
        return bool(self.alone) and (len(shape) != 1 or shape[0] in self.alone)


EVERY_TOKEN: Final = RowShapes(frozenset({(2, _LONG), (2 * _LONG,)}), frozenset({(2, 1), (2,)}))
"""The input of a layer that is mapped token by token."""

TOGETHER: Final = RowShapes(EVERY_TOKEN.decode, EVERY_TOKEN.decode, frozenset({_SHORT, _LONG, 1}))
"""The input where prompts are run alone, and decoded together."""

ALIGNED_ROWS: Final = RowShapes(
    EVERY_TOKEN.prefill | EVERY_TOKEN.decode, EVERY_TOKEN.prefill | EVERY_TOKEN.decode
)
"""The input in a forward of two rows of `_LONG` tokens, by token or by row."""

SAMPLED_ROWS: Final = RowShapes(EVERY_TOKEN.prefill | EVERY_TOKEN.decode, EVERY_TOKEN.decode)
"""The input of a head: the last token of each row, or every token if the model does not select."""


class ProbeSpec(NamedTuple):
    """How to run a model for the probe: two batches of prompts, the second with one token per row.

    `run` accepts prompts and a token, and returns the results of both batches, [2, rows, width].
    `batch` describes the batch for an error text. `rows`: the input rows that a body layer may
    have. `is_tolerant`: layers with other rows are wrapped too, for batches of one adapter.
    `joined`: as `run`, with prompts that are prefilled apart and then joined. `whole`: the logits
    after a text in one forward pass without a cache, [1, width].
    """

    run: Callable[[Prompts, int], Tensor]
    batch: str
    rows: RowShapes
    is_tolerant: bool = False
    joined: Callable[[Prompts, int], Tensor] | None = None
    whole: Callable[[Sequence[int]], Tensor] | None = None


class RecordedInput(NamedTuple):
    """One input of a layer: its shape, the tensor itself, and a copy or a digest of its values.

    `values` were taken during the call, so that a later change of `tensor` is seen.
    """

    shape: tuple[int, ...]
    tensor: Tensor | None = None
    values: Tensor | None = None


class ObservedInputs:
    """The inputs of each layer during the probe, in the order of the calls."""

    def __init__(self, names: Collection[str]) -> None:
        self.inputs: dict[str, list[RecordedInput]] = {name: [] for name in names}

    def has_all_rows(self, name: str, rows: RowShapes) -> bool:
        """Whether every input had all rows; a layer used twice has two inputs per forward."""
        shapes = [recorded.shape for recorded in self.inputs[name]]
        half = len(shapes) // 2
        prefill, decode = set(shapes[:half]), set(shapes[half:])
        return half > 0 and prefill <= rows.prefill and decode <= rows.decode

    def is_ordered(self, name: str, rows: RowShapes) -> bool:
        """Whether every input had its rows in the order of a mapping.

        As `has_all_rows`, or with any number of rows for each row of the batch, or for all of them
        together. Inputs of a row that was run alone have any shape.
        """
        shapes = [recorded.shape for recorded in self.inputs[name]]
        whole = rows.prefill | rows.decode
        return all(
            shape in whole
            # Rows of one sequence of the batch, or of an input that all of them share.
            or (len(shape) > 1 and shape[0] in {1, _ROWS})
            or rows.is_alone(shape)
            for shape in shapes
        )

    def share_inputs(self, names: Sequence[str]) -> bool:
        """Whether these layers always received the same tensor, unchanged between them.

        Only for layers that were recorded as `retained`.
        """
        return share_inputs([self.inputs[name] for name in names])


def record_layer_inputs(
    spec: ProbeSpec,
    layers: Mapping[str, nn.Module],
    vocab_size: int,
    retained: Collection[str] = (),
) -> ObservedInputs:
    """Run the model for two steps, batched and row by row, and record its layers' inputs.

    The tensors of `retained` layers are kept, for `share_inputs`. Raises `ModelRefused` if the
    model can't be batched.
    """
    prompts, token = probe_prompts(vocab_size)
    try:
        with _recording(layers, frozenset(retained)) as observed:
            together = spec.run(prompts, token)
        _compare(spec, together, prompts, token)
    except ModelRefused:
        raise
    except MODEL_CODE_ERRORS as error:
        raise ModelNotRun(
            f"the model does not run with {spec.batch}: {type(error).__name__}: {error}"
        ) from error
    return observed


def _compare(spec: ProbeSpec, together: Tensor, prompts: Prompts, token: int) -> None:
    """Raise `ModelRefused` if rows differ from the same rows alone, or from a whole forward."""
    # In one norm: a classifier's row may be a single number that is nearly zero.
    alone = torch.stack([spec.run([prompt], token)[:, 0] for prompt in prompts], dim=1)
    check_same(together, alone)
    if spec.joined is not None:
        check_same(spec.joined(prompts, token), alone, "a joined row")
    if spec.whole is not None:
        texts = [[*prompt, *steps_after(token)] for prompt in prompts]
        whole = torch.cat([spec.whole(text) for text in texts])
        check_same(alone[-1], whole, "a cached row")


def probe_prompts(vocab_size: int) -> tuple[list[list[int]], int]:
    """Return two prompts of unlike lengths, and a token that follows both."""
    tokens = [(7 * index + 3) % vocab_size for index in range(_LONG + 1)]
    return [tokens[:_SHORT], tokens[1:]], tokens[0]


def generation_probe(forward: Forward, make_cache: MakeCache, whole: WholeForward) -> ProbeSpec:
    """Return the probe of a generating model in padded batches: a prefill and decode steps."""
    spec = states_probe(forward, make_cache, whole, "a left-padded batch and a key/value cache")

    def run(prompts: Prompts, token: int) -> Tensor:
        steps = steps_after(token)
        return prefill_and_decode(forward, prompts, steps, make_cache, checks_cache=True)

    return spec._replace(run=run, rows=EVERY_TOKEN)


def states_probe(
    forward: Forward, make_cache: MakeCache, whole: WholeForward | None, batch: str
) -> ProbeSpec:
    """Return the probe of a generating model whose prompts are run alone."""

    def run(prompts: Prompts, token: int) -> Tensor:
        return prefill_and_decode(forward, prompts, steps_after(token), make_cache)

    def joined(prompts: Prompts, token: int) -> Tensor:
        caches = [make_cache([len(prompt)], []) for prompt in prompts]
        pairs = zip(prompts, caches, strict=True)
        logits = [torch.cat([forward(torch.tensor([one]), cache, ()) for one, cache in pairs])]
        first, *others = caches
        for other in others:
            first.join(other)
        for step in steps_after(token):
            first.grow(1)
            logits.append(forward(torch.full((len(prompts), 1), step), first, ()))
        return torch.stack(logits)

    return ProbeSpec(run, batch, TOGETHER, is_tolerant=True, joined=joined, whole=whole)


def steps_after(token: int) -> list[int]:
    """Return the tokens of a probe's decode steps."""
    return [max(0, token - number) for number in range(_STEPS)]


def pooling_probe(forward: PoolingForward, dtype: torch.dtype) -> ProbeSpec:
    """Return the probe of a pooling model: two forwards.

    A layer of the body may also receive one row per prompt, as a pooler does. `dtype` is the
    model's own; its float32 results are compared with the rounding of that dtype.
    """

    def run(prompts: Prompts, token: int) -> Tensor:
        return torch.stack([forward(prompts), forward([[token]] * len(prompts))]).to(dtype)

    return ProbeSpec(run, "a right-padded batch (encoder-decoder models do not)", SAMPLED_ROWS)


def is_bidirectional(states: PoolingForward, vocab_size: int) -> bool:
    """Whether a token's states depend on the tokens after it.

    `states` returns those of each token, [rows, tokens, width]. Two texts with the same beginning
    are compared without their first token, to which many models attend regardless of its content.
    Where experts are chosen, later tokens change how tokens are grouped and so their rounding, but
    no more. Raises `ModelRefused` if the model does not run.
    """
    begin = [(7 * index + 3) % vocab_size for index in range(_SHORT)]
    ends = ([(step * index + 5) % vocab_size for index in range(_SHORT)] for step in (7, 11))
    try:
        one, other = (states([begin + end])[0, 1:_SHORT] for end in ends)
    except MODEL_CODE_ERRORS as error:
        raise ModelNotRun(f"the model does not run: {type(error).__name__}: {error}") from error
    return _difference(one, other) > _ROUNDING.get(one.dtype, _ROUNDING_HALF)


def prefill_and_decode(
    forward: Forward,
    prompts: Prompts,
    next_tokens: Sequence[int],
    make_cache: MakeCache,
    images: Sequence[ImageInputs | None] = (),
    checks_cache: bool = False,
) -> Tensor:
    """Return the logits after a prefill and after each step, [1 + steps, rows, vocabulary]."""
    width = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    cache = make_cache([len(prompt) for prompt in prompts], position_offsets(images))
    logits = [forward(padded, cache, images)]
    if checks_cache:
        _check_cache(cache, width)
    for step, token in enumerate(next_tokens, start=1):
        cache.grow(1)
        logits.append(forward(torch.full((len(prompts), 1), token), cache, ()))
        if checks_cache:
            _check_cache(cache, width + step)
    return torch.stack(logits)


def _check_cache(cache: RowCache, width: int) -> None:
    if not isinstance(cache, BatchKVCache):
        return
    rows = len(cache)
    for number, layer in enumerate(cache.layers):
        shape = () if layer.keys is None else tuple(layer.keys.shape)
        if len(shape) != 4 or shape[0] != rows or shape[2] != width:
            raise ModelRefused(
                f"layer {number} caches {shape}; only keys and values of "
                f"[rows, heads, tokens, head_dim] can be batched, here ({rows}, ?, {width}, ?)"
            )
    if not cache.layers:
        raise ModelRefused("the model fills no key/value cache; generation would start over")


def check_same(found: Tensor, alone: Tensor, row: str = "a padded row") -> None:
    """Raise `ModelRefused` if a batch's rows differ from the same rows alone."""
    allowed = ERRORS_MAX.get(alone.dtype, ERROR_MAX_HALF)
    error = _difference(found, alone)
    if not error <= allowed:
        raise ModelRefused(
            f"{row}'s results differ from the row alone (relative norm {error:.1e}, "
            f"at most {allowed:.0e}); the model can't be batched"
        )


def check_causal(whole: WholeForward, vocab_size: int) -> None:
    """Raise `ModelRefused` for a model whose logits depend on later tokens, as an encoder's do.

    `whole` returns the logits after each token of a text.
    """
    [begin, text], _ = probe_prompts(vocab_size)
    try:
        logits, shorter = whole([*begin, *text]), whole(begin)
    except MODEL_CODE_ERRORS as error:
        raise ModelNotRun(f"the model does not run: {type(error).__name__}: {error}") from error
    if len(logits) == len(begin) + len(text):
        check_same(logits[len(begin) - 1], shorter[-1], "with more tokens after it a row")


def check_separate(forward: Forward, make_cache: MakeCache, vocab_size: int) -> None:
    """Raise `ModelRefused` for a model that continues one row with a text of one token."""
    [begin, text], token = probe_prompts(vocab_size)
    logits = []
    for before in (begin, text):
        for tokens in (before, [token]):
            cache = make_cache([len(tokens)], [])
            last = forward(torch.tensor([tokens]), cache, ())
            for step in steps_after(token):
                cache.grow(1)
                forward(torch.tensor([[step]]), cache, ())
        logits.append(last)
    check_same(logits[0], logits[1], "after another row a row")


def share_inputs(inputs: Sequence[Sequence[RecordedInput]]) -> bool:
    """Whether the layers with these inputs always received one tensor, unchanged between them."""
    if len({len(calls) for calls in inputs}) != 1 or not inputs[0]:
        return False
    return all(_is_one_input(together) for together in zip(*inputs, strict=True))


def _difference(found: Tensor, expected: Tensor) -> float:
    """The relative norm of the difference."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _is_one_input(inputs: Sequence[RecordedInput]) -> bool:
    first = inputs[0]
    return all(
        recorded.tensor is first.tensor is not None
        and recorded.values is not None
        and first.values is not None
        and torch.equal(recorded.values, first.values)
        for recorded in inputs
    )


@contextmanager
def _recording(
    layers: Mapping[str, nn.Module], retained: frozenset[str]
) -> Iterator[ObservedInputs]:
    """Record every layer's inputs: the shapes of tokens, and of activations without the last axis.

    A call without a tensor records nothing.
    """
    observed = ObservedInputs(layers.keys())

    def collect(name: str, layer: nn.Module, x: Tensor) -> None:
        shape = tuple(x.shape if isinstance(layer, nn.Embedding) else x.shape[:-1])
        tensors = (x, x.clone()) if name in retained else ()
        observed.inputs[name].append(RecordedInput(shape, *tensors))

    with input_hooks(layers, collect):
        yield observed


@contextmanager
def input_hooks(
    layers: Mapping[str, nn.Module], on_input: Callable[[str, nn.Module, Tensor], None]
) -> Iterator[None]:
    """Call `on_input` with a layer's name, itself and its first argument, if that is a tensor."""

    def before(name: str, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            on_input(name, layer, arguments[0])

    hooks = [
        layer.register_forward_pre_hook(partial(before, name)) for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
