"""One output of a generation: its prompt, its tokens, and their text.

Streamed text is never withdrawn: an incomplete character, and text that may become a stop string,
are held back. A token that ends the output is not part of it.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

from msgspec import structs

from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_inputs import ImageInputs
from loradock.engine.models.image_processor import ProcessedPrompt
from loradock.engine.serving.queue import owner_of
from loradock.engine.serving.sampling import PromptLogprobs, Sampler
from loradock.engine.serving.structured import GrammarMatcher
from loradock.messages.commands import StartGeneration
from loradock.messages.ids import OpId, Slot
from loradock.messages.prompts import MAX_TOKENS_DEFAULT
from loradock.messages.requests import TokensStreamed
from loradock.messages.views import FinishReason, TokenLogprob

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

    def __init__(
        self, tokenizer: Any, prompt: SequenceOf[int], *, skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._special_ids = _special_ids(tokenizer)
        # Tokens whose text was returned, as context, followed by pending ones.
        self._window = self._context(self._last_words(prompt))
        self._returned = len(self._window)

    def _last_words(self, prompt: SequenceOf[int]) -> list[int]:
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

    def _decode(self, tokens: SequenceOf[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text


class StopFilter:
    """A filter that ends the text before a stop string and holds back what may begin one.

    The stop string that is complete first ends the text; of two that are complete at once, the one
    that began first. So the result does not depend on how the text is divided.
    """

    def __init__(self, stops: SequenceOf[str], includes_stop: bool = False) -> None:
        """`includes_stop`: the text ends after the stop string."""
        self._stops = stops
        self._includes_stop = includes_stop
        self._pending = ""
        self.matched = ""

    @property
    def has_matched(self) -> bool:
        """True if the text has ended at a stop string, which is `matched`."""
        return bool(self.matched)

    def add(self, text: str) -> str:
        """Return the text that may be shown now; after a match, none."""
        if not self._stops:
            return text
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


class PreparedPrompt(NamedTuple):
    """All that a generation needs before it is queued; `grammar`: that of its structure, if any."""

    prompt: ProcessedPrompt
    grammar: GrammarMatcher | None = None

    def fork(self) -> "PreparedPrompt":
        """Return the prompt with a grammar matcher for one more output."""
        return self if self.grammar is None else self._replace(grammar=self.grammar.fork())


@dataclass
class Output:
    """The output so far: all tokens, and the pieces of text that were streamed with them.

    `logprobs` has an entry per token, if they were requested, and one for `end_token`.
    `finish_reason` is set at the end.
    """

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    end_token: int | None = None


class Sequence:
    """Output number `index` of a request, from the queue to its end.

    `owner`: the adapter and the client whose turns it has. `prompt`: its tokens, empty until
    `set_prompt`. `images`: its images, until they are in the KV cache. `can_resume`: whether its KV
    cache can be computed again from its tokens. `is_active`: whether its generation is in progress.
    """

    def __init__(self, command: StartGeneration, model: CausalModel, index: int = 0) -> None:
        self.command = command
        self.owner: Final = owner_of(command)
        self.index = index
        self.is_active = True
        self.prompt: list[int] = []
        # Made with the prompt, which its penalties depend on.
        self.sampler: Sampler
        self.prompt_logprobs: PromptLogprobs | None = None
        self.images: ImageInputs | None = None
        self.can_resume = True
        self.output = Output()
        # Tokens of the prompt that were in the KV cache when the sequence first began.
        self.prefix_tokens = 0
        # Tokens that it had at the beginning of its time slice in the slot that it uses.
        self._tokens_before_slice = 0
        sampling = command.sampling
        eos_ids = frozenset() if sampling.ignore_eos else frozenset(model.eos_ids)
        self._end_ids = eos_ids | frozenset(sampling.stop_token_ids)
        self._stop_filter = StopFilter(sampling.stop, sampling.include_stop)
        self._output_tokens_max = sampling.max_tokens
        self._model = model
        self._detokenizer: Detokenizer | None = None

    def set_prompt(self, prepared: PreparedPrompt) -> None:
        """Store the prompt in the form that the model accepts."""
        (self.prompt, self.images), grammar = prepared
        self.can_resume = self.images is None
        sampling = self.command.sampling
        if not self._output_tokens_max:
            left = self._model.max_model_len - len(self.prompt)
            self._output_tokens_max = min(MAX_TOKENS_DEFAULT, left)
        self.sampler = Sampler(sampling, self.prompt, self._end_ids, grammar, self.index)
        if sampling.prompt_logprobs is not None and self.index == 0:
            self.prompt_logprobs = PromptLogprobs(self.prompt, sampling.prompt_logprobs)
        if self.images is not None:
            # Image files are large and are not needed again.
            self.command = structs.replace(self.command, prompt="")
        if self._model.tokenizer is not None:
            self._detokenizer = Detokenizer(
                self._model.tokenizer, self.prompt, skip_special=sampling.skip_special_tokens
            )

    def record_reused(self, tokens: int) -> None:
        """Record that the first tokens were cached; after a preemption they are its own."""
        if not self.output.tokens:
            self.prefix_tokens = min(tokens, len(self.prompt))

    @property
    def order_key(self) -> tuple[int, OpId, int]:
        """The order of sequences that need the same memory: by priority, and then by age."""
        return self.command.priority, self.command.op, self.index

    @property
    def slice_tokens(self) -> int:
        """The tokens that it has generated in its time slice."""
        return len(self.output.tokens) - self._tokens_before_slice

    def resume(self, slot: Slot, slot_version: int) -> None:
        """Continue with the adapter in this slot."""
        self.command = structs.replace(self.command, slot=slot, generation=slot_version)
        self._tokens_before_slice = len(self.output.tokens)

    @property
    def tokens(self) -> list[int]:
        """The prompt and the output so far, from which the KV cache can be computed again."""
        return self.prompt + self.output.tokens

    @property
    def can_recompute(self) -> bool:
        """True if its KV cache can be computed again from its tokens or its images."""
        return self.can_resume or self.images is not None

    @property
    def prompt_length(self) -> int:
        """The length of the pass that computes its first tokens, which may scale positions.

        It changes if `generate` would compute the sequence again from its first token.
        """
        tokens = len(self.prompt) + len(self.output.tokens)
        lengths = self._model.row_lengths
        return lengths.prompt_length(len(self.prompt), tokens if self.can_resume else 0)

    @property
    def tokens_max(self) -> int:
        """The most tokens that the prompt and the output can have together."""
        return len(self.prompt) + self._output_tokens_max

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if its prefill has to compute the logits of all tokens of the prompt."""
        return self.prompt_logprobs is not None and not self.output.tokens

    def append(self, token: int) -> tuple[str, FinishReason | None]:
        """Append the next token; return the text to stream and, at the end, the finish reason.

        A token that ends the output is not part of it. The token that completes a stop string is,
        but the stop string's text is not, unless `include_stop` is set.
        """
        output, sampling = self.output, self.command.sampling
        if self.sampler.logprob is not None:
            output.logprobs.append(self.sampler.logprob)
        if token in self._end_ids:
            output.end_token = token
            output.stop_reason = token if token in sampling.stop_token_ids else None
            return self.flush(), "stop"
        output.tokens.append(token)
        self.sampler.append(token)
        text = self._detokenizer.add(token) if self._detokenizer else ""
        if len(output.tokens) >= sampling.min_tokens:
            text = self._stop_filter.add(text)
        if self._stop_filter.has_matched:
            return text, self._matched()
        is_complete = self.sampler.grammar is not None and self.sampler.grammar.is_complete
        if not is_complete and len(output.tokens) < self._output_tokens_max:
            return text, None
        text += self.flush()
        if self._stop_filter.has_matched:
            return text, self._matched()
        return text, "stop" if is_complete else "length"

    def _matched(self) -> FinishReason:
        self.output.stop_reason = self._stop_filter.matched
        return "stop"

    def streamed(self, offset: int, text: str) -> TokensStreamed:
        """Return the message with the tokens from `offset` on, and `text`."""
        output, prompt = self.output, self.prompt_logprobs
        return TokensStreamed(
            self.command.request_id,
            offset,
            tuple(output.tokens[offset:]),
            text,
            self.index,
            output.finish_reason,
            output.stop_reason if output.finish_reason else None,
            tuple(output.logprobs[offset:]),
            tuple(prompt.entries) if prompt is not None and offset == 0 else (),
            output.end_token,
        )

    def full_output(self) -> TokensStreamed:
        """Return the output so far, from its first token."""
        return self.streamed(0, "".join(self.output.text))

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        if self._detokenizer is None:
            return ""
        return self._stop_filter.add(self._detokenizer.flush()) + self._stop_filter.flush()
