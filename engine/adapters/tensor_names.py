"""What the names in an adapter's weights file mean.

What it is: the naming rules of PEFT's format, as one table. What it is not: a check of shapes. One
rule: a name is understood wholly, or it is told; none is passed over in silence, except copies of
the base model's own embeddings and what the caller asked to skip.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.adapters.module_paths import Naming
from engine.layout import ModuleKind

PREFIX: Final = "base_model.model."
"""What PEFT puts before every path, and some tools leave out."""


class Family(NamedTuple):
    """One way to name a module's A and B; the pattern's groups are the module and the matrix."""

    kind: ModuleKind
    pattern: re.Pattern[str]
    told: str


FAMILIES: Final = (
    Family(
        ModuleKind.EXPERTS,
        re.compile(r"(.+\.experts(?:\.base_layer)*)\.lora_([AB])(?:\.weight)?\Z"),
        "`<...>.experts.lora_A.weight`, `<...>.experts.base_layer.lora_A.weight`",
    ),
    Family(
        ModuleKind.EMBEDDING,
        re.compile(r"(.+)\.lora_embedding_([AB])\Z"),
        "`<module>.lora_embedding_A`",
    ),
    Family(
        ModuleKind.LINEAR,
        re.compile(r"(.+)\.lora_([AB])\.weight\Z"),
        "`<module>.lora_A.weight`",
    ),
)
"""The first family that a name is of says what it means."""

EMBEDDING_NAMES: Final = (
    *("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out"),
    *("tok_embeddings", "shared", "output_projection", "decoder"),
)
"""How models call their embeddings and heads; PEFT saves copies of them beside adapters."""

_SAVED: Final = re.compile(r"(.+)\.(weight|bias)\Z")
_UNSERVED: Final = {
    ".lora_magnitude_vector.weight": "DoRA is not served",
    ".lora_magnitude_vector": "DoRA is not served",
    ".lora_B.bias": "a bias in B is not served",
    ".token_adapter.trainable_tokens_delta": "trained token embeddings are not served",
    ".bias": "trained biases are not served",
}


@dataclass
class PairNames:
    """Which tensors are one module's A and B; `source` is the module's path in the checkpoint.

    Of a saved head `a` is the weight and `b` the bias.
    """

    source: str
    kind: ModuleKind = ModuleKind.LINEAR
    a: str | None = None
    b: str | None = None


class WeightNames(NamedTuple):
    """A file's names, sorted by module path in the model.

    `pairs`: what is applied. `experts`: tensors of fused experts, by the path before `.lora_`; the
    config and the shapes decide what they mean, never the name alone. `copies`: of the base
    model's own embeddings, by module. `unexpected`: with their reason.
    """

    pairs: dict[str, PairNames]
    experts: dict[str, PairNames]
    copies: dict[str, str]
    unexpected: list[str]


def sort_names(
    names: Iterable[str], naming: Naming, saved_modules: Collection[str] = ()
) -> WeightNames:
    """Each module with the tensor names of its A and its B; one of the two may be missing.

    `saved_modules` are the names of heads that the adapter brings whole. Raises
    `AdapterDoesNotFit` for a path that `naming` finds ambiguous.
    """
    found = WeightNames({}, {}, {}, [])
    for name in names:
        path = name.removeprefix(PREFIX)
        if not naming.skips(path):
            meant = _as_matrix(path) or _as_head(path, saved_modules)
            if meant is not None:
                _file(found, name, meant, naming)
            elif (copied := _copied(path)) is not None:
                found.copies[naming.resolve(copied)] = name
            elif not _is_copied_bias(path):
                found.unexpected.append(name + _reason(path))
    return found


class _Meaning(NamedTuple):
    source: str
    kind: ModuleKind
    matrix: str


def _as_matrix(path: str) -> _Meaning | None:
    for family in FAMILIES:
        match = family.pattern.match(path)
        if match is not None:
            return _Meaning(match[1], family.kind, match[2].lower())
    return None


def _as_head(path: str, saved_modules: Collection[str]) -> _Meaning | None:
    match = _SAVED.match(path)
    if match is None or not any(part in saved_modules for part in match[1].split(".")):
        return None
    return _Meaning(match[1], ModuleKind.HEAD, "a" if match[2] == "weight" else "b")


def _copied(path: str) -> str | None:
    """The embedding or head whose weight is saved under `path`; None for anything else."""
    module = path.removesuffix(".weight").removesuffix(".base_layer")
    is_copy = path.endswith(".weight") and module.rpartition(".")[2] in EMBEDDING_NAMES
    return module if is_copy else None


def _is_copied_bias(path: str) -> bool:
    """Whether `path` is the base bias of an adapted head; of any other name it is a trained one."""
    module = path.removesuffix(".base_layer.bias")
    return module != path and module.rpartition(".")[2] in EMBEDDING_NAMES


def _file(found: WeightNames, name: str, meant: _Meaning, naming: Naming) -> None:
    is_fused = meant.kind is ModuleKind.EXPERTS
    module, mark, rest = meant.source.partition(".base_layer" if is_fused else "\0")
    module = naming.resolve(module) + mark + rest
    pairs = found.experts if is_fused else found.pairs
    pair = pairs.setdefault(module, PairNames(meant.source, meant.kind))
    other = getattr(pair, meant.matrix)
    if other is not None:
        found.unexpected.append(f"{name} (the same as {other})")
    elif pair.kind is not meant.kind:
        found.unexpected.append(f"{name} (another kind than {pair.a or pair.b})")
    else:
        setattr(pair, meant.matrix, name)


def _reason(path: str) -> str:
    return next((f" ({why})" for suffix, why in _UNSERVED.items() if path.endswith(suffix)), "")
