"""The longest context of a model, from what its configuration states and how it encodes positions.

A position scheme that extends a trained length by a factor has the product as its context. llama3
states the extended length itself, and a factor that is larger than what it extends.
"""

from collections.abc import Mapping
from typing import Any, Final

_CONTEXT_FIELDS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("context_length", "model_max_length", "max_sequence_length"),
)
"""Where configurations state the longest context, in order of preference."""

_TRAINED_LENGTH: Final = "original_max_position_embeddings"

_EXTENDED: Final = ("yarn", "longrope", "dynamic")
"""The types of rotary embeddings that extend a trained length by their factor."""

CONTEXT_TOKENS_DEFAULT: Final = 8192
"""The longest context of a model that states none, as with ALiBi, unless one is configured."""


def longest_context(config: Any, configured: int) -> int:
    """Return the most tokens of one row; `configured` 0 selects the model's own."""
    text_config = config.get_text_config(decoder=True)
    stated = [getattr(text_config, name, None) for name in _CONTEXT_FIELDS]
    positions = next((one for one in stated if isinstance(one, int) and one > 0), 0)
    extended = [_extended(one, positions) for one in rope_parameters(text_config)]
    limits = (max([positions, *extended]), configured)
    # Position schemes without a table, such as ALiBi or a recurrent state, have no length.
    return min((limit for limit in limits if limit > 0), default=CONTEXT_TOKENS_DEFAULT)


def rope_parameters(text_config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of the rotary embeddings: of all layers, or of each type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    return [parameters, *(one for one in parameters.values() if isinstance(one, Mapping))]


def _extended(rope: Mapping[str, Any], stated: int) -> int:
    factor = rope.get("factor")
    if rope.get("rope_type") not in _EXTENDED or not factor:
        return 0
    # "dynamic" extends the stated length, regardless of a trained one.
    trained = stated if rope["rope_type"] == "dynamic" else rope.get(_TRAINED_LENGTH, stated)
    return int(trained * factor)
