"""What the names in an adapter's weights file mean.

What it is: the naming rules of PEFT's format for linear layers. What it is not: a check of shapes.
One rule: a name is understood wholly, or it is told; none is passed over in silence, except copies
of the base model's own embeddings and what the caller asked to skip.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

Rename = Callable[[str], str]
"""From a module's path in the checkpoint to its path in the model."""

_PREFIX: Final = "base_model.model."
_WEIGHT: Final = re.compile(r"(.+)\.lora_([AB])\.weight\Z")
_BASE_COPIES: Final = tuple(
    f".{module}.{suffix}"
    for module in ("embed_tokens", "lm_head")
    for suffix in ("weight", "base_layer.weight")
)
_UNSERVED: Final = {
    ".lora_embedding_A": "adapted embeddings are not served",
    ".lora_embedding_B": "adapted embeddings are not served",
    ".lora_A": "adapted expert parameters are not served",
    ".lora_B": "adapted expert parameters are not served",
    ".lora_magnitude_vector.weight": "DoRA is not served",
    ".lora_magnitude_vector": "DoRA is not served",
    ".lora_B.bias": "a bias in B is not served",
    ".bias": "trained biases are not served",
}


@dataclass
class PairNames:
    """Which tensors are one module's A and B; `source` is the module's path in the checkpoint."""

    source: str
    a: str | None = None
    b: str | None = None


class WeightNames(NamedTuple):
    """A file's names, sorted by module path in the model; `unexpected` come with their reason."""

    pairs: dict[str, PairNames]
    unexpected: list[str]


def sort_names(
    names: Iterable[str], rename: Rename | None = None, skip_prefixes: Iterable[str] = ()
) -> WeightNames:
    """Each module with the tensor names of its A and its B; one of the two may be missing."""
    skipped = tuple(skip_prefixes)
    found = WeightNames({}, [])
    for name in names:
        path = name.removeprefix(_PREFIX)
        if f".{path}".endswith(_BASE_COPIES) or path.startswith(skipped):
            continue
        match = _WEIGHT.match(path)
        if match is None:
            found.unexpected.append(name + _reason(path))
            continue
        source, matrix = match[1], match[2].lower()
        pair = found.pairs.setdefault(rename(source) if rename else source, PairNames(source))
        if getattr(pair, matrix) is not None:
            found.unexpected.append(f"{name} (the same as {getattr(pair, matrix)})")
        setattr(pair, matrix, name)
    return found


def _reason(path: str) -> str:
    return next((f" ({why})" for suffix, why in _UNSERVED.items() if path.endswith(suffix)), "")
