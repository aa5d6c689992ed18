"""The length of prompts: what a request may contain, and truncation if it asks for that."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal, Protocol

from msgspec import Meta

from loradock.gateway.http.errors import HttpError, prompt_too_long
from loradock.messages.prompts import PROMPT_CHARACTERS_MAX, PROMPT_TOKENS_MAX, Truncation

WHOLE_CONTEXT: Final = -1
"""The value of `truncate_prompt_tokens` for as many tokens as the context has space for."""

TruncatedTokens = Annotated[int, Meta(ge=WHOLE_CONTEXT, le=PROMPT_TOKENS_MAX)]
Side = Literal["left", "right"]


def check_length(prompt: str | Sequence[int], context: int | None, param: str) -> None:
    """Raise `HttpError` for a prompt that is too long to be sent; `context` None: unknown."""
    unit, most = "tokens", PROMPT_TOKENS_MAX
    if isinstance(prompt, str):
        unit, most = "characters", PROMPT_CHARACTERS_MAX
    if len(prompt) > most:
        raise prompt_too_long(f"{len(prompt)} {unit} > {most} maximum", context, param)


def truncation_of(tokens: int | None, side: Side | None, default: Side) -> Truncation | None:
    """Return the truncation that a request asks for; raises `HttpError`.

    `default`: the side that is cut without `truncation_side`.
    """
    if tokens is None:
        return None
    if tokens == 0:
        message = "truncate_prompt_tokens must be -1 (the model's context) or at least 1, got 0"
        raise HttpError(400, message, "truncate_prompt_tokens")
    return Truncation(max(0, tokens), side or default)


class ChatLengths(Protocol):
    """The fields of a chat that bound its prompt."""

    truncate_prompt_tokens: int | None
    truncation_side: Side | None
    max_tokens: int | None
    max_completion_tokens: int | None


def shortened_chat(
    prompt: str | tuple[int, ...], body: ChatLengths, context: int | None
) -> str | tuple[int, ...]:
    """Return the prompt of a chat after the truncation that it asks for; raises `HttpError`."""
    check_length(prompt, context, "messages")
    truncation = truncation_of(body.truncate_prompt_tokens, body.truncation_side, "left")
    if truncation is None:
        return prompt
    if isinstance(prompt, str):
        message = "truncate_prompt_tokens is not served for images; leave it out"
        raise HttpError(400, message, "truncate_prompt_tokens")
    output = body.max_completion_tokens or body.max_tokens or 1
    tokens = list(prompt)
    return tuple(truncated(truncation, tokens, tokens, context and context - output))


def truncated(
    truncation: Truncation,
    tokens: list[int],
    content: list[int],
    space: int | None,
) -> list[int]:
    """Return the tokens of a prompt after truncation; raises `HttpError`.

    `content`: those without special ones. `space`: the tokens of the context that the output does
    not need; None if the context is unknown.
    """
    limit = truncation.tokens or space
    if limit is None:
        message = (
            "truncate_prompt_tokens -1 needs the context of the model, which has none in its "
            "config.json; name a number of tokens, or start the gateway with --max-model-len"
        )
        raise HttpError(400, message, "truncate_prompt_tokens")
    return truncation.cut(tokens, content, max(1, limit))
