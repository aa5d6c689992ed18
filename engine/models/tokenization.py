"""Tokenization of a client's prompt, without a chat template.

A prompt that this model can't run is refused with what was found and what is allowed, before it
takes any resource.
"""

from collections.abc import Sequence
from typing import Any, Final

from loradock.engine.errors import ContextExceeded, Malformed
from loradock.engine.models.served_model import ServedModel
from loradock.messages.prompts import MultimodalPrompt, Prompt, TextPrompt, Truncation

CHARACTERS_PER_TOKEN_MAX: Final = 32
"""A text longer than this many times the context is refused before it is tokenized."""


def prompt_tokens(
    model: ServedModel,
    prompt: Prompt,
    output_tokens: int = 0,
    truncation: Truncation | None = None,
) -> list[int]:
    """Return the token ids of a prompt that must leave `output_tokens` of the context.

    Raises `Malformed`. With a truncation no prompt is too long; a text of more characters than
    `check_text` allows is cut to these first.
    """
    if isinstance(prompt, MultimodalPrompt):
        raise Malformed("images in the prompt; this engine accepts text alone")
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise Malformed("the model's directory has no tokenizer, so prompts are token ids")
        if truncation is not None:
            prompt = _cut_text(model, prompt, truncation)
        check_text(model, prompt)
    tokens = _tokenize(model.tokenizer, prompt)
    if truncation is not None:
        content = tokens
        if isinstance(prompt, str):
            content = model.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        limit = min(truncation.tokens or model.max_model_len, model.max_model_len)
        tokens = truncation.cut(tokens, content, limit - output_tokens)
    media = model.media_tokens.intersection(tokens)
    if media:
        raise Malformed(
            f"token {min(media)} in the prompt stands for an image, a video or a sound, and a "
            "text alone contains none: send the image too, or leave the token out"
        )
    check_tokens(model, tokens, output_tokens)
    return tokens


def check_text(model: ServedModel, text: str) -> None:
    """Raise `ContextExceeded` for a text that is too long to be tokenized."""
    characters_max = model.max_model_len * CHARACTERS_PER_TOKEN_MAX
    if len(text) > characters_max:
        raise ContextExceeded(
            f"{_limit(model.max_model_len)} the prompt is too long: {len(text)} characters "
            f"> {characters_max} that are tokenized for it; shorten the prompt"
        )


def _cut_text(model: ServedModel, text: str, truncation: Truncation) -> str:
    characters_max = model.max_model_len * CHARACTERS_PER_TOKEN_MAX
    return text[-characters_max:] if truncation.side == "left" else text[:characters_max]


def check_tokens(model: ServedModel, tokens: Sequence[int], output_tokens: int) -> None:
    """Raise `Malformed` for a token unknown to the model, `ContextExceeded` for too many.

    Tokens that stand for images can be beyond the embedding, because they are not looked up.
    """
    beyond = [token for token in tokens if token >= model.vocab_size]
    unknown = [token for token in beyond if token not in model.media_tokens]
    if unknown:
        raise Malformed(
            f"token {unknown[0]} in the prompt; this model's are 0 to {model.vocab_size - 1}"
        )
    _check_length(len(tokens), output_tokens, model.max_model_len)


def _check_length(found: int, output_tokens: int, allowed: int) -> None:
    """Refuse a prompt that leaves no space for `output_tokens`, of which 0 need none."""
    if found > allowed or (found == allowed and output_tokens):
        most = allowed - 1 if output_tokens else allowed
        raise ContextExceeded(
            f"{_limit(allowed)} the prompt is too long: {found} tokens > {most} maximum; shorten "
            "the prompt"
        )
    if found + output_tokens > allowed:
        raise ContextExceeded(
            f"{_limit(allowed)} the prompt is too long for max_tokens {output_tokens}: it has "
            f"{found} tokens; shorten it, or lower max_tokens to {allowed - found}"
        )


def _limit(tokens: int) -> str:
    """Return how refusals begin: programs recognize an exceeded context by this text."""
    return f"this model's maximum context length is {tokens} tokens, and"


def _tokenize(tokenizer: Any, prompt: TextPrompt) -> list[int]:
    """Return a prompt's token ids; an empty prompt becomes the beginning-of-text token."""
    tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    if tokens:
        return tokens
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None:
        raise Malformed("an empty prompt, and no beginning-of-text token to start from")
    return [first]
