"""Log-probabilities as the OpenAI protocol and vLLM have them, with the texts of the tokens."""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from messages.views import TokenLogprob

LOGPROB_MIN: Final = -9999.0
"""Stands for the log-probability of an impossible token, because JSON has no infinity."""

TokenText = Callable[[int], str]
Entries = Sequence[TokenLogprob | None]
"""A prompt's entries begin with None; an output's contain none."""


class CompletionLogprobs(Struct, frozen=True):
    """Those of a text: one entry per token, `text_offset` in characters from the text's start."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens; `bytes` are those of its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    """A token of a message."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Those of a message."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(Struct, frozen=True):
    """One token at a place of the prompt, as vLLM reports it; `rank` 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per token of the prompt, token ids with what is known of them; null for the first token."""


def completion_logprobs(
    tokens: Sequence[int], entries: Entries, text_of: TokenText, offset: int
) -> CompletionLogprobs:
    """Return the log-probabilities of tokens that begin at character `offset` of the text."""
    texts = [text_of(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        offsets,
        [None if entry is None else _bounded(entry.logprob) for entry in entries],
        texts,
        [None if entry is None else _best(entry, text_of) for entry in entries],
    )


def chat_logprobs(entries: Sequence[TokenLogprob], text_of: TokenText) -> ChatLogprobs:
    """Return the log-probabilities of a message's tokens."""
    content = []
    for entry in entries:
        text = text_of(entry.token)
        top = [
            TopLogprob(text_of(token), _bounded(logprob), _bytes(text_of(token)))
            for token, logprob in entry.top
        ]
        content.append(ChatLogprob(text, _bounded(entry.logprob), _bytes(text), top))
    return ChatLogprobs(content)


def prompt_logprobs(entries: Entries, text_of: TokenText) -> PromptLogprobs:
    """Return the log-probabilities of a prompt's tokens."""
    return [None if entry is None else _prompt_entry(entry, text_of) for entry in entries]


def _prompt_entry(entry: TokenLogprob, text_of: TokenText) -> dict[str, PromptLogprob]:
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
    return {
        str(token): PromptLogprob(_bounded(logprob), rank, text_of(token))
        for token, logprob, rank in (*ranked, (entry.token, entry.logprob, entry.rank))
    }


def _best(entry: TokenLogprob, text_of: TokenText) -> dict[str, float]:
    """Return the most likely tokens, with the chosen one in any case."""
    both = (*entry.top, (entry.token, entry.logprob))
    return {text_of(token): _bounded(logprob) for token, logprob in both}


def _bounded(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


def _bytes(text: str) -> list[int]:
    return list(text.encode(errors="replace"))
