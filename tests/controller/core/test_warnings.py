"""An adapter's warnings are kept with its record, from the report on, and leave with it."""

from pathlib import Path

import msgspec
import pytest

from loradock.controller.core.controller import Controller
from loradock.controller.core.views import list_adapters
from loradock.controller.log.exports import decode_export, export_state, import_state
from loradock.controller.log.replay import replay
from loradock.controller.log.retention import Retention
from loradock.controller.log.snapshotter import SnapshotOrder, make_snapshot
from loradock.controller.log.writer import Log
from loradock.messages import requests as rq
from loradock.messages.records import Record
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.engine_records import Content, EngineAdapter
from tests.support.simulation.logged_histories import header_of

WARNINGS = ("layers 3 and 7 have no tensors", "tokenizer.json is not used")
REQUESTS = (rq.LoadAdapter, rq.StageAdapter, rq.ActivateAdapter, rq.HoldAdapter)


@pytest.fixture
def bench() -> CoreBench:
    bench = CoreBench()
    bench.files["a"] = Content("content of a", 10, 10, warnings=WARNINGS)
    return bench


def shown(bench: CoreBench) -> dict[str, tuple[str, ...]]:
    listed = list_adapters(bench.world, rq.ListAdapters("l"))
    return {view.adapter: view.warnings for view in listed.adapters}


@pytest.mark.parametrize("kind", REQUESTS)
def test_they_are_in_each_answer_that_an_adapter_is_there(bench: CoreBench, kind: type) -> None:
    for _ in range(2):
        assert bench.request(kind, "a").warnings == WARNINGS
    assert bench.request(kind, "b").warnings == ()
    assert shown(bench) == {"a": WARNINGS, "b": ()}


def test_they_outlive_an_eviction_and_end_with_the_adapter(bench: CoreBench) -> None:
    bench.activate("a")
    assert bench.request(rq.EvictAdapter, "a").warnings == ()
    assert shown(bench) == {"a": WARNINGS}
    # It is not checked again.
    assert bench.request(rq.ActivateAdapter, "a").warnings == WARNINGS
    bench.request(rq.RemoveAdapter, "a", True)
    assert not bench.world.warnings


def test_a_replacement_has_its_own(bench: CoreBench) -> None:
    bench.activate("a")
    bench.files["other"] = Content("other content", 10, 10, warnings=WARNINGS[1:])
    assert bench.request(rq.LoadAdapter, "a", "other", True).warnings == WARNINGS[1:]
    assert bench.request(rq.LoadAdapter, "a", "b", True).warnings == ()
    assert not bench.world.warnings


def test_an_inventory_has_those_that_the_log_lost(bench: CoreBench) -> None:
    request = bench.send(rq.ActivateAdapter, "a")
    inputs = len(bench.inputs)
    bench.settle()
    assert bench.reply(request).warnings == WARNINGS
    bench.restart_controller(lost_inputs=len(bench.inputs) - inputs)
    bench.settle()
    assert bench.reply(request).warnings == WARNINGS
    assert shown(bench) == {"a": WARNINGS}


def test_a_record_with_another_id_keeps_them(bench: CoreBench) -> None:
    bench.activate("a")
    bench.lose_engine()
    unknown = EngineAdapter(1, "b", "b", bench.files["b"], "gpu-slot", True, 0, 7)
    bench.start_engine(adapters={1: unknown}, seen={20}, generations_seen={7})
    bench.settle()
    assert bench.adapter("a").id != 1
    assert bench.request(rq.ActivateAdapter, "a").warnings == WARNINGS


def test_a_digest_has_them_and_their_absence_leaves_no_trace(bench: CoreBench) -> None:
    bench.activate("a")
    with_warnings = bench.controller.digest()
    bench.world.warnings[bench.adapter("a").id] = WARNINGS[:1]
    assert with_warnings != bench.controller.digest()
    del bench.world.warnings[bench.adapter("a").id]
    without = bench.controller.digest()
    assert without not in (with_warnings, Controller(bench.limits).digest())


def test_a_snapshot_and_an_export_have_them(bench: CoreBench, tmp_path: Path) -> None:
    bench.activate("a", "b")
    with Log(tmp_path / "log", header_of(bench.limits)) as log:
        log.append([msgspec.msgpack.decode(data, type=Record) for data in bench.inputs], 1)
    assert make_snapshot(tmp_path / "log", SnapshotOrder(len(bench.inputs), Retention("keep")))
    result = replay(tmp_path / "log", checked=True)
    assert result.snapshot_seq == len(bench.inputs)
    assert result.controller is not None
    assert result.digest == bench.controller.digest()
    assert list(result.controller.world.warnings.values()) == [WARNINGS]
    state = decode_export(msgspec.json.encode(export_state(tmp_path / "log")))
    import_state(tmp_path / "new", state)
    imported = replay(tmp_path / "new", checked=True).controller
    assert imported is not None
    listed = list_adapters(imported.world, rq.ListAdapters("l"))
    assert {view.adapter: view.warnings for view in listed.adapters} == {"a": WARNINGS, "b": ()}
