"""`POST /v1/chat/completions`: messages to a prompt by a chat template, and its answer.

The other protocols of chats are converted to a `ChatRequest`, and start the same `Chat`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from loradock.gateway.http.endpoint import INFERENCE, post
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import ServerSentEvents
from loradock.gateway.inference.answer import Chat, InferenceAnswer
from loradock.gateway.inference.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    TokenTextOf,
    chat_logprobs,
    prompt_logprobs,
)
from loradock.gateway.inference.model_files import ModelFiles
from loradock.gateway.inference.prompts import (
    ChatPrompts,
    Json,
    Messages,
    json_size,
    refuse_images,
)
from loradock.gateway.inference.sampling import (
    Logprobs,
    Rendered,
    SamplingFields,
    Tokens,
    check_length,
    rendered,
    sampling_of,
    truncated,
    truncation_of,
)
from loradock.gateway.inference.service import (
    GenerationStart,
    Service,
    TokenIds,
    Usage,
    UsageCount,
    random_id,
    returned_ids,
    token_text_of,
)
from loradock.gateway.inference.tokenizer import Tokenizer
from loradock.gateway.inference.tool_parsers import Step
from loradock.gateway.inference.tools import OutputReader, ToolPlan, plan_of
from loradock.messages.requests import TokensStreamed

MAX_TOKENS_DEFAULT: Final = 128
"""For a chat that sets no limit, if the context of the model is unknown."""


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body; tools are passed to the template too."""

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
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    echo: bool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    include_reasoning: bool | None = None
    functions: list[Json] | None = None
    function_call: str | None = None


class CalledFunction(Struct, frozen=True, omit_defaults=True):
    """The function of a call; a chunk has its name, or a piece of its arguments."""

    name: str | None = None
    arguments: str = msgspec.field(default_factory=str)


class AnsweredCall(Struct, frozen=True):
    """A call of a tool."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(Struct, frozen=True):
    """The assistant's message; `content` is null if it consists of calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: tuple[AnsweredCall, ...] = ()


class ChatChoice(Struct, frozen=True):
    """One message."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The answer to `POST /v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: TokenIds = UNSET


class CallDelta(Struct, frozen=True, omit_defaults=True):
    """The part of a chunk for the call at place `index`; the first one has its id and name."""

    index: int
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    """The part of a chunk for a message."""

    role: str | None = None
    content: str | None = None
    tool_calls: tuple[CallDelta, ...] = ()


class ChunkChoice(Struct, frozen=True):
    """The part of a chunk for a choice."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """A chunk of a stream of `POST /v1/chat/completions`.

    `prompt_logprobs` are in the first one with tokens, if they are requested, and
    `prompt_token_ids` in the first one.
    """

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET


class Chats:
    """The endpoint, and what starts the chats of other protocols."""

    def __init__(self, service: Service, prompts: ChatPrompts) -> None:
        self._service = service
        self._prompts = prompts

    @post("/v1/chat/completions", errors=INFERENCE, has_images=True, span="chat")
    async def complete(self, body: ChatRequest) -> ChatCompletion | ServerSentEvents:
        """Continue a chat.

        The answer has all messages, or is a stream of chunks.
        """
        text_of = token_text_of(self._service, body, has_logprobs=bool(body.logprobs))
        chat = await self.start(body)
        answer = _Answer(self._service, chat, body, text_of)
        if body.return_token_ids:
            answer.prompt_ids = chat.prompt_ids
        return await answer.response(chat.run, body)

    async def start(self, body: ChatRequest) -> Chat:
        """Start the generation of a chat; raises `HttpError` and `LoradockError`."""
        service, count = self._service, body.n or 1
        _check(body)
        adapter = await service.models.find(body.model)
        files = await service.files_of(adapter)
        start, plan = await self._start_of(body, files)
        usage = UsageCount(count)
        prompt_ids = None if isinstance(start.prompt, str) else start.prompt
        if prompt_ids is not None:
            usage.on_prompt(0, len(prompt_ids))
        run = await service.start(adapter, [start], count)
        return Chat(run, adapter, usage, plan, prompt_ids)

    @post("/v1/chat/completions/render", errors=INFERENCE)
    async def render(self, body: ChatRequest) -> Rendered:
        """Token ids and parameters of a chat.

        They are what `complete` would generate from.
        """
        _check(body)
        refuse_images(body.messages)
        adapter = await self._service.models.find(body.model)
        start, _ = await self._start_of(body, await self._service.files_of(adapter))
        assert isinstance(start.prompt, tuple)  # noqa: S101 - a chat without images
        return rendered({random_id("chatcmpl"): start.prompt}, start.sampling, body)[0]

    async def _start_of(
        self, body: ChatRequest, files: ModelFiles
    ) -> tuple[GenerationStart, ToolPlan]:
        tokens_max = files.context if body.truncate_prompt_tokens is None else None
        found = await self._prompts.prompt_of(body, files, tokens_max)
        prompt = _shortened(found.prompt, body, self._service.context)
        tokens = None if isinstance(prompt, str) else len(prompt)
        max_tokens = self._max_tokens(body, tokens, files.defaults.max_new_tokens)
        sampling = sampling_of(body, files.defaults, max_tokens)
        if body.logprobs:
            sampling["logprobs"] = body.top_logprobs or 0
        make_plan = partial(plan_of, body, found.tool_format)
        plan = await self._service.workers.run(json_size(body.tools), make_plan)
        sampling |= _sampling_of_calls(
            plan, body, files.tokenizer, has_structure="structure" in sampling
        )
        return GenerationStart(prompt, sampling, found.images), plan

    def _max_tokens(self, body: ChatRequest, prompt_tokens: int | None, default: int | None) -> int:
        limit = body.max_completion_tokens or body.max_tokens
        context = self._service.context
        if limit is not None:
            return limit
        if context is None or prompt_tokens is None:
            return default or MAX_TOKENS_DEFAULT
        # The engine refuses a prompt that fills the context.
        left = max(1, context - prompt_tokens)
        return min(left, default or left)


def _shortened(
    prompt: str | tuple[int, ...], body: ChatRequest, context: int | None
) -> str | tuple[int, ...]:
    """Return the prompt of a chat after the truncation that it asks for; raises `HttpError`."""
    check_length(prompt, context, "messages")
    truncation = truncation_of(body.truncate_prompt_tokens, body.truncation_side, "left")
    if truncation is None:
        return prompt
    if isinstance(prompt, str):
        message = "truncate_prompt_tokens is not served for images; leave it out"
        raise HttpError(400, message, "truncate_prompt_tokens")
    output = body.max_completion_tokens or body.max_tokens or 1
    tokens = list(prompt)
    return tuple(truncated(truncation, tokens, tokens, context and context - output))


def _sampling_of_calls(
    plan: ToolPlan, body: ChatRequest, tokenizer: Tokenizer | None, *, has_structure: bool
) -> dict[str, Any]:
    """Return the sampling parameters that calls of tools need."""
    if plan.structure is not None:
        # A `response_format` describes messages, and a forced answer is a call.
        if has_structure and body.response_format is None:
            message = "a forced call and another structure of the output exclude each other"
            raise HttpError(400, message, "tool_choice")
        return {"structure": plan.structure}
    is_special = plan.tags and tokenizer and tokenizer.special_texts.intersection(plan.tags)
    return {"skip_special_tokens": False} if is_special else {}


def _check(body: ChatRequest) -> None:
    limit = body.max_completion_tokens
    if limit is not None and limit < 1:
        name = "max_completion_tokens"
        raise HttpError(400, f"{name} must be at least 1, got {limit}", name)
    if body.top_logprobs and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.max_tokens == 0:
        raise HttpError(400, "max_tokens must be at least 1, got 0", "max_tokens")
    if body.echo:
        raise HttpError(400, "echo is not served for chats; leave it out", "echo")
    if body.modalities not in (None, ["text"]):
        raise HttpError(400, f"modalities must be ['text'], got {body.modalities}", "modalities")


class _Answer(InferenceAnswer[ChatCompletion, ChunkChoice, ChatChunk]):
    """The answer to one chat."""

    def __init__(
        self, service: Service, chat: Chat, body: ChatRequest, text_of: TokenTextOf
    ) -> None:
        super().__init__(service, "chatcmpl", chat.adapter, chat.usage)
        self._readers = [OutputReader(chat.plan) for _ in range(chat.run.choices)]
        self._body = body
        self._has_prompt_logprobs = body.prompt_logprobs is not None
        self._text_of = text_of
        # Those of a stream, until a chunk has them.
        self._unsent: PromptLogprobs | UnsetType = UNSET
        self.prompt_ids: TokenIds = UNSET

    def _whole(self, choices: list[TokensStreamed]) -> ChatCompletion:
        entries = choices[0].prompt_logprobs
        shown = prompt_logprobs(entries, self._text_of) if self._has_prompt_logprobs else None
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            usage=self.usage.usage(),
            prompt_logprobs=shown,
            prompt_token_ids=self.prompt_ids,
        )

    def _whole_choice(self, index: int, choice: TokensStreamed) -> ChatChoice:
        reader = self._readers[index]
        reader.read(choice)
        calls = tuple(
            [
                AnsweredCall(call.id, CalledFunction(call.name, call.text))
                for call in reader.blocks.calls
            ]
        )
        content = reader.blocks.text
        message = ChatMessage(content if content or not calls else None, tool_calls=calls)
        reason = reader.finish_reason(choice) or ""
        scores, ids = self._logprobs(choice), returned_ids(choice, self._body)
        return ChatChoice(index, message, reason, scores, choice.stop_reason, ids)

    def _first_parts(self, choice: int) -> list[ChunkChoice]:
        """Return the role."""
        return [ChunkChoice(choice, Delta(role="assistant", content=""))]

    def _parts(self, choice: int, chunk: TokensStreamed | None) -> list[ChunkChoice]:
        if chunk is None:
            return []
        if self._has_prompt_logprobs and chunk.prompt_logprobs:
            self._unsent = prompt_logprobs(chunk.prompt_logprobs, self._text_of)
        reader = self._readers[choice]
        deltas = _deltas(reader.read(chunk))
        if not deltas:
            # The text of the tokens is held back, or they have none.
            deltas = [Delta(content="") if chunk.tokens else Delta()]
        reason = reader.finish_reason(chunk)
        # Clients take a call for complete when a later chunk has the reason.
        if reason is not None and deltas[-1].tool_calls:
            deltas.append(Delta())
        parts = [ChunkChoice(choice, delta) for delta in deltas]
        ids = returned_ids(chunk, self._body)
        parts[0] = replace(parts[0], logprobs=self._logprobs(chunk), token_ids=ids)
        parts[-1] = replace(parts[-1], finish_reason=reason, stop_reason=chunk.stop_reason)
        return parts

    def _logprobs(self, chunk: TokensStreamed) -> ChatLogprobs | None:
        is_shown = self._body.logprobs and chunk.logprobs
        return chat_logprobs(chunk.logprobs, self._text_of) if is_shown else None

    def _chunk(self, parts: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        shown, self._unsent = self._unsent, UNSET
        ids, self.prompt_ids = self.prompt_ids, UNSET
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=parts,
            usage=usage,
            prompt_logprobs=shown,
            prompt_token_ids=ids,
        )


def _deltas(steps: Sequence[Step]) -> list[Delta]:
    """Return what steps add to a message: one text or one piece of a call each."""
    deltas: list[Delta] = []
    begun: Step | None = None
    for step in steps:
        if begun is not None:
            arguments = step.text if step.kind == "more" else ""
            deltas.append(_call_delta(begun, arguments))
            begun = None
        elif step.kind == "begin":
            begun = step if step.block.kind == "call" else None
        elif step.kind == "more":
            is_text = step.block.kind == "text"
            deltas.append(Delta(content=step.text) if is_text else _call_delta(step, step.text))
    return deltas if begun is None else [*deltas, _call_delta(begun, "")]


def _call_delta(step: Step, arguments: str) -> Delta:
    call = step.block
    if step.kind == "begin":
        function = CalledFunction(call.name, arguments)
        return Delta(tool_calls=(CallDelta(call.call_index, function, call.id, "function"),))
    return Delta(tool_calls=(CallDelta(call.call_index, CalledFunction(arguments=arguments)),))
