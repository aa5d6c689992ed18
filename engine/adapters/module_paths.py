"""Resolution of module paths in an adapter to this model's module paths.

A path is renamed by the caller's function first. If the model has the result, the path means that
module. If not, it means a module only if equivalences lead to exactly one. Similar names are never
searched for.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from loradock.engine.adapters.weights_mapper import Rename
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.models.library.names import PreTrainedModel

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
        """Whether the path starts with one of `skip_prefixes`."""
        return path.startswith(self._skipped)

    def drops(self, source: str) -> bool:
        """Whether the caller's function maps this module's path to nothing."""
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
