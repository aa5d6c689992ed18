"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from functools import partial
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, field

from loradock.gateway.http.endpoint import INFERENCE, get, post
from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference.prompts import (
    MESSAGES_MAX,
    ChatPrompts,
    Json,
    Message,
    refuse_images,
)
from loradock.gateway.inference.service import Service
from loradock.messages.prompts import TokenId


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A text in `prompt`, or a chat in `messages`."""

    messages: Annotated[list[Message], Meta(max_length=MESSAGES_MAX)] = field(default_factory=list)
    tools: Json = UNSET
    tool_choice: Json = UNSET
    documents: Json = UNSET
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json = UNSET
    reasoning_effort: str | None = None
    model: str | None = None
    prompt: Annotated[str, Meta(max_length=1_000_000)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Token ids."""

    tokens: Annotated[list[TokenId], Meta(max_length=262_144)]
    model: str | None = None


class Tokenized(Struct, frozen=True):
    """The answer to `POST /tokenize`."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    """The answer to `POST /detokenize`."""

    prompt: str


class Tokens:
    """The endpoints."""

    def __init__(self, service: Service, prompts: ChatPrompts) -> None:
        self._service = service
        self._prompts = prompts

    @post("/tokenize", errors=INFERENCE)
    async def tokenize(self, body: TokenizeRequest) -> Tokenized:
        """Token ids of a text or a chat."""
        tokenizer = self._service.tokenizer
        adapter = await self._service.models.find(body.model)
        if (body.prompt is None) == (not body.messages):
            raise HttpError(400, "send either 'prompt' or 'messages'", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            [tokens] = await self._service.tokens_of([body.prompt], special=special)
        else:
            refuse_images(body.messages)
            files = await self._service.files_of(adapter)
            rendered = await self._prompts.prompt_of(body, files)
            assert isinstance(rendered.prompt, tuple)  # noqa: S101 - a chat without images
            tokens = list(rendered.prompt)
        texts = None
        if body.return_token_strs:
            token_texts = partial(tokenizer.token_texts, tokens)
            texts = await self._service.workers.run(len(tokens), token_texts)
        return Tokenized(len(tokens), self._service.context, tokens, texts)

    @post("/detokenize", errors=INFERENCE)
    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        """Text of token ids."""
        await self._service.models.find(body.model)
        decode = partial(self._service.tokenizer.decode, body.tokens)
        return Detokenized(await self._service.workers.run(len(body.tokens), decode))


class TokenizerInfo:
    """The endpoint about the tokenizer's settings, as vLLM shows them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @get("/tokenizer_info", errors=(400,))
    async def info(self) -> dict[str, Any]:
        """Tokenizer."""
        config = {
            name: _shown(value)
            for name, value in self._service.tokenizer.config.items()
            if name not in ("vocab_file", "merges_file")
        }
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        template = self._service.adapter_files.base.sources.default
        if template:
            config["chat_template"] = template
        return config


def _shown(value: Any) -> Any:
    """Return a setting in which special tokens are texts."""
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("content"), str):
        return value["content"]
    return {name: _shown(one) for name, one in value.items()}
