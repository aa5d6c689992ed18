"""What a gateway reads of the base model's directory: tokenizer, templates, defaults, context."""

from pathlib import Path

import structlog
from msgspec import Struct, structs

from loradock.gateway.adapters.names import context_tokens
from loradock.gateway.inference.prompt_files import (
    GENERATION_CONFIG_FILE,
    NO_TEMPLATES,
    GenerationConfig,
    TemplateSources,
    generation_config,
    template_sources,
)
from loradock.gateway.inference.sampling import SamplingDefaults
from loradock.gateway.inference.templates import OperatorsTemplate, Templates
from loradock.gateway.inference.tokenizer import Tokenizer, read_text
from loradock.gateway.options import AUTO_PARSER

log = structlog.get_logger("gateway")


class ModelFiles(Struct, frozen=True):
    """What a gateway reads of the base model's directory, or with an adapter's files above it.

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
    """Return the files of a model's directory, which may be absent from this machine.

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
