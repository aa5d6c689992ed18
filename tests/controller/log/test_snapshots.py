"""Snapshots are used as they were written or not at all; a log continues the newest valid one.

`golden/snapshot-format-N-rules-M.snap` is one that a former version of these rules wrote:

    python -m tests.controller.log.test_snapshots

writes the one of the current format and rules if it is missing, and replaces none.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from loradock.controller.core.invariants import check
from loradock.controller.core.limits import RULES
from loradock.controller.log import snapshots
from loradock.controller.log.format import LogCorrupt
from loradock.controller.log.replay import ReplayResult, replay
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import segment_path, segment_paths
from loradock.controller.log.snapshots import (
    SnapshotInvalidError,
    decode_snapshot,
    drop_snapshots,
    read_snapshot,
    restore_controller,
    restore_newest,
    snapshot_path,
    snapshot_paths,
    take_snapshot,
    write_snapshot,
)
from loradock.controller.log.snapshotter import SnapshotOrder, make_snapshot
from loradock.messages.records import FORMAT
from tests.support.simulation.log_examples import flip
from tests.support.simulation.logged_histories import write_history
from tests.support.sources import ROOT

GOLDEN = ROOT / "tests" / "golden"
GOLDEN_SEED = 3
KEEP = Retention("keep")
FIRST, SECOND = 25, 45


GOLDEN_PATH = GOLDEN / f"snapshot-format-{FORMAT}-rules-{RULES}.snap"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log with snapshots after records `FIRST` and `SECOND`."""
    directory = tmp_path / "log"
    write_history(directory)
    for seq in (FIRST, SECOND):
        make_snapshot(directory, SnapshotOrder(seq, KEEP))
    return directory


def changed(path: Path, **changes: Any) -> None:
    """Write a snapshot again with other fields and the right checksum."""
    snapshot = msgspec.structs.replace(read_snapshot(path), **changes)
    body = msgspec.msgpack.encode(snapshot)
    path.write_bytes(b"LDS2" + xxhash.xxh3_128_digest(body) + body)


def same_as_from_start(directory: Path) -> ReplayResult:
    """Check that a replay from the newest valid snapshot leads to the same; return its result."""
    result, whole = replay(directory, checked=True), replay(directory, from_start=True)
    assert (result.digest, result.inputs) == (whole.digest, whole.inputs)
    assert result.position == whole.position
    return result


def test_a_replay_begins_with_the_newest_snapshot(directory: Path) -> None:
    result = same_as_from_start(directory)
    assert (result.snapshot_seq, result.skipped) == (SECOND, ())
    assert replay(directory, from_start=True).snapshot_seq == 0


@pytest.mark.parametrize("until", [FIRST - 1, FIRST, FIRST + 1, SECOND, SECOND + 1])
def test_until_begins_with_the_last_snapshot_before_it(directory: Path, until: int) -> None:
    result = replay(directory, until)
    assert result.inputs == until
    assert result.snapshot_seq == max(s for s in (0, FIRST, SECOND) if s <= until)
    assert result.digest == replay(directory, until, from_start=True).digest


def test_each_flipped_byte_and_each_cut_leads_to_the_snapshot_before(directory: Path) -> None:
    path = snapshot_path(directory, SECOND)
    data = path.read_bytes()
    corrupt = [data[:i] + bytes([data[i] ^ 0x40]) + data[i + 1 :] for i in range(len(data))]
    for wrong in (*corrupt, *(data[:size] for size in range(0, len(data), 7)), data + b"x"):
        path.write_bytes(wrong)
        with pytest.raises(SnapshotInvalidError):
            read_snapshot(path)
    result = same_as_from_start(directory)
    assert result.snapshot_seq == FIRST
    assert len(result.skipped) == 1
    assert str(path) in result.skipped[0]


WRONG: dict[str, dict[str, Any]] = {
    "the digest": {"digest": "0" * 32},
    "rules": {"rules": RULES + 1},
    "format": {"format": FORMAT + 1},
    "policy": {"policy": "unheard-of"},
    "not known|unknown": {"limits": {"unheard_of": 1}},
    "unknown here": {"world": msgspec.Raw(b"\x90")},
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_snapshot_that_is_intact_but_wrong_is_skipped(directory: Path, problem: str) -> None:
    path = snapshot_path(directory, SECOND)
    changed(path, **WRONG[problem])
    with pytest.raises(SnapshotInvalidError, match=problem):
        restore_controller(read_snapshot(path), path)
    assert same_as_from_start(directory).snapshot_seq == FIRST


def test_a_snapshot_under_another_name_is_skipped(directory: Path) -> None:
    snapshot_path(directory, SECOND).rename(snapshot_path(directory, SECOND + 1))
    assert same_as_from_start(directory).snapshot_seq == FIRST


def test_without_a_valid_snapshot_the_log_is_replayed_from_its_start(directory: Path) -> None:
    for path in snapshot_paths(directory):
        flip(path, 30)
    result = same_as_from_start(directory)
    assert result.snapshot_seq == 0
    assert len(result.skipped) == 2


def test_what_is_not_read_back_is_removed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = replay(directory)
    assert result.controller is not None
    snapshot = take_snapshot(result.controller, result.position)
    monkeypatch.setattr(snapshots, "encode_world", lambda _: b"other bytes")
    with pytest.raises(SnapshotInvalidError, match="another world"):
        write_snapshot(directory, snapshot)
    assert restore_newest(directory).snapshot == read_snapshot(snapshot_path(directory, SECOND))


def test_dropped_snapshots_are_those_with_the_record(directory: Path) -> None:
    assert drop_snapshots(directory, SECOND + 1) == []
    assert drop_snapshots(directory, FIRST + 1) == [snapshot_path(directory, SECOND)]
    assert same_as_from_start(directory).snapshot_seq == FIRST


# Missing segments


def test_segments_before_a_snapshot_may_be_missing(directory: Path) -> None:
    whole = replay(directory, from_start=True)
    for path, later in zip(segment_paths(directory), segment_paths(directory)[1:], strict=False):
        if int(later.stem) <= SECOND + 1:
            path.unlink()
    result = replay(directory, checked=True)
    assert (result.digest, result.snapshot_seq) == (whole.digest, SECOND)
    with pytest.raises(LogCorrupt, match="record 1 should be") as raised:
        replay(directory, from_start=True)
    assert raised.value.seq == 1


def test_a_missing_segment_after_a_snapshot_is_an_error(directory: Path) -> None:
    paths = [path for path in segment_paths(directory) if int(path.stem) > SECOND + 1]
    assert len(paths) > 1
    paths[0].unlink()
    with pytest.raises(LogCorrupt) as raised:
        replay(directory)
    assert (raised.value.file, raised.value.offset) == (paths[1], 0)
    assert raised.value.seq == int(paths[0].stem)


def test_the_segment_that_a_snapshot_ends_in_is_needed_for_its_rest(directory: Path) -> None:
    paths = segment_paths(directory)
    position = read_snapshot(snapshot_path(directory, SECOND)).position
    later = [path for path in paths if int(path.stem) > position.segment]
    assert int(later[0].stem) != SECOND + 1
    segment_path(directory, position.segment).unlink()
    with pytest.raises(LogCorrupt, match="missing") as raised:
        replay(directory)
    assert (raised.value.file, raised.value.seq) == (later[0], SECOND + 1)


def test_a_log_that_ends_before_its_snapshot_is_an_error(directory: Path) -> None:
    position = read_snapshot(snapshot_path(directory, SECOND)).position
    for path in segment_paths(directory):
        if int(path.stem) > position.segment:
            path.unlink()
    path = segment_path(directory, position.segment)
    path.write_bytes(path.read_bytes()[: position.offset - 1])
    with pytest.raises(LogCorrupt, match=f"contains record {SECOND}") as raised:
        replay(directory)
    assert raised.value.seq == SECOND
    for path in segment_paths(directory):
        path.unlink()
    with pytest.raises(LogCorrupt, match="missing"):
        replay(directory)


# Golden files


def write_golden(directory: Path) -> None:
    write_history(directory, GOLDEN_SEED)
    make_snapshot(directory, SnapshotOrder(SECOND, KEEP))
    GOLDEN_PATH.write_bytes(snapshot_path(directory, SECOND).read_bytes())


def test_the_golden_snapshot_is_restored() -> None:
    assert list(GOLDEN.glob("snapshot-*.snap")) == [GOLDEN_PATH], "see this file's docstring"
    # A golden file is not named after its record.
    snapshot = decode_snapshot(GOLDEN_PATH.read_bytes(), GOLDEN_PATH)
    controller = restore_controller(snapshot, GOLDEN_PATH, checked=True)
    check(controller.world, controller.limits)
    assert (snapshot.seq, controller.world.seq) == (SECOND, SECOND)
    assert len(controller.world.adapters) > 1
    assert controller.digest() == snapshot.digest


if __name__ == "__main__":
    import tempfile

    if not GOLDEN_PATH.exists():
        with tempfile.TemporaryDirectory() as name:
            write_golden(Path(name) / "log")
