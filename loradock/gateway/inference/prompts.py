"""The messages of a chat, and the prompt that a chat template makes of them.

A prompt is token ids, or a string with images. A rendered template contains the special tokens that
the model expects, so none are added.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference.chat_template import TemplateError
from loradock.gateway.inference.images import fetch_image, image_of_data_url, is_remote
from loradock.gateway.inference.model_files import ModelFiles
from loradock.gateway.inference.sampling import check_length
from loradock.gateway.inference.templates import Template, Templates
from loradock.gateway.inference.tokenizer import no_tokenizer
from loradock.gateway.options import AUTO_PARSER
from loradock.messages.prompts import IMAGES_MAX

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
        shown["tool_calls"] = [_call_as_dict(call) for call in message.tool_calls]
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


def _call_as_dict(call: ToolCall) -> dict[str, Any]:
    # Templates read the arguments as an object; the protocol has them as a text.
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise HttpError(
            400, f"arguments of a tool call must be JSON: {error}", "messages"
        ) from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def raw_json(value: Any) -> msgspec.Raw:
    """Return a value as undecoded JSON."""
    return msgspec.Raw(msgspec.json.encode(value))


def decoded(raw: Json, name: str) -> Any:
    """Return the value of a field that only the template reads; raises `HttpError`."""
    if raw is UNSET:
        return None
    text = bytes(raw)
    if len(text) > RAW_BYTES_MAX:
        raise HttpError(
            400, f"{name} must have at most {RAW_BYTES_MAX} bytes, got {len(text)}", name
        )
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"{name} can't be read: {error}", name) from error


class PromptFields(Protocol):
    """The fields of a chat that its template reads; Structs can't have them from two bases."""

    messages: list[Message]
    tools: Json
    tool_choice: Json
    documents: Json
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None
    chat_template: str | None
    chat_template_kwargs: Json
    reasoning_effort: str | None


class ChatPrompt(Struct, frozen=True):
    """What a generation starts from: token ids, or a text with images.

    `tool_format`: the format in which the model writes calls of tools; empty if unknown.
    """

    prompt: str | tuple[int, ...]
    images: tuple[bytes, ...] = ()
    tool_format: str = ""


class ChatPrompts:
    """Makes prompts of chats with the files of the model or an adapter."""

    def __init__(self, allowed_hosts: Sequence[str]) -> None:
        self._allowed_hosts = tuple(allowed_hosts)

    async def prompt_of(self, body: PromptFields, files: ModelFiles) -> ChatPrompt:
        """Return the prompt; raises `HttpError`."""
        if files.tokenizer is None:
            raise no_tokenizer()
        tokenizer, variables = files.tokenizer, _variables(body)
        template = _template_for(files.templates, has_tools=variables["tools"] is not None)
        conversation = conversation_of(body.messages, reads_parts=template.reads_parts)
        try:
            text = await template.render(conversation.messages, variables)
        except TemplateError as error:
            raise HttpError(400, str(error), "messages") from error
        check_length(text, files.context, "messages")
        configured = files.tool_parser
        tool_format = template.tool_format if configured == AUTO_PARSER else configured
        if body.continue_final_message:
            text = _until_final_content(text, body)
        if not conversation.image_urls:
            tokens = tokenizer.encode(text, special=bool(body.add_special_tokens))
            return ChatPrompt(tuple(tokens), tool_format=tool_format)
        images = await self._images(conversation.image_urls)
        # The engine's processor tokenizes this text itself and adds special tokens again.
        bos = tokenizer.special_tokens.get("bos_token", "")
        prompt = text.removeprefix(bos) if tokenizer.adds_bos else text
        return ChatPrompt(prompt, images, tool_format)

    async def _images(self, urls: Sequence[str]) -> tuple[bytes, ...]:
        if len(urls) > IMAGES_MAX:
            message = f"a chat can have at most {IMAGES_MAX} images, got {len(urls)}"
            raise HttpError(400, message, "messages")
        return tuple([await self._image(url) for url in urls])

    async def _image(self, url: str) -> bytes:
        if is_remote(url):
            return await asyncio.to_thread(fetch_image, url, self._allowed_hosts)
        return image_of_data_url(url)


def _template_for(templates: Templates, *, has_tools: bool) -> Template:
    """Return the template for a chat; raises `HttpError` if there is none."""
    template = templates.template_for(has_tools=has_tools)
    if template is not None:
        return template
    hint = "send a prompt to /v1/completions, or start the gateway with --chat-template"
    reason = templates.problem or "the model has no chat template"
    raise HttpError(400, f"{reason}; {hint}", "messages")


def _variables(body: PromptFields) -> dict[str, Any]:
    """Return the variables of the template other than the messages."""
    if body.chat_template is not None:
        message = "chat_template is not served; start the gateway with --chat-template"
        raise HttpError(400, message, "chat_template")
    further = decoded(body.chat_template_kwargs, "chat_template_kwargs") or {}
    tools, documents = decoded(body.tools, "tools"), decoded(body.documents, "documents")
    if not isinstance(further, dict):
        raise HttpError(400, "chat_template_kwargs must be an object", "chat_template_kwargs")
    for name, value in (("tools", tools), ("documents", documents)):
        if value is not None and not isinstance(value, list):
            raise HttpError(400, f"{name} must be a list", name)
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise HttpError(400, message, "continue_final_message")
    adds_prompt = not body.continue_final_message and body.add_generation_prompt is not False
    variables = {
        "tools": tools or None,
        "documents": documents,
        "add_generation_prompt": adds_prompt,
    }
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return {**further, **variables}


def _until_final_content(text: str, body: PromptFields) -> str:
    """Cut what the template adds after the last message's text, which is to be continued."""
    content = body.messages[-1].content
    final = content.strip() if isinstance(content, str) else ""
    position = text.rfind(final) if final else -1
    if position < 0:
        message = "the last message is no text that the chat template ends with"
        raise HttpError(400, message, "continue_final_message")
    return text[: position + len(final)]
