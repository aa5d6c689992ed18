"""The service of inference: it starts the generations of a request, and their `Run` reads them.

All generations of a request are started together, and read as a whole or as one sequence of
outputs. Closing a run cancels those that have not ended.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from loradock.client import (
    AsyncClient,
    AsyncGeneration,
    Classification,
    Embedding,
    LoradockError,
)
from loradock.gateway.adapters.models import Models
from loradock.gateway.http.endpoint import CLIENT
from loradock.gateway.http.errors import HttpError, prompt_too_long
from loradock.gateway.inference.adapter_files import AdapterFiles
from loradock.gateway.inference.logprobs import TokenText, TokenTextOf
from loradock.gateway.inference.model_files import ModelFiles
from loradock.gateway.inference.prompts import CHARACTERS_MAX
from loradock.gateway.inference.sampling import SamplingFields
from loradock.gateway.inference.tokenizer import Tokenizer, no_tokenizer
from loradock.gateway.inference.workers import Workers
from loradock.gateway.recorder import SPAN, Recorder
from loradock.messages.prompts import TextPrompt, Truncation
from loradock.messages.requests import GenerationDone, TokensStreamed

_STARTS_PER_STEP: Final = 32
"""The generations of a request that are started before other tasks run."""

_TEXTS_MAX: Final = 4096

Pooled = TypeVar("Pooled", Embedding, Classification)

TokenIds = tuple[int, ...] | UnsetType | None
"""Token ids, for requests with `return_token_ids`; null for a prompt with images."""


class Usage(Struct, frozen=True):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class GenerationStart(Struct, frozen=True):
    """One generation to start."""

    prompt: TextPrompt
    sampling: dict[str, Any]
    images: tuple[bytes, ...] = ()


class ChoiceOutput(NamedTuple):
    """A chunk of a choice, the last one with a finish reason; or the end of its generation."""

    choice: int
    chunk: TokensStreamed | None = None
    done: GenerationDone | None = None


class Run:
    """Generations in flight, each with `per_generation` choices."""

    def __init__(
        self, generations: Sequence[AsyncGeneration], recorder: Recorder, per_generation: int = 1
    ) -> None:
        self._generations = generations
        self._per_generation = per_generation
        self._measurements = [recorder.begin() for _ in generations]
        self._span = SPAN.get()
        self._span.on_start(self.choices)
        self._readers: list[asyncio.Task[None]] = []
        self._first: ChoiceOutput | None = None
        self._source = self._read_one(0) if len(generations) == 1 else self._read_all()

    @property
    def choices(self) -> int:
        """The number of choices."""
        return len(self._generations) * self._per_generation

    async def collected(self) -> list[ChoiceOutput]:
        """Read everything; return a chunk per choice, in order, and then each generation's end.

        Raises `LoradockError`.
        """
        chunks: list[list[TokensStreamed]] = [[] for _ in range(self.choices)]
        if len(self._generations) == 1:
            ends = [await self._collect(0, chunks)]
        else:
            numbers = range(len(self._generations))
            tasks = [asyncio.create_task(self._collect(number, chunks)) for number in numbers]
            try:
                ends = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return [
            *(ChoiceOutput(choice, _joined(parts)) for choice, parts in enumerate(chunks)),
            *ends,
        ]

    async def wait_for_first(self) -> None:
        """Wait for the first output: what fails before it can still be answered with a status."""
        self._first = await anext(self._source)

    async def outputs(self) -> AsyncGenerator[ChoiceOutput, None]:
        """Yield every output, and per generation one with `done`; raises `LoradockError`."""
        if self._first is not None:
            yield self._first
        async for output in self._source:
            yield output

    async def close(self) -> None:
        """Cancel what has not ended."""
        for reader in self._readers:
            reader.cancel()
        for generation, measurement in zip(self._generations, self._measurements, strict=True):
            measurement.on_closed()
            await generation.close()

    async def _collect(self, number: int, chunks: list[list[TokensStreamed]]) -> ChoiceOutput:
        measurement = self._measurements[number]
        first = number * self._per_generation

        def on_chunk(chunk: TokensStreamed) -> None:
            if generated := generated_tokens(chunk):
                measurement.on_tokens(chunk.index, len(generated))
            chunks[first + chunk.index].append(chunk)
            self._span.on_chunk(first + chunk.index, chunk)

        try:
            result = await self._generations[number].read(on_chunk)
        except LoradockError as error:
            self._fail(number, error)
            raise
        for index in range(self._per_generation):
            parts = chunks[first + index]
            if not parts or parts[-1].finish_reason is None:
                parts.append(_end(result, index))
                self._span.on_chunk(first + index, parts[-1])
        return self._finish(number, result)

    async def _read_one(self, number: int) -> AsyncGenerator[ChoiceOutput, None]:
        generation, measurement = self._generations[number], self._measurements[number]
        first = number * self._per_generation
        running = set(range(self._per_generation))
        try:
            async for chunk in generation:
                if generated := generated_tokens(chunk):
                    measurement.on_tokens(chunk.index, len(generated))
                if chunk.finish_reason is not None:
                    running.discard(chunk.index)
                self._span.on_chunk(first + chunk.index, chunk)
                yield ChoiceOutput(first + chunk.index, chunk)
        except LoradockError as error:
            self._fail(number, error)
            raise
        result = generation.result
        if result is not None:
            for index in sorted(running):
                end = _end(result, index)
                self._span.on_chunk(first + index, end)
                yield ChoiceOutput(first + index, end)
            yield self._finish(number, result)

    def _finish(self, number: int, result: GenerationDone) -> ChoiceOutput:
        self._measurements[number].on_done(result)
        first = number * self._per_generation
        self._span.on_done(first, result)
        return ChoiceOutput(first, done=result)

    def _fail(self, number: int, error: LoradockError) -> None:
        self._measurements[number].on_failed()
        self._span.on_error(error)

    async def _read_all(self) -> AsyncGenerator[ChoiceOutput, None]:
        outputs: asyncio.Queue[ChoiceOutput | LoradockError] = asyncio.Queue(maxsize=1)
        for number in range(len(self._generations)):
            self._readers.append(asyncio.create_task(self._forward(number, outputs)))
        running = len(self._generations)
        while running:
            output = await outputs.get()
            if isinstance(output, LoradockError):
                raise output
            running -= output.done is not None
            yield output

    async def _forward(
        self, number: int, outputs: "asyncio.Queue[ChoiceOutput | LoradockError]"
    ) -> None:
        try:
            async for output in self._read_one(number):
                await outputs.put(output)
        except LoradockError as error:
            # Raised again by the reader of the outputs.
            await outputs.put(error)


def generated_tokens(chunk: TokensStreamed) -> tuple[int, ...]:
    """Return the tokens of a chunk, with the one that ended the output."""
    return chunk.tokens if chunk.end_token is None else (*chunk.tokens, chunk.end_token)


def returned_ids(chunk: TokensStreamed, body: SamplingFields) -> tuple[int, ...] | UnsetType:
    """Return the token ids of a chunk if the request has `return_token_ids`."""
    return generated_tokens(chunk) if body.return_token_ids else UNSET


def _end(result: GenerationDone, index: int) -> TokensStreamed:
    """Return the end of an output whose stream has none."""
    return TokensStreamed(result.request_id, 0, (), index=index, finish_reason=result.finish_reason)


def _joined(parts: list[TokensStreamed]) -> TokensStreamed:
    """Return the chunks of a choice as one."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    return msgspec.structs.replace(
        parts[0],
        tokens=tuple(chain.from_iterable([part.tokens for part in parts])),
        text="".join([part.text for part in parts]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        end_token=last.end_token,
        logprobs=tuple(chain.from_iterable([part.logprobs for part in parts])),
    )


class Service:
    """Starts generations for the endpoints."""

    def __init__(
        self,
        client: AsyncClient,
        models: Models,
        recorder: Recorder,
        files: AdapterFiles,
        workers: Workers,
        timeout_s: float,
    ) -> None:
        self.client: Final = client
        self.models: Final = models
        self.recorder: Final = recorder
        self.timeout_s: Final = timeout_s
        self.adapter_files: Final = files
        self.workers: Final = workers

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `HttpError` if there is none."""
        tokenizer = self.adapter_files.base.tokenizer
        if tokenizer is None:
            raise no_tokenizer()
        return tokenizer

    @property
    def context(self) -> int | None:
        """The tokens of prompt and output together; None if unknown."""
        return self.adapter_files.base.context

    async def files_of(self, adapter: str | None) -> ModelFiles:
        """Return the files with which an adapter's requests are prompted and sampled.

        They are the model's, with the adapter's own above them. Raises `LoradockError`.
        """
        files = self.adapter_files
        return files.base if adapter is None else await files.of(adapter)

    async def tokens_of(
        self, texts: Sequence[str], *, special: bool, tokens_max: int | None = None
    ) -> list[list[int]]:
        """Return the token ids of texts.

        Raises `HttpError` for more characters than a request can have, and for a text that
        certainly has more than `tokens_max` tokens; None: any number is read.
        """
        characters = sum(map(len, texts))
        if characters > CHARACTERS_MAX:
            raise HttpError(
                400,
                f"the prompts of a request that needs their tokens must have at most "
                f"{CHARACTERS_MAX} characters together, got {characters}; send fewer",
                "prompt",
            )
        tokenizer, context = self.tokenizer, self.context

        def encode(text: str) -> list[int]:
            if tokens_max is not None and tokenizer.exceeds(text, tokens_max):
                raise prompt_too_long(f"more than {tokens_max} tokens", context, "prompt")
            return tokenizer.encode(text, special=special)

        return await self.workers.map(encode, texts)

    async def start(
        self, adapter: str | None, starts: Sequence[GenerationStart], count: int = 1
    ) -> Run:
        """Start generations with `count` choices each; raises `LoradockError`."""
        generations: list[AsyncGeneration] = []
        try:
            for number, one in enumerate(starts, 1):
                generations += [await self._start_one(adapter, one)]
                if number % _STARTS_PER_STEP == 0:
                    await asyncio.sleep(0)
                self.recorder.on_generation(count, one.sampling.get("max_tokens"))
            return Run(generations, self.recorder, count)
        except BaseException:
            for generation in generations:
                await generation.close()
            raise

    async def embed(
        self,
        inputs: Sequence[TextPrompt],
        adapter: str | None,
        truncation: Truncation | None,
        dimensions: int = 0,
    ) -> Embedding:
        """Return the vector of each input; raises `LoradockError`."""
        more = {**self._fields(adapter), "truncation": truncation, "dimensions": dimensions}
        return await self._measured(self.client.embed(inputs, adapter, **more))

    async def classify(
        self, inputs: Sequence[TextPrompt], adapter: str | None, truncation: Truncation | None
    ) -> Classification:
        """Return the scores of each input; raises `LoradockError`."""
        more = {**self._fields(adapter), "truncation": truncation}
        return await self._measured(self.client.classify(inputs, adapter, **more))

    def _fields(self, adapter: str | None) -> dict[str, Any]:
        """Return what requests of all kinds have in common."""
        client, trace = CLIENT.get(), _traceparent(adapter)
        return {"timeout_s": self.timeout_s, "trace": trace, "client": client}

    async def _measured(self, pooling: Awaitable[Pooled]) -> Pooled:
        measurement = self.recorder.begin()
        try:
            found = await pooling
            measurement.on_pooled(found.input_tokens)
            SPAN.get().on_pooled(found.input_tokens)
        except LoradockError:
            measurement.on_failed()
            raise
        finally:
            measurement.on_closed()
        return found

    async def _start_one(self, adapter: str | None, start: GenerationStart) -> AsyncGeneration:
        more = {**self._fields(adapter), **start.sampling, "images": start.images}
        return await self.client.generate(start.prompt, adapter, **more)


def _traceparent(adapter: str | None) -> str:
    """Return the `traceparent` of the current request, which needs this adapter."""
    span = SPAN.get()
    if adapter is not None:
        span.on_adapter(adapter)
    return span.parent


def new_id(prefix: str, separator: str = "-") -> str:
    """Return the id of the answer to the current request."""
    answer_id = random_id(prefix, separator)
    SPAN.get().on_id(answer_id)
    return answer_id


def random_id(prefix: str, separator: str = "-") -> str:
    """Return an id that no other answer has."""
    return f"{prefix}{separator}{secrets.token_hex(16)}"


def finish_reason(chunk: TokensStreamed) -> str | None:
    """Return the protocol's name for how a choice ended; None before its end."""
    return "abort" if chunk.finish_reason == "cancelled" else chunk.finish_reason


def token_text_of(service: Service, body: SamplingFields, *, has_logprobs: bool) -> TokenTextOf:
    """Return the function from a token id to its text in log-probabilities.

    Raises `HttpError` if they are requested and there is no tokenizer.
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
        """Record the tokens of a prompt."""
        self._prompt_tokens[prompt] = tokens

    def on_tokens(self, choice: int, tokens: int) -> None:
        """Count new tokens of a choice."""
        self._output_tokens[choice] = self._output_tokens.get(choice, 0) + tokens

    def on_done(self, choice: int, result: GenerationDone) -> None:
        """Record the tokens of the prompt of a choice."""
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
