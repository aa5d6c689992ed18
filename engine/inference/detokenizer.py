"""Output tokens to text: incremental detokenization, and stop strings across token borders.

Streamed text is never withdrawn: an incomplete character, and text that may become a stop string,
are held back.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS: Final = 5
"""Prompt tokens that are decoded before the output, for tokenizers that join words to them."""

PARTIAL_TOKENS_MAX: Final = 3
"""An incomplete UTF-8 character has at most three bytes, so at most three tokens."""

PENDING_TOKENS_MAX: Final = 8
"""Tokens that are held back before those that complete no character are shown as they are."""


@lru_cache(maxsize=4)
def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = [token for token, entry in added.items() if entry.special]
    return frozenset([*marked, *getattr(tokenizer, "all_special_ids", ())])


class Detokenizer:
    """Decodes an output token by token.

    The results of all calls, joined, equal the whole output decoded at once. `skip_special`:
    special tokens have no text. They are left out first: a context of special tokens alone would
    have no text, and many tokenizers drop the space before the first word of a text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._special_ids = _special_ids(tokenizer)
        # Tokens whose text was returned, as context, followed by pending ones.
        self._window = self._context(self._last_words(prompt))
        self._returned = len(self._window)

    def _last_words(self, prompt: Sequence[int]) -> list[int]:
        """Return the last `CONTEXT_TOKENS` tokens of a prompt that are text."""
        words = (token for token in reversed(prompt) if token not in self._special_ids)
        return list(islice(words, CONTEXT_TOKENS))[::-1]

    def add(self, token: int) -> str:
        """Return the text that `token` completes."""
        if self._skip_special and token in self._special_ids:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._returned > PENDING_TOKENS_MAX:
            return self._advance_partly(text)
        return ""

    def flush(self) -> str:
        """Return the text of the pending tokens, at the end of the output."""
        return self._advance(len(self._window), self._decode(self._window))

    def _context(self, prompt: list[int]) -> list[int]:
        """Return the longest tail of `prompt` that is whole characters; it may be empty."""
        while self._decode(prompt).endswith(REPLACEMENT):
            del prompt[0]
        return prompt

    def _advance_partly(self, text: str) -> str:
        """Return the text that no further token can change.

        The decoded head that ends within a character is no prefix of `text`.
        """
        for end in range(len(self._window) - PARTIAL_TOKENS_MAX, self._returned, -1):
            head = self._decode(self._window[:end])
            if text.startswith(head):
                return self._advance(end, head)
        return ""

    def _advance(self, end: int, text: str) -> str:
        """Mark the tokens before `end`, which decode to `text`, as returned; return the new part.

        The newest of them stay in the window as context.
        """
        before = self._decode(self._window[: self._returned])
        del self._window[: self._returned]
        self._returned = end - self._returned
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text


class StopFilter:
    """A filter that ends the text before a stop string and holds back what may begin one.

    The stop string that is complete first ends the text; of two that are complete at once, the one
    that began first. So the result does not depend on how the text is divided.
    """

    def __init__(self, stops: Sequence[str], includes_stop: bool = False) -> None:
        """`includes_stop`: the text ends after the stop string."""
        self._stops = stops
        self._includes_stop = includes_stop
        self._pending = ""
        self.matched = ""

    @property
    def has_matched(self) -> bool:
        """Whether the text has ended at a stop string, which is `matched`."""
        return bool(self.matched)

    def add(self, text: str) -> str:
        """Return the text that may be shown now; after a match, none."""
        if self.has_matched:
            return ""
        text = self._pending + text
        matches = [
            (at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0
        ]
        if matches:
            end, at, self.matched = min(matches)
            self._pending = ""
            return text[: end if self._includes_stop else at]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest tail of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
