"""Captured decode steps: CUDA graphs over blocks, one for each power of two of rows.

A step can be captured because a kernel reads keys and values through a table of blocks, whatever
the lengths of the sequences are. Its inputs are one small table on the device, and it reads nothing
back to the host.

A graph is replayed for a mapping only if the mapping's kernel launches equal the captured ones.
Adapters, ranks, slots and base rows may differ from replay to replay: kernels read them on the
device. With `specialize_active_lora` the number of active adapters, rounded up to a power of two,
is part of the key; without it one graph serves every number.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import structlog
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loradock.engine.layout import next_power_of_two
from loradock.engine.punica.wrapper import LaunchKey, PunicaWrapper
from loradock.engine.serving.forward import DecodeInputs, PackedModel
from loradock.engine.serving.paged_cache import PackedChunk
from loradock.engine.serving.step_table import StepTable

_log = structlog.get_logger()

GRAPHS_MAX: Final = 64
"""The most graphs that are kept."""

DecodeStep = Callable[[], Tensor]
"""Work over tensors of fixed address, into which the caller writes the inputs before each call."""

Shared = TypeVar("Shared")

_DATA_DEPENDENT: Final = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape),
)
"""PyTorch's tags of operations that the host has to wait for."""

_INDEXED: Final = (torch.ops.aten.index,)
_INDEX_WRITES: Final = (
    *(torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_),
)
"""Operations that the host waits for only if an index is a mask."""

_GROUPED: Final = torch.ops.aten._grouped_mm
_GROUPED_DTYPE: Final = torch.bfloat16
_GROUPED_MAJORS: Final = (9, 10)
"""The dtype and the compute capabilities for which a grouped matmul is one kernel. For all others
PyTorch copies the groups' ends to the host, without a dispatched operation, and loops over them."""

_COPIES: Final = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
"""Operations that may copy from one device to another."""


class HostSync(RuntimeError):  # noqa: N818 - named by what was found, like the engine's errors
    """Work that had to run on the device alone needed the host."""


class ForbidHostSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which operations that read `device`, or copy to or from it, raise `HostSync`.

    Work that passes can be captured and replayed with other data. There is no list of operations:
    PyTorch's own tags specify whether a result depends on data.

    An operation reads the device if its result is a value, or has a shape, that depends on data
    there. With another `device`, data on the host may be read. On a CPU `tolist` and `numpy` read
    memory without a dispatched operation and are not detected.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation, unless it reads or copies."""
        if _depends_on_data(func, args) and self._device in _devices_of(args):
            raise HostSync(f"{func} reads the device")
        result = self._decomposed(func, args, kwargs or {})
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _COPIES and len({*_devices_of(args), *_devices_of([result])}) > 1:
            raise HostSync(f"{func} copies between the device and the host")
        return result

    def _decomposed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a composite operation, each part of which is checked."""
        with self:
            return func.decompose(*args, **kwargs)


def _depends_on_data(func: Any, args: Sequence[Any]) -> bool:
    operation = func.overloadpacket
    if operation is _GROUPED:
        return _loops_on_host(args[0])
    if operation in _INDEXED:
        return any(_is_mask(index) for index in args[1])
    if operation in _INDEX_WRITES:
        # One value is written under a mask without a count of its elements.
        return args[2].numel() > 1 and any(_is_mask(index) for index in args[1])
    return not _DATA_DEPENDENT.isdisjoint(func.tags)


def _loops_on_host(x: Tensor) -> bool:
    """Return whether a grouped matmul over these rows is a loop on the host."""
    if x.device.type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(x.device)
    return x.dtype != _GROUPED_DTYPE or major not in _GROUPED_MAJORS


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _devices_of(values: Sequence[Any]) -> list[str]:
    return [value.device.type for value in values if isinstance(value, Tensor)]


class SyncCheckedRunner:
    """Calls every step, and raises `HostSync` for one that could not be captured."""

    failure = ""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, step: DecodeStep, shape: Hashable) -> Tensor:
        """Return the result of `step` under the current mapping."""
        del shape
        with ForbidHostSync(self._device):
            return step()


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
            # Also if that failed: the step is then called directly on the current stream.
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

    Steps of equal shape must do the same to the same tensors; a result is valid until the next
    call. The mapping is set on `punica` before each call. At most `graphs_max` graphs are kept; the
    least recently used one is evicted. A step for which `capture` fails is called directly, and
    `failure` is the reason.
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
        """Replay the graph of this shape and mapping; capture it first if there is none."""
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

    def _try_to_capture(self, step: DecodeStep, key: GraphKey) -> DecodeStep | None:
        self._punica.has_derived = False
        try:
            replay = self._capture(step)
        except RuntimeError as error:
            self.failure = f"{type(error).__name__}: {error}"
        else:
            if not self._punica.has_derived:
                return replay
            # The tables of their groups are made for one mapping, and no later one overwrites them.
            self.failure = "a layer has rows that are neither the tokens nor the sampled rows"
        _log.warning("a step is not captured", key=key, reason=self.failure)
        return None


StepRunner = SyncCheckedRunner | GraphRunner
"""Runs steps; `failure`: why a step was called directly instead, empty if none was."""


class CapturedDecode:
    """Decode steps over blocks, each of a power of two of rows, run by `runner`.

    Unused rows are dummies: one token of the base model each, which attends only to itself, in a
    block that no sequence has. The memory of a step's inputs is the same for every number of rows,
    so that nothing but this number distinguishes two steps.
    """

    def __init__(self, packed: PackedModel, runner: StepRunner) -> None:
        self.runner: Final = runner
        self._packed = packed
        self.rows_max: Final = next_power_of_two(packed.sequences_max)
        # Each part is padded to two words, and one row takes two as well.
        words = (len(DecodeInputs._fields) + packed.shared_rows) * max(2, self.rows_max)
        self._inputs = StepTable(packed.device, words)

    def padded_rows(self, rows: int) -> int:
        """Return the number of rows, dummies included, that the mapping of a step must have."""
        return next_power_of_two(rows)

    def run(self, chunks: Sequence[PackedChunk], rows: int = 1) -> Tensor:
        """Return the logits after each chunk's one token, [chunks, vocabulary].

        They are valid until the next call. rows: the least of the step, dummies included. Raises
        `ValueError` for more rows than the memory of a step's inputs has, which graphs read.
        """
        padded = self.padded_rows(max(rows, len(chunks)))
        if padded > self.rows_max:
            raise ValueError(f"a decode step of {padded} rows, at most {self.rows_max}")
        numbers = self._packed.decode_numbers(chunks, padded)
        sent = self._inputs.send([torch.tensor(one, dtype=torch.int64) for one in numbers])
        inputs = DecodeInputs(*sent)
        return self.runner.run(lambda: self._packed.decode(inputs), padded)[: len(chunks)]
