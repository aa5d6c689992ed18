"""The model that adapters are matched with, and the paths that they may have for its modules.

A path is renamed by the caller's function first. If the model has the result, the path means that
module. If not, it means a module only if equivalences lead to exactly one. Similar names are never
searched for.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from loradock.engine.adapters.saved_tokenizer import BaseTokenizer
from loradock.engine.config import AdapterBounds, LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layout import ModuleShape
from loradock.engine.models.library.names import PreTrainedModel

Modules = Mapping[str, ModuleShape]
"""The module-slices of a model that can be adapted, by full path."""


class BaseWeights(NamedTuple):
    """A linear base layer's weight `[out, in]` and bias `[out]`, None if it has none.

    Of a norm the weight is `[features]`.
    """

    weight: Tensor
    bias: Tensor | None


ReadBase = Callable[[str], BaseWeights | None]
"""Returns the base weights of a module; None if they can't be read."""


class BaseParameter(NamedTuple):
    """A parameter of the base model, or the rows of it that this process has.

    `values`: whole rows, from `first_row` of the whole parameter on. `shape`: of all of it.
    """

    values: Tensor
    shape: tuple[int, ...]
    first_row: int = 0


Replacements = Mapping[str, str | None]
"""Old parts of paths and new ones; None: tensors with this part are skipped."""


@runtime_checkable
class PathRules(Protocol):
    """Replacements by prefix, substring and suffix, as `WeightsMapper` and vLLM's class have.

    The other rules of `WeightsMapper` are optional, because older classes lack them.
    """

    @property
    def orig_to_new_prefix(self) -> Replacements:
        """Prefixes to replace."""
        ...

    @property
    def orig_to_new_substr(self) -> Replacements:
        """Substrings to replace."""
        ...

    @property
    def orig_to_new_suffix(self) -> Replacements:
        """Suffixes to replace."""
        ...


@dataclass(frozen=True)
class WeightsMapper:
    """Replacements in module paths, applied in the order regex, substring, prefix, suffix.

    A pattern of `orig_to_new_regex` may match anywhere in the path; its replacement may name groups
    (`\\1`). The mapper is the program's own, so its patterns are trusted.
    """

    orig_to_new_substr: Replacements = field(default_factory=dict)
    orig_to_new_prefix: Replacements = field(default_factory=dict)
    orig_to_new_suffix: Replacements = field(default_factory=dict)
    orig_to_new_regex: Mapping[re.Pattern[str], str | None] = field(default_factory=dict)


Rename = Callable[[str], str | None]
"""From a module's path in the checkpoint to its path in the model; None: it is skipped."""


def rename_of(mapper: object) -> Rename | None:
    """Return a mapper as a function; raises `TypeError` for an object that is none."""
    if mapper is None:
        return None
    if isinstance(mapper, Mapping):
        mapper = WeightsMapper(orig_to_new_prefix=dict(mapper))
    if isinstance(mapper, PathRules):
        rules = mapper
        if getattr(rules, "orig_to_new_renaming", None):
            raise TypeError(
                "weights_mapper has orig_to_new_renaming, which is not applied here; write its "
                "rules as orig_to_new_regex, or pass a function of a path"
            )
        return lambda path: _mapped(rules, path)
    if callable(mapper):
        return mapper
    raise TypeError(
        f"weights_mapper is {mapper!r}; a function of a path, a mapping of prefixes or a "
        "WeightsMapper is needed"
    )


def _replace_first(path: str, old: str, new: str) -> str:
    return path.replace(old, new, 1)


_RULES: Final = (
    (
        "orig_to_new_regex",
        lambda path, old: old.search(path),
        lambda path, old, new: old.sub(new, path),
    ),
    ("orig_to_new_substr", str.__contains__, _replace_first),
    ("orig_to_new_prefix", str.startswith, _replace_first),
    ("orig_to_new_suffix", str.endswith, lambda path, old, new: path.removesuffix(old) + new),
)
"""The rules in the order in which they apply: a test of a path, and the new path."""


def _mapped(rules: PathRules, path: str) -> str | None:
    for name, matches, replaced in _RULES:
        for old, new in getattr(rules, name, {}).items():
            if matches(path, old):
                if new is None:
                    return None
                path = replaced(path, old, new)
    return path


TENSORS_PER_MODULE: Final = 8
"""More tensors than an adapter can have for one module or expert: A, B, a magnitude, a bias, and
copies of the base model's parameters."""

OTHER_TENSORS_MAX: Final = 4096
"""The tensors for which a model has no module that are read, so that an error can name them."""

SKIP_PREFIXES: Final = ("mtp.",)
"""Prefixes of layers that a served model does not use: they predict more tokens in training."""


class Equivalence(NamedTuple):
    """Paths that start with `prefix` may mean those with `replacement` in its place."""

    prefix: str
    replacement: str


class ModulePathResolver:
    """Resolves paths of adapters to those of a model.

    `modules`: paths that can be adapted; their parents' paths are known too, because experts are
    named by them. `equivalences`: see `equivalences_of`. `rename` is applied before these, and
    `skip_prefixes` before `rename`.
    """

    def __init__(
        self,
        modules: Iterable[str] = (),
        equivalences: Iterable[Equivalence] = (),
        rename: Rename | None = None,
        skip_prefixes: Iterable[str] = (),
    ) -> None:
        self._known = {
            path[:end]
            for path in modules
            for end in (len(path), *(i for i, letter in enumerate(path) if letter == "."))
        }
        self._equivalences = tuple(equivalences)
        self._rename = rename
        self._skipped = tuple(skip_prefixes)

    def skips(self, path: str) -> bool:
        """Return whether the path starts with one of `skip_prefixes`."""
        return path.startswith(self._skipped)

    def drops(self, source: str) -> bool:
        """Return whether the caller's function maps this module's path to nothing."""
        return self._rename is not None and self._rename(source) is None

    def resolve(self, source: str) -> str:
        """Return the path in this model; the renamed path if the model has no such module.

        Raises `AdapterDoesNotFit` if equivalences lead to several modules.
        """
        return self.locate((self._rename(source) if self._rename else source) or source)

    def locate(self, path: str) -> str:
        """Return the path in this model for one that was renamed already; raises like `resolve`."""
        if path in self._known:
            return path
        others = {
            replacement + path.removeprefix(prefix)
            for prefix, replacement in self._equivalences
            if path.startswith(prefix)
        }
        found = sorted(others & self._known)
        if len(found) > 1:
            raise AdapterDoesNotFit(
                f"{path} may be {' or '.join(found)} of this model; rename it to one of them"
            )
        return found[0] if found else path


def suffixes(names: Iterable[str]) -> set[str]:
    """Return every name, and the part after each of its dots."""
    return {
        name[start:]
        for name in names
        for start in (0, *(i + 1 for i, c in enumerate(name) if c == "."))
    }


def equivalences_of(model: PreTrainedModel) -> tuple[Equivalence, ...]:
    """Return the alternative paths that adapters may have for this model's modules.

    A pooling model: with and without the prefix of its class with a head (`model.`). A multimodal
    model: paths of its text part as in a text model, with and without its prefix; older paths, from
    before the parts had a common prefix; and older paths of image encoders, with one level more.
    Any other model: none, so that paths are exact.
    """
    prefix, text = f"{model.base_model_prefix}.", _path_of_text_part(model)
    found: list[Equivalence] = []
    if text is not None:
        found += [Equivalence(old, f"{text}.") for old in ("language_model.model.", prefix, "")]
        found += [Equivalence("language_model.", ""), Equivalence("", prefix)]
        found += _inner_encoders(model, prefix)
    if model.get_output_embeddings() is None:
        found += [Equivalence(prefix, ""), Equivalence("", prefix)]
    return tuple(dict.fromkeys(found))


def _inner_encoders(model: PreTrainedModel, prefix: str) -> list[Equivalence]:
    encoder = model.get_encoder(modality="image")
    path = next((path for path, module in model.named_modules() if module is encoder), "")
    older = {f"{one}.vision_model." for one in (path, path.removeprefix(prefix)) if one}
    return [Equivalence(old, f"{path}.") for old in sorted(older)]


def _path_of_text_part(model: PreTrainedModel) -> str | None:
    """Return the path of a multimodal model's text model; None for a text model."""
    if model.config.get_text_config(decoder=True) is model.config:
        return None
    decoder = model.get_decoder()
    return next((path for path, module in model.named_modules() if module is decoder), None)


@dataclass(frozen=True)
class AdapterTarget:
    """The model and the engine's limits, against which an adapter is checked.

    `lora_config` has its dtype resolved. `equivalences`: see `equivalences_of`.
    `image_layers`: the paths of tower and connector, wrapped or not. `requires_head`: the model has
    no trained classification head, so an adapter must contain one. `missing_layers`: the paths of
    layers on another rank of a pipeline, whose tensors are skipped. `read_base` returns a linear
    module's base weights. `has_parameter`: whether a parameter's path is, or ends in, a name.
    `unwrapped`: why layers with these paths are not wrapped. `tokenizer`: compared with adapters'
    own; None compares nothing. `token_embedding`: its path. `tied`: the modules that share its
    weight, itself included; none if it is not tied. `base_parameter` returns a module's own weight
    or bias, None if it can't be read. `has_module`: whether a module's path ends in a name.
    """

    modules: Modules
    lora_config: LoRAConfig
    equivalences: tuple[Equivalence, ...] = ()
    image_layers: frozenset[str] = frozenset()
    requires_head: bool = False
    missing_layers: tuple[str, ...] = ()
    read_base: ReadBase = field(default=lambda _: None, compare=False)
    has_parameter: Callable[[str], bool] = field(default=lambda _: True, compare=False)
    unwrapped: Mapping[str, str] = field(default_factory=dict)
    tokenizer: BaseTokenizer | None = field(default=None, compare=False)
    token_embedding: str = ""
    tied: frozenset[str] = frozenset()
    base_parameter: Callable[[str, str], BaseParameter | None] = field(
        default=lambda _, __: None, compare=False
    )
    has_module: Callable[[str], bool] = field(default=lambda _: True, compare=False)

    def bounded(self, bounds: AdapterBounds) -> AdapterBounds:
        """Return the bounds for adapters of this model, by the tensors that it could use."""
        if self.missing_layers:
            # Files have tensors for them too.
            return bounds
        experts = map(attrgetter("experts"), self.modules.values())
        places = len(self.image_layers) + sum(experts)
        tensors = TENSORS_PER_MODULE * places + OTHER_TENSORS_MAX
        return replace(bounds, tensors_max=min(bounds.tensors_max, tensors))

    def excludes(self, module: str) -> bool:
        """Return whether a module is not adapted because `enable_tower_connector_lora` is off."""
        return module in self.image_layers and not self.lora_config.enable_tower_connector_lora

    def path_resolver(
        self, rename: Rename | None = None, skip_prefixes: Iterable[str] = SKIP_PREFIXES
    ) -> ModulePathResolver:
        """Return the resolver from paths in adapters to this model's paths."""
        known = (*self.modules, *self.image_layers, *self.tied)
        known += (self.token_embedding,) if self.token_embedding else ()
        skipped = (*skip_prefixes, *(f"{path}." for path in self.missing_layers))
        return ModulePathResolver(known, self.equivalences, rename, skipped)


def target_of(model: object) -> AdapterTarget:
    """Return what adapters of a manager, or of its model, are checked against.

    Raises `TypeError` for an object that is neither.
    """
    if isinstance(model, AdapterTarget):
        return model
    manager = getattr(model, "lora_manager", model)
    target = getattr(manager, "adapter_target", None)
    if not isinstance(target, AdapterTarget):
        raise TypeError(
            f"model is {type(model).__name__}; a manager, the model that it has wrapped, or its "
            "adapter_target is needed"
        )
    return target
