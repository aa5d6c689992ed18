"""Decode steps captured as CUDA graphs, one per shape, and replayed for every batch of that shape.

A graph is replayed for a mapping only if the mapping's kernel launches equal the captured ones.
Adapters, ranks, slots and base rows may differ from replay to replay: kernels read them on the
device. With `specialize_active_lora` the number of active adapters, rounded up to a power of two,
is part of the key; without it one graph serves every number.
"""

from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import ReferenceType, ref

import structlog
import torch
from torch import Tensor

from loradock.engine.inference.decoding.host_sync_guard import ForbidHostSync
from loradock.engine.punica.wrapper import LaunchKey, PunicaWrapper

_log = structlog.get_logger()

GRAPHS_MAX: Final = 64
"""The most graphs that are kept."""

DecodeStep = Callable[[], Tensor]
"""Work over tensors of fixed address, into which the caller writes the inputs before each call."""

Shared = TypeVar("Shared")


class StepRunner(Protocol):
    """A way to run steps.

    `failure`: why a step could not be run in this way and was called directly; empty if none was.
    """

    failure: str

    def run(self, step: DecodeStep, shape: Hashable) -> Tensor:
        """Return the result of `step` under the current mapping, valid until the next call.

        Steps of equal shape must do the same to the same tensors.
        """

    def invalidate(self) -> None:
        """Drop anything captured: the tensors of all steps were reallocated."""


class SyncCheckedRunner:
    """Calls every step, and raises `HostSync` for one that could not be captured."""

    failure = ""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, step: DecodeStep, shape: Hashable) -> Tensor:
        """Return the result of `step`."""
        del shape
        with ForbidHostSync(self._device):
            return step()

    def invalidate(self) -> None:
        """Do nothing: nothing is captured."""


class GraphKey(NamedTuple):
    """The properties that a captured step depends on: its shape, and the mapping's launches."""

    shape: Hashable
    launches: LaunchKey


class WeakShared(Generic[Shared]):
    """Returns one object for as long as its callers keep it alive, and then a new one."""

    def __init__(self, make: Callable[[], Shared]) -> None:
        self._make = make
        self._latest: ReferenceType[Shared] | None = None

    def __call__(self) -> Shared:
        """Return the live object, or make one."""
        shared = None if self._latest is None else self._latest()
        if shared is None:
            shared = self._make()
            self._latest = ref(shared)
        return shared


class _Pool:
    """A memory pool of graphs, which lives as long as any of them.

    PyTorch captures nothing more into a pool whose last graph is gone while a tensor is in it.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class _Replay:
    """A captured step: calling it replays the graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor, pool: _Pool) -> None:
        self._graph, self._output, self._pool = graph, output, pool

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._output


class CudaCapture:
    """Captures a step as a CUDA graph; the result replays it.

    All live graphs share one memory pool, so an output is valid until the next replay of any
    graph. Raises `ValueError` for a device that is not CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"graphs can't be captured on {device}; a CUDA device is needed")
        self._pool = WeakShared(_Pool)
        # The same stream for all graphs: libraries keep memory for each stream that they have seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: DecodeStep) -> DecodeStep:
        """Return the step's graph."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        # A failed capture does not restore the current stream; this does.
        try:
            with torch.cuda.stream(self._stream):
                # Kernels are compiled and scratch memory grows before the capture.
                for _ in range(2):
                    step()
                return self._record(step, self._pool())
        finally:
            # Also where that failed: the step is then called directly on the current stream.
            current.wait_stream(self._stream)

    def _record(self, step: DecodeStep, pool: _Pool) -> _Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads allocate page-locked memory meanwhile, which is not part of the graph.
        with torch.cuda.graph(
            graph, pool=pool.handle, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = step()
        return _Replay(graph, output, pool)


class GraphRunner:
    """Runs every step as the graph that `capture` made at the first call with its key.

    The mapping is set on `punica` before each call. At most `graphs_max` graphs are kept; the least
    recently used one is evicted. A step for which `capture` fails is called directly.
    """

    def __init__(
        self,
        punica: PunicaWrapper,
        capture: Callable[[DecodeStep], DecodeStep],
        graphs_max: int = GRAPHS_MAX,
    ) -> None:
        self.failure = ""
        self._punica = punica
        self._capture = capture
        self._graphs_max = graphs_max
        self._captured: dict[GraphKey, DecodeStep | None] = {}

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The keys of all graphs, the most recently used last."""
        return tuple(self._captured)

    def run(self, step: DecodeStep, shape: Hashable) -> Tensor:
        """Replay the graph of this shape and mapping; capture it first where there is none."""
        key = GraphKey(shape, self._punica.launch_key)
        if not key.launches.is_fixed:
            return step()
        if key in self._captured:
            replay = self._captured.pop(key)
        else:
            if len(self._captured) >= self._graphs_max:
                del self._captured[next(iter(self._captured))]
            replay = self._try_to_capture(step, key)
        self._captured[key] = replay
        return step() if replay is None else replay()

    def invalidate(self) -> None:
        """Drop all graphs."""
        self._captured.clear()

    def _try_to_capture(self, step: DecodeStep, key: GraphKey) -> DecodeStep | None:
        try:
            return self._capture(step)
        except RuntimeError as error:
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("a step is not captured", key=key, reason=self.failure)
            return None
