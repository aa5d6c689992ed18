"""One generation: its request, its prompt, and its output as tokens and text.

Streamed text is never withdrawn. A token that ends the output is not part of it.
"""

from dataclasses import dataclass, field

from msgspec import structs

from engine.inference.detokenizer import Detokenizer, StopFilter
from engine.inference.sampler import Sampler
from engine.models.causal_model import CausalModel
from engine.models.image_processor import ProcessedPrompt
from engine.models.vision.image_inputs import ImageInputs
from messages.commands import StartGeneration
from messages.prompts import MAX_TOKENS_DEFAULT
from messages.requests import FinishReason, TokensStreamed


@dataclass
class Output:
    """The output so far: all tokens, and the pieces of text that were streamed with them."""

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Sequence:
    """One request, from the queue to its end.

    `prompt`: its tokens, empty until `set_prompt`. `images`: its images, until they are in the
    KV cache. `can_resume`: whether its KV cache can be computed again from its tokens.
    """

    def __init__(self, command: StartGeneration, model: CausalModel) -> None:
        self.command = command
        self.prompt: list[int] = []
        # Made with the prompt, which its penalties depend on.
        self.sampler: Sampler
        self.images: ImageInputs | None = None
        self.can_resume = True
        self.output = Output()
        # Tokens of the prompt that were in the KV cache when the sequence first began.
        self.prefix_tokens = 0
        sampling = command.sampling
        eos_ids = frozenset() if sampling.ignore_eos else frozenset(model.eos_ids)
        self._end_ids = eos_ids | frozenset(sampling.stop_token_ids)
        self._stop_filter = StopFilter(sampling.stop, sampling.include_stop)
        self._context_tokens_max = model.context_tokens_max
        self._output_tokens_max = sampling.max_tokens
        self._tokenizer = model.tokenizer
        self._detokenizer: Detokenizer | None = None

    def set_prompt(self, prompt: ProcessedPrompt) -> None:
        """Store the prompt in the form that the model accepts."""
        self.prompt, self.images = prompt
        self.can_resume = self.images is None
        if not self._output_tokens_max:
            left = self._context_tokens_max - len(self.prompt)
            self._output_tokens_max = min(MAX_TOKENS_DEFAULT, left)
        self.sampler = Sampler(self.command.sampling, self.prompt, self._end_ids)
        if self.images is not None:
            # Image files are large and are not needed again.
            self.command = structs.replace(self.command, prompt="")
        if self._tokenizer is not None:
            self._detokenizer = Detokenizer(self._tokenizer, self.prompt)

    def note_reused(self, tokens: int) -> None:
        """Record that the first tokens were cached; after a preemption they are its own."""
        if not self.output.tokens:
            self.prefix_tokens = min(tokens, len(self.prompt))

    @property
    def tokens(self) -> list[int]:
        """The prompt and the output so far, from which the KV cache can be computed again."""
        return self.prompt + self.output.tokens

    def append(self, token: int) -> tuple[str, FinishReason | None]:
        """Append the next token; return the text to stream and, at the end, the finish reason.

        A token that ends the output is not part of it. The token that completes a stop string is,
        but the stop string's text is not, unless `include_stop` is set.
        """
        if token in self._end_ids:
            return self.flush(), "stop"
        self.output.tokens.append(token)
        self.sampler.history.append(token)
        text = self._detokenizer.add(token) if self._detokenizer else ""
        if len(self.output.tokens) >= self.command.sampling.min_tokens:
            text = self._stop_filter.add(text)
        if self._stop_filter.has_matched:
            return text, "stop"
        if len(self.output.tokens) < self._output_tokens_max:
            return text, None
        text += self.flush()
        return text, "stop" if self._stop_filter.has_matched else "length"

    def full_output(self) -> TokensStreamed:
        """Return the output so far, from its first token."""
        output = self.output
        text = "".join(output.text)
        return TokensStreamed(self.command.request_id, 0, tuple(output.tokens), text)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        if self._detokenizer is None:
            return ""
        return self._stop_filter.add(self._detokenizer.flush()) + self._stop_filter.flush()
