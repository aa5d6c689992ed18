"""Log-probabilities as the OpenAI protocol and vLLM have them, with the texts of the tokens."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from loradock.messages.views import TokenLogprob

LOGPROB_MIN: Final = -9999.0
"""Stands for the log-probability of an impossible token, because JSON has no infinity."""


class TokenText(NamedTuple):
    """The text of a token, and its bytes in UTF-8, which can be a part of a character."""

    text: str
    data: bytes


TokenTextOf = Callable[[int], TokenText]
"""Returns the text of a token id."""
Entries = Sequence[TokenLogprob | None]
"""A prompt's entries begin with None; an output's contain none."""


class CompletionLogprobs(Struct, frozen=True):
    """The log-probabilities of a text, with an entry per token.

    `text_offset`: the character in which a token begins, from the text's start.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens; `bytes` are its own, and can be a part of a character."""

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
    """The log-probabilities of a message."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(Struct, frozen=True):
    """One token at a place of the prompt, as vLLM reports it; `rank` 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per token of the prompt, token ids with what is known of them; null for the first token."""


class CharacterCount:
    """Counts the characters of a text whose tokens arrive in order and can end within one."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def add(self, data: bytes) -> int:
        """Add a token's bytes; return the index of the character in which they begin."""
        first = self._characters
        self._characters += len(self._decoder.decode(data))
        return first


def completion_logprobs(
    tokens: Sequence[int], entries: Entries, text_of: TokenTextOf, count: CharacterCount
) -> CompletionLogprobs:
    """Return the log-probabilities of tokens that follow those in `count`, and add them to it."""
    texts = [text_of(token) for token in tokens]
    return CompletionLogprobs(
        [count.add(token.data) for token in texts],
        [None if entry is None else _bounded(entry.logprob) for entry in entries],
        [token.text for token in texts],
        [None if entry is None else _best(entry, text_of) for entry in entries],
    )


def chat_logprobs(entries: Sequence[TokenLogprob], text_of: TokenTextOf) -> ChatLogprobs:
    """Return the log-probabilities of a message's tokens."""
    content = []
    for entry in entries:
        text, data = text_of(entry.token)
        # As many as are requested, the chosen one among them, even if others are more likely.
        best = list(_ranked(entry).items())[: len(entry.top)]
        top = [_top(text_of(token), logprob) for token, logprob in best]
        content.append(ChatLogprob(text, _bounded(entry.logprob), list(data), top))
    return ChatLogprobs(content)


def _top(token: TokenText, logprob: float) -> TopLogprob:
    return TopLogprob(token.text, _bounded(logprob), list(token.data))


def prompt_logprobs(entries: Entries, text_of: TokenTextOf) -> PromptLogprobs:
    """Return the log-probabilities of a prompt's tokens."""
    return [None if entry is None else _prompt_entry(entry, text_of) for entry in entries]


def _prompt_entry(entry: TokenLogprob, text_of: TokenTextOf) -> dict[str, PromptLogprob]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
    ranks[entry.token] = entry.rank
    return {
        str(token): PromptLogprob(_bounded(logprob), ranks[token], text_of(token).text)
        for token, logprob in _ranked(entry).items()
    }


def _best(entry: TokenLogprob, text_of: TokenTextOf) -> dict[str, float]:
    """Return the chosen token and the most likely ones; of equal texts, the first counts."""
    best: dict[str, float] = {}
    for token, logprob in _ranked(entry).items():
        best.setdefault(text_of(token).text, _bounded(logprob))
    return best


def _ranked(entry: TokenLogprob) -> dict[int, float]:
    """Return the log-probability of the chosen token, and of the others from the most likely on."""
    return {entry.token: entry.logprob} | dict(entry.top)


def _bounded(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
