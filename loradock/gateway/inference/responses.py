"""`POST /v1/responses`: chats in OpenAI's Responses protocol, without any stored state."""

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct
from starlette.requests import Request

from loradock.gateway.http.endpoints import Answer
from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference.chat import Chat, Chats
from loradock.gateway.inference.event_answer import EventAnswer
from loradock.gateway.inference.responses_request import (
    FunctionChoice,
    FunctionTool,
    Reasoning,
    ResponsesRequest,
    TextConfig,
    chat_of,
)
from loradock.gateway.inference.service import Service
from loradock.gateway.tools.blocks import Block, Step

_ENDED: Final = ("stop", "tool_calls")
"""How an output ends that is complete."""


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
    """Shared prefixes are not counted apart."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """Reasoning is not counted apart."""

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


class _Event(Struct, frozen=True, tag_field="type", kw_only=True):
    """An event; they are numbered from 0."""

    sequence_number: int


class _OfResponse(_Event, frozen=True, kw_only=True):
    response: ResponseAnswer


class Created(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    """The answer is known to the server."""


class InProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    """Its generation has begun."""


class Completed(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    """The whole answer."""


class EndedIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """The answer, which is incomplete."""


class Failed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    """The answer until its failure."""


class _OfItem(_Event, frozen=True, kw_only=True):
    output_index: int
    item: Item


class ItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""


class ItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    """The whole item."""


class _AboutItem(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _AboutContent(_AboutItem, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(_AboutContent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """The text of a message begins."""

    part: OutputText


class PartDone(_AboutContent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """The text of a message is complete."""

    part: OutputText


class TextDelta(_AboutContent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: tuple[()] = ()


class TextDone(_AboutContent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text."""

    text: str
    logprobs: tuple[()] = ()


class ArgumentsDelta(
    _AboutItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(
    _AboutItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """All arguments of a call."""

    name: str
    arguments: str


class Responses:
    """The endpoint."""

    def __init__(self, service: Service, chats: Chats) -> None:
        self._service = service
        self._chats = chats

    async def create(self, _: Request, body: ResponsesRequest) -> Answer:
        """Answer `POST /v1/responses`."""
        chat = await self._chats.start(chat_of(body))
        return await _Answer(self._service, chat, body).response(stream=bool(body.stream))


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

    def _begun(self) -> Sequence[Struct]:
        response = self._response("in_progress", [], None)
        return [
            self._event(Created, response=response),
            self._event(InProgress, response=response),
        ]

    def _changed(self, step: Step) -> Sequence[Struct]:
        block = step.block
        about = {"item_id": self._item_id(block), "output_index": block.index}
        if step.kind == "more":
            kind = TextDelta if block.kind == "text" else ArgumentsDelta
            return [self._event(kind, **about, delta=step.text)]
        if step.kind == "begin":
            item = self._item(block, "in_progress")
            events = [self._event(ItemAdded, output_index=block.index, item=item)]
            if block.kind == "text":
                events.append(self._event(PartAdded, **about, part=OutputText("")))
            return events
        text = block.text
        if block.kind == "call":
            done = [self._event(ArgumentsDone, **about, name=block.name, arguments=text)]
        else:
            done = [
                self._event(TextDone, **about, text=text),
                self._event(PartDone, **about, part=OutputText(text)),
            ]
        item = self._item(block)
        return [*done, self._event(ItemDone, output_index=block.index, item=item)]

    def _ended(self) -> Sequence[Struct]:
        response = self._final()
        kind = Completed if response.status == "completed" else EndedIncomplete
        return [self._event(kind, response=response)]

    def _failed(self, error: HttpError) -> Struct:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failure = Failure(code, error.message)
        output = [self._item(block, "incomplete") for block in self.blocks]
        return self._event(Failed, response=self._response("failed", output, None, error=failure))

    def _event(self, kind: Any, **fields: Any) -> Struct:
        number = self._events_sent
        self._events_sent += 1
        event: Struct = kind(sequence_number=number, **fields)
        return event

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
