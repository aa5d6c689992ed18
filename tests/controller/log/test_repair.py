"""Repair: the cut does what the plan contains, and the bytes that are cut off are kept."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from controller.log import repair as repair_module
from controller.log.format import LogBusy
from controller.log.repair import repair, repair_plan
from controller.log.segments import read, verify
from controller.log.writer import Log
from tests.support.simulation.log_examples import (
    HEADER,
    Crash,
    CrashingDisk,
    files,
    flip,
    make_records,
    write,
)

COUNT = 60


@pytest.fixture
def directory(tmp_path: Path, without_fsync: None) -> Path:
    write(tmp_path / "log", make_records(COUNT), segment_bytes_max=1000)
    return tmp_path / "log"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_continues(directory: Path, count: int) -> None:
    """The log contains its first `count` records and accepts more."""
    assert [record for _, _, record in read(directory)] == make_records(COUNT)[:count]
    with Log.open(directory, HEADER) as log:
        assert log.append(make_records(1), epoch=2) == count + 1
    assert verify(directory).damage is None


def test_an_intact_log_needs_no_repair(directory: Path) -> None:
    os.truncate(files(directory)[-1], files(directory)[-1].stat().st_size - 1)
    before = contents(directory)
    assert repair_plan(directory) is None
    assert repair(directory) is None
    assert contents(directory) == before


def test_damage_in_the_middle(directory: Path) -> None:
    damaged, *later = files(directory)[2:]
    before = contents(directory)
    flip(damaged, 600)
    with_flip = contents(directory)
    plan = repair_plan(directory)
    assert plan is not None
    assert (plan.file, plan.later_files) == (damaged, tuple(later))
    assert plan.offset <= 600
    assert plan.lost_records == COUNT - plan.seq
    assert (
        plan.lost_bytes == sum(len(before[path.name]) for path in (damaged, *later)) - plan.offset
    )
    assert contents(directory) == with_flip, "a plan changes nothing"

    assert repair(directory) == plan
    after = contents(directory)
    assert after.pop(damaged.name) == with_flip[damaged.name][: plan.offset]
    assert after.pop(f"{damaged.name}.0.damaged") == with_flip[damaged.name][plan.offset :]
    for path in later:
        assert after.pop(f"{path.name}.0.damaged") == with_flip[path.name]
    assert after == {path.name: before[path.name] for path in files(directory)[:2]}
    assert_continues(directory, plan.seq - 1)


def test_a_missing_segment(directory: Path) -> None:
    _, _, lost, *later = files(directory)
    lost.unlink()
    plan = repair(directory)
    assert plan is not None
    assert (plan.file, plan.offset, plan.later_files) == (later[0], 0, tuple(later[1:]))
    assert plan.lost_records == COUNT + 1 - int(later[0].stem)
    assert files(directory) == files(directory)[:2]
    assert_continues(directory, int(lost.stem) - 1)


def test_a_damaged_beginning_leaves_an_empty_log(directory: Path) -> None:
    flip(files(directory)[0], 50)
    plan = repair(directory)
    assert plan is not None
    assert (plan.seq, plan.lost_records) == (1, COUNT)
    assert files(directory) == []
    assert_continues(directory, 0)


def test_repairing_twice_keeps_both(directory: Path) -> None:
    first = files(directory)[0]
    flip(first, 900)
    assert repair(directory) is not None
    flip(first, 400)
    assert repair(directory) is not None
    assert (directory / f"{first.name}.0.damaged").exists()
    assert (directory / f"{first.name}.1.damaged").exists()
    assert repair(directory) is None


def test_a_log_in_use_is_not_repaired(directory: Path) -> None:
    with Log.open(directory, HEADER), pytest.raises(LogBusy):
        repair(directory)


def test_a_repair_that_is_interrupted_can_be_done_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = contents(directory)
    for at in range(1, 100):
        for path in directory.iterdir():
            path.unlink()
        for name, data in original.items():
            (directory / name).write_bytes(data)
        flip(files(directory)[1], 600)
        seq = repair_plan(directory).seq
        disk = CrashingDisk(at, "before")
        with monkeypatch.context() as patch:
            patch.setattr(repair_module, "os", disk)
            with suppress(Crash):
                repair(directory)
        repair(directory)
        assert_continues(directory, seq - 1)
        if not disk.is_dead:
            assert at > len(original)
            return
    pytest.fail("the repair did not end")
