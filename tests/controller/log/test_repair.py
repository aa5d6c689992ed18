"""Repair: the cut does what the plan contains, and the bytes that are cut off are kept."""

import os
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from loradock.controller.log.format import LogBusy, LogFull
from loradock.controller.log.repair import repair, repair_plan
from loradock.controller.log.replay import replay
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import read, segment_paths, verify
from loradock.controller.log.snapshotter import SnapshotOrder, make_snapshot
from loradock.controller.log.writer import Log
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import (
    HEADER,
    files,
    flip,
    make_records,
    write,
)
from tests.support.simulation.logged_histories import write_history
from tests.support.simulation.memory_storage import MemoryStorage

COUNT = 60


@pytest.fixture
def directory(tmp_path: Path, without_fsync: None) -> Path:
    write(tmp_path / "log", make_records(COUNT), segment_bytes_max=1000)
    return tmp_path / "log"


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of the segments and of what a repair puts aside, by file name."""
    return {path.name: path.read_bytes() for path in directory.glob("*.log*")}


def assert_continues(directory: Path, count: int) -> None:
    """The log contains its first `count` records and accepts more."""
    assert [record for _, _, record in read(directory)] == make_records(COUNT)[:count]
    with Log(directory, HEADER) as log:
        assert log.append(make_records(1), epoch=2) == count + 1
    assert verify(directory).corruption is None


def test_an_intact_log_needs_no_repair(directory: Path) -> None:
    os.truncate(files(directory)[-1], files(directory)[-1].stat().st_size - 1)
    before = contents(directory)
    assert repair_plan(directory) is None
    assert repair(directory) is None
    assert contents(directory) == before


def test_corruption_in_the_middle(directory: Path) -> None:
    corrupt, *later = files(directory)[2:]
    before = contents(directory)
    flip(corrupt, 600)
    with_flip = contents(directory)
    plan = repair_plan(directory)
    assert plan is not None
    assert (plan.written, plan.put_aside) == ((corrupt,), (corrupt, *later))
    assert (plan.seen_until, plan.is_end_known, plan.snapshot) == (COUNT, False, None)
    assert "on are lost; the last that the files show is 60" in plan.loss
    assert contents(directory) == with_flip, "a plan changes nothing"

    assert repair(directory) == plan
    after = contents(directory)
    cut = after.pop(corrupt.name)
    assert with_flip[corrupt.name].startswith(cut)
    assert len(cut) <= 600
    for path in (corrupt, *later):
        assert after.pop(f"{path.name}.0.corrupt") == with_flip[path.name]
    assert after == {path.name: before[path.name] for path in files(directory)[:2]}
    assert_continues(directory, plan.next_seq - 1)


def test_a_missing_segment(directory: Path) -> None:
    _, _, lost, *later = files(directory)
    lost.unlink()
    plan = repair(directory)
    assert plan is not None
    assert (plan.written, plan.put_aside, plan.seen_until) == ((), tuple(later), COUNT)
    assert files(directory) == files(directory)[:2]
    assert_continues(directory, int(lost.stem) - 1)


def test_a_corrupt_beginning_leaves_an_empty_log(directory: Path) -> None:
    flip(files(directory)[0], 50)
    plan = repair(directory)
    assert plan is not None
    assert (plan.next_seq, plan.seen_until) == (1, COUNT)
    assert files(directory) == []
    assert_continues(directory, 0)


def test_repairing_twice_keeps_both(directory: Path) -> None:
    first = files(directory)[0]
    flip(first, 900)
    assert repair(directory) is not None
    flip(first, 400)
    assert repair(directory) is not None
    assert (directory / f"{first.name}.0.corrupt").exists()
    assert (directory / f"{first.name}.1.corrupt").exists()
    assert repair(directory) is None


def test_a_log_in_use_is_not_repaired(directory: Path) -> None:
    with Log(directory, HEADER), pytest.raises(LogBusy):
        repair(directory)


def test_after_corruption_before_a_snapshot_the_log_begins_with_the_snapshot(
    tmp_path: Path,
) -> None:
    """Here in the segment of the snapshot: its later records are written again."""
    directory = tmp_path / "log"
    seq = len(write_history(directory))
    make_snapshot(directory, SnapshotOrder(seq - 9, Retention("keep")))
    digest, segments = replay(directory).digest, files(directory)
    snapshot = directory / f"{seq - 9:020}.snap"
    holder = [path for path in segments if int(path.stem) <= seq - 9][-1]
    flip(holder, 150)
    before = contents(directory)
    plan = repair(directory)
    assert plan is not None
    assert (plan.snapshot, plan.loss) == (snapshot, "no record is lost")
    assert plan.put_aside == tuple(segments)
    after = contents(directory)
    assert {f"{name}.0.corrupt": data for name, data in before.items()}.items() <= after.items()
    assert verify(directory)[:2] == (len(plan.written), 9)
    assert verify(directory).corruption is None
    assert replay(directory, checked=True).digest == digest


def test_without_space_nothing_is_changed() -> None:
    storage, path = memory_log()
    storage.flip(path, 600)
    before = storage.read(path)
    storage.faults.bytes_max = len(before) + 100
    with pytest.raises(LogFull, match="make space"):
        repair(path.parent, storage)
    assert storage.read(path) == before
    storage.faults.bytes_max *= 10
    assert repair(path.parent, storage) is not None
    assert verify(path.parent, storage).corruption is None


def memory_log(rng: Random | None = None) -> tuple[MemoryStorage, Path]:
    """A log of one segment in memory, and the segment's path."""
    storage, directory = MemoryStorage(rng), Path("/log")
    with Log(directory, HEADER, storage=storage) as log:
        log.append(make_records(COUNT), epoch=1)
    (path,) = segment_paths(directory, storage)
    return storage, path


def test_a_repair_that_fails_or_is_interrupted_can_be_done_again() -> None:
    """Each operation fails once, and the power is lost then."""
    seed = fresh_seed()
    for number in range(100):
        storage, path = memory_log(Random(seed + number))
        whole = storage.read(path)
        storage.flip(path, 600)
        corrupt = storage.read(path)
        calls = len(storage.calls)
        storage.fail_call(calls + number)
        with suppress(LogFull):
            repair(path.parent, storage)
        ended = len(storage.calls) <= calls + number
        storage.lose_power()
        kept = [storage.read(path.parent / name) for name in storage.names(path.parent)]
        assert corrupt in kept
        repair(path.parent, storage)
        assert whole.startswith(storage.read(path))
        assert verify(path.parent, storage).corruption is None
        if ended:
            assert number > 6
            return
    pytest.fail("the repair did not end")
