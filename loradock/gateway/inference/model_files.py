"""The files that say how a model is prompted and sampled, as `transformers` saves them.

A base model and an adapter have them under the same names, beside the weights. Of a base model, the
tokenizer and the context are read too.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import structlog
from msgspec import Meta, Struct, structs

from loradock.gateway.adapters.models import context_tokens
from loradock.gateway.inference.sampling import SamplingDefaults
from loradock.gateway.inference.templates import OperatorsTemplate, Templates
from loradock.gateway.inference.tokenizer import (
    TOKENIZER_CONFIG_FILE,
    Tokenizer,
    json_object,
    read_text,
)
from loradock.gateway.options import AUTO_PARSER
from loradock.messages.prompts import TokenId

TEMPLATE_FILE: Final = "chat_template.jinja"
TOOL_TEMPLATE_FILE: Final = "additional_chat_templates/tool_use.jinja"
PROCESSOR_TEMPLATE_FILE: Final = "chat_template.json"
"""The file in which processors of images had their template before it had a separate file."""
GENERATION_CONFIG_FILE: Final = "generation_config.json"

log = structlog.get_logger("gateway")

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
    """Return the templates of a list of objects with `name` and `template`, or of an object."""
    entries = [one for one in saved if isinstance(one, dict)] if isinstance(saved, list) else []
    by_name = {entry.get("name"): entry.get("template") for entry in entries}
    named = saved if isinstance(saved, dict) else by_name
    found = [named.get(name) for name in TemplateSources.__struct_fields__]
    return TemplateSources(*[one if isinstance(one, str) else "" for one in found])


class GenerationConfig(NamedTuple):
    """The recommendations of a generation_config.json, and the tokens that end an output."""

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

    `do_sample` is not read, as in vLLM. Raises `ValueError` for values that no request can have.
    """
    found = json_object(text, GENERATION_CONFIG_FILE)
    given = {name: found[name] for name in _RECOMMENDED if found.get(name) is not None}
    try:
        ids = msgspec.convert(given, _EndTokens).eos_token_id
        defaults = msgspec.convert(structs.asdict(below) | given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ValueError(f"{GENERATION_CONFIG_FILE}: {error}") from error
    return GenerationConfig(defaults, (ids,) if isinstance(ids, int) else ids)


class ModelFiles(Struct, frozen=True):
    """The files of the base model's directory that a gateway reads, or an adapter's above them.

    `tokenizer`, `context`: None if unknown; always the base model's, as are `end_tokens`, which end
    an output, and `sources`, the templates that were found. `tool_parser`: the configured format of
    tool calls.
    """

    tokenizer: Tokenizer | None = None
    templates: Templates = Templates()
    context: int | None = None
    defaults: SamplingDefaults = SamplingDefaults()
    end_tokens: frozenset[int] = frozenset()
    sources: TemplateSources = NO_TEMPLATES
    tool_parser: str = AUTO_PARSER


def read_model_files(
    directory: str, template_file: str = "", context: int = 0, tool_parser: str = AUTO_PARSER
) -> ModelFiles:
    """Return the files of a model's directory, which can be absent from this machine.

    Raises `OSError` and `ValueError` for a configured chat template that can't be used.
    """
    if not directory:
        return ModelFiles(context=context or None)
    path = Path(directory)
    tokenizer = None
    try:
        tokenizer = Tokenizer(path)
    except (OSError, ValueError) as error:
        log.warning(
            "chats are not served: no tokenizer.json", directory=directory, error=str(error)
        )
    own = context_tokens(directory)
    defaults, end_tokens = _generation_config_of(path)
    files = ModelFiles(
        tokenizer,
        context=context or own,
        defaults=defaults,
        end_tokens=frozenset(end_tokens),
        tool_parser=tool_parser,
    )
    return files if tokenizer is None else _with_templates(files, tokenizer, path, template_file)


def _with_templates(
    files: ModelFiles, tokenizer: Tokenizer, path: Path, configured: str
) -> ModelFiles:
    if configured:
        return _with_compiled(files, tokenizer, TemplateSources(Path(configured).read_text()))
    try:
        sources = template_sources(lambda name: read_text(path / name), tokenizer.config)
        return _with_compiled(files, tokenizer, sources)
    except (OSError, ValueError) as error:
        log.warning("chats are not served", directory=str(path), error=str(error))
        return structs.replace(files, templates=Templates(problem=f"the model: {error}"))


def _with_compiled(files: ModelFiles, tokenizer: Tokenizer, sources: TemplateSources) -> ModelFiles:
    default, tool_use = [
        OperatorsTemplate(source, tokenizer.special_tokens) if source else None
        for source in (sources.default, sources.tool_use)
    ]
    return structs.replace(files, templates=Templates(default, tool_use), sources=sources)


def _generation_config_of(path: Path) -> GenerationConfig:
    try:
        text = read_text(path / GENERATION_CONFIG_FILE) or "{}"
        return generation_config(text, SamplingDefaults())
    except (OSError, ValueError) as error:
        log.warning("generation defaults are not used", directory=str(path), error=str(error))
        return GenerationConfig(SamplingDefaults(), ())
