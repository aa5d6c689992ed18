"""Choice of the next tokens from logits, for all rows of a batch in one pass on their device.

The order is that of vLLM: structures, forbidden tokens and biases, penalties, temperature, min_p,
top_k, top_p, draw. A request with a seed draws the same tokens regardless of the rest of the batch:
each row is drawn by inverting its cumulative distribution at one number of the request's random
sequence.

The formulas of penalties are those of vLLM's sampler, whose frequency and presence penalties are
OpenAI's, and whose repetition penalty is that of CTRL (Keskar et al., 2019). Log-probabilities are
those of the model's own logits, before penalties, temperature and filters, as vLLM's
`raw_logprobs` are.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.serving.structured import GrammarMatcher, apply_masks
from loradock.messages.prompts import Sampling
from loradock.messages.views import TokenLogprob

NOT_FINITE: Final = -1
"""Stands for a token if a row's logits are not finite."""

NOT_STRUCTURED: Final = -2
"""Stands for a token if a row's structure can't be followed further."""

CANDIDATES: Final = 256
"""The number of most likely tokens that are sorted first for top_p; more only if needed."""

_CANDIDATES_GROWTH: Final = 8
_CHUNK: Final = 1024
# Division by a smaller temperature would make NaN of the maximum, which is 0.
_TEMPERATURE_MIN: Final = 1e-37

PROMPT_LOGITS_BYTES_MAX: Final = 128 << 20
"""Bound on the float32 logits of a prompt's tokens that are in memory at once, in bytes."""

WHOLE_LOGITS_BYTES_MAX: Final = 512 << 20
"""The same bound for a prompt with images, which is computed in one pass."""


def score(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Return a table of each row's token: [rows, 2 + 2 * top] float64, on the device of `logits`.

    logits: [rows, vocabulary]; tokens: [rows] int64. The columns are the token's log-probability
    and rank, the `top` most likely tokens, and their log-probabilities.
    """
    scores = logits.float()
    normalizer = scores.logsumexp(-1, keepdim=True)
    own = scores.gather(-1, tokens[:, None])
    rank = (scores > own).sum(-1, keepdim=True) + 1
    columns = [(own - normalizer).double(), rank.double()]
    if top:
        best = scores.topk(min(top, scores.shape[-1]))
        columns += [best.indices.double(), (best.values - normalizer).double()]
    return torch.cat(columns, -1)


def _entry(token: int, row: Sequence[float], top: int) -> TokenLogprob:
    """Return the entry of a row of the table that was read back, with the `top` best tokens."""
    size = (len(row) - 2) // 2
    top = min(top, size)
    best = zip(map(int, row[2 : 2 + top]), row[2 + size : 2 + size + top], strict=True)
    return TokenLogprob(token, row[0], int(row[1]), tuple(best))


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, in the order in which chunks of it are prefilled.

    `entries` has one per token whose predecessor's logits were seen; the first is None, because
    nothing precedes it.
    """

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self.prompt: Final = prompt
        self.top: Final = top
        self.entries: list[TokenLogprob | None] = [None]


class PromptChunk(NamedTuple):
    """The logits of a prompt's tokens from position `first` on: [tokens, vocabulary]."""

    prompt: PromptLogprobs
    first: int
    logits: Tensor

    @property
    def following(self) -> Sequence[int]:
        """The tokens without an entry that these logits predict."""
        return self.prompt.prompt[len(self.prompt.entries) : self.first + len(self.logits) + 1]

    @property
    def new_logits(self) -> Tensor:
        """The logits that predict them; those of a prefill that is repeated are left out."""
        skipped = len(self.prompt.entries) - 1 - self.first
        return self.logits[skipped : skipped + len(self.following)]


def score_prompts(chunks: Sequence[PromptChunk]) -> None:
    """Add the entries of the tokens that the chunks predict, read back from the device at once."""
    chunks = [chunk for chunk in chunks if chunk.following]
    if not chunks:
        return
    parts = [chunk.new_logits for chunk in chunks]
    logits = torch.cat(parts) if len(parts) > 1 else parts[0]
    tokens = [token for chunk in chunks for token in chunk.following]
    tops = [chunk.prompt.top for chunk in chunks for _ in chunk.following]
    table = score(logits, torch.tensor(tokens, device=logits.device), max(tops)).tolist()
    entries = map(_entry, tokens, table, tops)
    for chunk in chunks:
        chunk.prompt.entries += islice(entries, len(chunk.following))


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
    """Return the logits with every row's changes; `logits` itself if there are none.

    logits: [rows, vocabulary], unchanged; the result is float32 if it differs. Tokens outside of
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


class Sampler:
    """One output's choice of tokens: its options, its random sequence and its earlier tokens.

    `prompt`: the prompt's tokens. `end_ids`: tokens that end the output, forbidden before
    `min_tokens`. `grammar`: that of its structure. `index`: the number of the output. `logprob`:
    that of the token which was chosen last, if the options request it.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        end_ids: frozenset[int] = frozenset(),
        grammar: GrammarMatcher | None = None,
        index: int = 0,
    ) -> None:
        self.options: Final = sampling
        self.history: Final = TokenHistory(sampling, prompt, end_ids)
        self.grammar: Final = grammar
        self.logprob: TokenLogprob | None = None
        seed = None if sampling.seed is None else sampling.seed + index
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.options.temperature == 0.0

    def uniform(self) -> float:
        """Return the next number of the random sequence, from 0 to below 1."""
        return self._random.random()

    def append(self, token: int) -> None:
        """Count a token of the output."""
        self.history.append(token)
        if self.grammar is not None:
            self.grammar.append(token)


def sample(samplers: Sequence[Sampler], logits: Tensor) -> list[int]:
    """Return each row's next token, and store its log-probability if it is requested.

    logits: [rows, vocabulary], unchanged. `NOT_FINITE` stands for a token of a row with NaN or +inf
    anywhere, or -inf everywhere, and `NOT_STRUCTURED` for one whose structure can't be followed.
    """
    grammars = [sampler.grammar for sampler in samplers]
    tokens = _choose(samplers, apply_masks(grammars, logits))
    scored = [row for row, one in enumerate(samplers) if one.options.logprobs is not None]
    chosen = _score(samplers, scored, logits, tokens) if scored else tokens.tolist()
    return [
        NOT_STRUCTURED if grammar is not None and grammar.error else int(token)
        for grammar, token in zip(grammars, chosen, strict=True)
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
    for row, top, at in zip(rows, tops, range(count, len(found), width), strict=True):
        samplers[row].logprob = _entry(int(found[row]), found[at : at + width], top)
    return found[:count]


def _choose(samplers: Sequence[Sampler], logits: Tensor) -> Tensor:
    """Return each row's next token, or `NOT_FINITE`: [rows] int64 on the device."""
    scores = adjust_logits([sampler.history for sampler in samplers], logits)
    # NaN and +inf survive the maximum, which is -inf if every token is forbidden.
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
    if rounding leaves none that exceeds, it is the last one with a weight.
    """
    reached = weights.cumsum(-1)
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = places.where(weights > 0, -1).amax(-1, keepdim=True)
    index = torch.searchsorted(reached, target, right=True).minimum(last)
    before = (reached - weights).gather(-1, index)
    return index, target - before
