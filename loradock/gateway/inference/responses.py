"""`POST /v1/responses`: chats in OpenAI's Responses protocol.

No answer is stored, so a request that refers to a stored one is refused.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from loradock.gateway.http.endpoint import INFERENCE, post
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import ServerSentEvents
from loradock.gateway.inference.answer import Chat, Event, EventAnswer
from loradock.gateway.inference.chat import ChatRequest, Chats
from loradock.gateway.inference.prompts import (
    MESSAGES_MAX,
    FunctionCall,
    ImagePart,
    ImageUrl,
    Json,
    Message,
    Part,
    RefusalPart,
    TextPart,
    ToolCall,
    check_parts,
    raw_json,
)
from loradock.gateway.inference.sampling import JsonSchema, ResponseFormat
from loradock.gateway.inference.service import Service
from loradock.gateway.inference.tool_parsers import Block, Step

INCLUDED: Final = ("reasoning.encrypted_content",)
"""Fields that can be included, and never are, because answers have none of them."""


class InputText(Struct, frozen=True, tag_field="type", tag="input_text"):
    """A text."""

    text: str


class OutputTextPart(Struct, frozen=True, tag_field="type", tag="output_text"):
    """A text of an earlier answer."""

    text: str


class RefusalOutput(Struct, frozen=True, tag_field="type", tag="refusal"):
    """A refusal of an earlier answer."""

    refusal: str


class InputImage(Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image, as a data URL or the URL of an allowed host."""

    image_url: str
    detail: str | None = None


Content = str | list[InputText | OutputTextPart | RefusalOutput | InputImage]


class InputItem(Struct, frozen=True):
    """A `message`, a `function_call` or a `function_call_output`; each has some of the fields."""

    type: str = "message"
    role: str = ""
    content: Content = ""
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: Content = ""


class FunctionTool(Struct, frozen=True):
    """A function that the model can call; no other type of tool is served."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Struct, frozen=True):
    """The one function that has to be called."""

    type: str
    name: str = ""


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """`text`, `json_object`, or `json_schema` with a schema."""

    type: str
    name: str = "output"
    schema: msgspec.Raw | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The structure of the answer; `verbosity` has no effect."""

    format: TextFormat = TextFormat("text")
    verbosity: str | None = None


class Reasoning(Struct, frozen=True, omit_defaults=True):
    """`effort` is the template's `reasoning_effort`; a summary is not made."""

    effort: str | None = None
    summary: str | None = None


class ResponsesStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing is obfuscated."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body; fields below `conversation` are accepted and change nothing.

    `store` does so too: answers are never stored, and say `store: false`.
    """

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MESSAGES_MAX)]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    prompt: Json = UNSET
    conversation: Json = UNSET
    store: bool | None = None
    metadata: dict[str, str] | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    user: str | None = None


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Return the chat of a request; raises `HttpError`."""
    _check_served(body)
    return ChatRequest(
        model=body.model,
        messages=_messages_of(body),
        tools=_tools_of(body.tools or ()),
        tool_choice=_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format_of(body.text),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
    )


def _check_served(body: ResponsesRequest) -> None:
    """Raise `HttpError` for what is not served."""
    no_store = "answers are not stored; send the earlier items in input"
    wrong = {
        "previous_response_id": (body.previous_response_id is not None, no_store),
        "conversation": (_is_set(body.conversation), no_store),
        "prompt": (_is_set(body.prompt), "there are no stored prompts; send instructions"),
        "background": (bool(body.background), "answers are not stored; send background: false"),
        "truncation": (
            body.truncation not in (None, "disabled"),
            "inputs are not shortened; send truncation: 'disabled'",
        ),
        "top_logprobs": (bool(body.top_logprobs), "use /v1/chat/completions for logprobs"),
        "include": (
            any(name not in INCLUDED for name in body.include or ()),
            f"only {', '.join(INCLUDED)} can be included",
        ),
    }
    for name, (is_wrong, reason) in wrong.items():
        if is_wrong:
            raise HttpError(400, f"{name} is not served: {reason}", name)


def _is_set(value: Json) -> bool:
    return isinstance(value, msgspec.Raw) and bytes(value).strip() != b"null"


def _messages_of(body: ResponsesRequest) -> list[Message]:
    """Return the messages; templates expect one system message, and calls in one message."""
    if isinstance(body.input, str):
        given = [Message("user", body.input)]
    else:
        check_parts(map(_parts_of, body.input), "input")
        given = [_message_of(item) for item in body.input]
    instructions = [Message("system", body.instructions)] if body.instructions else []
    turns = groupby([*instructions, *given], key=lambda message: message.role)
    return [
        message
        for number, (role, turn) in enumerate(turns)
        for message in _joined(role, list(turn), is_first=number == 0)
    ]


def _parts_of(item: InputItem) -> int:
    return sum(1 if isinstance(one, str) else len(one) for one in (item.content, item.output))


def _joined(role: str, turn: list[Message], *, is_first: bool) -> list[Message]:
    """Return the messages of one turn, with its calls in the message that they follow."""
    if role == "system" and is_first and len(turn) > 1:
        return [Message(role, "\n\n".join([_text(message.content) for message in turn]))]
    joined: list[Message] = []
    for message in turn:
        if joined and message.tool_calls:
            last = joined[-1]
            # A list is copied once, and not with each of its calls.
            calls = last.tool_calls if last.tool_calls is not None else []
            calls += message.tool_calls
            joined[-1] = replace(last, tool_calls=calls)
        else:
            joined.append(message)
    return joined


def _message_of(item: InputItem) -> Message:
    match item.type:
        case "message":
            # Templates know the role under its former name.
            role = "system" if item.role == "developer" else item.role
            if role not in ("system", "user", "assistant"):
                message = f"a role must be system, developer, user or assistant, got {role!r}"
                raise HttpError(400, message, "input")
            return Message(role, _content(item.content))
        case "function_call":
            call = ToolCall(FunctionCall(item.name, item.arguments), item.call_id)
            return Message("assistant", None, tool_calls=[call])
        case "function_call_output":
            return Message("tool", _content(item.output), tool_call_id=item.call_id)
    message = (
        "items of input must be messages, function_call or function_call_output, got "
        f"{item.type!r}; leave it out"
    )
    raise HttpError(400, message, "input")


def _content(content: Content) -> str | list[Part]:
    """Return the content of a message; a single text is a string."""
    if isinstance(content, str):
        return content
    match content:
        case [InputText(text=text) | OutputTextPart(text=text)]:
            return text
    return [_part(part) for part in content]


def _part(part: InputText | OutputTextPart | RefusalOutput | InputImage) -> Part:
    match part:
        case InputImage(image_url=url, detail=detail):
            return ImagePart(ImageUrl(url, detail))
        case RefusalOutput(refusal=refusal):
            return RefusalPart(refusal)
        case InputText(text=text) | OutputTextPart(text=text):
            return TextPart(text)


def _text(content: str | list[Part] | None) -> str:
    """Return the content of a system message as a string."""
    if not isinstance(content, list):
        return content or ""
    if not all(isinstance(part, TextPart) for part in content):
        raise HttpError(400, "a system message must consist of texts", "input")
    return "\n".join([part.text for part in content if isinstance(part, TextPart)])


def _tools_of(tools: Sequence[FunctionTool]) -> msgspec.Raw | UnsetType:
    """Return the tools as a chat has them."""
    if not tools:
        return UNSET
    other = next((tool.type for tool in tools if tool.type != "function"), None)
    if other is not None:
        raise HttpError(400, f"tools must be functions, got {other!r}; leave it out", "tools")
    shown = ("name", "description", "parameters", "strict")
    return raw_json(
        [
            {
                "type": "function",
                "function": {
                    name: value
                    for name in shown
                    if (value := getattr(tool, name)) is not None or name == "name"
                },
            }
            for tool in tools
        ]
    )


def _choice_of(choice: str | FunctionChoice | None) -> msgspec.Raw | UnsetType:
    if choice is None:
        return UNSET
    if isinstance(choice, str):
        return raw_json(choice)
    return raw_json({"type": choice.type, "function": {"name": choice.name}})


def _format_of(text: TextConfig | None) -> ResponseFormat | None:
    if text is None:
        return None
    wanted = text.format
    if wanted.type != "json_schema":
        return ResponseFormat(wanted.type)
    return ResponseFormat(wanted.type, JsonSchema(wanted.name, wanted.schema))


_ENDED: Final = ("stop", "tool_calls")
"""Reasons of the end of a complete output."""


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: str
    content: tuple[OutputText, ...]
    role: str = "assistant"


class FunctionCallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


Item = OutputMessage | FunctionCallItem


class InputDetails(Struct, frozen=True):
    """Shared prefixes are not counted separately."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """Reasoning is not counted separately."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """Numbers of tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class Incomplete(Struct, frozen=True):
    """Why an answer is incomplete."""

    reason: str


class Failure(Struct, frozen=True):
    """Why an answer failed."""

    code: str
    message: str


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """The answer to `POST /v1/responses`; most fields repeat the request."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    model: str
    output: list[Item]
    usage: ResponseUsage | None
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: Reasoning
    temperature: float | None
    text: TextConfig
    tool_choice: str | FunctionChoice
    tools: list[FunctionTool]
    top_p: float | None
    truncation: str = "disabled"
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    user: str | None = None


class Responses:
    """The endpoint."""

    def __init__(self, service: Service, chats: Chats) -> None:
        self._service = service
        self._chats = chats

    @post("/v1/responses", errors=INFERENCE, has_images=True, span="chat")
    async def create(self, body: ResponsesRequest) -> ResponseAnswer | ServerSentEvents:
        """Continue a chat, as in the Responses protocol."""
        chat = await self._chats.start(chat_of(body))
        answer = _Answer(self._service, chat, body)
        return await answer.respond(chat.run, stream=bool(body.stream))


class _Answer(EventAnswer[ResponseAnswer]):
    """The answer to one request."""

    def __init__(self, service: Service, chat: Chat, body: ResponsesRequest) -> None:
        super().__init__(service, "resp", chat)
        self._body = body
        self._events_sent = 0

    def _final(self) -> ResponseAnswer:
        output = [self._item(block) for block in self.blocks]
        usage = self.usage.usage()
        counted = ResponseUsage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        if self.reason in _ENDED:
            return self._response("completed", output, counted)
        details = Incomplete("max_output_tokens") if self.reason == "length" else None
        return self._response("incomplete", output, counted, incomplete_details=details)

    def _begun(self) -> Sequence[Event]:
        response = self._response("in_progress", [], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def _changed(self, step: Step) -> Sequence[Event]:
        block, is_text = step.block, step.block.kind == "text"
        item = {"output_index": block.index}
        part = {"item_id": self._item_id(block), **item}
        kind = "response.function_call_arguments"
        if is_text:
            part, kind = {**part, "content_index": 0}, "response.output_text"
        if step.kind == "more":
            more = {"logprobs": ()} if is_text else {}
            return [self._event(f"{kind}.delta", **part, delta=step.text, **more)]
        if step.kind == "begin":
            shown = self._item(block, "in_progress")
            events = [self._event("response.output_item.added", **item, item=shown)]
            if is_text:
                text = OutputText("")
                events.append(self._event("response.content_part.added", **part, part=text))
            return events
        if is_text:
            done = [
                self._event(f"{kind}.done", **part, text=block.text, logprobs=()),
                self._event("response.content_part.done", **part, part=OutputText(block.text)),
            ]
        else:
            done = [self._event(f"{kind}.done", **part, name=block.name, arguments=block.text)]
        shown = self._item(block)
        return [*done, self._event("response.output_item.done", **item, item=shown)]

    def _ended(self) -> Sequence[Event]:
        response = self._final()
        return [self._event(f"response.{response.status}", response=response)]

    def _failed(self, error: HttpError) -> Event:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failure = Failure(code, error.message)
        output = [self._item(block, "incomplete") for block in self.blocks]
        response = self._response("failed", output, None, error=failure)
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event; they are numbered from 0."""
        number = self._events_sent
        self._events_sent += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _item_id(self, block: Block) -> str:
        prefix = "msg" if block.kind == "text" else "fc"
        return f"{prefix}_{self.id.partition('_')[2]}{block.index:04x}"

    def _item(self, block: Block, status: str = "") -> Item:
        """Return an item; one that begins has no content yet."""
        is_cut_off = self.reason not in (None, *_ENDED) and block is self.blocks[-1]
        status = status or ("incomplete" if is_cut_off else "completed")
        # Its block may have all of its text already: the steps of a chunk are taken together.
        text = "" if status == "in_progress" else block.text
        if block.kind == "call":
            return FunctionCallItem(self._item_id(block), status, block.id, block.name, text)
        content = () if status == "in_progress" else (OutputText(text),)
        return OutputMessage(self._item_id(block), status, content)

    def _response(
        self, status: str, output: list[Item], usage: ResponseUsage | None, **more: Any
    ) -> ResponseAnswer:
        body = self._body
        return ResponseAnswer(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=output,
            usage=usage,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or Reasoning(),
            temperature=body.temperature,
            text=body.text or TextConfig(),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=body.top_p,
            user=body.user,
            **more,
        )
