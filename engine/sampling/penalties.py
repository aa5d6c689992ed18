"""Changes of logits before a token is chosen: forbidden tokens, biases and penalties.

Formulas and order are those of vLLM's sampler, whose frequency and presence penalties are OpenAI's,
and whose repetition penalty is that of CTRL (Keskar et al., 2019).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.messages.prompts import Sampling


class _Change(NamedTuple):
    """The change of one token's logit: divided (or multiplied, if negative), then subtracted."""

    token: int
    bias: float
    divisor: float
    subtracted: float


class TokenHistory:
    """The tokens of one request so far, and the changes of logits that they lead to."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], end_ids: frozenset[int]) -> None:
        self._options: Final = sampling
        self._end_ids: Final = end_ids
        self._bias: Final = dict(sampling.logit_bias)
        has_repetition = sampling.repetition_penalty != 1.0
        self._prompt: Final = frozenset(prompt) if has_repetition else frozenset[int]()
        self._output: Counter[int] = Counter()
        self._output_count = 0
        self._counts_output: Final = has_repetition or bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )

    def append(self, token: int) -> None:
        """Count a token of the output."""
        self._output_count += 1
        if self._counts_output:
            self._output[token] += 1

    @property
    def forbidden(self) -> frozenset[int]:
        """The tokens that must not be chosen next."""
        return self._end_ids if self._output_count < self._options.min_tokens else frozenset()

    def changes(self) -> Iterable[_Change]:
        """Return a change per token whose logit changes."""
        options, output = self._options, self._output
        for token in self._bias.keys() | self._prompt | output.keys():
            count = output[token]
            is_repeated = count or token in self._prompt
            yield _Change(
                token,
                self._bias.get(token, 0.0),
                options.repetition_penalty if is_repeated else 1.0,
                options.frequency_penalty * count + options.presence_penalty * (count > 0),
            )


def adjust_logits(histories: Sequence[TokenHistory], logits: Tensor) -> Tensor:
    """Return the logits with every row's changes; `logits` itself where there are none.

    logits: [rows, vocabulary], unchanged; the result is float32 where it differs. Tokens outside of
    the vocabulary are ignored.
    """
    vocabulary = logits.shape[-1]
    changes = [
        (row, change)
        for row, history in enumerate(histories)
        for change in history.changes()
        if change.token < vocabulary
    ]
    forbidden = [
        (row, token)
        for row, history in enumerate(histories)
        for token in history.forbidden
        if token < vocabulary
    ]
    if not changes and not forbidden:
        return logits
    adjusted = logits.float().clone()
    if forbidden:
        adjusted[_index(forbidden, logits)] = -torch.inf
    if changes:
        at = _index([(row, change.token) for row, change in changes], logits)
        numbers = torch.tensor([change[1:] for _, change in changes], device=logits.device)
        bias, divisor, subtracted = numbers.unbind(-1)
        biased = adjusted[at] + bias
        repeated = torch.where(biased > 0, biased / divisor, biased * divisor)
        adjusted[at] = repeated - subtracted
    return adjusted


def _index(places: Sequence[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the token of each place, on the device of `like`."""
    rows, tokens = torch.tensor(places, device=like.device).unbind(-1)
    return rows, tokens
