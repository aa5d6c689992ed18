"""A log's adapters and goals are carried to a log of any rules, and nothing is imported by halves.

`golden/demo-log` is the log of a demo at the first milestone, of rules 1, in segments of format 2:
720 generations on eight adapters and three slots, a controller and an engine that were killed.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loradock.controller.core.limits import RULES, Limits
from loradock.controller.core.world import Adapter
from loradock.controller.log.exports import (
    ExportedState,
    ImportRefusedError,
    decode_export,
    export_state,
    import_state,
)
from loradock.controller.log.format import LogForeign
from loradock.controller.log.replay import replay
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import verify
from loradock.controller.log.snapshotter import SnapshotOrder, make_snapshot
from loradock.controller.log.writer import Log
from loradock.messages.records import ControllerStarted, Record
from loradock.messages.reports import EngineInventory
from tests.support.simulation.log_examples import Crash, CrashingDisk, write_with
from tests.support.simulation.logged_histories import header_of, write_history
from tests.support.sources import ROOT

DEMO_LOG = ROOT / "tests" / "golden" / "demo-log"
KEPT = ("name", "path", "fingerprint", "rank", "load_bytes", "blob_bytes", "goal", "held")


def kept_of(adapter: Adapter) -> tuple[Any, ...]:
    return (
        *(getattr(adapter, name) for name in KEPT),
        adapter.counters.uses,
        adapter.counters.evictions,
    )


def exported(state: ExportedState) -> bytes:
    return msgspec.json.encode(state)


@pytest.mark.parametrize("seed", range(8))
def test_an_import_has_the_adapters_and_goals_of_the_log(tmp_path: Path, seed: int) -> None:
    write_history(tmp_path / "log", seed)
    before = replay(tmp_path / "log").controller
    state = export_state(tmp_path / "log")
    assert (state.rules, state.is_exact) == (RULES, True)
    seq = import_state(tmp_path / "new" / "log", decode_export(exported(state)))
    result = replay(tmp_path / "new" / "log", checked=True)
    after = result.controller
    assert before is not None
    assert after is not None
    current = [before.world.adapters[a] for a in before.world.names.values()]
    loaded = [a for a in current if "unregistered" not in (a.state, a.goal)]
    assert {kept_of(a) for a in after.world.adapters.values()} == {kept_of(a) for a in loaded}
    assert {a.state for a in after.world.adapters.values()} <= {"evicted"}
    assert seq == result.inputs == before.world.seq
    for name in ("events_seq", "next_op", "next_generation", "epoch"):
        assert getattr(after.world, name) == getattr(before.world, name)
    assert min(after.world.adapters, default=1 << 60) >= before.world.next_adapter_id
    again = export_state(tmp_path / "new" / "log")
    assert {a.name: a for a in again.adapters} == {a.name: a for a in state.adapters}


def test_an_imported_log_is_written_on(tmp_path: Path) -> None:
    write_history(tmp_path / "log", 3)
    state, directory = export_state(tmp_path / "log"), tmp_path / "new" / "log"
    seq = import_state(directory, state)
    limits = replay(directory).controller.limits  # type: ignore[union-attr]
    # Other limits begin another segment, as a server with other options does.
    other = msgspec.structs.replace(limits, requests_max=limits.requests_max - 1)
    with Log(directory, header_of(other)) as log:
        assert log.next_seq == seq + 1
        log.append([Record(state.time_ns + 1, ControllerStarted(1 << 40))], 1 << 40)
        inventory = EngineInventory("engine", 1, "model", limits.max_loras, 1 << 40)
        log.append([Record(state.time_ns + 2, inventory)], 1 << 40)
    assert verify(directory).corruption is None
    result = replay(directory, checked=True)
    assert (result.inputs, result.snapshot_seq) == (seq + 2, seq)
    assert result.controller is not None
    assert result.controller.limits == other
    wanted = [a.name for a in state.adapters if a.goal != "evicted"]
    moving = [a for a in result.controller.world.adapters.values() if a.op or a.name in wanted]
    assert {a.name for a in moving} >= set(wanted)
    made = make_snapshot(directory, SnapshotOrder(seq + 2, Retention("keep")))
    assert made is not None
    assert made.base == seq


def test_a_log_of_former_rules_is_refused_and_exported(tmp_path: Path) -> None:
    with pytest.raises(LogForeign, match="log export"):
        replay(DEMO_LOG)
    state = export_state(DEMO_LOG)
    assert (state.rules, state.is_exact) == (1, False)
    assert state.numbers.seq == verify(DEMO_LOG).last_seq
    names = ["caesar", "count", "devowel", "double", "piglatin", "reverse", "spell", "upper"]
    assert sorted(adapter.name for adapter in state.adapters) == names
    assert all(adapter.fingerprint and adapter.uses > 50 for adapter in state.adapters)
    import_state(tmp_path / "log", decode_export(exported(state)))
    result = replay(tmp_path / "log", checked=True)
    assert result.controller is not None
    assert sorted(result.controller.world.names) == names


def test_limits_of_other_rules_are_left_out_of_an_export(tmp_path: Path) -> None:
    own = header_of(Limits(max_loras=3))
    former = msgspec.structs.replace(own, rules=4, limits=own.limits | {"slot_quantum_ms": 250})
    with Log(tmp_path / "log", former) as log:
        log.append([Record(1, ControllerStarted(1))], 1)
    state = export_state(tmp_path / "log")
    assert (state.rules, state.is_exact, state.limits) == (4, False, own.limits)


def document(tmp_path: Path, **changes: Any) -> bytes:
    """Return an export with other fields."""
    write_history(tmp_path / "log", 3)
    return json.dumps(json.loads(exported(export_state(tmp_path / "log"))) | changes).encode()


ADAPTER = {"name": "a", "path": "a", "goal": "evicted"}
WRONG: dict[str, dict[str, Any]] = {
    "version": {"version": 2},
    "kind": {"kind": "state"},
    "unheard-of": {"policy": "unheard-of"},
    "is there twice": {"adapters": [ADAPTER, ADAPTER]},
    "goal": {"adapters": [ADAPTER | {"goal": "unregistered"}]},
    "can't have": {"adapters": [ADAPTER | {"held": True}]},
    "name": {"adapters": [ADAPTER | {"name": "../a"}]},
    "at least max-loras, which is 9, got 8": {"limits": {"slots_max": 9, "host_adapters_max": 8}},
    "known_adapters_max": {"limits": {"known_adapters_max": 1}, "adapters": [ADAPTER] * 2},
    "unknown field": {"another": 1},
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_wrong_document_is_refused(tmp_path: Path, problem: str) -> None:
    data = document(tmp_path, **WRONG[problem])
    with pytest.raises(ImportRefusedError, match=problem):
        import_state(tmp_path / "new" / "log", decode_export(data))
    assert not (tmp_path / "new").exists()


def test_limits_that_are_unknown_here_are_left_out(tmp_path: Path) -> None:
    data = document(tmp_path, limits={"slots_max": 3, "of_a_later_version": 7})
    import_state(tmp_path / "new", decode_export(data))
    assert replay(tmp_path / "new").controller.limits.max_loras == 3  # type: ignore[union-attr]


def test_a_directory_with_a_log_is_refused(tmp_path: Path) -> None:
    state = decode_export(document(tmp_path))
    with pytest.raises(ImportRefusedError, match="has files already"):
        import_state(tmp_path / "log", state)


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_crash_of_an_import_leaves_no_log_or_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    state = decode_export(document(tmp_path))
    for at in range(1, 100):
        directory = tmp_path / str(at) / "log"
        disk = CrashingDisk(at, when)
        with monkeypatch.context() as patch, suppress(Crash):
            write_with(disk, patch)
            import_state(directory, state)
        if not directory.exists():
            import_state(directory, state)
        result = replay(directory, checked=True)
        assert result.inputs == state.numbers.seq
        assert export_state(directory).adapters == state.adapters
        if not disk.is_dead:
            assert at > 10
            return
    pytest.fail("the import did not end")
