"""`POST /v1/messages` and `/v1/messages/count_tokens`: chats in Anthropic's protocol."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loradock.gateway.http.endpoints import Answer
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import json_response
from loradock.gateway.inference.anthropic_request import (
    CountRequest,
    MessagesRequest,
    chat_of,
    prompt_of,
)
from loradock.gateway.inference.chat import Chats
from loradock.gateway.inference.chat_prompt import ChatPrompts
from loradock.gateway.inference.event_answer import EventAnswer
from loradock.gateway.inference.service import Service
from loradock.gateway.tools.blocks import Block, Step

STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""How a chat ended -> the protocol's name; null for one that was cancelled."""


class AnthropicUsage(Struct, frozen=True):
    """Numbers of tokens; shared prefixes are not counted apart."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class TextAnswer(Struct, frozen=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class ToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: msgspec.Raw


class AnthropicAnswer(Struct, frozen=True, tag_field="type", tag="message"):
    """The answer to `POST /v1/messages`."""

    id: str
    model: str
    content: list[TextAnswer | ToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    role: str = "assistant"


class TokenCount(Struct, frozen=True):
    """The answer to `POST /v1/messages/count_tokens`."""

    input_tokens: int


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    """The message begins; it has no content yet."""

    message: AnthropicAnswer


class ContentBlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: TextAnswer | ToolUse


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of a call's input."""

    partial_json: str


class ContentBlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """A block gets more."""

    index: int
    delta: TextDelta | InputDelta


class ContentBlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class Ending(Struct, frozen=True):
    """How a message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    """The message is complete."""

    delta: Ending
    usage: AnthropicUsage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


class AnthropicMessages:
    """The endpoints."""

    def __init__(self, service: Service, chats: Chats, prompts: ChatPrompts) -> None:
        self._service = service
        self._chats = chats
        self._prompts = prompts

    async def create(self, _: Request, body: MessagesRequest) -> Answer:
        """Answer `POST /v1/messages`."""
        chat = await self._chats.start(chat_of(body))
        return await _Answer(self._service, "msg", chat).response(stream=bool(body.stream))

    async def count(self, _: Request, body: CountRequest) -> Response:
        """Answer `POST /v1/messages/count_tokens`."""
        adapter = await self._service.models.find(body.model)
        files = await self._service.files_of(adapter)
        rendered = await self._prompts.prompt_of(prompt_of(body), files)
        if isinstance(rendered.prompt, str):
            message = "tokens of images are not counted before they are used; leave them out"
            raise HttpError(400, message, "messages")
        return json_response(TokenCount(len(rendered.prompt)))


class _Answer(EventAnswer[AnthropicAnswer]):
    """The answer to one request."""

    def _final(self) -> AnthropicAnswer:
        return self._message([_content_of(block) for block in self.blocks])

    def _begun(self) -> Sequence[Struct]:
        return [MessageStart(self._message([]))]

    def _changed(self, step: Step) -> Sequence[Struct]:
        index, is_text = step.block.index, step.block.kind == "text"
        if step.kind == "begin":
            return [ContentBlockStart(index, _empty(step.block))]
        if step.kind == "more":
            delta = TextDelta(step.text) if is_text else InputDelta(step.text)
            return [ContentBlockDelta(index, delta)]
        return [ContentBlockStop(index)]

    def _ended(self) -> Sequence[Struct]:
        return [MessageDelta(self._ending, self._usage), MessageStop()]

    def _failed(self, error: HttpError) -> Struct:
        return error.anthropic_body

    @property
    def _ending(self) -> Ending:
        reason = STOP_REASONS.get(self.reason or "")
        if reason == "end_turn" and self.stop_text is not None:
            reason = "stop_sequence"
        return Ending(reason, self.stop_text)

    @property
    def _usage(self) -> AnthropicUsage:
        usage = self.usage.usage()
        return AnthropicUsage(usage.prompt_tokens, usage.completion_tokens)

    def _message(self, content: list[TextAnswer | ToolUse]) -> AnthropicAnswer:
        ending = self._ending
        return AnthropicAnswer(
            self.id, self.model, content, ending.stop_reason, ending.stop_sequence, self._usage
        )


def _empty(block: Block) -> TextAnswer | ToolUse:
    if block.kind == "text":
        return TextAnswer("")
    return ToolUse(block.id, block.name, msgspec.Raw(b"{}"))


def _content_of(block: Block) -> TextAnswer | ToolUse:
    """Return a whole block; a call that was cut off has no input, so its text is shown."""
    text = block.text
    if block.kind == "text" or not _is_json(text):
        return TextAnswer(text)
    return ToolUse(block.id, block.name, msgspec.Raw(text.encode()))


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
