"""The engine process against a bare ROUTER: it attaches, survives crashes, and ends on request."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import zmq

from loradock.controller.server.keys import KeyStore
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages import requests
from loradock.messages.engine_options import EngineOptions, EngineProcess, EngineStart
from loradock.messages.prompts import Sampling
from loradock.messages.wire import COMMANDS, REPORTS, DecodedFrame
from loradock.processes.subprocesses import engine_command
from tests.support.engine.engine_examples import ADAPTERS
from tests.support.simulation.key_examples import engine_keys
from tests.support.waiting import HANG_S, wait_until

pytest_plugins = ("tests.support.engine.engine_fixtures",)

ROOT = Path(__file__).parents[3]
NAMES = tuple(ADAPTERS)


class Controller:
    """The other end: a bound ROUTER that numbers its commands and keeps the frames it receives."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.epoch, self.seq, self.op = epoch, 0, 1000 * epoch
        self.received: list[DecodedFrame[rp.Report]] = []
        self._route = b""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without a ZAP handler every key is admitted; here the engine's own is the only one.
        pair = KeyStore(path.parent).server_pair()
        self._socket.curve_publickey = pair.public.encode()
        self._socket.curve_secretkey = pair.secret.encode()
        self._socket.curve_server = 1
        self._socket.bind(f"ipc://{path}")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send_raw(self, *parts: bytes) -> None:
        self._socket.send_multipart([self._route, *parts])

    def send(self, command: cm.Command) -> None:
        """Send a command with the next number."""
        self.seq += not isinstance(command, cm.ControllerBeat)
        self.send_raw(COMMANDS.encode(command, self.epoch, self.seq))

    def receive(self) -> DecodedFrame[rp.Report]:
        assert self._socket.poll(HANG_S * 1000), "the engine is silent"
        self._route, frame = self._socket.recv_multipart()
        self.received.append(REPORTS.decode(frame))
        return self.received[-1]

    def until(self, is_wanted: Callable[[rp.Report], bool]) -> list[DecodedFrame[rp.Report]]:
        """Receive frames until one is wanted; return them without other beats."""
        frames: list[DecodedFrame[rp.Report]] = []

        def next_is_wanted() -> bool:
            frame = self.receive()
            found = is_wanted(frame.message)
            if found or not isinstance(frame.message, rp.EngineBeat):
                frames.append(frame)
            return found

        wait_until(next_is_wanted, lambda: len(frames), f"after command {self.seq}", pause_s=0)
        return frames

    def attach(self) -> rp.EngineInventory:
        return self.until(is_inventory)[-1].message

    def do(self, kind: type, **fields: object) -> rp.Report:
        """Send a command; return its report."""
        self.op += 1
        op = self.op
        self.send(kind(op=op, **fields))
        return self.until(lambda report: getattr(report, "op", None) == op)[-1].message

    def start_generation(self, request_id: str, max_tokens: int) -> int:
        self.op += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=1.0, seed=1)
        self.send(
            cm.StartGeneration(
                op=self.op, request_id=request_id, adapter_id=0, slot=-1, generation=0,
                prompt="Hi", sampling=sampling,
            )
        )  # fmt: skip
        return self.op


def is_inventory(report: rp.Report) -> bool:
    return isinstance(report, rp.EngineInventory)


def is_beat(report: rp.Report) -> bool:
    return isinstance(report, rp.EngineBeat)


class RunningEngine:
    """One engine process."""

    def __init__(self, directory: Path, model: Path, root: Path, supervised: bool) -> None:
        self.path = directory / "engine"
        self.parent = subprocess.Popen(["sleep", "600"]) if supervised else None
        process = EngineProcess(
            start=EngineStart(
                connect=f"ipc://{self.path}",
                model=str(model),
                adapter_roots=(str(root),),
                max_loras=3,
                device_bytes_max=1_000_000,
                **engine_keys(directory),
            ),
            engine=EngineOptions(device="cpu"),
            parent_pid=self.parent.pid if self.parent else None,
            launch_id="a" * 32,
        )
        self.popen = subprocess.Popen(
            engine_command(process),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def end(self) -> tuple[int, str]:
        """Return the exit status and the text on stderr."""
        stderr = self.popen.communicate(timeout=HANG_S)[1]
        return self.popen.returncode, stderr

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.communicate()
        self.end_parent()

    def end_parent(self) -> None:
        if self.parent is not None:
            self.parent.kill()
            self.parent.wait()


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, model_directory: Path, adapter_root: Path
) -> Iterator[Callable[[bool], RunningEngine]]:
    started = []

    def start(supervised: bool) -> RunningEngine:
        directory = tmp_path_factory.mktemp("worker")
        started.append(RunningEngine(directory, model_directory, adapter_root, supervised))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


@pytest.fixture(scope="module")
def attached(start: Callable[[bool], RunningEngine]) -> Iterator[Controller]:
    """A controller with an attached engine; shared, so each test leaves it synchronised."""
    engine = start(False)
    controller = Controller(engine.path, epoch=1)
    controller.attach()
    yield controller
    controller.close()
    engine.popen.send_signal(signal.SIGTERM)
    status, stderr = engine.end()
    assert status == 0, stderr
    assert "Traceback" not in stderr


def test_the_first_frame_is_the_inventory(attached: Controller) -> None:
    first = attached.received[0]
    assert (first.epoch, first.seq) == (0, 0)
    inventory = first.message
    assert isinstance(inventory, rp.EngineInventory)
    assert inventory.engine_id == "a" * 32
    assert inventory.pid != os.getpid()
    assert (inventory.max_loras, inventory.device_bytes_max) == (3, 1_000_000)
    assert inventory.adapters == ()


def test_the_statistics_follow_each_inventory_before_anything_else(attached: Controller) -> None:
    for _ in range(10):
        attached.send(cm.RequestInventory(0))
        attached.attach()
        start = len(attached.received)
        attached.do(cm.DropWeights, adapter_id=9)
        beat = attached.received[start].message
        assert isinstance(beat, rp.EngineBeat)
        assert beat.statistics.kernels
        assert beat.statistics.arena_bytes_max > 0


def test_a_beat_names_the_requests_that_run(attached: Controller) -> None:
    op = attached.start_generation("named", max_tokens=100)
    attached.until(lambda report: is_beat(report) and report.running == (op,))
    attached.send(cm.StopGeneration(op=(stop := attached.op + 1), target=op))
    attached.op = stop
    attached.until(lambda report: is_beat(report) and not report.running)


def test_commands_are_executed_and_their_reports_are_numbered(attached: Controller) -> None:
    attached.send(cm.RequestInventory(0))
    attached.attach()
    start = len(attached.received)
    seq = attached.received[-1].seq
    source = {"adapter_id": 1, "adapter": "mlp", "path": ""}
    checked = attached.do(cm.CheckAdapter, **source)
    assert isinstance(checked, rp.AdapterChecked)
    for kind, fields in [
        (cm.LoadWeights, source | {"fingerprint": checked.fingerprint}),
        (cm.StageWeights, {"adapter_id": 1}),
        (cm.WriteSlot, {"adapter_id": 1, "slot": 2, "generation": 1}),
    ]:
        assert not isinstance(attached.do(kind, **fields), rp.OperationFailed)
    generated = attached.do(
        cm.StartGeneration, request_id="first", adapter_id=1, slot=2, generation=1,
        prompt="Hello", sampling=Sampling(max_tokens=9),
    )  # fmt: skip
    assert isinstance(generated, rp.GenerationEnded)
    assert isinstance(attached.do(cm.StageWeights, adapter_id=9), rp.OperationFailed)
    frames = attached.received[start:]
    tokens = [f.message for f in frames if isinstance(f.message, requests.TokensStreamed)]
    assert sum(len(report.tokens) for report in tokens) == generated.output_tokens
    numbered = [f.seq for f in frames if hasattr(f.message, "op")]
    assert numbered == list(range(seq + 1, seq + 7))
    assert {frame.epoch for frame in frames} == {1}


def test_malformed_frames_are_ignored(attached: Controller) -> None:
    random = Random(seed := 20)
    print(f"seed {seed}")
    good = COMMANDS.encode(cm.StopGeneration(op=10**6, target=1), 1, 10**6)
    attached.send_raw(b"")
    attached.send_raw(good, good)
    attached.send_raw(REPORTS.encode(rp.EngineBeat("x", 1), 9, 9))
    for _ in range(200):
        attached.send_raw(random.randbytes(random.randrange(40)))
        at = random.randrange(4, len(good))
        attached.send_raw(good[:at])
    assert isinstance(attached.do(cm.DropWeights, adapter_id=9), rp.OperationFailed)


def test_unacknowledged_reports_are_sent_again_in_order_before_the_inventory(
    attached: Controller,
) -> None:
    attached.send(cm.RequestInventory(0))
    last = attached.until(is_inventory)[-1].seq
    attached.send(cm.RequestInventory(last))
    attached.attach()
    for _ in range(4):
        attached.do(cm.DropWeights, adapter_id=9)
    attached.send(cm.ControllerBeat(last + 1))
    for acknowledged in (0, last + 2):
        attached.send(cm.RequestInventory(acknowledged))
        frames = attached.until(is_inventory)
        expected = range(max(last + 1, acknowledged) + 1, last + 5)
        assert [frame.seq for frame in frames[:-1]] == list(expected)
        assert frames[-1].seq == last + 4
        ops = [frame.message.op for frame in frames[:-1]]
        assert ops == sorted(ops)


def test_the_engine_outlives_its_controller(start: Callable[[bool], RunningEngine]) -> None:
    engine = start(True)
    first = Controller(engine.path, epoch=5)
    first.attach()
    first.do(cm.DropWeights, adapter_id=9)
    op = first.start_generation("survivor", max_tokens=120)
    first.until(lambda report: isinstance(report, requests.TokensStreamed))
    # Ctrl-C in the terminal reaches the engine too; its supervisor decides.
    engine.popen.send_signal(signal.SIGINT)
    first.close()
    second = Controller(engine.path, epoch=6)
    while not second.received or isinstance(second.received[-1].message, requests.TokensStreamed):
        second.receive()
    assert second.received[0].epoch == 5
    # Commands that the first controller sent late are ignored by the engine.
    second.send_raw(COMMANDS.encode(cm.DropWeights(op=99_999, adapter_id=1), 6, 1))
    second.seq = 1
    second.until(lambda report: getattr(report, "op", 0) == 99_999)
    second.send_raw(COMMANDS.encode(cm.DropWeights(op=99_998, adapter_id=1), 5, 2))
    second.until(is_beat)
    while op in second_inventory(second).running:
        second.until(is_beat)
    second.send(cm.RequestInventory(0))
    frames = second.until(is_inventory)
    assert [frame.seq for frame in frames] == [1, 2, 3, 3]
    assert {frame.epoch for frame in frames} == {6}
    assert {frame.message.op for frame in frames[:-1]} == {5001, op, 99_999}
    assert frames[-1].message.running == ()
    assert not [f for f in second.received if getattr(f.message, "op", 0) == 99_998]
    second.send(cm.ResendTokens("survivor"))
    again = second.until(lambda report: isinstance(report, requests.TokensStreamed))[-1].message
    (ended,) = [f.message for f in frames if isinstance(f.message, rp.GenerationEnded)]
    assert (again.offset, len(again.tokens)) == (0, ended.output_tokens)
    engine.end_parent()
    status, stderr = engine.end()
    assert status == 0, stderr
    assert "the supervisor is gone" in stderr
    assert stderr.count("former controller") == 1
    second.close()


def second_inventory(controller: Controller) -> rp.EngineInventory:
    controller.send(cm.RequestInventory(0))
    return controller.attach()
