"""Reading in a process without rights: what strangers wrote is parsed where it can reach nothing.

A process that is forked once, with the model's target, keeps one more ready for the next adapter.
That one receives the adapter's open files and a piece of shared memory, gives up its rights
(`sandbox.py`), reads and checks, and ends. Its memory is the model's own, copied on write. Its end
without an answer, for any reason, is one refused adapter. What it answers may be anything, so it
is checked like an adapter that a program passes.

One process is enough: with several ranks, each would have to agree on the same part of a file.
"""

import math
import mmap
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from threading import Lock
from typing import Final, NoReturn

import msgspec
import torch
from msgspec import Struct

from loradock.engine.adapters.directory import AdapterFiles, OpenFile
from loradock.engine.adapters.in_memory import misfits
from loradock.engine.adapters.layer_weights import LoRALayerWeights, highest_rank
from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.adapters.sandbox import give_up_rights
from loradock.engine.adapters.saved_tokenizer import TOKENIZER_FILES
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.adapters.weights import Allocate
from loradock.engine.errors import (
    AdapterUnsound,
    HostOutOfMemory,
    LoradockError,
    bounded_details,
    error_of,
)
from loradock.engine.layout import ALIGNMENT_BYTES, blob_bytes
from loradock.messages.errors import ErrorCode

_FILES_MAX: Final = 200
"""Fewer descriptors than the kernel sends with one message."""

_ANSWER_BYTES_MAX: Final = 64 << 20
"""The most bytes for what is not weights: the answer, and weights that are folded with the base."""

_MEMORY_BYTES: Final = 2 << 30
"""What reading maps at most beyond twice the bytes of the weights."""

_CPU_S_MAX: Final = 120

_TAKEN: Final = b"t"
_ENGINE_ENDED: Final = b"e"
_PLACE: Final = struct.Struct("<QQ")
"""The start and the end of an answer."""


class ReadRequest(Struct, frozen=True, array_like=True):
    """How to read open files; see `read_adapter`.

    `fingerprint`: of files whose values were checked before.
    """

    is_follower: bool = False
    is_3d_lora_weight: bool = False
    fingerprint: str | None = None
    compares_tokenizer: bool = True


class _Task(Struct, frozen=True, array_like=True):
    """A request, and the names of the files that are sent with it: config, index, weights, others.

    `size_bytes`: of the memory for the answer, which is sent before the files.
    """

    request: ReadRequest
    has_index: bool
    weights: int
    names: list[str]
    size_bytes: int


class _Matrix(Struct, frozen=True, array_like=True):
    """A contiguous tensor in the shared memory."""

    start: int
    dtype: str
    shape: tuple[int, ...]


class _Module(Struct, frozen=True, array_like=True):
    name: str
    rank: int
    alpha: float
    scaling: float
    a: _Matrix
    b: _Matrix


class _Answer(Struct, frozen=True, array_like=True):
    """An adapter, or the error with which it is refused."""

    fingerprint: str = ""
    modules: list[_Module] = []
    is_3d_lora_weight: bool = False
    warnings: tuple[str, ...] = ()
    code: ErrorCode | None = None
    message: str = ""
    details: tuple[str, ...] = ()


_TASKS: Final = msgspec.msgpack.Decoder(_Task)
_ANSWERS: Final = msgspec.msgpack.Decoder(_Answer)
_DTYPES: Final = {
    str(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int64, torch.int32),
    )
}

ReadOpened = Callable[[AdapterFiles, ReadRequest, Allocate], LoadedAdapter]
"""Reads and checks open files, with the weights in memory of this allocator."""


class ReaderProcess:
    """Reads adapters, each in a process without rights; used by several threads.

    Made before the process has other threads, and once the model that `read` needs is loaded.
    """

    def __init__(self, target: AdapterTarget, read: ReadOpened) -> None:
        self._target = target
        self._lock = Lock()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if not self._pid:
            self._control.close()
            _serve(control, read)
        control.close()

    def read(self, files: AdapterFiles, request: ReadRequest) -> LoadedAdapter:
        """Read and check open files in another process; raises the errors of reading.

        A process that ends without an answer is an `AdapterUnsound`.
        """
        names = TOKENIZER_FILES if request.compares_tokenizer else ()
        others = [file for name in names if (file := files.other(name)) is not None]
        opened = [*files.opened, *others]
        if len(opened) > _FILES_MAX:
            raise AdapterUnsound(
                f"{len(opened)} files; with --isolate-reading at most {_FILES_MAX} are read"
            )
        size_bytes = 2 * files.weights_bytes + _ANSWER_BYTES_MAX
        task = _Task(
            request,
            files.has_index,
            len(files.weights),
            [file.name for file in opened],
            size_bytes,
        )
        memory = os.memfd_create("adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, size_bytes)
            # A smaller file would end this process when it reads what it has mapped.
            fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
            descriptors = [memory, *(file.descriptor for file in opened)]
            start, end = self._answer(size_bytes, msgspec.msgpack.encode(task), descriptors)
            raw = os.pread(memory, end - start, start)
            shared = mmap.mmap(memory, end, mmap.MAP_SHARED)
            return self._checked(raw, shared, files.stamp)
        finally:
            os.close(memory)

    def close(self) -> None:
        """End the process that forks; those that read end by themselves."""
        self._control.close()
        os.waitpid(self._pid, 0)

    def _answer(self, size_bytes: int, task: bytes, descriptors: Sequence[int]) -> tuple[int, int]:
        """Let another process read; return where in the shared memory its answer is."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs, self._lock:
                try:
                    socket.send_fds(self._control, [_TAKEN], [theirs.fileno()])
                except ConnectionError as error:
                    raise RuntimeError(
                        "the process that starts readers has ended; restart the engine"
                    ) from error
            try:
                socket.send_fds(ours, [task], descriptors)
                found = ours.recv(_PLACE.size)
            except ConnectionError:
                found = b""
        start, end = _PLACE.unpack(found) if len(found) == _PLACE.size else (0, 0)
        if not 0 <= end - start <= _ANSWER_BYTES_MAX or not 0 < end <= size_bytes:
            raise AdapterUnsound(
                "the process that read it ended without an answer: its files exceed the time or "
                "the memory for reading, or are damaged"
            )
        return start, end

    def _checked(self, raw: bytes, memory: mmap.mmap, stamp: str) -> LoadedAdapter:
        """Return the adapter of an answer, which may be anything."""
        try:
            answer = _ANSWERS.decode(raw)
            loras = {one.name: self._weights(one, memory) for one in answer.modules}
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            raise AdapterUnsound(f"the process that read it answered wrongly: {error}") from error
        if answer.code is not None:
            raise error_of(answer.code, answer.message, details=bounded_details(answer.details))
        rank = highest_rank(loras.values())
        model = LoRAModel(1, rank, loras, answer.is_3d_lora_weight)
        ranks = {name: lora.rank for name, lora in loras.items()}
        modules, dtype = list(self._target.modules.values()), self._target.lora_config.dtype
        size_bytes = blob_bytes(ranks, modules, dtype)
        return LoadedAdapter(
            answer.fingerprint[:32],
            model,
            rank,
            model.size_bytes,
            size_bytes,
            f"{stamp} {model.size_bytes} {size_bytes}",
            bounded_details(answer.warnings),
        )

    def _weights(self, module: _Module, memory: mmap.mmap) -> LoRALayerWeights:
        shape = self._target.modules[module.name]
        lora = LoRALayerWeights(
            module.name,
            module.rank,
            module.alpha,
            _tensor(module.a, memory),
            _tensor(module.b, memory),
            module.scaling,
            kind=shape.kind,
        )
        wrong = next(misfits(module.name, lora, shape, self._target.lora_config.max_lora_rank), "")
        if wrong:
            raise ValueError(wrong)
        return lora


def _tensor(matrix: _Matrix, memory: mmap.mmap) -> torch.Tensor:
    """Return a tensor of the shared memory; raises `ValueError` for one that is not in it."""
    count = math.prod(matrix.shape)
    if matrix.start < 0 or min(matrix.shape, default=0) < 1:
        raise ValueError(f"a tensor at {matrix.start} with shape {matrix.shape}")
    flat = torch.frombuffer(memory, dtype=_DTYPES[matrix.dtype], count=count, offset=matrix.start)
    return flat.view(matrix.shape)


def _serve(control: socket.socket, read: ReadOpened) -> NoReturn:
    """Keep one process ready for the next adapter, until the engine has ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        while True:
            is_taken, takes = os.pipe()
            if not os.fork():
                _answer_next(control, takes, read)
            os.close(takes)
            if os.read(is_taken, 1) == _ENGINE_ENDED:
                break
            os.close(is_taken)
    finally:
        os._exit(0)


def _answer_next(control: socket.socket, takes: int, read: ReadOpened) -> NoReturn:
    """Wait for an adapter, write to `takes`, and read the adapter."""
    try:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        os.write(takes, _TAKEN if descriptors else _ENGINE_ENDED)
        if descriptors:
            _answer(socket.socket(fileno=descriptors[0]), read)
    finally:
        # Also after an error: its text may be anything, and the engine finds no answer.
        os._exit(0)


def _answer(engine: socket.socket, read: ReadOpened) -> None:
    """Receive one adapter's files, give up all rights, read, and answer."""
    raw, descriptors, _, _ = socket.recv_fds(engine, 1 << 20, _FILES_MAX + 1)
    _close_others({engine.fileno(), *descriptors})
    task = _TASKS.decode(raw)
    memory = SharedMemory(descriptors[0], task.size_bytes)
    config, *others = map(OpenFile, task.names, descriptors[1:])
    index = others.pop(0) if task.has_index else None
    weights, optional = others[: task.weights], others[task.weights :]
    by_name = {file.name: file for file in optional}
    opened = AdapterFiles(config, weights, index, by_name.get)
    give_up_rights(2 * task.size_bytes + _MEMORY_BYTES, _CPU_S_MAX)
    try:
        answer = memory.answer(read(opened, task.request, memory.allocate))
    except LoradockError as error:
        answer = _Answer(code=error.code, message=error.message, details=error.details)
    engine.send(_PLACE.pack(*memory.store(msgspec.msgpack.encode(answer))))


def _close_others(kept: set[int]) -> None:
    """Close all descriptors but the standard ones and `kept`."""
    ends = [*sorted(kept), os.sysconf("SC_OPEN_MAX")]
    start = 3
    for end in ends:
        os.closerange(start, end)
        start = end + 1


class SharedMemory:
    """The memory of an answer, which the reader fills from its start."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._memory = mmap.mmap(descriptor, size_bytes)
        self._all = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._end = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor; raises `HostOutOfMemory` if it has no room."""
        start, size_bytes = self._end, math.prod(shape) * dtype.itemsize
        end = start + size_bytes
        if end > len(self._all):
            raise HostOutOfMemory(f"{size_bytes} bytes more than twice those of the weights")
        self._end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._all[start:end].view(dtype).view(shape)

    def store(self, raw: bytes) -> tuple[int, int]:
        """Store bytes; return their start and their end."""
        start = self.allocate((len(raw),), torch.uint8).data_ptr() - self._all.data_ptr()
        self._memory[start : start + len(raw)] = raw
        return start, start + len(raw)

    def answer(self, loaded: LoadedAdapter) -> _Answer:
        """Return the answer for an adapter, of which all weights are in this memory then."""
        modules = [
            _Module(
                name,
                lora.rank,
                lora.lora_alpha,
                lora.scaling,
                self._matrix(lora.lora_a),
                self._matrix(lora.lora_b),
            )
            for name, lora in loaded.model.loras.items()
        ]
        is_3d = loaded.model.is_3d_lora_weight
        return _Answer(loaded.fingerprint, modules, is_3d, loaded.warnings)

    def _matrix(self, tensor: torch.Tensor) -> _Matrix:
        start = tensor.data_ptr() - self._all.data_ptr()
        if not tensor.is_contiguous() or not 0 <= start <= len(self._all) - tensor.nbytes:
            tensor = self.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)
            start = tensor.data_ptr() - self._all.data_ptr()
        return _Matrix(start, str(tensor.dtype), tuple(tensor.shape))
