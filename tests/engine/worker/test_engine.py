"""The engine's commands: every operation ends in one report, and a failed one changes nothing."""

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs
from peft import PeftModel
from safetensors.torch import load_file

from engine.adapters import LoadedAdapter
from engine.residency import residency
from engine.worker import engine as engine_module
from engine.worker.engine import EngineCommand
from messages import commands as cm
from messages import reports as rp
from messages.errors import ErrorCode
from messages.ids import CPU_CACHED, GPU_SLOT, PINNED
from tests.support.engine.engine_bench import PROMPT, WAIT_S, EngineBench, failure
from tests.support.engine.engine_examples import ADAPTERS

pytest_plugins = ("tests.support.engine.engine_fixtures",)

NAMES = tuple(ADAPTERS)


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench]) -> EngineBench:
    return make_engine()


def test_a_whole_life_has_one_report_a_step_and_the_inventory_says_where_it_is(
    bench: EngineBench,
) -> None:
    fingerprint = bench.fingerprint("attention")
    checked = bench.reports[-1]
    assert isinstance(checked, rp.AdapterChecked)
    assert checked.rank == 4
    assert bench.held() == {}
    source = {"adapter": "attention", "path": "", "fingerprint": fingerprint}
    slot = {"slot": 3, "generation": 7}
    steps = [
        (cm.LoadWeights, {"adapter_id": 5, **source}, rp.WeightsLoaded, CPU_CACHED),
        (cm.StageWeights, {"adapter_id": 5}, rp.WeightsStaged, PINNED),
        (cm.WriteSlot, {"adapter_id": 5, **slot}, rp.SlotWritten, GPU_SLOT),
        (cm.ResetSlot, slot, rp.SlotReset, PINNED),
        (cm.UnstageWeights, {"adapter_id": 5}, rp.WeightsUnstaged, CPU_CACHED),
        (cm.StageWeights, {"adapter_id": 5}, rp.WeightsStaged, PINNED),
        (cm.WriteSlot, {"adapter_id": 5, "slot": 3, "generation": 9}, rp.SlotWritten, GPU_SLOT),
        (cm.ResetSlot, {"slot": 3, "generation": 9}, rp.SlotReset, PINNED),
        (cm.DropWeights, {"adapter_id": 5}, rp.WeightsDropped, None),
    ]
    for kind, fields, report, state in steps:
        assert type(bench.do(kind, **fields)) is report
        held = bench.held()
        if state is None:
            assert held == {}
            continue
        where = (fields["slot"], fields["generation"]) if state == GPU_SLOT else (-1, 0)
        assert held[5] == rp.InventoryAdapter(
            *(5, "attention", "", fingerprint, 4, state, *where),
            *(checked.host_bytes, checked.blob_bytes),
        )
    assert Counter(report.op for report in bench.reports) == Counter(range(1, bench.op + 1))
    assert bench.engine.inventory().running == ()


def test_the_inventory_says_who_the_engine_is(bench: EngineBench) -> None:
    inventory = bench.engine.inventory()
    assert inventory.engine_id == "e" * 32
    assert inventory.pid > 0
    assert inventory.model
    assert (inventory.slots_max, inventory.device_bytes_max) == (4, 1 << 20)
    assert (inventory.last_op, inventory.running, inventory.adapters) == (0, (), ())


def test_generations_are_pefts_through_all_commands(
    bench: EngineBench, peft_models: dict[str, PeftModel]
) -> None:
    for slot, name in enumerate(NAMES[:4]):
        bench.bring(slot + 1, name, GPU_SLOT, slot)
    ops = {name: bench.generate(slot + 1, slot, 1) for slot, name in enumerate(NAMES[:4])}
    base = bench.generate(0, -1, 0)
    bench.wait(base)
    ids = torch.tensor([PROMPT])
    for name, op in ops.items():
        report = bench.wait(op)
        assert isinstance(report, rp.GenerationEnded)
        expected = peft_models[name].generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        expected = [token for token in expected[0, len(PROMPT) :].tolist() if token != 258]
        assert bench.tokens(op) == expected
        assert report.output_tokens == len(expected)


def test_files_that_are_missing_elsewhere_or_changed_are_refused(
    bench: EngineBench, tmp_path: Path
) -> None:
    mlp = bench.fingerprint("mlp")
    cases = [
        ({"adapter": "nobody", "path": "", "fingerprint": "x"}, ErrorCode.NOT_FOUND, "nobody"),
        (
            {"adapter": "a", "path": str(tmp_path), "fingerprint": "x"},
            ErrorCode.PATH_NOT_ALLOWED,
            "a",
        ),
        ({"adapter": "output", "path": "", "fingerprint": mlp}, ErrorCode.CONFLICT, "replace"),
    ]
    before = bench.state()
    for fields, code, word in cases:
        failure(bench.do(cm.LoadWeights, adapter_id=1, **fields), code, word)
        assert bench.state() == before
    bench.bring(1, "mlp", CPU_CACHED)


def test_slots_are_refused_before_anything_moves(
    bench: EngineBench, make_engine: Callable[..., EngineBench]
) -> None:
    bench.bring(1, "mlp", GPU_SLOT, slot=0)
    bench.bring(2, "attention", PINNED)
    before = bench.state()
    for slot, generation, code in [
        (0, 2, ErrorCode.CONFLICT),
        (4, 1, ErrorCode.NOT_RESIDENT),
        (-1, 1, ErrorCode.NOT_RESIDENT),
        (1, 0, ErrorCode.CONFLICT),
    ]:
        report = bench.do(cm.WriteSlot, adapter_id=2, slot=slot, generation=generation)
        failure(report, code)
        assert bench.state() == before
    for slot, generation in [(0, 2), (1, 1), (4, 1), (-1, 0)]:
        failure(bench.do(cm.ResetSlot, slot=slot, generation=generation), ErrorCode.NOT_RESIDENT)
        assert bench.state() == before
    small = make_engine(device_bytes_max=4096)
    small.bring(1, "everything", PINNED)
    before = small.state()
    report = small.do(cm.WriteSlot, adapter_id=1, slot=0, generation=1)
    failure(report, ErrorCode.DEVICE_OUT_OF_MEMORY)
    assert small.state() == before


def test_a_mapping_is_confirmed_only_as_it_is(bench: EngineBench) -> None:
    bench.bring(1, "mlp", GPU_SLOT, slot=2, generation=3)
    right, stale, empty = cm.SlotRef(2, 3), cm.SlotRef(2, 2), cm.SlotRef(0, 1)
    assert bench.do(cm.SetMapping, active=(right,)) == rp.MappingSet(bench.op)
    assert bench.do(cm.SetMapping, active=()) == rp.MappingSet(bench.op)
    for wrong in (stale, empty):
        failure(bench.do(cm.SetMapping, active=(right, wrong)), ErrorCode.NOT_RESIDENT)


def test_an_operation_is_done_once_and_a_late_one_still(bench: EngineBench) -> None:
    fingerprint = bench.fingerprint("mlp")
    load = cm.LoadWeights(op=50, adapter_id=1, adapter="mlp", path="", fingerprint=fingerprint)
    for _ in range(3):
        bench.engine.submit(load)
    bench.wait(50)
    bench.engine.submit(load)
    late = structs.replace(load, op=49, adapter_id=2)
    bench.engine.submit(late)
    assert bench.engine.last_op == 50
    assert isinstance(bench.wait(49), rp.WeightsLoaded)
    bench.poll()
    assert Counter(report.op for report in bench.reports)[50] == 1
    assert bench.held().keys() == {1, 2}


class Gate:
    """Holds a file job until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._entered, self._opened = threading.Event(), threading.Event()
        self._read = engine_module.read_adapter
        monkeypatch.setattr(engine_module, "read_adapter", self)

    def __call__(self, *arguments: object, **options: object) -> LoadedAdapter:
        self._entered.set()
        assert self._opened.wait(WAIT_S)
        return self._read(*arguments, **options)

    def wait_until_entered(self) -> None:
        assert self._entered.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()


def test_steps_go_on_while_a_load_is_held_up(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"adapter_id": 1, "adapter": "mlp", "path": ""}
    fingerprint = bench.fingerprint("mlp")
    gate = Gate(monkeypatch)
    load = bench.submit(cm.LoadWeights, **fields, fingerprint=fingerprint)
    gate.wait_until_entered()
    op = bench.generate(0, -1, 0)
    assert bench.engine.inventory().running == (load, op)
    assert not bench.engine.is_idle
    while not bench.engine.is_idle:
        bench.engine.step()
        bench.poll()
    assert len(bench.answers(op)) == 1
    assert bench.answers(load) == []
    assert bench.engine.inventory().running == (load,)
    bench.woken.clear()
    gate.open()
    assert bench.woken.wait(WAIT_S)
    bench.poll()
    assert bench.answers(load) == [rp.WeightsLoaded(load)]


def test_nothing_else_is_done_to_an_adapter_that_is_being_read(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = bench.fingerprint("mlp")
    fields = {"adapter_id": 1, "adapter": "mlp", "path": "", "fingerprint": fingerprint}
    gate = Gate(monkeypatch)
    load = bench.submit(cm.LoadWeights, **fields)
    gate.wait_until_entered()
    for kind in (cm.DropWeights, cm.StageWeights, cm.UnstageWeights):
        failure(bench.do(kind, adapter_id=1), ErrorCode.CONFLICT, str(load))
    failure(bench.do(cm.LoadWeights, **fields), ErrorCode.CONFLICT, str(load))
    failure(
        bench.do(cm.WriteSlot, adapter_id=1, slot=0, generation=1), ErrorCode.CONFLICT, str(load)
    )
    gate.open()
    assert bench.wait(load) == rp.WeightsLoaded(load)
    assert isinstance(bench.do(cm.DropWeights, adapter_id=1), rp.WeightsDropped)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("nobody foresaw this"), ErrorCode.ENGINE_GONE),
        (MemoryError("no memory"), ErrorCode.NO_ROOM),
        (torch.OutOfMemoryError("no memory"), ErrorCode.DEVICE_OUT_OF_MEMORY),
    ],
)
def test_whatever_a_file_job_raises_is_a_report(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch, error: Exception, code: ErrorCode
) -> None:
    fingerprint = bench.fingerprint("mlp")

    def raising(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "read_adapter", raising)
        fields = {"adapter_id": 1, "adapter": "mlp", "path": ""}
        failure(bench.do(cm.LoadWeights, **fields, fingerprint=fingerprint), code)
        failure(bench.do(cm.CheckAdapter, **fields), code)
    bench.bring(1, "mlp", CPU_CACHED)
    before = bench.state()
    with monkeypatch.context() as patch:
        patch.setattr(residency, "stage", raising)
        failure(bench.do(cm.StageWeights, adapter_id=1), code)
    assert bench.state() == before
    assert isinstance(bench.do(cm.StageWeights, adapter_id=1), rp.WeightsStaged)


def test_a_slot_that_is_given_to_another_fails_its_old_rows_only(bench: EngineBench) -> None:
    bench.bring(1, "mlp", GPU_SLOT, slot=0)
    bench.bring(2, "attention", PINNED)
    bench.bring(3, "everything", GPU_SLOT, slot=1)
    alone = bench.generate(3, 1, 1)
    bench.wait(alone)
    old, other = bench.generate(1, 0, 1, max_tokens=100), bench.generate(3, 1, 1)
    bench.engine.step()
    assert isinstance(bench.do(cm.ResetSlot, slot=0, generation=1), rp.SlotReset)
    assert isinstance(bench.do(cm.WriteSlot, adapter_id=2, slot=0, generation=2), rp.SlotWritten)
    new = bench.generate(2, 0, 2)
    failure(bench.wait(old), ErrorCode.NOT_RESIDENT, "generation 1 of slot 0")
    assert isinstance(bench.wait(new), rp.GenerationEnded)
    assert isinstance(bench.wait(other), rp.GenerationEnded)
    assert bench.tokens(other) == bench.tokens(alone)
    failure(bench.wait(bench.generate(1, 0, 1)), ErrorCode.NOT_RESIDENT)
    failure(bench.wait(bench.generate(1, 0, 2)), ErrorCode.NOT_RESIDENT)


def test_an_adapter_that_moved_to_another_slot_is_used_there(bench: EngineBench) -> None:
    bench.bring(1, "everything", GPU_SLOT, slot=2)
    before = bench.generate(1, 2, 1)
    bench.wait(before)
    for slot, generation, last in [(0, 1, (2, 1)), (3, 1, (0, 1))]:
        bench.do(cm.ResetSlot, slot=last[0], generation=last[1])
        bench.do(cm.WriteSlot, adapter_id=1, slot=slot, generation=generation)
        after = bench.generate(1, slot, generation)
        bench.wait(after)
        assert bench.tokens(after) == bench.tokens(before)
    base = bench.generate(0, -1, 0)
    bench.wait(base)
    assert bench.tokens(base) != bench.tokens(before)


def test_stopping_and_sending_again_go_to_the_generation(bench: EngineBench) -> None:
    op = bench.generate(0, -1, 0, max_tokens=60)
    bench.engine.step()
    bench.submit(cm.StopGeneration, target=op)
    assert bench.wait(op) == rp.GenerationEnded(op, "cancelled", len(PROMPT), 2)
    bench.engine.submit(cm.ResendTokens(f"r{op - 1}"))
    bench.poll()
    assert bench.reports[-1].offset == 0
    assert len(bench.reports[-1].tokens) == 2
    stop = bench.submit(cm.StopGeneration, target=op)
    bench.poll()
    assert bench.answers(stop) == []
    assert bench.engine.last_op == stop


def test_every_command_of_the_vocabulary_has_a_method(bench: EngineBench) -> None:
    kinds = set(EngineCommand.__args__) - {cm.ResendTokens}
    assert set(bench.engine._handlers) == kinds


def test_pickled_weights_are_read_where_the_engine_was_told_so(
    make_engine: Callable[..., EngineBench], adapter_root: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter_root / "mlp", tmp_path / "mlp")
    weights = tmp_path / "mlp" / "adapter_model.safetensors"
    torch.save(load_file(weights), tmp_path / "mlp" / "adapter_model.bin")
    weights.unlink()
    check = {"adapter_id": 1, "adapter": "mlp", "path": ""}
    refused = make_engine(adapter_roots=(tmp_path,)).do(cm.CheckAdapter, **check)
    failure(refused, ErrorCode.NOT_FOUND, "--allow-pickled-weights")
    told = make_engine(adapter_roots=(tmp_path,), allow_pickled_weights=True)
    assert isinstance(told.do(cm.CheckAdapter, **check), rp.AdapterChecked)
