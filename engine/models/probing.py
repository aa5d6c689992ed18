"""A probe of whether a model can be served in batches: a few tiny forwards when the engine starts.

Only observations count, never a model's name. A layer is mapped if it received every token of the
batch in the batch's order; siblings are packed if they received one tensor; a cache is batched if
padded rows answer as they do alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.errors import MODEL_CODE_ERRORS, ModelNotRun, ModelRefused
from loradock.engine.models.image_inputs import ImageInputs, position_offsets
from loradock.engine.models.observation import (
    ERRORS_MAX_GENERATED,
    EVERY_TOKEN,
    LONG,
    SHORT,
    TOGETHER,
    ObservedInputs,
    RowShapes,
    check_same,
    recording,
    relative_difference,
)
from loradock.engine.models.row_cache import RowCache

Forward = Callable[[Tensor, Any, Sequence[ImageInputs | None]], Tensor]
"""The signature of `CausalModel.forward`, whose second argument is a `RowCache`."""

MakeCache = Callable[[Sequence[int], Sequence[int]], RowCache]
"""Makes the cache of rows with these lengths and offsets."""

CheckCache = Callable[[Any, int], object]
"""Raises `ModelRefused` unless a cache is filled up to a column."""

WholeForward = Callable[[Sequence[int]], Tensor]
"""Returns the logits after a text, [1 or tokens, vocabulary], from one forward without a cache."""

GeneratedLogits = Callable[[Sequence[int], Sequence[int]], Tensor]
"""The signature of `loradock.engine.models.library.generation.generated_logits` for one model."""

Prompts = Sequence[Sequence[int]]

PoolingForward = Callable[[Prompts], Tensor]
"""The signature of `PoolingModel.forward`."""

_STEPS: Final = 4


class ProbeSpec(NamedTuple):
    """A way to run a model for a probe: two batches of prompts, the second with one token per row.

    `run` accepts prompts and a token, and returns the results of both batches, [2, rows, width].
    `batch` describes the batch for an error text. `rows`: the input rows that a layer can
    have. `is_tolerant`: layers with other rows are wrapped too, for batches of one adapter.
    `joined`: as `run`, with prompts that are prefilled apart and then joined. `whole`: the logits
    after a text in one forward pass without a cache, [1, width]. `generated`: the logits after a
    prompt and after each step, by the model's own loop, [1 + steps, width]. `is_last_resort`: used
    only if all other probes are refused.
    """

    run: Callable[[Prompts, int], Tensor]
    batch: str
    rows: RowShapes
    is_tolerant: bool = False
    joined: Callable[[Prompts, int], Tensor] | None = None
    whole: Callable[[Sequence[int]], Tensor] | None = None
    generated: GeneratedLogits | None = None
    is_last_resort: bool = False


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
        with recording(layers, frozenset(retained)) as observed:
            together = spec.run(prompts, token)
        _compare(spec, together, prompts, token)
    except ModelRefused:
        raise
    except MODEL_CODE_ERRORS as error:
        raise _not_run(error, f" with {spec.batch}") from error
    return observed


def _not_run(error: Exception, how: str = "") -> ModelNotRun:
    return ModelNotRun(f"the model does not run{how}: {type(error).__name__}: {error}")


def find_column_layers(
    spec: ProbeSpec, layers: Mapping[str, nn.Module], vocab_size: int
) -> frozenset[str]:
    """Return the layers whose inputs are [tokens, rows, ...], by the batch and its first row."""
    if not layers or spec.rows.alone:
        # Rows that are run alone need no order.
        return frozenset()
    prompts, token = probe_prompts(vocab_size)
    runs = []
    for rows in (prompts, prompts[:1]):
        with recording(layers, frozenset(layers)) as observed:
            spec.run(rows, token)
        runs.append(observed)
    together, alone = runs
    return frozenset(name for name in layers if together.has_rows_as_columns(name, alone))


def _compare(spec: ProbeSpec, together: Tensor, prompts: Prompts, token: int) -> None:
    """Raise `ModelRefused` if rows differ from the same rows alone, or from a whole forward."""
    # In one norm: a classifier's row can be a single number that is nearly zero.
    alone = torch.stack([spec.run([prompt], token)[:, 0] for prompt in prompts], dim=1)
    check_same(together, alone)
    if spec.joined is not None:
        check_same(spec.joined(prompts, token), alone, "a joined row")
    steps = steps_after(token)
    if spec.whole is not None:
        whole = torch.cat([spec.whole([*prompt, *steps]) for prompt in prompts])[None]
        check_same(alone[-1:], whole, "a cached row")
    if spec.generated is not None:
        own = torch.stack([spec.generated(prompt, steps) for prompt in prompts], dim=1)
        result = "it is not what generate() computes"
        check_same(alone, own.to(alone), "a cached row", result, ERRORS_MAX_GENERATED)


def probe_prompts(vocab_size: int) -> tuple[list[list[int]], int]:
    """Return two prompts of different lengths, and a token that follows both."""
    tokens = [(7 * index + 3) % vocab_size for index in range(LONG + 1)]
    return [tokens[:SHORT], tokens[1:]], tokens[0]


def generation_probe(
    forward: Forward, make_cache: MakeCache, whole: WholeForward, check_cache: CheckCache
) -> ProbeSpec:
    """Return the probe of a generating model in padded batches: a prefill and decode steps."""
    spec = states_probe(forward, make_cache, whole, "a left-padded batch and a key/value cache")

    def run(prompts: Prompts, token: int) -> Tensor:
        steps = steps_after(token)
        return prefill_and_decode(forward, prompts, steps, make_cache, check_cache=check_cache)

    return spec._replace(run=run, rows=EVERY_TOKEN)


def states_probe(
    forward: Forward,
    make_cache: MakeCache,
    whole: WholeForward | None,
    batch: str,
    generated: GeneratedLogits | None = None,
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

    return ProbeSpec(
        run, batch, TOGETHER, is_tolerant=True, joined=joined, whole=whole, generated=generated
    )


def steps_after(token: int) -> list[int]:
    """Return the tokens of a probe's decode steps."""
    return [max(0, token - number) for number in range(_STEPS)]


def pooling_probe(forward: PoolingForward, dtype: torch.dtype) -> ProbeSpec:
    """Return the probe of a pooling model: two forwards.

    A layer of the body can also receive one row per prompt, as a pooler does. `dtype` is the
    model's own; its float32 results are compared with the rounding of that dtype.
    """

    def run(prompts: Prompts, token: int) -> Tensor:
        return torch.stack([forward(prompts), forward([[token]] * len(prompts))]).to(dtype)

    batch = "a right-padded batch (encoder-decoder models do not)"
    return ProbeSpec(run, batch, EVERY_TOKEN)


def prefill_and_decode(
    forward: Forward,
    prompts: Prompts,
    next_tokens: Sequence[int],
    make_cache: MakeCache,
    images: Sequence[ImageInputs | None] = (),
    check_cache: CheckCache = lambda _cache, _width: None,
) -> Tensor:
    """Return the logits after a prefill and after each step, [1 + steps, rows, vocabulary]."""
    width = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    cache = make_cache([len(prompt) for prompt in prompts], position_offsets(images))
    logits = [forward(padded, cache, images)]
    check_cache(cache, width)
    for step, token in enumerate(next_tokens, start=1):
        cache.grow(1)
        logits.append(forward(torch.full((len(prompts), 1), token), cache, ()))
        check_cache(cache, width + step)
    return torch.stack(logits)


_ROUNDING: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_ROUNDING_HALF: Final = 0.02
"""The relative norm up to which a token's states count as equal; encoders differ by tenths."""


def is_bidirectional(states: PoolingForward, vocab_size: int) -> bool:
    """Return whether a token's states depend on the tokens after it.

    `states` returns one vector per token, [rows, tokens, width]. Two texts with the same beginning
    are compared without their first token, to which many models attend regardless of its content.
    If experts are chosen, later tokens change how tokens are grouped and so their rounding, but
    no more. Raises `ModelRefused` if the model does not run.
    """
    begin = [(7 * index + 3) % vocab_size for index in range(SHORT)]
    ends = ([(step * index + 5) % vocab_size for index in range(SHORT)] for step in (7, 11))
    try:
        one, other = (states([[*begin, *end]])[0, 1:SHORT] for end in ends)
    except MODEL_CODE_ERRORS as error:
        raise _not_run(error) from error
    return relative_difference(one, other) > _ROUNDING.get(one.dtype, _ROUNDING_HALF)


def check_rows_alone(
    whole: WholeForward, forward: Forward, make_cache: MakeCache, vocab_size: int
) -> None:
    """Raise `ModelRefused` for a model whose rows, run one by one, are not what `generate` means.

    `whole` returns the logits after each token of a text.
    """
    _check_causal(whole, vocab_size)
    _check_separate(forward, make_cache, vocab_size)


def _check_causal(whole: WholeForward, vocab_size: int) -> None:
    """Raise `ModelRefused` for a model whose logits depend on later tokens, as an encoder's do."""
    [begin, text], _ = probe_prompts(vocab_size)
    both = [*begin, *text]
    try:
        logits, shorter = whole(both), whole(begin)
    except MODEL_CODE_ERRORS as error:
        raise _not_run(error) from error
    if len(logits) == len(both):
        same = logits[len(begin) - 1], shorter[-1]
        result = "its tokens depend on later ones, so it can't continue a text from cached states"
        check_same(*same, "with more tokens after it a row", result)


def _check_separate(forward: Forward, make_cache: MakeCache, vocab_size: int) -> None:
    """Raise `ModelRefused` for a model that continues one row with a text of one token."""
    [begin, text], token = probe_prompts(vocab_size)
    steps = steps_after(token)

    def after(before: list[int]) -> Tensor:
        for tokens in (before, [token]):
            cache = make_cache([len(tokens)], [])
            last = forward(torch.tensor([tokens]), cache, ())
            for step in steps:
                cache.grow(1)
                forward(torch.tensor([[step]]), cache, ())
        return last

    check_same(after(begin), after(text), "after another row a row")
