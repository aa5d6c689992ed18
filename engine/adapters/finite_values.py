"""Whether every value of an adapter is finite, and stays so in the arena's dtype.

What it is: one pass a tensor, and one rule over the extremes. What it is not: a search for the
place; the tensor is named. One rule: rounding never lets a value pass another, so what holds for a
tensor's smallest and largest value after scaling and rounding holds for all between.
"""

from collections.abc import Mapping, Sequence

import torch

from engine.adapters.files.problems import Problems
from engine.adapters.files.weights_file import ValueRange
from engine.adapters.pairs import Pair
from engine.errors import NotFinite


def check_values(
    pairs: Sequence[Pair], ranges: Mapping[str, ValueRange], dtype: torch.dtype, problems: Problems
) -> None:
    """Tell every tensor that holds, or in `dtype` would hold, what is not finite."""
    named = [factor for pair in pairs for factor in pair.factors().items()]
    stored = torch.tensor([ranges[name] for name, _ in named], dtype=torch.float64)
    scaling = torch.tensor([scaling for _, scaling in named], dtype=torch.float32)
    kept = (stored.float() * scaling[:, None]).to(dtype)
    for index in (~kept.isfinite().all(1)).nonzero().flatten().tolist():
        name, factor = named[index]
        low, high = ranges[name]
        if stored[index].isfinite().all():
            text = f"{name} runs from {low:g} to {high:g}, times {factor:g} too far for {dtype}"
        else:
            text = f"{name} holds NaN or infinity; every value must be finite"
        problems.add(NotFinite, text)
