"""From output tokens to the text that a client may see.

What it is: incremental detokenisation, and stop strings across token borders. What it is not:
chat templates or anything on the prompt's side. One rule: text that was given out is never taken
back, so half a character, and what may become a stop string, wait.
"""

from collections.abc import Sequence
from typing import Any, Final

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS: Final = 5
"""How much of the prompt is decoded before the output, for tokenizers that join words to it."""

PARTIAL_TOKENS_MAX: Final = 3
"""A UTF-8 character that lacks its end has at most three bytes, so at most three tokens."""

WAITING_TOKENS_MAX: Final = 8
"""How many tokens wait before those that can't be part of an unfinished character are told."""


class Detokenizer:
    """Decodes an output token by token.

    What all calls return, joined, is what decoding the whole output at once gives.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = self._context(list(prompt[-CONTEXT_TOKENS:]))
        self._told = len(self._window)

    def add(self, token: int) -> str:
        """The text that became readable with `token`."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._tell(len(self._window), text)
        if len(self._window) - self._told > WAITING_TOKENS_MAX:
            return self._tell_some(text)
        return ""

    def rest(self) -> str:
        """What still waits, at the end of the output."""
        return self._tell(len(self._window), self._decode(self._window))

    def _context(self, prompt: list[int]) -> list[int]:
        """The longest end of `prompt` that is whole characters; it may be empty."""
        while self._decode(prompt).endswith(REPLACEMENT):
            del prompt[0]
        return prompt

    def _tell_some(self, text: str) -> str:
        """Tell what no further token can change; half a character is no prefix of `text`."""
        for end in range(len(self._window) - PARTIAL_TOKENS_MAX, self._told, -1):
            head = self._decode(self._window[:end])
            if text.startswith(head):
                return self._tell(end, head)
        return ""

    def _tell(self, end: int, text: str) -> str:
        """Give out the tokens before `end`, which say `text`; the newest stay as context."""
        before = self._decode(self._window[: self._told])
        del self._window[: self._told]
        self._told = end - self._told
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopFilter:
    """Passes text on until a stop string occurs; what may be the beginning of one is kept back.

    The stop string that is complete first ends the text; of two, the one that began first. So it
    makes no difference in what pieces the text comes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._kept = ""
        self.has_matched = False

    def add(self, text: str) -> str:
        """The text that may be shown now; after a match, none."""
        if self.has_matched:
            return ""
        text = self._kept + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.has_matched = True
            self._kept = ""
            return text[: min(matches)[1]]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """What was kept back, at the end of the output."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
