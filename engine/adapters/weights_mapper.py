"""Mappings from module paths in a checkpoint to those of a model, in the forms that programs have.

A mapper may be a function of a path, a mapping of prefixes, or rules for prefixes, substrings and
suffixes. Without an entry a path stays as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

Replacements = Mapping[str, str | None]
"""Old parts of paths and new ones; None: tensors with this part are skipped."""


@runtime_checkable
class PathRules(Protocol):
    """Replacements by prefix, substring and suffix, as `WeightsMapper` and vLLM's class have."""

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
    """Replacements in module paths, applied in the order substring, prefix, suffix."""

    orig_to_new_substr: Replacements = field(default_factory=dict)
    orig_to_new_prefix: Replacements = field(default_factory=dict)
    orig_to_new_suffix: Replacements = field(default_factory=dict)


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
        return lambda path: _mapped(rules, path)
    if callable(mapper):
        return mapper
    raise TypeError(
        f"weights_mapper is {mapper!r}; a function of a path, a mapping of prefixes or a "
        "WeightsMapper is needed"
    )


def _mapped(rules: PathRules, path: str) -> str | None:
    for old, new in rules.orig_to_new_substr.items():
        if old in path:
            if new is None:
                return None
            path = path.replace(old, new, 1)
    for old, new in rules.orig_to_new_prefix.items():
        if path.startswith(old):
            if new is None:
                return None
            path = path.replace(old, new, 1)
    for old, new in rules.orig_to_new_suffix.items():
        if path.endswith(old):
            if new is None:
                return None
            path = path.removesuffix(old) + new
    return path
