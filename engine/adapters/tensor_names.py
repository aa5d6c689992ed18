"""The names of tensors in an adapter's weights file, by the rules of PEFT's format.

Every name is either understood completely or reported. Only copies of the base model's own
embeddings, and names with the caller's `skip_prefixes`, are ignored.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.adapters.module_paths import ModulePathResolver
from engine.layout import ModuleKind

PREFIX: Final = "base_model.model."
"""The prefix that PEFT writes before every path, and that some tools omit."""


class NamePattern(NamedTuple):
    """A form of tensor names for a module's A and B; the pattern's groups are module and matrix."""

    kind: ModuleKind
    pattern: re.Pattern[str]


NAME_PATTERNS: Final = (
    NamePattern(
        ModuleKind.EXPERTS,
        re.compile(r"(.+\.experts(?:\.base_layer)*)\.lora_([AB])(?:\.weight)?\Z"),
    ),
    NamePattern(ModuleKind.EMBEDDING, re.compile(r"(.+)\.lora_embedding_([AB])\Z")),
    NamePattern(ModuleKind.LINEAR, re.compile(r"(.+)\.lora_([AB])\.weight\Z")),
)
"""The forms of names; the first that matches applies."""

EMBEDDING_NAMES: Final = (
    *("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out"),
    *("tok_embeddings", "shared", "output_projection", "decoder"),
)
"""Names of embeddings and heads in models; PEFT saves copies of them with adapters."""

_SAVED: Final = re.compile(r"(.+)\.(weight|bias)\Z")
_UNSERVED: Final = {
    ".lora_magnitude_vector.weight": "use_dora is off in the config",
    ".lora_magnitude_vector": "use_dora is off in the config",
    ".lora_B.bias": "lora_bias is off in the config",
    ".token_adapter.trainable_tokens_delta": "trained token embeddings are not served",
    ".bias": "bias is 'none' in the config",
}


@dataclass
class PairNames:
    """The names of one module's A and B; `source` is the module's path in the checkpoint.

    For a saved head `a` is the weight and `b` the bias.
    """

    source: str
    kind: ModuleKind = ModuleKind.LINEAR
    a: str | None = None
    b: str | None = None


class WeightNames(NamedTuple):
    """A file's names by module path in the model.

    `pairs`: of single modules. `experts`: tensors of fused experts, by the path before `.lora_`;
    config and shapes determine their meaning, never the name alone. `copies`: of the base model's
    own embeddings, by module. `unexpected`: other names, each with its reason.
    """

    pairs: dict[str, PairNames]
    experts: dict[str, PairNames]
    copies: dict[str, str]
    unexpected: list[str]


def sort_names(
    names: Iterable[str], resolver: ModulePathResolver, saved_modules: Collection[str] = ()
) -> WeightNames:
    """Sort tensor names by module; one of a pair's two names may be missing.

    `saved_modules`: names of heads whose weights the adapter replaces. Raises `AdapterDoesNotFit`
    for a path that `resolver` finds ambiguous.
    """
    found = WeightNames({}, {}, {}, [])
    for name in names:
        path = name.removeprefix(PREFIX)
        if not resolver.skips(path):
            parsed = _as_matrix(path) or _as_head(path, saved_modules)
            if parsed is not None and resolver.drops(parsed.source):
                continue
            if parsed is not None:
                _add_name(found, name, parsed, resolver)
            elif (copied := _copied(path)) is not None:
                found.copies[resolver.resolve(copied)] = name
            elif not _is_copied_bias(path):
                found.unexpected.append(name + _reason(path))
    return found


class _ParsedName(NamedTuple):
    """A tensor's module path in the checkpoint, its kind, and the matrix: "a" or "b"."""

    source: str
    kind: ModuleKind
    matrix: str


def _as_matrix(path: str) -> _ParsedName | None:
    for form in NAME_PATTERNS:
        match = form.pattern.match(path)
        if match is not None:
            return _ParsedName(match[1], form.kind, match[2].lower())
    return None


def _as_head(path: str, saved_modules: Collection[str]) -> _ParsedName | None:
    match = _SAVED.match(path)
    if match is None or not any(is_within(match[1], name) for name in saved_modules):
        return None
    return _ParsedName(match[1], ModuleKind.HEAD, "a" if match[2] == "weight" else "b")


def is_within(module: str, saved: str) -> bool:
    """Whether a module is, or is inside of, one that PEFT saves under a name: the path's end."""
    ends = [index for index, letter in enumerate(module) if letter == "."]
    return any(module[:end].endswith(saved) for end in (*ends, len(module)))


def _copied(path: str) -> str | None:
    """Return the embedding or head whose weight is saved under `path`; None for other names."""
    module = path.removesuffix(".weight").removesuffix(".base_layer")
    is_copy = path.endswith(".weight") and module.rpartition(".")[2] in EMBEDDING_NAMES
    return module if is_copy else None


def _is_copied_bias(path: str) -> bool:
    """Whether `path` is the base bias of an adapted head; any other bias is a trained one."""
    module = path.removesuffix(".base_layer.bias")
    return module != path and module.rpartition(".")[2] in EMBEDDING_NAMES


def _add_name(
    found: WeightNames, name: str, parsed: _ParsedName, resolver: ModulePathResolver
) -> None:
    is_fused = parsed.kind is ModuleKind.EXPERTS
    module, separator, rest = parsed.source.partition(".base_layer" if is_fused else "\0")
    module = resolver.resolve(module) + separator + rest
    pairs = found.experts if is_fused else found.pairs
    pair = pairs.setdefault(module, PairNames(parsed.source, parsed.kind))
    other = getattr(pair, parsed.matrix)
    if other is not None:
        found.unexpected.append(f"{name} (the same as {other})")
    elif pair.kind is not parsed.kind:
        found.unexpected.append(f"{name} (another kind than {pair.a or pair.b})")
    else:
        setattr(pair, parsed.matrix, name)


def _reason(path: str) -> str:
    return next((f" ({why})" for suffix, why in _UNSERVED.items() if path.endswith(suffix)), "")
