"""The place of a layer that lives on another rank of a pipeline."""

from collections.abc import Iterator
from typing import Any

from torch import nn


class PPMissingLayer(nn.Module):
    """A layer of another pipeline stage: it returns its first argument, and is never wrapped.

    Adapters' tensors for it and the modules below it are skipped: that stage's rank reads them.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return args[0] if args else next(iter(kwargs.values()))


def missing_layers(model: nn.Module) -> Iterator[str]:
    """Yield the paths of a model's missing layers."""
    for path, module in model.named_modules():
        if isinstance(module, PPMissingLayer):
            yield path
