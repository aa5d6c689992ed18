"""A snapshot at any point and the records after it are the whole log, also after failures."""

import shutil
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.core.actions import Action, PublishEvent
from loradock.controller.log.events import EventReader, events_path
from loradock.controller.log.format import LogError
from loradock.controller.log.replay import replay
from loradock.controller.log.retention import Retention, retention_from
from loradock.controller.log.segments import segment_paths, verify
from loradock.controller.log.snapshots import (
    read_snapshot,
    restore_newest,
    snapshot_path,
    snapshot_paths,
)
from loradock.controller.log.snapshotter import (
    SnapshotOrder,
    SnapshotterBusyError,
    _locked,
    make_snapshot,
)
from loradock.controller.log.storage import DISK
from loradock.controller.log.writer import Log
from loradock.messages.events import Published
from loradock.messages.ids import Seq
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import Crash, CrashingDisk, flip, write_with
from tests.support.simulation.logged_histories import (
    SEGMENT_BYTES,
    fold,
    header_of,
    history,
    write_history,
)
from tests.support.simulation.memory_storage import MemoryStorage

KEEP = Retention("keep")
AT_ONCE = Retention("drop", 0)


def events_of(actions: list[list[Action]]) -> list[Published]:
    return [a.message for group in actions for a in group if isinstance(a, PublishEvent)]


def events_in(directory: Path, storage: MemoryStorage) -> list[Published]:
    """Return all events of the database, which begin with event 1."""
    return list(EventReader(directory, storage).read(1, 1 << 20))


# The law


@given(seed=st.integers(0, 400), points=st.sets(st.integers(1, 60), min_size=1, max_size=6))
@settings(max_examples=25)
def test_a_snapshot_and_the_tail_are_the_whole_log(seed: Seq, points: set[int]) -> None:
    storage, directory = MemoryStorage(), Path("/log")
    limits, records = history(seed)
    whole, actions = fold(limits, records)
    with Log(directory, header_of(limits), segment_bytes_max=SEGMENT_BYTES, storage=storage) as log:
        for seq, record in enumerate(records, start=1):
            log.append([record], 1)
            if seq in points:
                made = make_snapshot(directory, SnapshotOrder(seq, KEEP), storage)
                assert made is not None
                assert made.seq == seq
    later: list[list[Action]] = []
    result = replay(directory, sink=later.append, checked=True, storage=storage)
    base = max((point for point in points if point <= len(records)), default=0)
    assert result.snapshot_seq == base
    assert result.digest == whole.digest()
    assert later == actions[base:]
    assert events_in(directory, storage) == events_of(actions[:base])
    assert len(snapshot_paths(directory, storage)) == min(2, len([p for p in points if p <= base]))


def test_only_records_up_to_the_order_are_contained(tmp_path: Path) -> None:
    """A record that is written may still be cut and refused: only its server knows."""
    records = write_history(tmp_path / "log")
    made = make_snapshot(tmp_path / "log", SnapshotOrder(20, KEEP))
    assert made is not None
    assert (made.seq, made.base, made.inputs) == (20, 0, 20)
    made = make_snapshot(tmp_path / "log", SnapshotOrder(len(records), KEEP))
    assert made is not None
    assert (made.seq, made.base, made.inputs) == (len(records), 20, len(records) - 20)
    assert make_snapshot(tmp_path / "log", SnapshotOrder(len(records), KEEP)).inputs == 0  # type: ignore[union-attr]


def test_two_snapshots_are_kept_and_a_bad_one_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write_history(directory)
    for seq in (10, 20, 30):
        make_snapshot(directory, SnapshotOrder(seq, KEEP))
    assert snapshot_paths(directory) == [snapshot_path(directory, seq) for seq in (20, 30)]
    flip(snapshot_path(directory, 30), 100)
    made = make_snapshot(directory, SnapshotOrder(40, KEEP))
    assert made is not None
    assert (made.base, len(made.skipped)) == (20, 1)
    assert snapshot_paths(directory) == [snapshot_path(directory, seq) for seq in (20, 40)]


def test_a_divergence_makes_no_snapshot(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    limits, records = history(3)
    with Log(directory, header_of(limits)) as log:
        log.append([msgspec.structs.replace(records[0], digest="0" * 32)], 1)
    with pytest.raises(LogError, match="before record 1 the digest"):
        make_snapshot(directory, SnapshotOrder(1, KEEP))
    assert snapshot_paths(directory) == []


def test_one_snapshotter_works_at_a_time(tmp_path: Path) -> None:
    write_history(tmp_path / "log")
    with _locked(tmp_path / "log", DISK), pytest.raises(SnapshotterBusyError):
        make_snapshot(tmp_path / "log", SnapshotOrder(10, KEEP))
    assert make_snapshot(tmp_path / "log", SnapshotOrder(10, KEEP)) is not None


# Crashes


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.parametrize("action", ["drop", "archive"])
def test_a_crash_at_any_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, action: Any
) -> None:
    written = tmp_path / "written"
    records = write_history(written)
    make_snapshot(written, SnapshotOrder(15, KEEP))
    digest = replay(written).digest
    for at in range(1, 1000):
        directory, archive = tmp_path / f"{at}", tmp_path / f"{at}-archive"
        shutil.copytree(written, directory)
        retention = Retention(action, 0, str(archive))
        disk = CrashingDisk(at, when)
        with monkeypatch.context() as patch, suppress(Crash):
            write_with(disk, patch)
            for seq in (30, 45):
                make_snapshot(directory, SnapshotOrder(seq, retention))
        assert replay(directory).digest == digest
        made = make_snapshot(directory, SnapshotOrder(len(records), retention))
        assert made is not None
        result = replay(directory)
        assert (result.digest, result.snapshot_seq) == (digest, len(records))
        assert not list(directory.glob("*.new"))
        if action == "archive":
            assert_nothing_is_missing(directory, archive, digest)
        if not disk.is_dead:
            assert at > 40
            return
    pytest.fail("the run did not end")


def test_a_loss_of_power_at_any_step_loses_nothing() -> None:
    seed, directory = fresh_seed(), Path("/log")
    for at in range(200):
        storage = MemoryStorage(Random(seed + at))
        records = write_history(directory, storage=storage)
        digest = replay(directory, storage=storage).digest
        make_snapshot(directory, SnapshotOrder(15, KEEP), storage)
        calls = len(storage.calls)
        storage.fail_call(calls + at)
        is_dead = False
        try:
            for seq in (30, 45):
                make_snapshot(directory, SnapshotOrder(seq, AT_ONCE), storage)
        except (OSError, LogError):
            is_dead = True
        storage.fail_nothing()
        storage.lose_power()
        assert replay(directory, storage=storage).digest == digest
        made = make_snapshot(directory, SnapshotOrder(len(records), AT_ONCE), storage)
        assert made is not None
        storage.lose_power()
        result = replay(directory, checked=True, storage=storage)
        assert (result.digest, result.snapshot_seq) == (digest, len(records))
        if not is_dead:
            assert at > 20
            return
    pytest.fail("the run did not end")


def test_unsynced_records_are_synced_before_they_are_in_a_snapshot() -> None:
    """A log that syncs rarely must not end before its snapshot after a loss of power."""
    for seed in range(20):
        storage, directory = MemoryStorage(Random(seed)), Path("/log")
        limits, records = history(3)
        log = Log(directory, header_of(limits), sync="never", storage=storage)
        log.append(records[:40], 1)
        make_snapshot(directory, SnapshotOrder(40, KEEP), storage)
        log.append(records[40:45], 1)
        storage.lose_power()
        Log(directory, header_of(limits), storage=storage).close()
        assert 40 <= replay(directory, storage=storage).inputs <= 45


def assert_nothing_is_missing(directory: Path, archive: Path, digest: str) -> None:
    """Check that the archive has what the log does not: together they are the whole log."""
    for path in archive.glob("*.log"):
        copy = directory / path.name
        assert not copy.exists() or copy.read_bytes() == path.read_bytes()
        copy.write_bytes(path.read_bytes())
    assert replay(directory, from_start=True).digest == digest


@pytest.mark.parametrize(
    "name", ["create", "write", "sync", "sync_data", "rename", "remove", "commit"]
)
def test_a_failing_disk_leaves_a_log_that_is_restored(name: str) -> None:
    """Each call of the storage fails once."""
    for at in range(1, 200):
        storage, directory = FailsOnce(name, at), Path("/log")
        records = write_history(directory, storage=storage)
        digest = replay(directory, from_start=True, storage=storage).digest
        make_snapshot(directory, SnapshotOrder(15, KEEP), storage)
        storage.is_counting = True
        for seq in (30, 45, len(records)):
            with suppress(OSError, LogError):
                make_snapshot(directory, SnapshotOrder(seq, AT_ONCE), storage)
            assert replay(directory, checked=True, storage=storage).digest == digest
        if not storage.has_failed:
            assert at > 3
            return
    pytest.fail("the run did not end")


class FailsOnce(MemoryStorage):
    """A storage of which one call of one kind fails."""

    def __init__(self, name: str, at: int) -> None:
        super().__init__()
        self.is_counting = self.has_failed = False
        self._at = at
        real = getattr(self, name)

        def call(*args: object) -> object:
            self._at -= self.is_counting
            if self.is_counting and self._at == 0:
                self.has_failed = True
                raise OSError(5, "the disk failed")
            return real(*args)

        setattr(self, name, call)


# Retention


def test_files_before_both_snapshots_are_dropped(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    records = write_history(directory)
    assert make_snapshot(directory, SnapshotOrder(20, AT_ONCE)).removed == ()  # type: ignore[union-attr]
    before = segment_paths(directory)
    made = make_snapshot(directory, SnapshotOrder(40, AT_ONCE))
    assert made is not None
    # The older snapshot needs the records after 20 and no others.
    needed = [path for path, later in pairwise(before) if int(later.stem) > 21] + before[-1:]
    assert segment_paths(directory) == needed != before
    assert made.removed == tuple(str(path) for path in before if path not in needed)
    flip(snapshot_path(directory, 40), 100)
    result = replay(directory)
    assert (result.snapshot_seq, result.inputs) == (20, len(records))
    assert verify(directory).corruption is None


def test_a_single_snapshot_or_keep_drops_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write_history(directory)
    before = segment_paths(directory)
    make_snapshot(directory, SnapshotOrder(40, AT_ONCE))
    make_snapshot(directory, SnapshotOrder(45, KEEP))
    assert segment_paths(directory) == before


def test_hours_are_those_of_recorded_time(tmp_path: Path) -> None:
    directory, hour = tmp_path / "log", 3_600_000_000_000
    limits, records = history(3, 100)
    started = records[0].time_ns
    with Log(directory, header_of(limits), segment_bytes_max=SEGMENT_BYTES) as log:
        for number, record in enumerate(records):
            # Ten records per hour.
            at_ns = started + number * hour // 10
            log.append([msgspec.structs.replace(record, time_ns=at_ns)], 1)
    for seq in (10, 20, 30, 40):
        make_snapshot(directory, SnapshotOrder(seq, Retention("drop", 2)))
    # At record 40, those up to the mark of record 20 are two hours old.
    first, second = (int(path.stem) for path in segment_paths(directory)[:2])
    assert first <= 21 < second


def test_an_archive_has_what_was_dropped(tmp_path: Path) -> None:
    directory, archive = tmp_path / "log", tmp_path / "archive"
    write_history(directory)
    whole = replay(directory, from_start=True).digest
    for seq in (20, 40):
        make_snapshot(directory, SnapshotOrder(seq, Retention("archive", 0, str(archive))))
    assert int(segment_paths(directory)[0].stem) > 1
    assert_nothing_is_missing(directory, archive, whole)


def test_an_archive_with_files_of_another_log_is_refused(tmp_path: Path) -> None:
    directory, archive = tmp_path / "log", tmp_path / "archive"
    write_history(directory)
    archive.mkdir()
    (archive / segment_paths(directory)[0].name).write_bytes(b"another log's")
    make_snapshot(directory, SnapshotOrder(20, KEEP))
    with pytest.raises(LogError, match="another log"):
        make_snapshot(directory, SnapshotOrder(40, Retention("archive", 0, str(archive))))
    assert restore_newest(directory).snapshot == read_snapshot(snapshot_path(directory, 40))
    assert replay(directory, from_start=True).inputs > 40


@pytest.mark.parametrize("text", ["", "dorp", "archive", "archive:"])
def test_a_retention_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="archive:DIRECTORY"):
        retention_from(text)


def test_retentions_are_read() -> None:
    assert retention_from("drop", 3) == Retention("drop", 3)
    assert retention_from("keep") == Retention("keep", 168)
    assert retention_from("archive:/a:b", 0) == Retention("archive", 0, "/a:b")


# Events


@pytest.mark.parametrize("is_corrupt", [True, False])
def test_events_are_made_again_from_the_first_record_on(tmp_path: Path, is_corrupt: bool) -> None:
    """Also after an upgrade from files of events."""
    directory = tmp_path / "log"
    write_history(directory)
    events = events_of(fold(*history(3, 100))[1])
    make_snapshot(directory, SnapshotOrder(20, KEEP))
    events_path(directory).unlink()
    if is_corrupt:
        events_path(directory).write_bytes(b"no database" * 1000)
    old = directory / f"events-{1:020}.evt"
    old.write_bytes(b"events of a former version")
    made = make_snapshot(directory, SnapshotOrder(40, KEEP))
    assert made is not None
    assert [text for text in made.skipped if "corrupt" in text] == list(made.skipped)
    assert bool(made.skipped) == is_corrupt
    assert list(EventReader(directory).read(1, 1000)) == events[: made.events_seq]
    assert not old.exists()


def test_without_the_first_record_events_begin_with_the_snapshot(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write_history(directory)
    for seq in (20, 40):
        make_snapshot(directory, SnapshotOrder(seq, AT_ONCE))
    assert int(segment_paths(directory)[0].stem) > 1
    base = EventReader(directory).newest_seq
    events_path(directory).unlink()
    made = make_snapshot(directory, SnapshotOrder(60, KEEP))
    assert made is not None
    reader = EventReader(directory)
    assert (reader.oldest_seq, reader.newest_seq) == (base + 1, made.events_seq)


def test_retention_drops_the_events_before_both_snapshots(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write_history(directory)
    events = events_of(fold(*history(3, 100))[1])
    first = make_snapshot(directory, SnapshotOrder(20, AT_ONCE))
    second = make_snapshot(directory, SnapshotOrder(40, AT_ONCE))
    assert first is not None
    assert second is not None
    reader = EventReader(directory)
    assert reader.oldest_seq == first.events_seq + 1
    assert (
        list(reader.read(reader.oldest_seq, 1000)) == events[first.events_seq : second.events_seq]
    )
