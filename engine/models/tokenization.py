"""A client's prompt as the tokens that a model reads.

What it is: tokenization, and what is refused before it. What it is not: a chat template. One rule:
a prompt that this model can't run is refused with what was found and what is allowed, before it
takes a place anywhere.
"""

from collections.abc import Sequence
from typing import Any, Final

from engine.errors import RequestRefused
from engine.models.served_model import ServedModel
from messages.requests import IllustratedPrompt, Prompt, TextPrompt

CHARACTERS_PER_TOKEN_MAX: Final = 32
"""A text longer than this many times the context is refused before it is tokenized."""


def prompt_tokens(model: ServedModel, prompt: Prompt, wanted: int = 0) -> list[int]:
    """The token ids of a prompt that leaves `wanted` tokens of the context.

    Raises `RequestRefused`.
    """
    if isinstance(prompt, IllustratedPrompt):
        raise RequestRefused("images in the prompt; this engine takes text alone")
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise RequestRefused("the model's directory has no tokenizer, so prompts are token ids")
        check_text(model, prompt)
    tokens = _tokenize(model.tokenizer, prompt)
    media = model.media_tokens.intersection(tokens)
    if media:
        raise RequestRefused(
            f"token {min(media)} in the prompt stands for an image, a video or a sound, and a "
            "text alone brings none: send the image too, or leave the token out"
        )
    check_tokens(model, tokens, wanted)
    return tokens


def check_text(model: ServedModel, text: str) -> None:
    """Raise `RequestRefused` for a text that is too long to be tokenized at all."""
    characters_max = model.context_tokens_max * CHARACTERS_PER_TOKEN_MAX
    if len(text) > characters_max:
        raise RequestRefused(
            f"a prompt of {len(text)} characters; a context of "
            f"{model.context_tokens_max} tokens is read up to {characters_max}"
        )


def check_tokens(model: ServedModel, tokens: Sequence[int], wanted: int) -> None:
    """Raise `RequestRefused` where the model does not know a token, or the context is too short.

    Tokens that stand for images may lie beyond the embedding: nobody looks them up.
    """
    foreign = [token for token in tokens if token >= model.vocab_size]
    foreign = [token for token in foreign if token not in model.media_tokens]
    if foreign:
        raise RequestRefused(
            f"token {foreign[0]} in the prompt; this model's are 0 to {model.vocab_size - 1}"
        )
    _check_length(len(tokens), wanted, model.context_tokens_max)


def _check_length(found: int, wanted: int, allowed: int) -> None:
    if found + wanted > allowed:
        more = f" and max_tokens {wanted} are {found + wanted}" if wanted else ""
        raise RequestRefused(f"a prompt of {found} tokens{more}; the context takes {allowed}")


def _tokenize(tokenizer: Any, prompt: TextPrompt) -> list[int]:
    """Token ids of a prompt; an empty one becomes the model's beginning-of-text token."""
    tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    if tokens:
        return tokens
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None:
        raise RequestRefused("an empty prompt, and no beginning-of-text token to start from")
    return [first]
