"""A process that reads adapters gives the same adapters and errors, and can do nothing else."""

import ctypes
import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from loradock.engine.adapters import LoadedAdapter, read_adapter, sandbox
from loradock.engine.adapters.reader import read_opened
from loradock.engine.adapters.reader_process import (
    ReaderProcess,
    ReadOpened,
    _Answer,
    _Matrix,
    _Module,
)
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import DEFAULT_BOUNDS
from loradock.engine.errors import AdapterDoesNotFit, AdapterUnsound, EngineError
from loradock.engine.layout import TOKENS_SUFFIX, ModuleKind, ModuleShape
from loradock.messages.ids import GPU_SLOT
from tests.support.engine.adapter_examples import CONFIG, LORA_CONFIG, MODULES, Q, tensors, write
from tests.support.engine.engine_bench import EngineBench
from tests.support.waiting import wait_until

pytest_plugins = ("tests.support.engine.engine_fixtures",)

ROWS = "model.embed_tokens"
TOKENS = ModuleShape(
    ROWS + TOKENS_SUFFIX, 16, 16, len(MODULES), kind=ModuleKind.TOKENS, is_optional=True
)
TARGET = AdapterTarget({**MODULES, TOKENS.name: TOKENS}, LORA_CONFIG)


@contextmanager
def reader(read: ReadOpened) -> Iterator[ReaderProcess]:
    process = ReaderProcess(TARGET, read)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def apart() -> Iterator[ReaderProcess]:
    with reader(lambda *one: read_opened(one[0], TARGET, DEFAULT_BOUNDS, *one[1:])) as process:
        yield process


def outcome(path: Path, process: ReaderProcess | None) -> object:
    try:
        found = read_adapter(str(path), [path.parent], TARGET, reader_process=process)
    except EngineError as error:
        return error.code, error.message, error.details
    loras = {
        name: (lora.rank, lora.scaling, lora.lora_a.tolist(), lora.lora_b.tolist())
        for name, lora in found.model.loras.items()
    }
    facts = (found.fingerprint, found.rank, found.host_bytes, found.blob_bytes, found.stamp)
    return facts, loras, found.warnings


NAN = torch.full((4, 16), float("nan"))
FILES = {
    "sound": {},
    "a sound one of another dtype": {
        "weights": {name: one.bfloat16() for name, one in tensors().items()}
    },
    "more trained tokens than its rank": {
        "config": {**CONFIG, "trainable_token_indices": {"embed_tokens": [3, 1, 4, 0, 5]}},
        "weights": {
            **tensors(),
            f"base_model.model.{ROWS}.token_adapter.trainable_tokens_delta": torch.ones(5, 16),
        },
    },
    "no object": {"config": b"[]"},
    "another rank": {"config": dict(CONFIG) | {"r": 3}},
    "not finite": {"weights": tensors(q_A=NAN)},
    "a name too many": {"weights": tensors() | {"x": NAN}},
    "cut off": {"weights": b"\x10"},
}


@pytest.mark.parametrize("name", FILES)
def test_adapters_and_errors_are_those_of_reading_here(
    apart: ReaderProcess, tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "a", **FILES[name])
    assert outcome(path, apart) == outcome(path, None)


def attempts() -> dict[str, Callable[[], object]]:
    libc = ctypes.CDLL(None, use_errno=True)
    engine = os.getpid()

    def execute() -> None:
        os.execv("/bin/true", ["true"])

    def connect() -> None:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    return {
        "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "list": lambda: os.listdir("/"),
        "write": lambda: os.open("/tmp/x", os.O_WRONLY | os.O_CREAT),
        "connect": connect,
        "pair": socket.socketpair,
        "fork": os.fork,
        "execute": execute,
        "kill": lambda: os.kill(engine, 0),
        "limits": lambda: os.setpriority(os.PRIO_PROCESS, 0, 5),
        "memory": lambda: mmap.mmap(-1, 64 << 30),
        "trace": lambda: _checked(libc.ptrace(0, 0, 0, 0)),
    }


def _checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "refused")


BY_LIMITS = {"open", "list", "write", "connect", "pair", "memory"}
"""What the kernel's limits refuse, also to root and where it filters no calls."""


@pytest.mark.parametrize("filters", [True, False])
def test_a_reader_can_reach_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: bool
) -> None:
    tried = attempts()
    if not filters:
        monkeypatch.setattr(sandbox, "_filter_calls", lambda: False)
        tried = {name: tried[name] for name in BY_LIMITS}

    def attack(*_: object) -> LoadedAdapter:
        done = []
        for name, attempt in tried.items():
            try:
                attempt()
                done.append(name)
            except (OSError, MemoryError):
                continue
        raise AdapterDoesNotFit(f"it could {done}")

    with reader(attack) as process, pytest.raises(AdapterDoesNotFit, match=r"it could \[\]"):
        read_adapter(str(write(tmp_path / "a")), [tmp_path], TARGET, reader_process=process)


def test_the_end_of_a_reader_is_one_refused_adapter(tmp_path: Path) -> None:
    class Fatal:
        """The ways in which a reader ends, by the number in the adapter's name."""

        def __call__(self, files: object, request: object, allocate: object) -> LoadedAdapter:
            name = files.weights[0].read(0, 1)  # type: ignore[attr-defined]
            {
                b"0": lambda: os._exit(0),
                b"1": lambda: ctypes.string_at(0),
                b"2": lambda: bytearray(1 << 40),
                b"3": lambda: 1 / 0,
            }[name]()
            raise AssertionError

    with reader(Fatal()) as process:
        for number in range(4):
            path = write(tmp_path / f"a{number}", weights=str(number).encode())
            with pytest.raises(AdapterUnsound, match="ended without an answer"):
                read_adapter(str(path), [tmp_path], TARGET, reader_process=process)


def test_a_ready_reader_that_ends_is_replaced(tmp_path: Path, apart: ReaderProcess) -> None:
    path = write(tmp_path / "a")
    expected = outcome(path, None)
    children = Path(f"/proc/{apart._pid}/task/{apart._pid}/children")
    for _ in range(3):
        ready = children.read_text()
        for child in ready.split():
            os.kill(int(child), signal.SIGKILL)
        wait_until(lambda: set(children.read_text().split()).isdisjoint(ready.split()))  # noqa: B023
        assert outcome(path, apart) == expected


A, B = _Matrix(0, "torch.float32", (4, 16)), _Matrix(256, "torch.float32", (16, 4))
WRONG = {
    "another module": _Module("model.x", 4, 8.0, 2.0, A, B),
    "another shape": _Module(Q, 4, 8.0, 2.0, A, A),
    "outside": _Module(Q, 4, 8.0, 2.0, msgspec.structs.replace(A, start=1 << 40), B),
    "before": _Module(Q, 4, 8.0, 2.0, msgspec.structs.replace(A, start=-64), B),
    "another dtype": _Module(Q, 4, 8.0, 2.0, msgspec.structs.replace(A, dtype="torch.int64"), B),
    "no dtype": _Module(Q, 4, 8.0, 2.0, msgspec.structs.replace(A, dtype="os.system"), B),
    "rank 0": _Module(Q, 0, 8.0, 2.0, msgspec.structs.replace(A, shape=(0, 16)), B),
    "no scaling": _Module(Q, 4, 0.0, 0.0, A, B),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused(apart: ReaderProcess, name: str) -> None:
    raw = msgspec.msgpack.encode(_Answer("f", [WRONG[name]]))
    with pytest.raises(AdapterUnsound, match="answered wrongly"):
        apart._checked(raw, mmap.mmap(-1, 4096), "")


def test_a_damaged_answer_is_refused(apart: ReaderProcess) -> None:
    good = msgspec.msgpack.encode(_Answer("f", [_Module(Q, 4, 8.0, 2.0, A, B)]))
    apart._checked(good, mmap.mmap(-1, 4096), "")
    for at in range(len(good)):
        with pytest.raises(AdapterUnsound):
            apart._checked(good[:at], mmap.mmap(-1, 4096), "")


def test_an_engine_that_reads_apart_serves_the_same(
    make_engine: Callable[..., EngineBench], no_eos: None
) -> None:
    outputs = []
    for isolated in (False, True):
        bench = make_engine(isolate_reading=isolated)
        bench.promote(1, "mlp", GPU_SLOT)
        bench.wait(op := bench.generate(1, 0, 1))
        outputs.append((bench.tokens(op), bench.adapters()))
    assert outputs[0] == outputs[1]
