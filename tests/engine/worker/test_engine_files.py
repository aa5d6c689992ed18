"""The engine's file jobs: steps continue meanwhile, and every error is reported."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loradock.engine.adapters import LoadedAdapter
from loradock.engine.residency import residency
from loradock.engine.worker import engine as engine_module
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import CPU_CACHED, PINNED
from tests.support.engine.engine_bench import EngineBench, failure
from tests.support.waiting import HANG_S

pytest_plugins = ("tests.support.engine.engine_fixtures",)


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench]) -> EngineBench:
    return make_engine()


def test_files_that_are_missing_outside_the_roots_or_changed_are_refused(
    bench: EngineBench, tmp_path: Path
) -> None:
    mlp = bench.fingerprint("mlp")
    cases = [
        ({"adapter": "missing", "path": "", "fingerprint": "x"}, ErrorCode.NOT_FOUND, "missing"),
        (
            {"adapter": "a", "path": str(tmp_path), "fingerprint": "x"},
            ErrorCode.PATH_NOT_ALLOWED,
            "a",
        ),
        ({"adapter": "output", "path": "", "fingerprint": mlp}, ErrorCode.CONFLICT, "replace"),
    ]
    before = bench.state()
    for fields, code, text in cases:
        failure(bench.do(cm.LoadWeights, adapter_id=1, **fields), code, text)
        assert bench.state() == before
    bench.promote(1, "mlp", CPU_CACHED)


class Gate:
    """Blocks file jobs until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._entered, self._opened = threading.Event(), threading.Event()
        self._read = engine_module.read_adapter
        monkeypatch.setattr(engine_module, "read_adapter", self)

    def __call__(self, *arguments: object, **options: object) -> LoadedAdapter:
        self._entered.set()
        assert self._opened.wait(HANG_S)
        return self._read(*arguments, **options)

    def wait_until_entered(self) -> None:
        assert self._entered.wait(HANG_S)

    def open(self) -> None:
        self._opened.set()


def test_steps_continue_while_a_load_is_blocked(
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
    assert len(bench.reports_of(op)) == 1
    assert bench.reports_of(load) == []
    assert bench.engine.inventory().running == (load,)
    bench.woken.clear()
    gate.open()
    assert bench.woken.wait(HANG_S)
    bench.poll()
    assert bench.reports_of(load) == [rp.WeightsLoaded(load)]


def test_an_adapter_that_is_being_read_refuses_other_operations(
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
        (RuntimeError("unforeseen"), ErrorCode.ENGINE_GONE),
        (MemoryError("no memory"), ErrorCode.NO_ROOM),
        (torch.OutOfMemoryError("no memory"), ErrorCode.DEVICE_OUT_OF_MEMORY),
    ],
)
def test_any_error_of_a_file_job_is_reported(
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
    bench.promote(1, "mlp", CPU_CACHED)
    before = bench.state()
    with monkeypatch.context() as patch:
        patch.setattr(residency, "stage", raising)
        failure(bench.do(cm.StageWeights, adapter_id=1), code)
    assert bench.state() == before
    assert isinstance(bench.do(cm.StageWeights, adapter_id=1), rp.WeightsStaged)


def test_layers_without_tensors_are_in_the_report_and_in_the_inventory(
    make_engine: Callable[..., EngineBench], adapter_root: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter_root / "attention", tmp_path / "attention")
    weights = tmp_path / "attention" / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if ".1." not in k}, weights)
    bench = make_engine(adapter_roots=(tmp_path,))
    fields = {"adapter": "attention", "path": ""}
    checked = bench.do(cm.CheckAdapter, adapter_id=1, **fields)
    assert isinstance(checked, rp.AdapterChecked)
    (warning,) = checked.warnings
    assert "self_attn.q_proj" in warning
    assert " of model.layers.1, " in warning
    assert bench.fingerprint("attention") == checked.fingerprint
    bench.promote(1, "attention", PINNED)
    assert bench.adapters()[1].warnings == checked.warnings


def test_pickled_weights_are_read_if_the_engine_allows_them(
    make_engine: Callable[..., EngineBench], adapter_root: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter_root / "mlp", tmp_path / "mlp")
    weights = tmp_path / "mlp" / "adapter_model.safetensors"
    torch.save(load_file(weights), tmp_path / "mlp" / "adapter_model.bin")
    weights.unlink()
    check = {"adapter_id": 1, "adapter": "mlp", "path": ""}
    refused = make_engine(adapter_roots=(tmp_path,)).do(cm.CheckAdapter, **check)
    failure(refused, ErrorCode.NOT_FOUND, "--allow-pickled-weights")
    allowing = make_engine(adapter_roots=(tmp_path,), allow_pickled_weights=True)
    assert isinstance(allowing.do(cm.CheckAdapter, **check), rp.AdapterChecked)
