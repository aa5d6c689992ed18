"""Log-probabilities of tokens and of the most likely ones, in one pass on the device.

They are of the model's own logits, before penalties, temperature and filters, as vLLM's
`raw_logprobs` are.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.messages.views import TokenLogprob

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


def read_scores(
    tokens: Sequence[int], table: Sequence[Sequence[float]], tops: Sequence[int]
) -> list[TokenLogprob]:
    """Return the entry of each row of a table that was read back, with `tops[row]` best tokens."""
    return [_entry(token, row, top) for token, row, top in zip(tokens, table, tops, strict=True)]


def _entry(token: int, row: Sequence[float], top: int) -> TokenLogprob:
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
    entries = iter(read_scores(tokens, table, tops))
    for chunk in chunks:
        chunk.prompt.entries += islice(entries, len(chunk.following))
