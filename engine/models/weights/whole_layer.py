"""Layers of a split model as they were, for a comparison of both."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import cast

import torch
from torch import Tensor, nn

from loradock.engine.parallel import WHOLE_PARAMETER, ParallelGroup, ParameterShard


class WholeLayer:
    """A layer before it was split, without its weights, and this rank's part of it.

    `shapes`: those of its parameters by name.
    """

    def __init__(
        self,
        layer: nn.Module,
        part: nn.Module,
        shapes: Mapping[str, torch.Size],
        group: ParallelGroup,
    ) -> None:
        self._layer = layer
        self._part = part
        self.shapes = shapes
        self._group = group

    @property
    def shards(self) -> Mapping[str, ParameterShard]:
        """What the part holds of each parameter."""
        return cast(Mapping[str, ParameterShard], self._part.shards)

    def forget(self) -> None:
        """Drop the whole weights."""
        for name in self.shapes:
            self._layer.register_parameter(name, None)

    def gather_on_call(self, device: torch.device) -> ExitStack:
        """Let each call of the layer gather its weights first, and drop them after it.

        Closing the result ends that.
        """
        dtype = next(self._part.parameters()).dtype
        # Models also look at weights' dtypes and devices outside of calls.
        expanded = {
            name: torch.zeros((), dtype=dtype, device=device).expand(shape)
            for name, shape in self.shapes.items()
        }

        def gather(*_: object) -> None:
            for name, empty in expanded.items():
                whole = torch.zeros_like(empty, memory_format=torch.contiguous_format)
                part = getattr(self._part, name)
                shard = self.shards.get(name, WHOLE_PARAMETER)
                self._set(name, self._group.assemble(shard, part, whole))

        def drop(*_: object) -> None:
            for name, empty in expanded.items():
                self._set(name, empty)

        handles = ExitStack()
        handles.callback(self.forget)
        handles.callback(self._layer.register_forward_pre_hook(gather).remove)
        handles.callback(self._layer.register_forward_hook(drop).remove)
        drop()
        return handles

    def _set(self, name: str, weight: Tensor) -> None:
        setattr(self._layer, name, nn.Parameter(weight, requires_grad=False))
