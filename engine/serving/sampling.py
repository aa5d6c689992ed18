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

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.serving.step_table import StepTable
from loradock.engine.serving.structured import NO_NUMBERS, GrammarMatcher, apply_masks, masks_of
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

    def changes(self) -> Iterable[_Change]:
        """Return a change per token whose logit changes; that of a forbidden one becomes -inf."""
        options, output = self._options, self._output
        forbidden = self._end_ids if self._output_count < options.min_tokens else frozenset()
        for token in forbidden:
            yield _Change(token, -math.inf, 1.0, 0.0)
        for token in (self._bias.keys() | self._prompt | output.keys()) - forbidden:
            count = output[token]
            is_repeated = count or token in self._prompt
            yield _Change(
                token,
                self._bias.get(token, 0.0),
                options.repetition_penalty if is_repeated else 1.0,
                options.frequency_penalty * count + options.presence_penalty * (count > 0),
            )


def changes_of(histories: Sequence[TokenHistory], vocabulary: int) -> Tensor:
    """Return the changes of all rows' logits, on the host: [changes, 5] float64, empty if none.

    The columns are the row, and the fields of `_Change`. Tokens outside of the vocabulary are
    ignored.
    """
    changes = [
        (row, *change)
        for row, history in enumerate(histories)
        for change in history.changes()
        if change.token < vocabulary
    ]
    return torch.tensor(changes, dtype=torch.float64) if changes else NO_NUMBERS


def adjust_logits(changes: Tensor, logits: Tensor) -> Tensor:
    """Return the logits with every change; `logits` itself if there are none.

    changes: those of `changes_of`, on the device of `logits`. logits: [rows, vocabulary],
    unchanged; the result is float32 if it differs.
    """
    if not len(changes):
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    at = changes[:, :2].long().unbind(-1)
    bias, divisor, subtracted = changes[:, 2:].float().unbind(-1)
    biased = adjusted[at] + bias
    repeated = torch.where(biased > 0, biased / divisor, biased * divisor)
    adjusted[at] = repeated - subtracted
    return adjusted


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


class _Numbers(NamedTuple):
    """The numbers that the choice of a batch needs, all of 8 bytes; a part may be empty.

    guided: [guided] int64, the rows with a structure, and masks: theirs, see `masks_of`. changes:
    see `changes_of`. draws: [6, drawn] float64: the row, a number from 0 to below 1, temperature,
    min_p, the most tokens and the most probability that are left, for each row that is drawn; the
    rows that are sorted for it come first. scored: [scored] int64, the rows with log-probabilities.
    """

    guided: Tensor
    masks: Tensor
    changes: Tensor
    draws: Tensor
    scored: Tensor

    def sent(self, table: StepTable) -> "_Numbers":
        """Return them on the device of `table`."""
        used = [part for part in self if part.numel()]
        if not used:
            return self
        sent = iter(table.send([part.flatten() for part in used]))
        return _Numbers(*[next(sent).view(part.shape) if part.numel() else part for part in self])


def _numbers_of(samplers: Sequence[Sampler], vocabulary: int) -> _Numbers:
    """Return the numbers of a batch on the host; each row that is drawn takes its next number."""
    drawn = {row for row, one in enumerate(samplers) if not one.is_greedy}
    cut = [row for row in drawn if _is_sorted(samplers[row].options)]
    order = [*cut, *drawn.difference(cut)]
    draws = [_draw_numbers(row, samplers[row], vocabulary) for row in order]
    scored = [row for row, one in enumerate(samplers) if one.options.logprobs is not None]
    return _Numbers(
        *masks_of([one.grammar for one in samplers], vocabulary),
        changes_of([one.history for one in samplers], vocabulary),
        torch.tensor(draws, dtype=torch.float64).T if draws else NO_NUMBERS,
        torch.tensor(scored) if scored else NO_NUMBERS,
    )


def _is_sorted(options: Sampling) -> bool:
    return options.top_k > 0 or options.top_p < 1.0


def _draw_numbers(row: int, sampler: Sampler, vocabulary: int) -> tuple[float, ...]:
    options = sampler.options
    temperature = max(options.temperature, _TEMPERATURE_MIN)
    tokens_max = min(options.top_k or vocabulary, vocabulary)
    return (row, sampler.uniform(), temperature, options.min_p, tokens_max, options.top_p)


def sample(samplers: Sequence[Sampler], logits: Tensor, table: StepTable) -> list[int]:
    """Return each row's next token, and store its log-probability if it is requested.

    logits: [rows, vocabulary], unchanged. table: memory on their device. `NOT_FINITE` stands for a
    token of a row with NaN or +inf anywhere, or -inf everywhere, and `NOT_STRUCTURED` for one whose
    structure can't be followed.

    All numbers are sent to the device by one copy, which the host gathers while the device computes
    the logits, and the results are read at once; again only if a row needs more candidates.
    """
    numbers = _numbers_of(samplers, logits.shape[-1]).sent(table)
    choice = _Choice(samplers, numbers, logits)
    top = max([one.options.logprobs or 0 for one in samplers])
    while True:
        tokens, needs_more = choice.tokens()
        scores = _scores(numbers.scored, logits, tokens, top)
        found = _read(tokens, needs_more, scores)
        if needs_more is None or not found[len(samplers)]:
            break
        choice.sort_more()
    if scores is not None:
        _store_logprobs(samplers, found, scores.shape[1])
    return [
        NOT_STRUCTURED if one.grammar is not None and one.grammar.error else int(token)
        for one, token in zip(samplers, found, strict=False)
    ]


def _scores(scored: Tensor, logits: Tensor, tokens: Tensor, top: int) -> Tensor | None:
    """Return the table of `score` for the rows `scored`; None if there are none."""
    if not len(scored):
        return None
    if len(scored) < len(logits):
        logits, tokens = logits[scored], tokens[scored]
    return score(logits, tokens.clamp(min=0), top)


def _read(*parts: Tensor | None) -> list[float]:
    """Return the numbers of all parts, which are read from the device at once."""
    own = [part for part in parts if part is not None]
    if len(own) == 1:
        return own[0].tolist()
    return torch.cat([part.double().flatten() for part in own]).tolist()


def _store_logprobs(samplers: Sequence[Sampler], found: list[float], width: int) -> None:
    """Store the entries of the rows that request them; found: ends with `width` numbers of each."""
    scored = [(row, one) for row, one in enumerate(samplers) if one.options.logprobs is not None]
    begins = range(len(found) - width * len(scored), len(found), width)
    for (row, one), begin in zip(scored, begins, strict=True):
        own = found[begin : begin + width]
        one.logprob = _entry(int(found[row]), own, one.options.logprobs or 0)


class _Choice:
    """The choice of a batch's tokens on the device, repeated if more candidates are needed.

    `candidates`: the number of most likely tokens that are sorted.
    """

    def __init__(self, samplers: Sequence[Sampler], numbers: _Numbers, logits: Tensor) -> None:
        drawn = [one.options for one in samplers if not one.is_greedy]
        most = max([CANDIDATES, *[one.top_k for one in drawn]])
        self.candidates = min(most, logits.shape[-1])
        self._sorted = len([one for one in drawn if _is_sorted(one)])
        self._draws = numbers.draws
        guided = apply_masks(numbers.guided, numbers.masks, logits)
        scores = adjust_logits(numbers.changes, guided)
        # NaN and +inf survive the maximum, which is -inf if every token is forbidden. `isfinite`
        # launches twice as many kernels.
        highest, self._best = scores.max(-1)
        self._is_finite = highest.abs() < math.inf
        if drawn:
            self._rows = self._draws[0].long()
            self._weights = self._weights_of(scores, max([one.min_p for one in drawn]) > 0.0)

    def _weights_of(self, scores: Tensor, has_min_p: bool) -> Tensor:
        """Return the weights of all tokens of the rows that are drawn; the largest is 1."""
        own = scores[self._rows].float()
        # Rows that are not finite are drawn from zeros instead, and marked later.
        own.masked_fill_(~self._is_finite[self._rows, None], 0.0)
        # The maximum is subtracted before the division, so that no small temperature overflows.
        own -= own.amax(-1, keepdim=True)
        weights = own.div_(self._draws[2, :, None].float()).exp_()
        return weights.where(weights >= self._draws[3, :, None], 0.0) if has_min_p else weights

    def tokens(self) -> tuple[Tensor, Tensor | None]:
        """Return each row's token, or `NOT_FINITE`, and whether a row needs more candidates.

        [rows] int64, and [] bool, or None if no row can need more.
        """
        tokens, needs_more = self._best, None
        if self._draws.numel():
            drawn, needs_more = self._draw()
            tokens = tokens.scatter(0, self._rows, drawn)
        return tokens.where(self._is_finite, NOT_FINITE), needs_more

    def sort_more(self) -> None:
        """Sort more candidates from now on."""
        self.candidates = min(_CANDIDATES_GROWTH * self.candidates, self._weights.shape[-1])

    def _draw(self) -> tuple[Tensor, Tensor | None]:
        """Return a token of each row that is drawn, and whether one needs more candidates."""
        count = self._sorted
        _, uniform, _, _, limit, top_p = self._draws.unsqueeze(-1).unbind()
        needs_more, parts = None, []
        if count:
            own = self._weights[:count], uniform[:count], limit[:count], top_p[:count]
            tokens, needs_more = _draw_sorted(*own, self.candidates)
            parts.append(tokens)
        if count < len(self._weights):
            parts.append(_draw_unsorted(self._weights[count:], uniform[count:]))
        return torch.cat(parts), needs_more


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


def _draw_sorted(
    weights: Tensor, uniform: Tensor, limit: Tensor, top_p: Tensor, size: int
) -> tuple[Tensor, Tensor | None]:
    """Draw from the `limit` most likely tokens that are needed to reach `top_p`.

    weights: [rows, vocabulary] float32; the others: [rows, 1] float64. Returns a token per row, and
    whether a row needs more candidates than `size`, None if these are all tokens.
    """
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    top = weights.topk(size)
    reached = top.values.double().cumsum(-1)
    last = (limit.long() - 1).clamp(max=size - 1)
    mass = reached.gather(-1, last).where(limit <= size, total)
    needs_more = None
    if size < weights.shape[-1]:
        needs_more = ((limit > size) & (reached[:, -1:] < top_p * mass)).any()
    rank = torch.arange(size, device=weights.device)
    before = reached - top.values
    kept = top.values.double().where((rank < limit) & (before < top_p * mass), 0.0)
    index, _ = _invert(kept, uniform * kept.sum(-1, keepdim=True))
    return top.indices.gather(-1, index)[:, 0], needs_more


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
