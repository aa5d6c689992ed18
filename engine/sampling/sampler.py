"""Choice of the next tokens from logits, for all rows of a batch in one pass on their device.

The order is that of vLLM: structures, forbidden tokens and biases, penalties, temperature, min_p,
top_k, top_p, draw. A request with a seed draws the same tokens regardless of
the rest of the batch: each row is drawn by inverting its cumulative distribution at one number of
the request's own random sequence.
"""

import random
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from loradock.engine.sampling.logprobs import read_scores, score
from loradock.engine.sampling.penalties import TokenHistory, adjust_logits
from loradock.engine.sampling.structure import Guide, apply_masks
from loradock.messages.prompts import Sampling
from loradock.messages.views import TokenLogprob

NOT_FINITE: Final = -1
"""Stands for a token where a row's logits are not finite."""

NOT_STRUCTURED: Final = -2
"""Stands for a token where a row's structure can't be followed further."""

CANDIDATES: Final = 256
"""The number of most likely tokens that are sorted first for top_p; more only where needed."""

_CANDIDATES_GROWTH: Final = 8
_CHUNK: Final = 1024
# Division by a smaller temperature would make NaN of the maximum, which is 0.
_TEMPERATURE_MIN: Final = 1e-37


class Sampler:
    """One output's choice of tokens: its options, its random sequence and its earlier tokens.

    `prompt`: the prompt's tokens. `end_ids`: tokens that end the output, forbidden before
    `min_tokens`. `guide`: that of its structure. `index`: the number of the output. `logprob`: that
    of the token which was chosen last, where the options request it.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        end_ids: frozenset[int] = frozenset(),
        guide: Guide | None = None,
        index: int = 0,
    ) -> None:
        self.options: Final = sampling
        self.history: Final = TokenHistory(sampling, prompt, end_ids)
        self.guide: Final = guide
        self.logprob: TokenLogprob | None = None
        seed = None if sampling.seed is None else sampling.seed + index
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.options.temperature == 0.0

    def uniform(self) -> float:
        """Return the next number of the random sequence, from 0 to below 1."""
        return self._random.random()

    def append(self, token: int) -> None:
        """Count a token of the output."""
        self.history.append(token)
        if self.guide is not None:
            self.guide.append(token)


def sample(samplers: Sequence[Sampler], logits: Tensor) -> list[int]:
    """Return each row's next token, and store its log-probability where it is requested.

    logits: [rows, vocabulary], unchanged. `NOT_FINITE` stands for a token of a row with NaN or +inf
    anywhere, or -inf everywhere, and `NOT_STRUCTURED` for one whose structure can't be followed.
    """
    guides = [sampler.guide for sampler in samplers]
    tokens = _choose(samplers, apply_masks(guides, logits))
    scored = [row for row, one in enumerate(samplers) if one.options.logprobs is not None]
    chosen = _score(samplers, scored, logits, tokens) if scored else tokens.tolist()
    return [
        NOT_STRUCTURED if guide is not None and guide.error else int(token)
        for guide, token in zip(guides, chosen, strict=True)
    ]


def _score(
    samplers: Sequence[Sampler], rows: list[int], logits: Tensor, tokens: Tensor
) -> list[float]:
    """Store the log-probabilities of these rows' tokens; return the tokens of all rows.

    Everything is read back from the device at once.
    """
    is_part = len(rows) < len(samplers)
    own, chosen = (logits[rows], tokens[rows]) if is_part else (logits, tokens)
    tops = [samplers[row].options.logprobs or 0 for row in rows]
    table = score(own, chosen.clamp(min=0), max(tops))
    found: list[float] = torch.cat([tokens.double(), table.flatten()]).tolist()
    count, width = len(samplers), table.shape[1]
    lines = [found[at : at + width] for at in range(count, len(found), width)]
    entries = read_scores([int(found[row]) for row in rows], lines, tops)
    for row, entry in zip(rows, entries, strict=True):
        samplers[row].logprob = entry
    return found[:count]


def _choose(samplers: Sequence[Sampler], logits: Tensor) -> Tensor:
    """Return each row's next token, or `NOT_FINITE`: [rows] int64 on the device."""
    scores = adjust_logits([sampler.history for sampler in samplers], logits)
    # NaN and +inf survive the maximum, which is -inf where every token is forbidden.
    highest, tokens = scores.max(-1)
    is_finite = highest.isfinite()
    rows = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    if rows:
        own = scores[rows].to(torch.float32)
        # Rows that are not finite are drawn from zeros instead, and marked below.
        own.masked_fill_(~is_finite[rows, None], 0.0)
        tokens[rows] = _draw([samplers[row] for row in rows], own)
    return tokens.where(is_finite, NOT_FINITE)


def _draw(samplers: Sequence[Sampler], scores: Tensor) -> Tensor:
    """Draw a token per row; scores: [rows, vocabulary] float32, overwritten."""
    options = [sampler.options for sampler in samplers]
    uniform = _column([sampler.uniform() for sampler in samplers], scores)
    # The maximum is subtracted before the division, so that no small temperature overflows.
    scores -= scores.amax(-1, keepdim=True)
    temperatures = [max(one.temperature, _TEMPERATURE_MIN) for one in options]
    weights = scores.div_(_column(temperatures, scores).float()).exp_()
    if any(one.min_p for one in options):
        # The largest weight is 1.
        weights = weights.where(weights >= _column([one.min_p for one in options], scores), 0.0)
    tokens = torch.empty(len(samplers), dtype=torch.int64, device=scores.device)
    sorted_rows = [row for row, one in enumerate(options) if one.top_k or one.top_p < 1.0]
    other_rows = [row for row, one in enumerate(options) if not (one.top_k or one.top_p < 1.0)]
    if sorted_rows:
        chosen = [options[row] for row in sorted_rows]
        tokens[sorted_rows] = _draw_sorted(chosen, weights[sorted_rows], uniform[sorted_rows])
    if other_rows:
        tokens[other_rows] = _draw_unsorted(weights[other_rows], uniform[other_rows])
    return tokens


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return a column on the device of `like`, [rows, 1] float64."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _draw_unsorted(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw from all tokens: first a chunk of the vocabulary, then a token of the chunk.

    weights: [rows, vocabulary] float32; uniform: [rows, 1]. A running sum over a large vocabulary
    in float32 would round small weights away.
    """
    rows, vocabulary = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % _CHUNK)).view(rows, -1, _CHUNK)
    sums = padded.sum(-1, dtype=torch.float64)
    chunk, rest = _invert(sums, uniform * sums.sum(-1, keepdim=True))
    inside = padded[torch.arange(rows, device=weights.device), chunk[:, 0]].double()
    token, _ = _invert(inside, rest)
    return (chunk * _CHUNK + token)[:, 0]


def _draw_sorted(options: Sequence[Sampling], weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw from the `top_k` most likely tokens that are needed to reach `top_p`."""
    vocabulary = weights.shape[-1]
    limits = [min(one.top_k or vocabulary, vocabulary) for one in options]
    top_p = _column([one.top_p for one in options], weights)
    limit = torch.tensor(limits, device=weights.device)[:, None]
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    size = min(vocabulary, max([CANDIDATES, *(one.top_k for one in options)]))
    while True:
        top = weights.topk(size)
        reached = top.values.double().cumsum(-1)
        mass = reached.gather(-1, (limit - 1).clamp(max=size - 1)).where(limit <= size, total)
        if size == vocabulary or bool(((limit <= size) | (reached[:, -1:] >= top_p * mass)).all()):
            break
        size = min(vocabulary, size * _CANDIDATES_GROWTH)
    rank = torch.arange(size, device=weights.device)
    before = reached - top.values
    kept = top.values.double().where((rank < limit) & (before < top_p * mass), 0.0)
    index, _ = _invert(kept, uniform * kept.sum(-1, keepdim=True))
    return top.indices.gather(-1, index)[:, 0]


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose cumulative weight exceeds `target`, and what exceeds it before.

    weights: [rows, count] float64; target: [rows, 1]. An index with weight 0 is never returned:
    where rounding leaves none that exceeds, it is the last one with a weight.
    """
    reached = weights.cumsum(-1)
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = places.where(weights > 0, -1).amax(-1, keepdim=True)
    index = torch.searchsorted(reached, target, right=True).minimum(last)
    before = (reached - weights).gather(-1, index)
    return index, target - before
