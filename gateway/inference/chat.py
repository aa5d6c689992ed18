"""`POST /v1/chat/completions`: messages to a prompt by the model's template, and its answer."""

from collections.abc import AsyncGenerator
from typing import Final

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from controller.client import LoradockError
from gateway.http.endpoints import Answer
from gateway.http.errors import HttpError, error_of
from gateway.http.streams import DONE, EventStream, data_event, error_events, json_response
from gateway.inference.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChunkChoice,
    Delta,
    Usage,
)
from gateway.inference.chat_prompt import ChatPrompts
from gateway.inference.messages import Json, Messages
from gateway.inference.run import Output, Run
from gateway.inference.sampling import SamplingFields, StreamOptions, of_choice, sampling_of
from gateway.inference.service import Service, Start, UsageCount, finish_reason, new_id
from gateway.timestamps import unix_seconds

MAX_TOKENS_DEFAULT: Final = 128
"""For a chat that sets no limit, where the context of the model is unknown."""


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body; tools are passed to the template, and calls are not extracted from the answer."""

    messages: Messages
    tools: Json = UNSET
    tool_choice: Json = UNSET
    documents: Json = UNSET
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json = UNSET
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    include_reasoning: bool | None = None


class Chats:
    """The endpoint."""

    def __init__(self, service: Service, prompts: ChatPrompts) -> None:
        self._service = service
        self._prompts = prompts

    async def complete(self, _: Request, body: ChatRequest) -> Answer:
        """Answer with all messages, or with a stream of chunks."""
        service, count = self._service, body.n or 1
        _check(body)
        adapter = await service.models.find(body.model)
        rendered = await self._prompts.prompt_of(body)
        tokens = None if isinstance(rendered.prompt, str) else len(rendered.prompt)
        max_tokens = self._max_tokens(body, tokens)
        sampling = sampling_of(body, service.files.defaults, max_tokens)
        starts = [
            Start(rendered.prompt, of_choice(sampling, index), rendered.images)
            for index in range(count)
        ]
        usage = UsageCount(count)
        if tokens is not None:
            usage.on_prompt(0, tokens)
        run = await service.start(adapter, starts)
        answer = _Answer(service.models.names.shown(adapter), usage)
        if not body.stream:
            return json_response(await answer.collected(run))
        options = body.stream_options or StreamOptions()
        return EventStream(answer.events(run, options), run.close)

    def _max_tokens(self, body: ChatRequest, prompt_tokens: int | None) -> int:
        limit = body.max_completion_tokens or body.max_tokens
        context = self._service.context
        if limit is not None:
            return limit
        if context is None or prompt_tokens is None:
            return MAX_TOKENS_DEFAULT
        # The engine refuses a prompt that fills the context.
        return max(1, context - prompt_tokens)


def _check(body: ChatRequest) -> None:
    limit = body.max_completion_tokens
    if limit is not None and limit < 1:
        raise HttpError(
            400, f"max_completion_tokens is {limit}; at least 1", "max_completion_tokens"
        )
    if body.echo:
        raise HttpError(400, "echo is not served for chats; leave it out", "echo")
    if body.modalities not in (None, ["text"]):
        raise HttpError(400, f"modalities {body.modalities}; only text is served", "modalities")


class _Answer:
    """The answer to one request, whole or as chunks."""

    def __init__(self, model: str, usage: UsageCount) -> None:
        self._id = new_id("chatcmpl")
        self._created = unix_seconds()
        self._model = model
        self._usage = usage

    async def collected(self, run: Run) -> ChatCompletion:
        """Read the whole run, and close it."""
        texts: list[list[str]] = [[] for _ in range(run.choices)]
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
            ChatChoice(index, ChatMessage("".join(texts[index])), reason)
            for index, reason in enumerate(reasons)
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage.usage(),
        )

    async def events(self, run: Run, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; each choice begins with its role."""
        try:
            for choice in range(run.choices):
                role = Delta(role="assistant", content="")
                yield self._event(ChunkChoice(choice, role), options)
            async for output in run.outputs():
                yield self._event(self._choice_of(output), options)
        except LoradockError as error:
            yield error_events(error_of(error))
            return
        if options.include_usage:
            yield data_event(self._chunk([], self._usage.usage()))
        yield DONE

    def _choice_of(self, output: Output) -> ChunkChoice:
        if output.done is None:
            self._usage.on_tokens(output.choice, len(output.tokens))
            return ChunkChoice(output.choice, Delta(content=output.text))
        self._usage.on_done(output.choice, output.done)
        return ChunkChoice(output.choice, Delta(), finish_reason(output.done))

    def _event(self, choice: ChunkChoice, options: StreamOptions) -> bytes:
        usage: Usage | UnsetType | None = None if options.include_usage else UNSET
        if options.continuous_usage_stats:
            usage = self._usage.usage_of(choice.index)
        return data_event(self._chunk([choice], usage))

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )
