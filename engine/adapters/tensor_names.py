"""The names of tensors in an adapter's weights file, by the rules of PEFT's format.

Every name is either understood completely or reported. Only names with the caller's
`skip_prefixes` are ignored.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from loradock.engine.adapters.target import ModulePathResolver
from loradock.engine.layout import ModuleKind

PREFIX: Final = "base_model.model."
"""The prefix that PEFT writes before every path, and that some tools omit."""

_DEFAULT: Final = re.compile(
    r"(\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save"
    r"|trainable_tokens_delta))\.default(?=\.|\Z)"
)
"""The adapter's name inside of PEFT's model, which its files omit and its loader accepts."""


def path_of(name: str) -> str:
    """Return a tensor's path in the adapted model, without prefix and adapter name."""
    return _DEFAULT.sub(r"\1", name.removeprefix(PREFIX))


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

_SAVED: Final = re.compile(r"(.+?)(\.modules_to_save)?\.(weight|bias)\Z")
_TOKENS: Final = re.compile(r"(.+?)(?:\.token_adapter)?\.trainable_tokens_delta\Z")
_COPY: Final = re.compile(
    r"(.+?)((?:\.(?:base_layer|original_module|token_adapter))*)\.(weight|bias)\Z"
)
"""Names of base weights in PEFT's model, whose wrappers have them under other names."""
_UNSERVED: Final = {
    ".lora_magnitude_vector.weight": "use_dora is off in the config",
    ".lora_magnitude_vector": "use_dora is off in the config",
    ".lora_B.bias": "lora_bias is off in the config",
    ".trainable_tokens_delta": "trainable_token_indices is off in the config",
    ".bias": "bias is 'none' in the config",
}


@dataclass
class PairNames:
    """The names of one module's A and B; `source` is the module's path in the checkpoint.

    For a replaced module `a` is the weight and `b` the bias, for trained tokens `a` their rows.
    """

    source: str
    kind: ModuleKind = ModuleKind.LINEAR
    a: str | None = None
    b: str | None = None


class CopiedParameter(NamedTuple):
    """A parameter of the base model: its module's path, and "weight" or "bias"."""

    source: str
    field: str


class WeightNames(NamedTuple):
    """A file's names by module path in the model.

    `pairs`: of single modules. `experts`: tensors of fused experts, by the path before `.lora_`;
    config and shapes determine their meaning, never the name alone. `copies`: the base model's
    parameters that tensors are copies of, by the tensors' names. `tokens`: of trained token rows.
    `same`: second tensors for one weight, with the first one's name; their values must be equal.
    `unexpected`: other names, each with its reason.
    """

    pairs: dict[str, PairNames]
    experts: dict[str, PairNames]
    copies: dict[str, CopiedParameter]
    tokens: dict[str, PairNames]
    same: dict[str, str]
    unexpected: list[str]


class _ParsedName(NamedTuple):
    """A tensor's module path in the checkpoint, its kind, and the matrix: "a" or "b"."""

    source: str
    kind: ModuleKind
    matrix: str


def sort_names(
    names: Iterable[str], resolver: ModulePathResolver, saved_modules: Collection[str] = ()
) -> WeightNames:
    """Sort tensor names by module; one of a pair's two names may be missing.

    `saved_modules`: names of modules that the adapter replaces whole. Raises `AdapterDoesNotFit`
    for a path that `resolver` finds ambiguous.
    """
    found = WeightNames({}, {}, {}, {}, {}, [])
    for name in names:
        path = path_of(name)
        parsed = _parsed(path, saved_modules)
        if resolver.skips(path) or (parsed is not None and resolver.drops(parsed.source)):
            continue
        if parsed is None:
            found.unexpected.append(name + _reason(path))
        elif isinstance(parsed, CopiedParameter):
            found.copies[name] = parsed._replace(source=resolver.resolve(parsed.source))
        else:
            _add_name(found, name, parsed, resolver)
    return found


def _as_matrix(path: str) -> _ParsedName | None:
    for form in NAME_PATTERNS:
        match = form.pattern.match(path)
        if match is not None:
            return _ParsedName(match[1], form.kind, match[2].lower())
    return None


def _parsed(path: str, saved_modules: Collection[str]) -> _ParsedName | CopiedParameter | None:
    parsed = _as_matrix(path) or _as_tokens(path)
    if parsed is not None:
        return parsed
    copied = _COPY.match(path)
    if copied is None:
        return None
    found = CopiedParameter(copied[1], copied[3])
    return found if copied[2] else _as_replaced(path, saved_modules) or _as_embedding(found)


def _as_tokens(path: str) -> _ParsedName | None:
    match = _TOKENS.match(path)
    return None if match is None else _ParsedName(match[1], ModuleKind.TOKENS, "a")


def _as_replaced(path: str, saved_modules: Collection[str]) -> _ParsedName | None:
    match = _SAVED.match(path)
    if match is None:
        return None
    is_saved = match[2] or any(is_within(match[1], name) for name in saved_modules)
    matrix = "a" if match[3] == "weight" else "b"
    return _ParsedName(match[1], ModuleKind.HEAD, matrix) if is_saved else None


def _as_embedding(found: CopiedParameter) -> CopiedParameter | None:
    """Return the parameter if PEFT also copies it under its own name."""
    return found if found.source.rpartition(".")[2] in EMBEDDING_NAMES else None


def is_within(module: str, saved: str) -> bool:
    """Return whether PEFT saves a module, or what it is inside of, under this end of a path."""
    ends = [index for index, letter in enumerate(module) if letter == "."]
    return any(module[:end].endswith(saved) for end in (*ends, len(module)))


def _add_name(
    found: WeightNames, name: str, parsed: _ParsedName, resolver: ModulePathResolver
) -> None:
    is_fused = parsed.kind is ModuleKind.EXPERTS
    module, separator, rest = parsed.source.partition(".base_layer" if is_fused else "\0")
    module = resolver.resolve(module) + separator + rest
    by_kind = {ModuleKind.EXPERTS: found.experts, ModuleKind.TOKENS: found.tokens}
    pairs = by_kind.get(parsed.kind, found.pairs)
    pair = pairs.setdefault(module, PairNames(parsed.source, parsed.kind))
    other = getattr(pair, parsed.matrix)
    if other is not None and pair.kind is parsed.kind is ModuleKind.HEAD:
        found.same[name] = other
    elif other is not None:
        found.unexpected.append(f"{name} (the same as {other})")
    elif pair.kind is not parsed.kind:
        found.unexpected.append(f"{name} (another kind than {pair.a or pair.b})")
    else:
        setattr(pair, parsed.matrix, name)


def _reason(path: str) -> str:
    return next((f" ({why})" for suffix, why in _UNSERVED.items() if path.endswith(suffix)), "")
