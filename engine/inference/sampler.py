"""Choice of the next tokens from logits: greedy, temperature, top-k and top-p.

A request with a seed draws the same tokens regardless of the rest of the batch.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from messages.prompts import Sampling

NOT_FINITE: Final = -1
"""Stands for a token where a row's logits are not finite."""


class Sampler:
    """One request's choice of tokens; its random state advances with every draw."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self._sampling.temperature == 0.0

    def draw(self, logits: Tensor) -> int:
        """Draw a token; logits: [vocabulary], any dtype and device, no NaN, not all -inf."""
        top = self._top_k(logits.double().cpu())
        # The maximum is subtracted before the division, so that no small temperature overflows.
        scaled = (top.values - top.values.max()) / self._sampling.temperature
        index = torch.multinomial(self._top_p(scaled.softmax(0)), 1, generator=self._random)
        return int(top.indices[index])

    def _top_k(self, logits: Tensor) -> "torch.return_types.topk":
        """Return the `top_k` largest logits, or all, largest first."""
        count = self._sampling.top_k or len(logits)
        return torch.topk(logits, min(count, len(logits)))

    def _top_p(self, probabilities: Tensor) -> Tensor:
        """Zero the tail that is not needed to reach `top_p`; probabilities: largest first."""
        if self._sampling.top_p == 1.0:
            return probabilities
        before = probabilities.cumsum(0) - probabilities
        return probabilities.masked_fill(before >= self._sampling.top_p, 0.0)


def sample(samplers: Sequence[Sampler], logits: Tensor) -> list[int]:
    """Return each row's next token, or `NOT_FINITE`; logits: [rows, vocabulary]."""
    tokens: list[int] = logits.argmax(-1).tolist()
    # NaN and +inf survive the maximum, which is -inf where every token is forbidden.
    is_finite = logits.amax(-1).isfinite().tolist()
    for row, sampler in enumerate(samplers):
        if not is_finite[row]:
            tokens[row] = NOT_FINITE
        elif not sampler.is_greedy:
            tokens[row] = sampler.draw(logits[row])
    return tokens
