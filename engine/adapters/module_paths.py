"""Which module of this model a path in an adapter means.

What it is: the one place where a path becomes another: the caller's renaming, then the path itself,
then a short list of equivalences. What it is not: a search for what looks alike. One rule: a path
that the model has means itself; another means a module only by an equivalence that leads to exactly
one, and else nothing.
"""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from transformers import PreTrainedModel

from engine.errors import AdapterDoesNotFit

Rename = Callable[[str], str]
"""From a module's path in the checkpoint to its path in the model."""

SKIP_PREFIXES: Final = ("mtp.",)
"""What a served model has no use for: layers that predict further tokens while training."""


class Equivalence(NamedTuple):
    """Paths that begin with `prefix` may be those that begin with `becomes` instead."""

    prefix: str
    becomes: str


class Naming:
    """A model's paths, and how those of adapters lead to them.

    `modules`: what can be adapted; their parents' paths are known too, because experts are named by
    them. `equivalences`: see `equivalences_of`. `rename` comes first, `skip_prefixes` before all.
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
        """Whether nothing is to be read of what begins so."""
        return path.startswith(self._skipped)

    def resolve(self, source: str) -> str:
        """The path in this model; the renamed path itself where the model has nothing like it.

        Raises `AdapterDoesNotFit` where two equivalences lead to two modules.
        """
        path = self._rename(source) if self._rename else source
        if path in self._known:
            return path
        others = {
            becomes + path.removeprefix(prefix)
            for prefix, becomes in self._equivalences
            if path.startswith(prefix)
        }
        found = sorted(others & self._known)
        if len(found) > 1:
            raise AdapterDoesNotFit(
                f"{source} may be {' or '.join(found)} of this model; rename it to the one it means"
            )
        return found[0] if found else path


def equivalences_of(model: PreTrainedModel) -> tuple[Equivalence, ...]:
    """The other ways in which adapters for this model may name its modules.

    A pooling model: with and without the prefix that its class with a head has (`model.`). A
    multimodal model: its text part as a text model calls itself, with and without its prefix, and
    paths of the time when the parts were not yet under that prefix, and when an encoder of images
    had all of its layers under one more name. Any other model: none, paths are exact.
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
    olds = {f"{one}.vision_model." for one in (path, path.removeprefix(prefix)) if one}
    return [Equivalence(old, f"{path}.") for old in sorted(olds)]


def _path_of_text_part(model: PreTrainedModel) -> str | None:
    """Where a multimodal model has its text model; None for a model that is one."""
    if model.config.get_text_config(decoder=True) is model.config:
        return None
    decoder = model.get_decoder()
    return next((path for path, module in model.named_modules() if module is decoder), None)
