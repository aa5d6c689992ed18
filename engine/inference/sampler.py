"""How one request's next token is chosen from its logits.

What it is: greedy, temperature, top-k and top-p, with the request's own random numbers. What it is
not: a judge of logits that are not finite (the caller fails such a row). One rule: a request with
a seed draws the same tokens whatever else is in the batch.
"""

import torch
from torch import Tensor

from messages.requests import Sampling


class Sampler:
    """One request's choice of tokens; keeps its random state between steps."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self._sampling.temperature == 0.0

    def choose(self, logits: Tensor) -> int:
        """Draw a token; logits: [vocabulary], any dtype and device, no NaN, not all -inf."""
        likely = self._likely(logits.double().cpu())
        # The largest is subtracted first, so that no temperature however small overflows.
        scaled = (likely.values - likely.values.max()) / self._sampling.temperature
        place = torch.multinomial(self._nucleus(scaled.softmax(0)), 1, generator=self._random)
        return int(likely.indices[place])

    def _likely(self, logits: Tensor) -> "torch.return_types.topk":
        """The `top_k` largest logits, or all, largest first."""
        count = self._sampling.top_k or len(logits)
        return torch.topk(logits, min(count, len(logits)))

    def _nucleus(self, probabilities: Tensor) -> Tensor:
        """Zero what is not needed to reach `top_p`; probabilities: largest first."""
        if self._sampling.top_p == 1.0:
            return probabilities
        before = probabilities.cumsum(0) - probabilities
        return probabilities.masked_fill(before >= self._sampling.top_p, 0.0)
