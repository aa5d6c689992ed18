"""Mappings from module paths in a checkpoint to those of a model, in the forms that programs have.

A mapper may be a function of a path, a mapping of prefixes, or rules for patterns, prefixes,
substrings and suffixes. Without an entry a path stays as it is.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

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
"""The rules in the order in which they apply: whether one matches a path, and the new path."""


def _mapped(rules: PathRules, path: str) -> str | None:
    for name, matches, replaced in _RULES:
        for old, new in getattr(rules, name, {}).items():
            if matches(path, old):
                if new is None:
                    return None
                path = replaced(path, old, new)
    return path
