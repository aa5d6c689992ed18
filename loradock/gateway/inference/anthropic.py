"""`POST /v1/messages` and `/v1/messages/count_tokens`: chats in Anthropic's protocol."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from loradock.gateway.http.endpoint import INFERENCE, post
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import ServerSentEvents
from loradock.gateway.inference.answer import Event, EventAnswer
from loradock.gateway.inference.chat import ChatRequest, Chats
from loradock.gateway.inference.prompts import (
    MESSAGES_MAX,
    ChatPrompts,
    FunctionCall,
    ImagePart,
    ImageUrl,
    Json,
    Message,
    Part,
    TextPart,
    ToolCall,
    check_parts,
    raw_json,
    refuse_images,
)
from loradock.gateway.inference.sampling import STOP_MAX, JsonSchema, ResponseFormat, StopText
from loradock.gateway.inference.service import Service
from loradock.gateway.inference.tool_parsers import Block, Step


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class Base64Source(Struct, frozen=True, tag_field="type", tag="base64"):
    """The bytes of an image."""

    media_type: str
    data: str


class UrlSource(Struct, frozen=True, tag_field="type", tag="url"):
    """The address of an image."""

    url: str


class ImageBlock(Struct, frozen=True, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | UrlSource


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of an earlier answer."""

    id: str
    name: str
    input: msgspec.Raw


class ToolResultBlock(Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a tool; `is_error` is not shown to the model, whose content tells it."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] = ""
    is_error: bool | None = None


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    """The reasoning of an earlier answer."""

    thinking: str


AnthropicBlock = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


class AnthropicMessage(Struct, frozen=True):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[AnthropicBlock]


class AnthropicTool(Struct, frozen=True):
    """A tool of the client; those that a server executes are not served."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class AnthropicChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of tools to be called: any number, `any` at least one, `tool` the named one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, frozen=True):
    """Only `disabled` is served: whether a model reasons follows from its template."""

    type: str


class OutputFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The structure of the whole answer."""

    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`effort` is the template's `reasoning_effort`."""

    format: OutputFormat | None = None
    effort: str | None = None


class _Prompt(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that a prompt is made of."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: str | list[TextBlock] = ""
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Json = UNSET


class CountRequest(_Prompt, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(_Prompt, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/messages`; the last three fields are accepted and not used."""

    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=STOP_MAX)] | None = None
    metadata: Json = UNSET
    service_tier: str | None = None


def chat_of(body: MessagesRequest) -> ChatRequest:
    """Return the chat of a request; raises `HttpError`."""
    chat = prompt_of(body)
    chat.max_completion_tokens = body.max_tokens
    chat.stream = body.stream
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.stop = body.stop_sequences
    return chat


def prompt_of(body: MessagesRequest | CountRequest) -> ChatRequest:
    """Return a chat with what its prompt is made of; raises `HttpError`."""
    if body.thinking is not None and body.thinking.type != "disabled":
        raise HttpError(400, "thinking must be disabled or left out", "thinking")
    check_parts(len(one.content) if isinstance(one.content, list) else 1 for one in body.messages)
    messages = [one for message in body.messages for one in _messages_of(message)]
    if body.system:
        messages.insert(0, Message("system", _content(body.system)))
    output = body.output_config or OutputConfig()
    # An answer continues a last message of the assistant.
    continues = messages[-1].role == "assistant"
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=_tools_of(body.tools),
        tool_choice=_choice_of(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        continue_final_message=True if continues else None,
        reasoning_effort=output.effort,
        response_format=_format_of(output.format),
    )


def _content(content: str | Sequence[TextBlock | ImageBlock]) -> str | list[Part]:
    """Return the content of a message; a single text is a string."""
    if isinstance(content, str):
        return content
    match content:
        case [TextBlock(text=text)]:
            return text
    return [_part(block) for block in content]


def _part(block: TextBlock | ImageBlock) -> Part:
    if isinstance(block, TextBlock):
        return TextPart(block.text)
    if isinstance(block.source, UrlSource):
        return ImagePart(ImageUrl(block.source.url))
    source = block.source
    return ImagePart(ImageUrl(f"data:{source.media_type};base64,{source.data}"))


def _messages_of(message: AnthropicMessage) -> list[Message]:
    """Return the messages of one turn: results of tools are separate messages."""
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    blocks = message.content
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    shown = [block for block in blocks if isinstance(block, TextBlock | ImageBlock)]
    if (uses or thoughts) if message.role == "user" else results:
        wrong = "tool_use and thinking" if message.role == "user" else "tool_result"
        text = f"{wrong} can't be in a message of the {message.role}"
        raise HttpError(400, text, "messages")
    found = [
        Message("tool", _content(result.content), tool_call_id=result.tool_use_id)
        for result in results
    ]
    if not results or shown:
        calls = [_call(use) for use in uses]
        content = _content(shown) if shown else None if calls else ""
        thought = "".join(thoughts) or None
        found.append(
            Message(message.role, content, tool_calls=calls or None, reasoning_content=thought)
        )
    return found


def _call(use: ToolUseBlock) -> ToolCall:
    return ToolCall(FunctionCall(use.name, bytes(use.input).decode()), use.id)


def _tools_of(tools: Sequence[AnthropicTool] | None) -> msgspec.Raw | UnsetType:
    if not tools:
        return UNSET
    functions = []
    for tool in tools:
        function = {"name": tool.name, "parameters": tool.input_schema}
        described = {"description": tool.description} if tool.description is not None else {}
        functions.append({"type": "function", "function": {**function, **described}})
    return raw_json(functions)


def _choice_of(choice: AnthropicChoice | None) -> msgspec.Raw | UnsetType:
    if choice is None:
        return UNSET
    if choice.type == "tool":
        if choice.name is None:
            raise HttpError(400, "tool_choice of type tool needs a name", "tool_choice")
        return raw_json({"type": "function", "function": {"name": choice.name}})
    return raw_json("required" if choice.type == "any" else choice.type)


def _format_of(wanted: OutputFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    return ResponseFormat("json_schema", JsonSchema("output", wanted.schema))


STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""Reason of a chat's end -> the protocol's name; null if it was cancelled."""


class AnthropicUsage(Struct, frozen=True):
    """Numbers of tokens; shared prefixes are not counted separately."""

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


class AnthropicMessages:
    """The endpoints."""

    def __init__(self, service: Service, chats: Chats, prompts: ChatPrompts) -> None:
        self._service = service
        self._chats = chats
        self._prompts = prompts

    @post("/v1/messages", errors=INFERENCE, has_images=True, shape="anthropic", span="chat")
    async def create(self, body: MessagesRequest) -> AnthropicAnswer | ServerSentEvents:
        """Continue a chat, as in Anthropic's protocol."""
        chat = await self._chats.start(chat_of(body))
        answer = _Answer(self._service, "msg", chat)
        return await answer.respond(chat.run, stream=bool(body.stream))

    @post("/v1/messages/count_tokens", errors=INFERENCE, shape="anthropic")
    async def count(self, body: CountRequest) -> TokenCount:
        """Tokens of a chat, as in Anthropic's protocol."""
        chat = prompt_of(body)
        refuse_images(chat.messages)
        adapter = await self._service.models.find(body.model)
        files = await self._service.files_of(adapter)
        rendered = await self._prompts.prompt_of(chat, files)
        return TokenCount(len(rendered.prompt))


class _Answer(EventAnswer[AnthropicAnswer]):
    """The answer to one request."""

    def _final(self) -> AnthropicAnswer:
        return self._message([_content_of(block) for block in self.blocks])

    def _begun(self) -> Sequence[Event]:
        return [{"type": "message_start", "message": self._message([])}]

    def _changed(self, step: Step) -> Sequence[Event]:
        block, index = step.block, {"index": step.block.index}
        if step.kind == "begin":
            return [{"type": "content_block_start", **index, "content_block": _empty(block)}]
        if step.kind == "end":
            return [{"type": "content_block_stop", **index}]
        delta = {"type": "input_json_delta", "partial_json": step.text}
        if block.kind == "text":
            delta = {"type": "text_delta", "text": step.text}
        return [{"type": "content_block_delta", **index, "delta": delta}]

    def _ended(self) -> Sequence[Event]:
        reason, sequence = self._ending
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            {"type": "message_delta", "delta": delta, "usage": self._usage},
            {"type": "message_stop"},
        ]

    def _failed(self, error: HttpError) -> Event:
        return {"type": "error", "error": error.anthropic_body.error}

    @property
    def _ending(self) -> tuple[str | None, str | None]:
        """The reason of the end, and the text that the output was stopped at."""
        reason = STOP_REASONS.get(self.reason or "")
        if reason == "end_turn" and self.stop_text is not None:
            reason = "stop_sequence"
        return reason, self.stop_text

    @property
    def _usage(self) -> AnthropicUsage:
        usage = self.usage.usage()
        return AnthropicUsage(usage.prompt_tokens, usage.completion_tokens)

    def _message(self, content: list[TextAnswer | ToolUse]) -> AnthropicAnswer:
        reason, sequence = self._ending
        return AnthropicAnswer(self.id, self.model, content, reason, sequence, self._usage)


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
