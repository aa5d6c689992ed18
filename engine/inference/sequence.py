"""One output of a generation: the prompt, and what was generated as tokens and text.

Streamed text is never withdrawn. A token that ends the output is not part of it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from loradock.engine.inference.detokenizer import Detokenizer, StopFilter
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_processor import ProcessedPrompt
from loradock.engine.models.vision.image_inputs import ImageInputs
from loradock.engine.sampling.logprobs import PromptLogprobs
from loradock.engine.sampling.sampler import Sampler
from loradock.engine.sampling.structure import Guide
from loradock.messages.commands import StartGeneration
from loradock.messages.ids import OpId, Slot
from loradock.messages.prompts import MAX_TOKENS_DEFAULT
from loradock.messages.requests import TokensStreamed
from loradock.messages.views import FinishReason, TokenLogprob


class PreparedPrompt(NamedTuple):
    """All that a generation needs before it is queued; `guide`: that of its structure, if any."""

    prompt: ProcessedPrompt
    guide: Guide | None = None


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

    `prompt`: its tokens, empty until `set_prompt`. `images`: its images, until they are in the
    KV cache. `can_resume`: whether its KV cache can be computed again from its tokens.
    """

    def __init__(self, command: StartGeneration, model: CausalModel, index: int = 0) -> None:
        self.command = command
        self.index = index
        self.prompt: list[int] = []
        # Made with the prompt, which its penalties depend on.
        self.sampler: Sampler
        self.prompt_logprobs: PromptLogprobs | None = None
        self.images: ImageInputs | None = None
        self.can_resume = True
        self.output = Output()
        # Tokens of the prompt that were in the KV cache when the sequence first began.
        self.prefix_tokens = 0
        # Tokens that it had when its adapter was written into the slot that it uses.
        self._tokens_before_turn = 0
        sampling = command.sampling
        eos_ids = frozenset() if sampling.ignore_eos else frozenset(model.eos_ids)
        self._end_ids = eos_ids | frozenset(sampling.stop_token_ids)
        self._stop_filter = StopFilter(sampling.stop, sampling.include_stop)
        self._output_tokens_max = sampling.max_tokens
        self._model = model
        self._detokenizer: Detokenizer | None = None

    def set_prompt(self, prepared: PreparedPrompt) -> None:
        """Store the prompt in the form that the model accepts."""
        (self.prompt, self.images), guide = prepared
        self.can_resume = self.images is None
        sampling = self.command.sampling
        if not self._output_tokens_max:
            left = self._model.context_tokens_max - len(self.prompt)
            self._output_tokens_max = min(MAX_TOKENS_DEFAULT, left)
        self.sampler = Sampler(sampling, self.prompt, self._end_ids, guide, self.index)
        if sampling.prompt_logprobs is not None and self.index == 0:
            self.prompt_logprobs = PromptLogprobs(self.prompt, sampling.prompt_logprobs)
        if self.images is not None:
            # Image files are large and are not needed again.
            self.command = structs.replace(self.command, prompt="")
        if self._model.tokenizer is not None:
            self._detokenizer = Detokenizer(
                self._model.tokenizer, self.prompt, skip_special=sampling.skip_special_tokens
            )

    def note_reused(self, tokens: int) -> None:
        """Record that the first tokens were cached; after a preemption they are its own."""
        if not self.output.tokens:
            self.prefix_tokens = min(tokens, len(self.prompt))

    @property
    def rank(self) -> tuple[int, OpId, int]:
        """What orders sequences that need the same memory: by priority, and then by age."""
        return self.command.priority, self.command.op, self.index

    @property
    def has_progressed(self) -> bool:
        """Whether it has generated a token since it began, or since it was resumed."""
        return len(self.output.tokens) > self._tokens_before_turn

    def resume(self, slot: Slot, generation: int) -> None:
        """Continue with the adapter in this slot."""
        self.command = structs.replace(self.command, slot=slot, generation=generation)
        self._tokens_before_turn = len(self.output.tokens)

    @property
    def tokens(self) -> list[int]:
        """The prompt and the output so far, from which the KV cache can be computed again."""
        return self.prompt + self.output.tokens

    @property
    def prompt_length(self) -> int:
        """The length of the pass that computes its first tokens, which may scale positions.

        It changes where `generate` would compute the sequence again from its first token.
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
        """Whether its prefill has to compute the logits of all tokens of the prompt."""
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
        is_complete = self.sampler.guide is not None and self.sampler.guide.is_complete
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
