"""What an engine does during a step: an adapter passes its stages, and the step notices nothing."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import get_args

import pytest
import torch
import zmq

from loradock.engine.errors import DeviceOutOfMemory
from loradock.engine.worker.worker import Wakeup, Worker
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import CPU_CACHED, GPU_SLOT, PINNED
from tests.support.engine.arena_examples import ManualCopier
from tests.support.engine.engine_bench import EngineBench, failure
from tests.support.engine.stepped_worker import SteppedWorker, stepped
from tests.support.waiting import HANG_S, wait_until

pytest_plugins = ("tests.support.engine.engine_fixtures",)

FIELDS = {
    cm.CheckAdapter: {"adapter_id": 1, "adapter": "mlp", "path": ""},
    cm.LoadWeights: {"adapter_id": 1, "adapter": "mlp", "path": "", "fingerprint": ""},
    cm.StageWeights: {"adapter_id": 1},
    cm.UnstageWeights: {"adapter_id": 1},
    cm.WriteSlot: {"adapter_id": 1, "slot": 0, "generation": 1},
    cm.ResetSlot: {"slot": 0, "generation": 1},
    cm.PreemptSlot: {"slot": 0, "generation": 1},
    cm.DropWeights: {"adapter_id": 1},
    cm.StartGeneration: {"request_id": "r", "adapter_id": 1, "slot": 0, "generation": 1},
    cm.StartPooling: {
        "request_id": "r",
        "adapter_id": 1,
        "slot": 0,
        "generation": 1,
        "task": "embed",
    },
    cm.StopGeneration: {"target": 1},
}
BESIDE = {cm.CheckAdapter, cm.LoadWeights, cm.StageWeights, cm.UnstageWeights, cm.DropWeights}


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench]) -> EngineBench:
    return make_engine()


class Beside:
    """What a worker does with an engine during a step."""

    def __init__(self, bench: EngineBench) -> None:
        self._bench = bench

    def submit(self, kind: type, **fields: object) -> bool:
        self._bench.op += 1
        return self._bench.engine.submit_beside(kind(op=self._bench.op, **fields))

    def do(self, kind: type, **fields: object) -> rp.Report:
        assert self.submit(kind, **fields)
        return wait_until(self._bench.engine.poll_beside)[0]


def test_commands_of_slots_and_sequences_wait_for_the_end_of_a_step(bench: EngineBench) -> None:
    assert FIELDS.keys() == set(get_args(cm.Operation | cm.StopGeneration))
    beside = Beside(bench)
    assert {kind for kind, fields in FIELDS.items() if beside.submit(kind, **fields)} == BESIDE
    bench.promote(2, "mlp", PINNED)
    assert beside.submit(cm.WriteSlot, adapter_id=2, slot=0, generation=1)


def test_a_write_for_which_others_have_to_move_waits_for_the_end_of_a_step(
    make_engine: Callable[..., EngineBench], bench: EngineBench
) -> None:
    names = ("output", "mlp", "attention")
    sizes = [bench.do(cm.CheckAdapter, adapter_id=1, adapter=name, path="") for name in names]
    _, mlp_bytes, attention_bytes = (checked.blob_bytes for checked in sizes)
    bench = make_engine(device_bytes_max=mlp_bytes + attention_bytes)
    bench.promote(1, "output", GPU_SLOT, slot=0)
    bench.promote(2, "mlp", GPU_SLOT, slot=1)
    bench.promote(3, "attention", PINNED)
    bench.do(cm.ResetSlot, slot=0, generation=1)
    write = {"adapter_id": 3, "slot": 0, "generation": 2}
    assert not Beside(bench).submit(cm.WriteSlot, **write)
    assert isinstance(bench.do(cm.WriteSlot, **write), rp.SlotWritten)


def test_an_adapter_is_written_during_a_step_and_published_after_it(bench: EngineBench) -> None:
    bench.promote(2, "mlp", GPU_SLOT, 1)
    bench.wait(expected := bench.generate(2, 1, 1))
    beside, arena = Beside(bench), bench.engine.residency.arena
    rows, version = arena.directory.host_offsets.clone(), arena.directory.version
    source = FIELDS[cm.CheckAdapter]
    checked = beside.do(cm.CheckAdapter, **source)
    assert isinstance(checked, rp.AdapterChecked)
    loaded = beside.do(cm.LoadWeights, **source, fingerprint=checked.fingerprint)
    staged = beside.do(cm.StageWeights, adapter_id=1)
    written = beside.do(cm.WriteSlot, **FIELDS[cm.WriteSlot])
    kinds = [type(report) for report in (loaded, staged, written)]
    assert kinds == [rp.WeightsLoaded, rp.WeightsStaged, rp.SlotWritten]
    assert torch.equal(arena.directory.host_offsets, rows)
    assert arena.directory.version == version
    assert bench.engine.residency.residents[0] is None
    bench.wait(op := bench.generate(1, 0, 1))
    assert bench.tokens(op) == bench.tokens(expected)
    assert bench.adapters()[1].state == GPU_SLOT
    assert not bench.reports_of(written.op), "each operation ends in one report"


def test_an_inventory_has_what_was_written_during_the_step(bench: EngineBench) -> None:
    bench.promote(1, "mlp", PINNED)
    written = Beside(bench).do(cm.WriteSlot, **FIELDS[cm.WriteSlot])
    bench.poll()
    assert bench.adapters()[1].state == GPU_SLOT
    assert written.op not in bench.engine.inventory().running


def test_a_copy_that_fails_during_a_step_is_reported_once_after_it(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.promote(1, "mlp", PINNED)
    arena = bench.engine.residency.arena
    monkeypatch.setattr(arena, "_copier", copier := ManualCopier())
    before = bench.state()
    assert Beside(bench).submit(cm.WriteSlot, **FIELDS[cm.WriteSlot])
    [copy] = copier.copies
    copy.done = True

    def fail() -> None:
        raise DeviceOutOfMemory("no memory for a copy")

    monkeypatch.setattr(copy, "wait", fail)
    assert not bench.engine.poll_beside()
    bench.poll()
    [report] = bench.reports_of(bench.op)
    failure(report, ErrorCode.DEVICE_OUT_OF_MEMORY, "copy")
    assert bench.state() == before
    arena.check()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedWorker]:
    with stepped(tmp_path_factory.mktemp("served") / "d") as worker, worker.streams():
        yield worker


def test_a_load_is_answered_within_a_step_and_the_first_token_comes_two_steps_later(
    served: SteppedWorker,
) -> None:
    with ThreadPoolExecutor() as pool, served.held_steps(cm.StartGeneration) as start:
        assert served.client.load("caesar").state == CPU_CACHED
        assert served.engine.steps == start
        cold = pool.submit(served.first_token, "caesar")
        assert cold.result() == start + 2


def test_an_adapter_that_needs_the_slot_of_another_one_costs_one_more_step(
    served: SteppedWorker,
) -> None:
    for name in ("devowel", "double", "piglatin"):
        served.client.activate(name)
    served.client.load("reverse")
    with (
        ThreadPoolExecutor() as pool,
        served.held_steps(cm.ResetSlot, cm.StartGeneration) as start,
    ):
        assert pool.submit(served.first_token, "reverse").result() == start + 3


class FailingEngine:
    """An engine that always steps, and fails beside its first step."""

    is_idle, is_copying, running = False, True, ()
    engine_id, last_op = "e" * 32, 0

    def __init__(self) -> None:
        self._failed = Event()

    def submit(self, command: object) -> None:
        raise AssertionError(command)

    def step(self) -> None:
        assert self._failed.wait(HANG_S)

    def poll(self) -> list[rp.Report]:
        return []

    def poll_beside(self) -> list[rp.Report]:
        self._failed.set()
        raise RuntimeError("the device failed")


def test_an_error_beside_a_step_ends_the_worker_after_it() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        worker = Worker(FailingEngine(), socket, Wakeup(), ())  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="the device failed"):
            worker.run()
