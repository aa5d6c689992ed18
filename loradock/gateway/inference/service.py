"""What the endpoints of inference have in common: model, tokenizer, starts, ids and usage."""

import secrets
from collections.abc import Awaitable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

from msgspec import Struct

from loradock.client import (
    AsyncClient,
    AsyncGeneration,
    Classification,
    Embedding,
    LoradockError,
)
from loradock.gateway.adapters.models import Models
from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference.adapter_files import AdapterFiles
from loradock.gateway.inference.answers import Usage
from loradock.gateway.inference.logprobs import TokenText, TokenTextOf
from loradock.gateway.inference.model_files import ModelFiles
from loradock.gateway.inference.run import Run
from loradock.gateway.inference.sampling import SamplingFields
from loradock.gateway.inference.tokenizer import Tokenizer, no_tokenizer
from loradock.gateway.metrics.recorder import Recorder
from loradock.messages.prompts import TextPrompt, Truncation
from loradock.messages.requests import GenerationDone, TokensStreamed

CHOICES_PER_REQUEST_MAX: Final = 2048
_TEXTS_MAX: Final = 4096

Pooled = TypeVar("Pooled", Embedding, Classification)


class Start(Struct, frozen=True):
    """One generation to start."""

    prompt: TextPrompt
    sampling: dict[str, Any]
    images: tuple[bytes, ...] = ()


class Service:
    """Starts generations for the endpoints."""

    def __init__(
        self,
        client: AsyncClient,
        models: Models,
        recorder: Recorder,
        files: AdapterFiles,
        timeout_s: float,
    ) -> None:
        self.client: Final = client
        self.models: Final = models
        self.recorder: Final = recorder
        self.timeout_s: Final = timeout_s
        self.adapter_files: Final = files

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `HttpError` where there is none."""
        tokenizer = self.adapter_files.base.tokenizer
        if tokenizer is None:
            raise no_tokenizer()
        return tokenizer

    @property
    def context(self) -> int | None:
        """The tokens of prompt and output together; None where unknown."""
        return self.adapter_files.base.context

    async def files_of(self, adapter: str | None) -> ModelFiles:
        """Return the files with which an adapter's requests are prompted and sampled.

        They are the model's, with the adapter's own above them. Raises `LoradockError`.
        """
        files = self.adapter_files
        return files.base if adapter is None else await files.of(adapter)

    async def start(self, adapter: str | None, starts: Sequence[Start], count: int = 1) -> Run:
        """Start generations with `count` choices each; raises `LoradockError`."""
        if len(starts) * count > CHOICES_PER_REQUEST_MAX:
            raise HttpError(
                400,
                f"{len(starts) * count} texts are requested; one request may produce "
                f"{CHOICES_PER_REQUEST_MAX}",
                "n",
            )
        generations: list[AsyncGeneration] = []
        try:
            for one in starts:
                generations += [await self._start_one(adapter, one)]
                self.recorder.on_generation(count, one.sampling.get("max_tokens"))
            return self.run_of(generations, count)
        except BaseException:
            for generation in generations:
                await generation.close()
            raise

    def run_of(self, generations: Sequence[AsyncGeneration], count: int) -> Run:
        """Return the run of generations that were started, with `count` choices each."""
        return Run(generations, self.recorder, count)

    async def embed(
        self,
        inputs: Sequence[TextPrompt],
        adapter: str | None,
        truncation: Truncation | None = None,
        dimensions: int = 0,
    ) -> Embedding:
        """Return the vector of each input; raises `LoradockError`."""
        return await self._measured(
            self.client.embed(
                inputs,
                adapter,
                timeout_s=self.timeout_s,
                trace=self.trace_of(adapter),
                truncation=truncation,
                dimensions=dimensions,
            )
        )

    async def classify(
        self,
        inputs: Sequence[TextPrompt],
        adapter: str | None,
        truncation: Truncation | None = None,
    ) -> Classification:
        """Return the scores of each input; raises `LoradockError`."""
        return await self._measured(
            self.client.classify(
                inputs,
                adapter,
                timeout_s=self.timeout_s,
                trace=self.trace_of(adapter),
                truncation=truncation,
            )
        )

    async def _measured(self, pooling: Awaitable[Pooled]) -> Pooled:
        measurement = self.recorder.begin()
        try:
            found = await pooling
            measurement.on_pooled(found.input_tokens)
        except LoradockError:
            measurement.on_failed()
            raise
        finally:
            measurement.on_closed()
        return found

    def new_id(self, prefix: str, separator: str = "-") -> str:
        """Return an id for the answer to a request."""
        return random_id(prefix, separator)

    def trace_of(self, adapter: str | None) -> str:  # noqa: ARG002 - for a service with traces
        """Return the `traceparent` of what is started with an adapter; empty without traces."""
        return ""

    async def _start_one(self, adapter: str | None, start: Start) -> AsyncGeneration:
        return await self.client.generate(
            start.prompt,
            adapter,
            images=start.images,
            timeout_s=self.timeout_s,
            trace=self.trace_of(adapter),
            **start.sampling,
        )


def random_id(prefix: str, separator: str = "-") -> str:
    """Return an id that no other answer has."""
    return f"{prefix}{separator}{secrets.token_hex(16)}"


def finish_reason(chunk: TokensStreamed) -> str | None:
    """Return the protocol's name for how a choice ended; None before its end."""
    return "abort" if chunk.finish_reason == "cancelled" else chunk.finish_reason


def token_text_of(service: Service, body: SamplingFields, *, has_logprobs: bool) -> TokenTextOf:
    """Return the function from a token id to its text in log-probabilities.

    Raises `HttpError` where they are requested and there is no tokenizer.
    """
    if not has_logprobs and body.prompt_logprobs is None:
        return _no_text
    if body.return_tokens_as_token_ids:
        return _id_as_text
    tokenizer = service.tokenizer

    @lru_cache(maxsize=_TEXTS_MAX)
    def text_of(token: int) -> TokenText:
        return TokenText(tokenizer.token_text(token), tokenizer.token_bytes(token))

    return text_of


def _id_as_text(token: int) -> TokenText:
    text = f"token_id:{token}"
    return TokenText(text, text.encode())


def _no_text(_: int) -> TokenText:
    """Return nothing: the request has no log-probabilities."""
    return TokenText("", b"")


class UsageCount:
    """Counts the tokens of a request with several choices per prompt."""

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._prompt_tokens: dict[int, int] = {}
        self._output_tokens: dict[int, int] = {}

    def on_prompt(self, prompt: int, tokens: int) -> None:
        """Note the tokens of a prompt."""
        self._prompt_tokens[prompt] = tokens

    def on_tokens(self, choice: int, tokens: int) -> None:
        """Count new tokens of a choice."""
        self._output_tokens[choice] = self._output_tokens.get(choice, 0) + tokens

    def on_done(self, choice: int, result: GenerationDone) -> None:
        """Note the tokens of the prompt of a choice."""
        self._prompt_tokens[choice // self._choices_per_prompt] = result.prompt_tokens

    def usage(self) -> Usage:
        """Return the total of all choices."""
        prompt, output = sum(self._prompt_tokens.values()), sum(self._output_tokens.values())
        return Usage(prompt, prompt + output, output)

    def usage_of(self, choice: int) -> Usage:
        """Return the usage of one choice until now."""
        prompt = self._prompt_tokens.get(choice // self._choices_per_prompt, 0)
        output = self._output_tokens.get(choice, 0)
        return Usage(prompt, prompt + output, output)
