"""Steps captured as CUDA graphs, one for each shape, and replayed for every batch of it.

What it is: one graph a key, and replay. What it is not: a cache of results, or a judge of what a
step may do; a step that reads the device from the host can't be captured. One rule: a graph is
replayed for a mapping only if its launches are those that the mapping would get.

Adapters, ranks, slots and base rows may differ from replay to replay: kernels read them on the
device. With `specialize_active_lora` the number of active adapters, at powers of two, is part of
the key; without it one graph serves them all.
"""

from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import ReferenceType, ref

import structlog
import torch
from torch import Tensor

from engine.inference.host_sync_guard import NoHostReads
from engine.punica.wrapper import LaunchKey, PunicaWrapper

_log = structlog.get_logger()

GRAPHS_MAX: Final = 64
"""How many graphs are kept."""

Step = Callable[[], Tensor]
"""Work over tensors of fixed address: whoever gives it writes its inputs there before each call."""

Held = TypeVar("Held")


class StepRunner(Protocol):
    """A way to run steps.

    `failure`: why some step could not be run so, and was run by itself; empty where none was.
    """

    failure: str

    def run(self, step: Step, shape: Hashable) -> Tensor:
        """What `step` gives, under the mapping that is set; good until the next call.

        Steps of equal shape do the same to the same tensors.
        """

    def forget(self) -> None:
        """Know that the tensors of all steps are others from now on."""


class WatchedSteps:
    """Every step by itself, under watch: one that could not be captured raises `HostRead`."""

    failure = ""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, step: Step, shape: Hashable) -> Tensor:
        """What `step` gives."""
        del shape
        with NoHostReads(self._device):
            return step()

    def forget(self) -> None:
        """Nothing is remembered."""


class GraphKey(NamedTuple):
    """What a captured step depends on: its own shape, and the launches over the mapping."""

    shape: Hashable
    launches: LaunchKey


class WhileHeld(Generic[Held]):
    """Gives one thing for as long as somebody else holds it, and then another."""

    def __init__(self, make: Callable[[], Held]) -> None:
        self._make = make
        self._latest: ReferenceType[Held] | None = None

    def __call__(self) -> Held:
        """The one that is held, or a new one."""
        held = None if self._latest is None else self._latest()
        if held is None:
            held = self._make()
            self._latest = ref(held)
        return held


class _Pool:
    """Memory that graphs share, for as long as one of them lives.

    PyTorch captures nothing more into a pool whose last graph is gone while a tensor lies there.
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
    """Captures a step as a CUDA graph; what it gives replays it.

    All graphs that live together take their memory from one pool, one after the other, so what one
    gave holds until the next replay of any. Raises ValueError for a device that is not CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"steps are to be captured on {device}; graphs are CUDA's")
        self._pool = WhileHeld(_Pool)
        # The same for all graphs: libraries keep memory for each stream that they have seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Step) -> Step:
        """The step's graph."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        # A capture that fails does not go back to the stream before it; this does.
        with torch.cuda.stream(self._stream):
            # Kernels are compiled and scratch memory grows before anything is recorded.
            for _ in range(2):
                step()
            replay = self._record(step, self._pool())
        current.wait_stream(self._stream)
        return replay

    def _record(self, step: Step, pool: _Pool) -> _Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads allocate page-locked memory meanwhile, which is no part of the graph.
        with torch.cuda.graph(
            graph, pool=pool.handle, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = step()
        return _Replay(graph, output, pool)


class CapturedSteps:
    """Every step by what `capture` made of it at the first call with its key.

    The mapping is set on `punica` before each call. At most `graphs_max` are kept: the one that
    was not used for longest makes room. A step that `capture` fails for is run by itself.
    """

    def __init__(
        self,
        punica: PunicaWrapper,
        capture: Callable[[Step], Step],
        graphs_max: int = GRAPHS_MAX,
    ) -> None:
        self.failure = ""
        self._punica = punica
        self._capture = capture
        self._graphs_max = graphs_max
        self._captured: dict[GraphKey, Step | None] = {}

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """What is captured, the last used at the end."""
        return tuple(self._captured)

    def run(self, step: Step, shape: Hashable) -> Tensor:
        """Replay the graph of this shape and mapping; captures it where there is none."""
        key = GraphKey(shape, self._punica.launch_key)
        if key in self._captured:
            replay = self._captured.pop(key)
        else:
            if len(self._captured) >= self._graphs_max:
                del self._captured[next(iter(self._captured))]
            replay = self._try_to_capture(step, key)
        self._captured[key] = replay
        return step() if replay is None else replay()

    def forget(self) -> None:
        """Drop all graphs."""
        self._captured.clear()

    def _try_to_capture(self, step: Step, key: GraphKey) -> Step | None:
        try:
            return self._capture(step)
        except RuntimeError as error:
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("a step is not captured", key=key, reason=self.failure)
            return None
