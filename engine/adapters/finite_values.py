"""Check that every value of an adapter is finite, also in the arena's dtype.

Scaling and rounding are monotonic, so checking a tensor's smallest and largest value covers all
values between them.
"""

from collections.abc import Mapping, Sequence

import torch

from loradock.engine.adapters.files.problems import Problems
from loradock.engine.adapters.files.weights_file import ValueRange
from loradock.engine.adapters.pairs import TensorPair
from loradock.engine.errors import NotFinite


def check_values(
    pairs: Sequence[TensorPair],
    ranges: Mapping[str, ValueRange],
    dtype: torch.dtype,
    problems: Problems,
) -> None:
    """Add every tensor with a value that is not finite, or would not be in `dtype`."""
    named = [factor for pair in pairs for factor in pair.factors().items()]
    stored = torch.tensor([ranges[name] for name, _ in named], dtype=torch.float64)
    scaling = torch.tensor([scaling for _, scaling in named], dtype=torch.float32)
    kept = (stored.float() * scaling[:, None]).to(dtype)
    for index in (~kept.isfinite().all(1)).nonzero().flatten().tolist():
        name, factor = named[index]
        low, high = ranges[name]
        if stored[index].isfinite().all():
            values = f"{name} has values from {low:g} to {high:g}"
            text = f"{values}; times {factor:g} they are too large for {dtype}"
        else:
            text = f"{name} contains NaN or infinity; every value must be finite"
        problems.add(NotFinite, text)
