"""`POST /v1/chat/completions`: messages to a prompt by a chat template, and its answer."""

from typing import Final

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.endpoints import Answer
from gateway.http.errors import HttpError
from gateway.http.streams import json_response
from gateway.inference.answer import InferenceAnswer
from gateway.inference.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChunkChoice,
    Delta,
    TokenIds,
    Usage,
)
from gateway.inference.chat_prompt import ChatPrompts
from gateway.inference.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    TokenTextOf,
    chat_logprobs,
    prompt_logprobs,
)
from gateway.inference.messages import Json, Messages
from gateway.inference.model_files import ModelFiles
from gateway.inference.prompt_length import shortened_chat
from gateway.inference.rendered import rendered
from gateway.inference.run import returned_ids
from gateway.inference.sampling import Logprobs, SamplingFields, Tokens, sampling_of
from gateway.inference.service import (
    Service,
    Start,
    UsageCount,
    finish_reason,
    random_id,
    token_text_of,
)
from messages.requests import TokensStreamed

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
        files = await service.files_of(adapter)
        start = await self._start_of(body, files)
        text_of = token_text_of(service, body, has_logprobs=bool(body.logprobs))
        usage = UsageCount(count)
        prompt_ids = None if isinstance(start.prompt, str) else start.prompt
        if prompt_ids is not None:
            usage.on_prompt(0, len(prompt_ids))
        run = await service.start(adapter, [start], count)
        answer = _Answer(service, adapter, usage, body, text_of)
        if body.return_token_ids:
            answer.prompt_ids = prompt_ids
        return await answer.response(run, body)

    async def render(self, _: Request, body: ChatRequest) -> Response:
        """Answer with what `complete` would generate from."""
        _check(body)
        adapter = await self._service.models.find(body.model)
        start = await self._start_of(body, await self._service.files_of(adapter))
        if isinstance(start.prompt, str):
            raise HttpError(400, "images are not served here; leave them out", "messages")
        answer_id = random_id("chatcmpl")
        return json_response(rendered(answer_id, start.prompt, start.sampling, body))

    async def _start_of(self, body: ChatRequest, files: ModelFiles) -> Start:
        found = await self._prompts.prompt_of(body, files)
        prompt = shortened_chat(found.prompt, body, self._service.context)
        tokens = None if isinstance(prompt, str) else len(prompt)
        max_tokens = self._max_tokens(body, tokens, files.defaults.max_new_tokens)
        sampling = sampling_of(body, files.defaults, max_tokens)
        if body.logprobs:
            sampling["logprobs"] = body.top_logprobs or 0
        return Start(prompt, sampling, found.images)

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


def _check(body: ChatRequest) -> None:
    limit = body.max_completion_tokens
    if limit is not None and limit < 1:
        raise HttpError(
            400, f"max_completion_tokens is {limit}; at least 1", "max_completion_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.max_tokens == 0:
        raise HttpError(400, "max_tokens is 0; at least 1", "max_tokens")
    if body.echo:
        raise HttpError(400, "echo is not served for chats; leave it out", "echo")
    if body.modalities not in (None, ["text"]):
        raise HttpError(400, f"modalities {body.modalities}; only text is served", "modalities")


class _Answer(InferenceAnswer[ChatCompletion, ChunkChoice, ChatChunk]):
    """The answer to one chat."""

    def __init__(
        self,
        service: Service,
        adapter: str | None,
        usage: UsageCount,
        body: ChatRequest,
        text_of: TokenTextOf,
    ) -> None:
        super().__init__(service, "chatcmpl", adapter, usage)
        self._body = body
        self._has_logprobs = bool(body.logprobs)
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
        reason = finish_reason(choice) or ""
        scores, ids = self._logprobs(choice), returned_ids(choice, self._body)
        return ChatChoice(index, ChatMessage(choice.text), reason, scores, choice.stop_reason, ids)

    def _first_parts(self, choice: int) -> list[ChunkChoice]:
        """Return the role."""
        return [ChunkChoice(choice, Delta(role="assistant", content=""))]

    def _parts(self, choice: int, chunk: TokensStreamed | None) -> list[ChunkChoice]:
        if chunk is None:
            return []
        if self._has_prompt_logprobs and chunk.prompt_logprobs:
            self._unsent = prompt_logprobs(chunk.prompt_logprobs, self._text_of)
        has_content = chunk.text or chunk.tokens
        delta = Delta(content=chunk.text) if has_content else Delta()
        reason, scores = finish_reason(chunk), self._logprobs(chunk)
        ids = returned_ids(chunk, self._body)
        return [ChunkChoice(choice, delta, reason, scores, chunk.stop_reason, ids)]

    def _logprobs(self, chunk: TokensStreamed) -> ChatLogprobs | None:
        if not self._has_logprobs or not chunk.logprobs:
            return None
        return chat_logprobs(chunk.logprobs, self._text_of)

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
