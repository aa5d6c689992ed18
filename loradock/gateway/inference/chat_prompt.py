"""From the messages of a request to a prompt of token ids, or to a text with images.

A rendered template contains the special tokens that the model expects, so none are added.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference.chat_template import TemplateError
from loradock.gateway.inference.images import fetch_image, image_of_data_url, is_remote
from loradock.gateway.inference.messages import Json, Message, conversation_of, decoded
from loradock.gateway.inference.model_files import ModelFiles
from loradock.gateway.inference.prompt_length import check_length
from loradock.gateway.inference.templates import Template, Templates
from loradock.gateway.inference.tokenizer import no_tokenizer
from loradock.gateway.options import AUTO_PARSER
from loradock.messages.prompts import IMAGES_MAX


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
            raise HttpError(400, f"{len(urls)} images; {IMAGES_MAX} are allowed", "messages")
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
        raise HttpError(400, "chat_template_kwargs is not an object", "chat_template_kwargs")
    for name, value in (("tools", tools), ("documents", documents)):
        if value is not None and not isinstance(value, list):
            raise HttpError(400, f"{name} is not a list", name)
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
