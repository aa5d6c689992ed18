"""Tokenization of a client's prompt, without a chat template.

A prompt that this model can't run is refused with what was found and what is allowed, before it
takes any resource.
"""

from collections.abc import Sequence
from typing import Any, Final

from engine.errors import RequestRefused
from engine.models.served_model import ServedModel
from messages.prompts import IllustratedPrompt, Prompt, TextPrompt

CHARACTERS_PER_TOKEN_MAX: Final = 32
"""A text longer than this many times the context is refused before it is tokenized."""


def prompt_tokens(model: ServedModel, prompt: Prompt, output_tokens: int = 0) -> list[int]:
    """Return the token ids of a prompt that must leave `output_tokens` of the context.

    Raises `RequestRefused`.
    """
    if isinstance(prompt, IllustratedPrompt):
        raise RequestRefused("images in the prompt; this engine accepts text alone")
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise RequestRefused("the model's directory has no tokenizer, so prompts are token ids")
        check_text(model, prompt)
    tokens = _tokenize(model.tokenizer, prompt)
    media = model.media_tokens.intersection(tokens)
    if media:
        raise RequestRefused(
            f"token {min(media)} in the prompt stands for an image, a video or a sound, and a "
            "text alone contains none: send the image too, or leave the token out"
        )
    check_tokens(model, tokens, output_tokens)
    return tokens


def check_text(model: ServedModel, text: str) -> None:
    """Raise `RequestRefused` for a text that is too long to be tokenized."""
    characters_max = model.context_tokens_max * CHARACTERS_PER_TOKEN_MAX
    if len(text) > characters_max:
        raise RequestRefused(
            f"a prompt of {len(text)} characters; at most {characters_max} are read for a context "
            f"of {model.context_tokens_max} tokens"
        )


def check_tokens(model: ServedModel, tokens: Sequence[int], output_tokens: int) -> None:
    """Raise `RequestRefused` for a token unknown to the model, or a context that is too short.

    Tokens that stand for images may be beyond the embedding, because they are not looked up.
    """
    beyond = [token for token in tokens if token >= model.vocab_size]
    unknown = [token for token in beyond if token not in model.media_tokens]
    if unknown:
        raise RequestRefused(
            f"token {unknown[0]} in the prompt; this model's are 0 to {model.vocab_size - 1}"
        )
    _check_length(len(tokens), output_tokens, model.context_tokens_max)


def _check_length(found: int, output_tokens: int, allowed: int) -> None:
    """Refuse a prompt that leaves no space for `output_tokens`, of which 0 need none."""
    if found > allowed or (found == allowed and output_tokens):
        raise RequestRefused(
            f"the prompt ({found} tokens) does not fit the model's context ({allowed} tokens)"
        )
    if found + output_tokens > allowed:
        raise RequestRefused(
            f"the prompt ({found} tokens) and max_tokens ({output_tokens}) do not fit the model's "
            f"context ({allowed} tokens); max_tokens may be up to {allowed - found}"
        )


def _tokenize(tokenizer: Any, prompt: TextPrompt) -> list[int]:
    """Return a prompt's token ids; an empty prompt becomes the beginning-of-text token."""
    tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    if tokens:
        return tokens
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None:
        raise RequestRefused("an empty prompt, and no beginning-of-text token to start from")
    return [first]
