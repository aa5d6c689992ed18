"""Trials of what a token depends on: later tokens, and rows that were run before."""

from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from loradock.engine.errors import MODEL_CODE_ERRORS, ModelRefused
from loradock.engine.models.trials.comparison import (
    Compared,
    RunFailed,
    check_same,
    located,
    relative_difference,
)
from loradock.engine.models.trials.difference import Aligned
from loradock.engine.models.trials.observation import SHORT
from loradock.engine.models.trials.probe import (
    Forward,
    MakeCache,
    PoolingForward,
    Prompts,
    WholeForward,
    probe_prompts,
    steps_after,
)

_ROUNDING: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_ROUNDING_HALF: Final = 0.02
"""The relative norm up to which a token's states count as equal; encoders differ by tenths."""


def is_bidirectional(states: PoolingForward, vocab_size: int) -> bool:
    """Whether a token's states depend on the tokens after it.

    `states` returns those of each token, [rows, tokens, width]. Two texts with the same beginning
    are compared without their first token, to which many models attend regardless of its content.
    Where experts are chosen, later tokens change how tokens are grouped and so their rounding, but
    no more. Raises `ModelRefused` if the model does not run.
    """
    begin = [(7 * index + 3) % vocab_size for index in range(SHORT)]
    ends = ([(step * index + 5) % vocab_size for index in range(SHORT)] for step in (7, 11))
    run = partial(_states_of_beginnings, states, begin, list(ends))
    try:
        one, other = run()
    except MODEL_CODE_ERRORS as error:
        raise RunFailed("", error, run) from error
    return relative_difference(one, other) > _ROUNDING.get(one.dtype, _ROUNDING_HALF)


def _states_of_beginnings(states: PoolingForward, begin: list[int], ends: Prompts) -> list[Tensor]:
    return [states([[*begin, *end]])[0, 1:SHORT] for end in ends]


def check_rows_alone(
    model: nn.Module,
    whole: WholeForward,
    forward: Forward,
    make_cache: MakeCache,
    vocab_size: int,
) -> None:
    """Raise `ModelRefused` for a model whose rows, run one by one, are not what `generate` means.

    `whole` returns the logits after each token of a text.
    """
    try:
        _check_causal(whole, vocab_size)
        _check_separate(forward, make_cache, vocab_size)
    except ModelRefused as refusal:
        raise located(refusal, model) from refusal


def _check_causal(whole: WholeForward, vocab_size: int) -> None:
    """Raise `ModelRefused` for a model whose logits depend on later tokens, as an encoder's do."""
    [begin, text], _ = probe_prompts(vocab_size)
    both = [*begin, *text]
    try:
        logits, shorter = whole(both), whole(begin)
    except MODEL_CODE_ERRORS as error:
        raise RunFailed("", error, partial(whole, both)) from error
    if len(logits) == len(both):
        compared = Compared(partial(whole, both), partial(whole, begin), Aligned(at_start=True))
        same = (logits[len(begin) - 1], shorter[-1])
        result = "its tokens depend on later ones, so it can't continue a text from cached states"
        check_same(*same, "with more tokens after it a row", compared, result)


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

    found, expected = partial(after, begin), partial(after, text)
    compared = Compared(found, expected, Aligned(last=1 + len(steps)))
    check_same(found(), expected(), "after another row a row", compared)
