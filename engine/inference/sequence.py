"""A generation on its way: what was asked, what it has got so far, and how that becomes text.

What it is: one row of the batch, from the queue to its end. What it is not: the batch or its cache
(`engine.generate`). One rule: what was given out is never taken back, and a token that ends the
output is no part of it.
"""

from dataclasses import dataclass, field

from msgspec import structs

from engine.inference.detokenizer import Detokenizer, StopFilter
from engine.inference.sampler import Sampler
from engine.models.causal_model import PreparedModel
from engine.models.image_processor import Reading
from engine.models.vision.media import Media
from messages.commands import StartGeneration
from messages.reports import TokensGenerated
from messages.requests import FinishReason


@dataclass
class Output:
    """What a request has got so far: all tokens, and the text that was given out with them."""

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Row:
    """One request on its way from the queue to its end.

    `prompt`: its tokens, none while it waits to be read. `media`: its images, until they are in the
    cache.
    """

    def __init__(self, command: StartGeneration, model: PreparedModel) -> None:
        self.command = command
        self.prompt: list[int] = []
        self.media: Media | None = None
        self.output = Output()
        self.sampler = Sampler(command.sampling)
        self.stops = StopFilter(command.sampling.stop)
        self._tokenizer = model.tokenizer
        self._text: Detokenizer | None = None
        self._eos_ids = model.eos_ids

    def take(self, reading: Reading) -> None:
        """Have the prompt as the model reads it."""
        self.prompt, self.media = reading
        if self.media is not None:
            # Files of images are large, and nobody looks at them again.
            self.command = structs.replace(self.command, prompt="")
        if self._tokenizer is not None:
            self._text = Detokenizer(self._tokenizer, self.prompt)

    def accept(self, token: int) -> tuple[str, FinishReason | None]:
        """Take the next token; the text it made readable, and how the output ended if it did.

        A token that ends the model's output is no part of it. The token that completed a stop
        string is, but the stop string's text is not.
        """
        if token in self._eos_ids:
            return self.rest(), "stop"
        self.output.tokens.append(token)
        text = self.stops.add(self._text.add(token)) if self._text else ""
        if self.stops.has_matched:
            return text, "stop"
        if len(self.output.tokens) < self.command.sampling.max_tokens:
            return text, None
        text += self.rest()
        return text, "stop" if self.stops.has_matched else "length"

    def everything(self) -> TokensGenerated:
        """The output so far, from its first token."""
        output = self.output
        text = "".join(output.text)
        return TokensGenerated(self.command.request_id, 0, tuple(output.tokens), text)

    def rest(self) -> str:
        """The text that was still waiting, at the end of the output."""
        if self._text is None:
            return ""
        return self.stops.add(self._text.rest()) + self.stops.rest()
