"""Captured graphs: what ran is recorded, and a replay runs it again on the same memory.

A value that the host computed during the capture is repeated by each replay, as on a device. All
graphs share one pool, so a replay overwrites what the others left there.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.support.device.record import RECORD
from tests.support.device.streams import Stream, capture, current_stream, use_stream

_graphs: "Final[weakref.WeakSet[Graph]]" = weakref.WeakSet()


class Graph:
    """Operations on the tensors in host memory, in their order, and the results that they made."""

    def __init__(self, *_: object, **__: object) -> None:
        self.steps: list[Callable[[], object]] = []
        self.results: list[Tensor] = []
        _graphs.add(self)

    def replay(self) -> None:
        RECORD.replays += 1
        current_stream().launch()
        with _disable_current_modes(), torch.inference_mode():
            for other in _graphs:
                if other is not self:
                    other.poison()
            for step in self.steps:
                step()

    def poison(self) -> None:
        """Overwrite every result with NaN."""
        for result in self.results:
            if result.is_floating_point():
                result.fill_(float("nan"))

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """Record one operation: a replay writes its results to where the capture left them."""
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        self.results += [result for result in results if id(result) not in inputs]

        def again() -> None:
            made = [
                leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)
            ]
            for result, new in zip(results, made, strict=True):
                if result is not new:
                    result.copy_(new)

        self.steps.append(again)


class _Current:
    graph: Graph | None = None


_current: Final = _Current()


def record_step(step: Callable[[], object]) -> None:
    """Add a step that makes no new tensors to the graph that is being captured."""
    if _current.graph is not None:
        _current.graph.steps.append(step)


def record_operation(function: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
    """Add an operation to the graph that is being captured, if there is one."""
    if _current.graph is not None:
        _current.graph.add(function, args, kwargs, out)


def keep_view(view: Any) -> None:
    """Keep a view alive as long as the graph: later steps use its memory."""
    if _current.graph is not None:
        _current.graph.steps.append(lambda: view)


@contextmanager
def capture_graph(
    graph: Graph, pool: object = None, stream: Stream | None = None, **_: object
) -> Iterator[None]:
    """Run the block, and record it; the results of the run are as if it had not been captured."""
    capture.is_active, _current.graph = True, graph
    try:
        with use_stream(stream or Stream()):
            yield
    finally:
        capture.is_active, _current.graph = False, None
