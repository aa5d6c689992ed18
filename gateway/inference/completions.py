"""`POST /v1/completions`: texts and token ids continued, one choice or several."""

from collections.abc import AsyncGenerator
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from controller.client import LoradockError
from gateway.http.endpoints import Answer
from gateway.http.errors import HttpError, error_of
from gateway.http.streams import DONE, EventStream, data_event, error_events, json_response
from gateway.inference.answers import Completion, CompletionChoice, Usage
from gateway.inference.run import Output, Run
from gateway.inference.sampling import SamplingFields, StreamOptions, of_choice, sampling_of
from gateway.inference.service import Service, Start, UsageCount, finish_reason, new_id
from gateway.timestamps import unix_seconds
from messages.prompts import TokenId

MAX_TOKENS_DEFAULT = 16
"""As in the OpenAI protocol."""

PROMPTS_MAX = 2048

Prompt = Annotated[str, Meta(max_length=1_000_000)]
TokenIds = Annotated[list[TokenId], Meta(max_length=262_144)]


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body: one prompt or a list of them, each a text or token ids."""

    prompt: Prompt | Annotated[list[str | int | TokenIds], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class Completions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def complete(self, _: Request, body: CompletionRequest) -> Answer:
        """Answer with all texts, or with a stream of chunks."""
        service, count = self._service, body.n or 1
        max_tokens = body.max_tokens or MAX_TOKENS_DEFAULT
        sampling = sampling_of(body, service.files.defaults, max_tokens)
        prompts = prompts_of(body.prompt)
        if body.add_special_tokens is False:
            prompts = [self._without_special_tokens(prompt) for prompt in prompts]
        echoes = [self._text_of(prompt) for prompt in prompts] if body.echo else []
        usage = self._usage(body, prompts)
        adapter = await service.models.find(body.model)
        starts = [
            Start(tuple(prompt) if isinstance(prompt, list) else prompt, of_choice(sampling, index))
            for prompt in prompts
            for index in range(count)
        ]
        run = await service.start(adapter, starts)
        answer = _Answer(service.models.names.shown(adapter), echoes, count, usage)
        if not body.stream:
            return json_response(await answer.collected(run))
        options = body.stream_options or StreamOptions()
        return EventStream(answer.events(run, options), run.close)

    def _without_special_tokens(self, prompt: str | list[int]) -> str | list[int]:
        tokenizer = self._service.tokenizer
        return tokenizer.encode(prompt, special=False) if isinstance(prompt, str) else prompt

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt)

    def _usage(self, body: CompletionRequest, prompts: list[str | list[int]]) -> UsageCount:
        """Return the counter of tokens, with those of the prompts if chunks need them."""
        usage = UsageCount(body.n or 1)
        if body.stream_options and body.stream_options.continuous_usage_stats:
            for index, prompt in enumerate(prompts):
                if isinstance(prompt, str):
                    tokens = self._service.tokenizer.encode(prompt, special=True)
                    usage.on_prompt(index, len(tokens))
                else:
                    usage.on_prompt(index, len(prompt))
        return usage


def prompts_of(
    prompt: str | list[str | int | list[int]], param: str = "prompt"
) -> list[str | list[int]]:
    """Return each prompt of a request; raises `HttpError` for a list of several kinds."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [one for one in prompt if isinstance(one, str)]
    tokens = [one for one in prompt if isinstance(one, int)]
    lists = [one for one in prompt if isinstance(one, list)]
    if len(tokens) == len(prompt):
        return [tokens]
    if len(prompt) not in (len(texts), len(lists)):
        raise HttpError(400, "prompts of several kinds; all texts or all lists of ids", param)
    return [*texts, *lists]


class _Answer:
    """The answer to one request, whole or as chunks."""

    def __init__(self, model: str, echoes: list[str], per_prompt: int, usage: UsageCount) -> None:
        self._id = new_id("cmpl")
        self._created = unix_seconds()
        self._model = model
        self._echoes = echoes
        self._per_prompt = per_prompt
        self._usage = usage

    async def collected(self, run: Run) -> Completion:
        """Read the whole run, and close it."""
        texts = [[self._echo(choice)] for choice in range(run.choices)]
        reasons = [""] * run.choices
        try:
            async for output in run.outputs():
                texts[output.choice].append(output.text)
                if output.done is not None:
                    self._usage.on_done(output.choice, output.done)
                    reasons[output.choice] = finish_reason(output.done)
        finally:
            await run.close()
        choices = [
            CompletionChoice(index, "".join(texts[index]), reason)
            for index, reason in enumerate(reasons)
        ]
        return self._completion(choices, self._usage.usage())

    async def events(self, run: Run, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        try:
            for choice in range(run.choices if self._echoes else 0):
                echo = CompletionChoice(choice, self._echo(choice), None)
                yield self._event(echo, options)
            async for output in run.outputs():
                yield self._event(self._choice_of(output), options)
        except LoradockError as error:
            yield error_events(error_of(error))
            return
        if options.include_usage:
            yield data_event(self._completion([], self._usage.usage()))
        yield DONE

    def _choice_of(self, output: Output) -> CompletionChoice:
        if output.done is None:
            self._usage.on_tokens(output.choice, len(output.tokens))
            return CompletionChoice(output.choice, output.text, None)
        self._usage.on_done(output.choice, output.done)
        return CompletionChoice(output.choice, output.text, finish_reason(output.done))

    def _event(self, choice: CompletionChoice, options: StreamOptions) -> bytes:
        usage: Usage | UnsetType | None = None if options.include_usage else UNSET
        if options.continuous_usage_stats:
            usage = self._usage.usage_of(choice.index)
        return data_event(self._completion([choice], usage))

    def _echo(self, choice: int) -> str:
        return self._echoes[choice // self._per_prompt] if self._echoes else ""

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )
