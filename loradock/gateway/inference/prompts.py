"""The messages of a chat, and the prompt that a chat template makes of them.

A prompt is token ids, or a string with images. A rendered template contains the special tokens that
the model expects, so none are added.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from loradock.gateway.http.errors import HttpError, prompt_too_long
from loradock.gateway.inference.chat_template import TemplateError
from loradock.gateway.inference.images import (
    check_urls,
    fetch_image,
    image_of_data_url,
    is_remote,
)
from loradock.gateway.inference.model_files import ModelFiles
from loradock.gateway.inference.sampling import check_length
from loradock.gateway.inference.templates import Template, Templates
from loradock.gateway.inference.tokenizer import Tokenizer, no_tokenizer
from loradock.gateway.inference.workers import Workers
from loradock.gateway.options import AUTO_PARSER
from loradock.messages.prompts import PROMPT_CHARACTERS_MAX

MESSAGES_MAX: Final = 4096
PARTS_MAX: Final = 8192
"""Bound on the parts and the calls of tools of all messages of a chat."""
_PART_SIZE: Final = 64
"""The characters that converting and rendering a part takes as long as."""
CHARACTERS_MAX: Final = 4 * PROMPT_CHARACTERS_MAX
"""Bound on what a request lets the gateway render or tokenize, in characters.

It exceeds that of one prompt: a template can leave something out, and prompts can be several.
"""
RAW_BYTES_MAX: Final = 1 << 20
"""Bound on JSON that only the template reads, in bytes."""

Json = msgspec.Raw | UnsetType
"""A value that is decoded only if it is used."""


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True):
    """A data URL, or the URL of an allowed host; `detail` is not used."""

    url: str
    detail: str | None = None


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of every part: marks for the caches of other servers, which are not read."""

    cache_control: Json = UNSET
    prompt_cache_breakpoint: Json = UNSET


class TextPart(_Part, frozen=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class ImagePart(_Part, frozen=True, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl


class RefusalPart(_Part, frozen=True, tag_field="type", tag="refusal"):
    """An earlier refusal of the assistant, which is a string to the template."""

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


def check_parts(counts: Iterable[int], param: str = "messages") -> None:
    """Raise `HttpError` unless messages with these numbers of parts are short enough to convert."""
    found = sum(counts)
    if found > PARTS_MAX:
        raise HttpError(400, f"a chat can have at most {PARTS_MAX} parts, got {found}", param)


def size_of(messages: Sequence[Message], context: int | None) -> int:
    """Return a number of characters that a chat takes as long to convert as.

    Raises `HttpError` for too many parts or characters. Images are not counted.
    """
    contents = [one.content if isinstance(one.content, list) else () for one in messages]
    parts = [
        len(one.tool_calls or ()) + len(content)
        for one, content in zip(messages, contents, strict=True)
    ]
    check_parts(parts)
    characters = sum(len(_text(part)) for content in contents for part in content)
    characters += sum(len(one.content) for one in messages if isinstance(one.content, str))
    characters += sum(
        len(call.function.arguments) for one in messages for call in one.tool_calls or ()
    )
    if characters > CHARACTERS_MAX:
        found = f"{characters} characters > {CHARACTERS_MAX} maximum"
        raise prompt_too_long(found, context, "messages")
    return characters + _PART_SIZE * (len(messages) + sum(parts))


def refuse_images(messages: Sequence[Message]) -> None:
    """Raise `HttpError` for images, whose tokens only the engine counts, before any is read."""
    if _image_urls(messages):
        raise HttpError(400, "images are not served here; leave them out", "messages")


def _image_urls(messages: Sequence[Message]) -> list[str]:
    return [
        part.image_url.url
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ImagePart)
    ]


def conversation_of(messages: Sequence[Message], *, reads_parts: bool) -> Conversation:
    """Convert messages; raises `HttpError` for images that the template has no place for."""
    urls = _image_urls(messages)
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
    # Templates read the arguments as an object; the protocol has them as a string.
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


def json_size(raw: Json) -> int:
    """Return the bytes of a field that is decoded only if it is used."""
    return 0 if raw is UNSET else len(bytes(raw))


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
    """The start of a generation: token ids, or a string with images.

    `tool_format`: the format in which the model writes calls of tools; empty if unknown.
    """

    prompt: str | tuple[int, ...]
    images: tuple[bytes, ...] = ()
    tool_format: str = ""


class ChatPrompts:
    """Makes prompts of chats with the files of the model or an adapter."""

    def __init__(self, allowed_hosts: Sequence[str], workers: Workers) -> None:
        self._allowed_hosts = tuple(allowed_hosts)
        self._workers = workers

    async def prompt_of(
        self, body: PromptFields, files: ModelFiles, tokens_max: int | None = None
    ) -> ChatPrompt:
        """Return the prompt; raises `HttpError`, also if it certainly has more tokens than that."""
        if files.tokenizer is None:
            raise no_tokenizer()
        tokenizer, workers = files.tokenizer, self._workers
        size = size_of(body.messages, files.context)
        variables = _variables(body)
        size += json_size(body.tools) + json_size(body.documents)
        template = _template_for(files.templates, has_tools=variables["tools"] is not None)
        convert = partial(conversation_of, body.messages, reads_parts=template.reads_parts)
        conversation = await workers.run(size, convert)
        check_urls(conversation.image_urls)
        try:
            text = await template.render(conversation.messages, variables, size, workers)
        except TemplateError as error:
            raise HttpError(400, str(error), "messages") from error
        check_length(text, files.context, "messages")
        configured = files.tool_parser
        tool_format = template.tool_format if configured == AUTO_PARSER else configured
        if body.continue_final_message:
            text = _until_final_content(text, body)
        if not conversation.image_urls:
            encode = partial(_encode, tokenizer, text, bool(body.add_special_tokens), tokens_max)
            tokens = await workers.run(len(text), encode)
            return ChatPrompt(tokens, tool_format=tool_format)
        images = tuple([await self._image(url) for url in conversation.image_urls])
        # The engine's processor tokenizes this text itself and adds special tokens again.
        bos = tokenizer.special_tokens.get("bos_token", "")
        prompt = text.removeprefix(bos) if tokenizer.adds_bos else text
        return ChatPrompt(prompt, images, tool_format)

    async def _image(self, url: str) -> bytes:
        if is_remote(url):
            return await asyncio.to_thread(fetch_image, url, self._allowed_hosts)
        return await self._workers.run(len(url), partial(image_of_data_url, url))


def _encode(
    tokenizer: Tokenizer, text: str, special: bool, tokens_max: int | None
) -> tuple[int, ...]:
    if tokens_max is not None and tokenizer.exceeds(text, tokens_max):
        raise prompt_too_long(f"more than {tokens_max} tokens", tokens_max, "messages")
    return tuple(tokenizer.encode(text, special=special))


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
