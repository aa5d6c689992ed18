"""The messages of a chat: their types, and the dictionaries that chat templates read."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from loradock.gateway.http.errors import HttpError

MESSAGES_MAX: Final = 4096
RAW_BYTES_MAX: Final = 1 << 20
"""Bound on JSON that only the template reads, in bytes."""

Json = msgspec.Raw | UnsetType
"""A value that is decoded only where it is needed."""


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True):
    """A data URL, or the URL of an allowed host; `detail` is not used."""

    url: str
    detail: str | None = None


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every part may have: marks for the caches of other servers, which are not read."""

    cache_control: Json = UNSET
    prompt_cache_breakpoint: Json = UNSET


class TextPart(_Part, frozen=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class ImagePart(_Part, frozen=True, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl


class RefusalPart(_Part, frozen=True, tag_field="type", tag="refusal"):
    """An earlier refusal of the assistant, which is a text to the template."""

    refusal: str


class FunctionCall(Struct, frozen=True):
    """A call that the assistant requested; `arguments` is JSON."""

    name: str
    arguments: str = "{}"


class ToolCall(Struct, frozen=True):
    """One call of a message."""

    function: FunctionCall
    id: str = ""
    type: str = "function"


Part = TextPart | ImagePart | RefusalPart


class Message(Struct, frozen=True):
    """One message; fields without a use here are ignored, because answers are sent back."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]


class Conversation(NamedTuple):
    """Messages as templates read them, and the URLs of their images in order."""

    messages: list[dict[str, Any]]
    image_urls: list[str]


def conversation_of(messages: Sequence[Message], *, reads_parts: bool) -> Conversation:
    """Convert messages; raises `HttpError` for images that the template has no place for."""
    urls = [
        part.image_url.url
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ImagePart)
    ]
    if urls and not reads_parts:
        raise HttpError(
            400, "images, and the model's chat template has no place for any", "messages"
        )
    return Conversation([_as_dict(message, reads_parts) for message in messages], urls)


def _as_dict(message: Message, reads_parts: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": _content(message, reads_parts)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            shown[name] = value
    if message.tool_calls:
        shown["tool_calls"] = [_call(call) for call in message.tool_calls]
    return shown


def _content(message: Message, reads_parts: bool) -> Any:
    content = message.content
    if content is None:
        return "" if message.tool_calls is None else None
    if reads_parts:
        parts = [TextPart(content)] if isinstance(content, str) else content
        return [_part(part) for part in parts]
    if isinstance(content, str):
        return content
    return "\n".join(_text(part) for part in content)


def _part(part: Part) -> dict[str, str]:
    return (
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": _text(part)}
    )


def _text(part: Part) -> str:
    match part:
        case TextPart(text=text) | RefusalPart(refusal=text):
            return text
    return ""


def _call(call: ToolCall) -> dict[str, Any]:
    # Templates read the arguments as an object; the protocol has them as a text.
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise HttpError(
            400, f"arguments of a tool call are not JSON: {error}", "messages"
        ) from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def decoded(raw: Json, name: str) -> Any:
    """Return the value of a field that only the template reads; raises `HttpError`."""
    if raw is UNSET:
        return None
    text = bytes(raw)
    if len(text) > RAW_BYTES_MAX:
        raise HttpError(400, f"{name} has {len(text)} bytes; {RAW_BYTES_MAX} are allowed", name)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"{name} can't be read: {error}", name) from error
