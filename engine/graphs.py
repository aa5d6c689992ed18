"""A step captured as a CUDA graph for each shape of batch, and replayed for every batch of it.

What it is: static inputs, one graph a key, and replay. What it is not: a cache of results, or a
judge of what a step may do; a step that reads the device from the host can't be captured. One rule:
a graph is replayed for a mapping only if its launches are those that the mapping would get.

Adapters, ranks, slots and base rows may differ from replay to replay: kernels read them on the
device. With `specialize_active_lora` the number of active adapters, at powers of two, is part of
the key; without it one graph serves them all.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.punica import LaunchKey, PunicaWrapper


class GraphKey(NamedTuple):
    """What a captured step depends on: its inputs' forms, and the launches over the mapping."""

    inputs: tuple[tuple[torch.Size, torch.dtype], ...]
    launches: LaunchKey


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor


class CapturedStep:
    """`step(*inputs)` by graph; the mapping is set on `punica` before each call.

    The output is the graph's own tensor: it holds until the next call with the same key. At most
    `graphs_max` graphs are captured, and other batches run step by step.
    """

    def __init__(
        self, step: Callable[..., Tensor], punica: PunicaWrapper, graphs_max: int = 64
    ) -> None:
        self._step = step
        self._punica = punica
        self._graphs_max = graphs_max
        self._captured: dict[GraphKey, _Captured] = {}

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """What was captured so far."""
        return tuple(self._captured)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the step; captures it when its key is new.

        inputs: tensors on one CUDA device. Raises ValueError for others.
        """
        for tensor in inputs:
            if tensor.device.type != "cuda":
                raise ValueError(f"an input on {tensor.device}; graphs are CUDA's")
        key = self.key_of(*inputs)
        if key not in self._captured:
            if len(self._captured) >= self._graphs_max:
                return self._step(*inputs)
            self._captured[key] = self._capture(inputs)
        captured = self._captured[key]
        for static, tensor in zip(captured.inputs, inputs, strict=True):
            static.copy_(tensor)
        captured.graph.replay()
        return captured.output

    def key_of(self, *inputs: Tensor) -> GraphKey:
        """The key of a call with these inputs under the mapping that is set."""
        forms = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        return GraphKey(forms, self._punica.launch_key)

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Captured:
        static = tuple(tensor.clone() for tensor in inputs)
        current = torch.cuda.current_stream()
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            # Kernels are compiled and scratch memory grows before anything is recorded.
            for _ in range(2):
                self._step(*static)
        current.wait_stream(warm_up)
        self._punica.grouper.freeze()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._step(*static)
        return _Captured(graph, static, output)
