"""Steps captured as CUDA graphs, one for each shape, and replayed for every batch of it.

What it is: one graph a key, and replay. What it is not: a cache of results, or a judge of what a
step may do; a step that reads the device from the host can't be captured. One rule: a graph is
replayed for a mapping only if its launches are those that the mapping would get.

Adapters, ranks, slots and base rows may differ from replay to replay: kernels read them on the
device. With `specialize_active_lora` the number of active adapters, at powers of two, is part of
the key; without it one graph serves them all.
"""

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple, Protocol

import structlog
import torch
from torch import Tensor

from engine.host_reads import NoHostReads
from engine.punica import LaunchKey, PunicaWrapper

_log = structlog.get_logger()

GRAPHS_MAX: Final = 64
"""How many graphs are kept."""

Step = Callable[[], Tensor]
"""Work over tensors of fixed address: whoever gives it writes its inputs there before each call."""


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


class CudaCapture:
    """Captures a step as a CUDA graph; what it gives replays it.

    All graphs take their memory from one pool, one after the other, so what one gave holds until
    the next replay of any. Raises ValueError for a device that is not CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"steps are to be captured on {device}; graphs are CUDA's")
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """The step's graph."""
        current = torch.cuda.current_stream()
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            # Kernels are compiled and scratch memory grows before anything is recorded.
            for _ in range(2):
                step()
        current.wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        # Other threads allocate page-locked memory meanwhile, which is no part of the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


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
