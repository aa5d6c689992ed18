"""The chat templates and generation defaults that are saved beside adapters.

Trainers save them with the tokenizer that they trained with, and an adapter answers as trained only
if it is prompted as in training. They are read when a request first needs them, once per version of
an adapter, from the adapter's directory as this machine sees it.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import structlog
from msgspec import Struct, structs

from loradock.gateway.adapters.models import Models, Version
from loradock.gateway.inference.model_files import (
    GENERATION_CONFIG_FILE,
    NO_TEMPLATES,
    GenerationConfig,
    ModelFiles,
    TemplateSources,
    generation_config,
    template_sources,
)
from loradock.gateway.inference.sampling import SamplingDefaults
from loradock.gateway.inference.templates import AdaptersTemplate, TemplateProcess, Templates
from loradock.gateway.inference.tokenizer import TOKENIZER_CONFIG_FILE, json_object, special_tokens
from loradock.processes.safe_open import NoSuchName, NotAllowed, NotFound, SafeDirectory


class NotReadable(Exception):  # noqa: N818 - what the files are
    """Files that this gateway can't or may not read; the text says why."""


class FileRefused(Exception):  # noqa: N818 - what happens to the file
    """A file that is there, and is not used; the text says why."""


class AdapterDirectory(SafeDirectory):
    """The directory of an adapter, open within a `with` block, for small text files.

    The engine has checked the adapter's own files by its rules. A gateway reads others beside them,
    possibly on another machine, so it checks again that they are below configured roots.
    """

    def read(self, name: str, bytes_max: int) -> str | None:
        """Return the text of a file; None if there is none of this name.

        Raises `NotReadable`, and `FileRefused` for one that is longer than `bytes_max` or no text.
        """
        try:
            with open(self.open(name), "rb") as file:
                data = file.read(bytes_max + 1)
                size_bytes = max(len(data), os.fstat(file.fileno()).st_size)
        except NoSuchName:
            return None
        except (NotAllowed, NotFound, OSError) as error:
            raise NotReadable(f"{name} can't be read: {error}") from error
        if len(data) > bytes_max:
            raise FileRefused(f"{name} has {size_bytes} bytes; at most {bytes_max} are read")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise FileRefused(f"{name} is not UTF-8") from error


TEMPLATE_BYTES_MAX: Final = 256 << 10
"""The longest template of an adapter; the longest known ones have 40 KB."""
CONFIG_BYTES_MAX: Final = 4 << 20
"""The longest JSON file; some tokenizer_config.json list thousands of tokens in 1 MB."""

VERSIONS_MAX: Final = 1024
"""The adapters whose files are kept; the least recently used are read again."""

log = structlog.get_logger("gateway")


class _Saved(Struct, frozen=True):
    """The content of an adapter's directory.

    `problem`: why its chat template, which is there, can't be used. `warnings`: what else is not.
    """

    sources: TemplateSources = NO_TEMPLATES
    special_tokens: dict[str, str] = {}
    generation: GenerationConfig | None = None
    problem: str = ""
    warnings: tuple[str, ...] = ()


class _Kept(NamedTuple):
    version: Version
    files: asyncio.Task[ModelFiles]


class AdapterFiles:
    """The files of the model, with the files of adapters above them.

    `roots`: the directories that adapters are read from. `has_template`: the operator has chosen a
    template for all of them.
    """

    def __init__(
        self, models: Models, base: ModelFiles, roots: Sequence[str], *, has_template: bool
    ) -> None:
        self.base: Final = base
        self.process: Final = TemplateProcess()
        self._models = models
        self._roots = tuple(roots)
        self._has_template = has_template
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        # Many adapters are saved with the same template.
        self._compiled: WeakValueDictionary[object, AdaptersTemplate] = WeakValueDictionary()
        self._has_reported = False

    async def of(self, adapter: str) -> ModelFiles:
        """Return the files for requests of an adapter; raises `LoradockError`."""
        if not self._roots:
            self._report_no_roots(adapter)
            return self.base
        version = await self._models.version_of(adapter)
        kept = self._kept.get(adapter)
        if kept is None or kept.version != version:
            task = asyncio.ensure_future(self._read(adapter, version))
            task.add_done_callback(partial(self._forget_failed, adapter))
            kept = self._kept[adapter] = _Kept(version, task)
            if len(self._kept) > VERSIONS_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(adapter)
        # A request that is abandoned does not end the reading that others wait for.
        return kept.files.result() if kept.files.done() else await asyncio.shield(kept.files)

    def _report_no_roots(self, adapter: str) -> None:
        if not self._has_reported:
            self._has_reported = True
            log.warning(
                "chat templates and generation defaults of adapters are not read, and the model's "
                "are used: start the gateway with --adapter-root",
                adapter=adapter,
            )

    async def _read(self, adapter: str, version: Version) -> ModelFiles:
        saved = await asyncio.to_thread(_read_directory, version.path, self._roots, self.base)
        templates, warnings = self.base.templates, saved.warnings
        if not self._has_template:
            templates = await self._templates_of(adapter, saved)
        if templates.problem:
            warnings = (*warnings, f"chats are refused: {templates.problem}")
        for text in warnings:
            log.warning("files of an adapter are not used", adapter=adapter, reason=text)
        defaults = _defaults_of(saved, self.base)
        return structs.replace(self.base, templates=templates, defaults=defaults)

    async def _templates_of(self, adapter: str, saved: _Saved) -> Templates:
        base = self.base
        own = {} if base.tokenizer is None else base.tokenizer.special_tokens
        tokens = own | saved.special_tokens
        if saved.problem:
            return Templates(problem=f"adapter {adapter!r}: {saved.problem}")
        # The model's own is rendered here, without another process.
        if saved.sources == NO_TEMPLATES or (saved.sources, tokens) == (base.sources, own):
            return base.templates
        try:
            return Templates(
                await self._compile(saved.sources.default, tokens),
                await self._compile(saved.sources.tool_use, tokens),
            )
        except ValueError as error:
            return Templates(problem=f"adapter {adapter!r}: {error}")

    async def _compile(self, source: str, tokens: dict[str, str]) -> AdaptersTemplate | None:
        if not source:
            return None
        key = (source, *sorted(tokens.items()))
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = await self.process.compile(source, tokens)
        return found

    def _forget_failed(self, adapter: str, files: asyncio.Task[ModelFiles]) -> None:
        """Let the next request read again what could not be read for a reason of the system."""
        kept = self._kept.get(adapter)
        if kept is not None and kept.files is files and (files.cancelled() or files.exception()):
            del self._kept[adapter]


def _read_directory(path: str, roots: Sequence[str], base: ModelFiles) -> _Saved:
    """Read an adapter's directory; blocks."""
    try:
        with AdapterDirectory(path, roots) as directory:
            saved = _read_templates(directory)
            return _with_generation_config(directory, base, saved)
    except (NotAllowed, NotFound) as error:
        return _Saved(warnings=(f"the model's chat template and defaults are used: {error}",))


def _read_templates(directory: AdapterDirectory) -> _Saved:
    def read(name: str) -> str | None:
        is_json = name.endswith(".json")
        return directory.read(name, CONFIG_BYTES_MAX if is_json else TEMPLATE_BYTES_MAX)

    try:
        config = json_object(read(TOKENIZER_CONFIG_FILE) or "{}", TOKENIZER_CONFIG_FILE)
        return _Saved(template_sources(read, config), special_tokens(config))
    except NotReadable as error:
        return _Saved(warnings=(f"the model's chat template is used: {error}",))
    except (FileRefused, ValueError) as error:
        return _Saved(problem=str(error))


def _with_generation_config(directory: AdapterDirectory, base: ModelFiles, saved: _Saved) -> _Saved:
    try:
        text = directory.read(GENERATION_CONFIG_FILE, CONFIG_BYTES_MAX)
        if text is None:
            return saved
        return structs.replace(saved, generation=generation_config(text, base.defaults))
    except (NotReadable, FileRefused, ValueError) as error:
        warning = f"the model's generation defaults are used: {error}"
        return structs.replace(saved, warnings=(*saved.warnings, warning))


def _defaults_of(saved: _Saved, base: ModelFiles) -> SamplingDefaults:
    """Return the defaults of an adapter; its end tokens end its outputs besides the model's."""
    defaults, end_tokens = saved.generation or GenerationConfig(base.defaults, ())
    eos = saved.special_tokens.get("eos_token", "")
    tokenizer = base.tokenizer
    if tokenizer is not None and eos and eos != tokenizer.special_tokens.get("eos_token"):
        found = tokenizer.token_id(eos)
        end_tokens = end_tokens if found is None else (*end_tokens, found)
    further = sorted({*end_tokens} - base.end_tokens)
    return structs.replace(defaults, stop_token_ids=tuple(further))
