"""The files that say how a model is prompted and sampled, as `transformers` saves them.

A base model and an adapter have them under the same names, beside the weights.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct, structs

from loradock.gateway.inference.sampling import SamplingDefaults
from loradock.messages.prompts import TokenId

TEMPLATE_FILE: Final = "chat_template.jinja"
TOOL_TEMPLATE_FILE: Final = "additional_chat_templates/tool_use.jinja"
PROCESSOR_TEMPLATE_FILE: Final = "chat_template.json"
"""Where processors of images were saved with their template before it had a file of its own."""
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
GENERATION_CONFIG_FILE: Final = "generation_config.json"

SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")

ReadText = Callable[[str], str | None]
"""Returns the text of a file by its name; None if there is none."""


class TemplateSources(Struct, frozen=True):
    """Chat templates; empty ones are absent. `tool_use` is for chats with tools."""

    default: str = ""
    tool_use: str = ""


NO_TEMPLATES: Final = TemplateSources()


def template_sources(read: ReadText, tokenizer_config: Mapping[str, Any]) -> TemplateSources:
    """Return the templates of a directory; the files precede the entry of the configuration.

    Raises `ValueError` for an entry that has none for chats.
    """
    files = TemplateSources(read(TEMPLATE_FILE) or "", read(TOOL_TEMPLATE_FILE) or "")
    if files != NO_TEMPLATES:
        return files
    name, saved = TOKENIZER_CONFIG_FILE, tokenizer_config.get("chat_template")
    if saved is None:
        name = PROCESSOR_TEMPLATE_FILE
        saved = json_object(read(name) or "{}", name).get("chat_template")
    if saved is None or isinstance(saved, str):
        return TemplateSources(saved or "")
    found = _named(saved)
    if found == NO_TEMPLATES:
        raise ValueError(
            f"chat_template in {name} must be a string or a list with a template named 'default'"
        )
    return found


def _named(saved: object) -> TemplateSources:
    """Return those of a list of objects with `name` and `template`, or of an object of them."""
    entries = [one for one in saved if isinstance(one, dict)] if isinstance(saved, list) else []
    by_name = {entry.get("name"): entry.get("template") for entry in entries}
    named = saved if isinstance(saved, dict) else by_name
    found = [named.get(name) for name in TemplateSources.__struct_fields__]
    return TemplateSources(*[one if isinstance(one, str) else "" for one in found])


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer's configuration names."""
    tokens = {name: _token_text(tokenizer_config.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in tokens.items() if text}


def _token_text(entry: object) -> str:
    """Return the text of a special token, which is saved as a string or as an object."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


class GenerationConfig(NamedTuple):
    """What a generation_config.json recommends, and the tokens that end an output."""

    defaults: SamplingDefaults
    end_tokens: tuple[TokenId, ...]


class _EndTokens(Struct, frozen=True):
    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()


_RECOMMENDED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"),
    "eos_token_id",
)


def generation_config(text: str, below: SamplingDefaults) -> GenerationConfig:
    """Return the content of a generation_config.json; what it leaves out is as in `below`.

    `do_sample` is not read, as in vLLM. Raises `ValueError` for values that no request may have.
    """
    found = json_object(text, GENERATION_CONFIG_FILE)
    given = {name: found[name] for name in _RECOMMENDED if found.get(name) is not None}
    try:
        ids = msgspec.convert(given, _EndTokens).eos_token_id
        defaults = msgspec.convert(structs.asdict(below) | given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ValueError(f"{GENERATION_CONFIG_FILE}: {error}") from error
    return GenerationConfig(defaults, (ids,) if isinstance(ids, int) else ids)


def json_object(text: str, name: str) -> dict[str, Any]:
    """Return the object in a JSON file; raises `ValueError`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be an object, is a {type(found).__name__}")
    return found
