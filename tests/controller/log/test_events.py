"""The database of events: each event is found by its number, and no changed byte is believed."""

import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.log.events import (
    SCHEMA,
    EventReader,
    EventsCorrupt,
    EventWriter,
    events_path,
)
from loradock.controller.log.format import LogError, LogForeign
from loradock.controller.log.storage import CHUNK_BYTES, DISK
from loradock.messages.events import AdapterCached, Published
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import flip
from tests.support.simulation.memory_storage import MemoryStorage

COUNT = 3000
LOG = Path("/log")


def published(first: int, last: int, name: str = "a") -> tuple[Published, ...]:
    return tuple(
        Published(seq, 10 * seq, AdapterCached(f"{name}-{seq}")) for seq in range(first, last + 1)
    )


def write(directory: Path, *parts: tuple[Published, ...], storage: Any = DISK) -> int:
    """Write each part with another writer; return the number of the newest event."""
    for part in parts:
        with EventWriter(directory, storage) as writer:
            writer.add(part)
    return EventReader(directory, storage).newest_seq


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    assert write(tmp_path, published(1, 700), published(701, 701), published(702, COUNT)) == COUNT
    return tmp_path


def test_without_a_database_there_are_no_events(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    for _ in range(3):
        assert (reader.oldest_seq, reader.newest_seq, reader.next_seq(1)) == (0, 0, 0)
        assert reader.read(1, 10) == ()
        assert reader.problem(10) == ""
        # Then with an empty file, as after a crash while it was created, and without rows.
        if events_path(tmp_path).exists():
            EventWriter(tmp_path).__exit__(None, None, None)
        events_path(tmp_path).touch()


@pytest.mark.parametrize("count_max", [1, 1024, 4096])
def test_every_event_is_found_by_its_number(directory: Path, count_max: int) -> None:
    reader, events = EventReader(directory), published(1, COUNT)
    assert (reader.oldest_seq, reader.newest_seq) == (1, COUNT)
    for first_seq in (1, 2, 700, 701, 702, *range(3, COUNT, 97), COUNT - 1, COUNT):
        assert reader.next_seq(first_seq) == first_seq
        assert reader.read(first_seq, count_max) == events[first_seq - 1 :][:count_max]
    for first_seq in (0, COUNT + 1, 2**63 - 1, 2**63):
        assert reader.read(first_seq, count_max) == ()
    assert reader.next_seq(2**63) == 0


def test_numbers_can_have_a_gap(tmp_path: Path) -> None:
    write(tmp_path, published(11, 20), published(31, 40))
    reader = EventReader(tmp_path)
    assert [reader.next_seq(seq) for seq in (1, 11, 20, 21, 30, 31, 40, 41)] == [
        *(11, 11, 20, 31, 31, 31, 40, 0)
    ]
    assert reader.read(15, 100) == published(15, 20)
    assert (reader.oldest_seq, reader.newest_seq) == (11, 40)
    assert reader.problem(7) == ""


def test_a_reader_finds_every_event_while_a_replay_of_the_whole_log_writes_them(
    directory: Path,
) -> None:
    reader = EventReader(directory)
    with EventWriter(directory) as writer:
        for start in range(1, COUNT + 501, 250):
            writer.add(published(start, start + 249))
            assert reader.read(1, COUNT) == published(1, COUNT)
    assert reader.read(1, COUNT + 600) == published(1, COUNT + 500)


@pytest.mark.parametrize("changed", [1, 2, 1500, COUNT])
def test_a_replay_of_a_log_that_was_cut_replaces_events(directory: Path, changed: int) -> None:
    events = (*published(1, changed - 1), *published(changed, COUNT - 1, "new"))
    with EventWriter(directory) as writer:
        writer.add(events)
        writer.cut_after(COUNT - 1)
    assert EventReader(directory).read(1, COUNT + 1) == events


@pytest.mark.parametrize("seq", [0, 1, 700, 1500, COUNT, COUNT + 5])
def test_events_after_and_before_a_number_are_dropped(directory: Path, seq: int) -> None:
    reader = EventReader(directory)
    with EventWriter(directory) as writer:
        writer.cut_after(seq)
        assert writer.newest_seq == min(seq, COUNT)
    assert reader.read(1, COUNT) == published(1, min(seq, COUNT))
    with EventWriter(directory) as writer:
        writer.add(published(min(seq, COUNT) + 1, COUNT))
        writer.drop_before(seq)
    assert reader.oldest_seq == (seq if seq <= COUNT else 0) or seq == 0
    assert reader.read(max(seq, 1), COUNT) == published(max(seq, 1), COUNT)


@given(starts=st.lists(st.integers(0, 300), max_size=6), size=st.integers(1, 200))
def test_overlapping_replays_write_each_event_once(starts: list[int], size: int) -> None:
    """Each begins at or before the end of the last one, as after a skipped snapshot."""
    storage, newest = MemoryStorage(), 0
    storage.make_directory(LOG)
    for start in starts:
        first = min(start, newest) + 1
        newest = max(newest, first + size - 1)
        assert write(LOG, published(first, first + size - 1), storage=storage) == newest
    assert EventReader(LOG, storage).read(1, 4000) == published(1, newest)


# Failures


def test_an_exception_leaves_what_was_committed(directory: Path) -> None:
    with pytest.raises(TypeError), EventWriter(directory) as writer:
        writer.add((*published(COUNT + 1, COUNT + 10), Published(COUNT + 11, 0, object())))  # type: ignore[arg-type]
    assert EventReader(directory).newest_seq == COUNT


def test_commits_are_bounded_and_a_failed_one_changes_nothing() -> None:
    """Also on a full disk, and after a loss of power."""
    events = published(1, 3 * COUNT, "a" * 100)
    for at in range(20):
        storage = MemoryStorage(Random(at))
        storage.make_directory(LOG)
        storage.faults.bytes_max = 40_000 * (at + 1)
        storage.fail_call(at + 1)
        with pytest.raises(LogError, match=r"events.sqlite: (disk I/O error|.* full)"):
            write(LOG, events, storage=storage)
        storage.fail_nothing()
        storage.lose_power()
        newest = EventReader(LOG, storage).newest_seq
        assert EventReader(LOG, storage).read(1, len(events)) == events[:newest]
        assert write(LOG, events, storage=storage) == len(events)
        assert EventReader(LOG, storage).read(1, len(events)) == events
    commits = [name for name, _ in storage.calls if name == "commit"]
    assert len(commits) > len(events) * 100 / CHUNK_BYTES


def test_a_locked_database_is_reported(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loradock.controller.log.storage._LOCKED_S", 0.0)
    other = sqlite3.connect(events_path(directory))
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(LogError, match="locked"):
        EventReader(directory).read(1, 1)
    with pytest.raises(LogError, match="locked"):
        write(directory, published(1, 1))
    other.close()
    assert EventReader(directory).read(1, COUNT) == published(1, COUNT)


def test_no_flipped_bit_is_believed(directory: Path) -> None:
    rng, path = Random(fresh_seed()), events_path(directory)
    size, reader = path.stat().st_size, EventReader(directory)
    expected, reports = published(1, COUNT), 0
    # The first bytes are sqlite's header, where each means something else.
    for offset in (*range(0, 100, 3), *(rng.randrange(size) for _ in range(100))):
        bit = rng.randrange(8)
        flip(path, offset, bit)
        try:
            found = reader.read(1, COUNT)
        except LogError:
            reports += 1
        else:
            assert found == expected[: len(found)]
        reports += reader.problem(COUNT) != ""
        flip(path, offset, bit)
    assert reports > 100
    assert reader.read(1, COUNT) == expected


def test_a_row_that_was_changed_is_corrupt(directory: Path) -> None:
    with sqlite3.connect(events_path(directory)) as other:
        other.execute(
            "UPDATE events SET event = (SELECT event FROM events WHERE seq = 8) WHERE seq = 7"
        )
    other.close()
    reader = EventReader(directory)
    assert reader.read(1, 100) == published(1, 6)
    with pytest.raises(EventsCorrupt, match="event 7 is not the one"):
        reader.read(7, 1)
    assert reader.read(8, COUNT) == published(8, COUNT)
    assert "event 7" in reader.problem(100)


@pytest.mark.parametrize("content", [b"not a database" * 100, b"SQLite format 3\0" + bytes(4096)])
def test_a_corrupt_database_is_replaced_by_a_writer(tmp_path: Path, content: bytes) -> None:
    events_path(tmp_path).write_bytes(content)
    with pytest.raises(EventsCorrupt):
        EventReader(tmp_path).read(1, 1)
    with EventWriter(tmp_path) as writer:
        assert "is corrupt" in writer.removed
        writer.add(published(1, 5))
    assert EventReader(tmp_path).read(1, 10) == published(1, 5)


def test_corruption_that_a_writer_meets_later_removes_the_database(directory: Path) -> None:
    path = events_path(directory)
    with EventWriter(directory) as writer:
        data = path.read_bytes()
        path.write_bytes(data[:100] + b"\xff" * (len(data) - 100))
        with pytest.raises(EventsCorrupt):
            writer.cut_after(10)
    assert not path.exists()
    assert write(directory, published(1, 5)) == 5


def test_another_version_s_database_is_refused_and_replaced_by_a_writer(directory: Path) -> None:
    other = sqlite3.connect(events_path(directory))
    other.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    other.close()
    with pytest.raises(LogForeign, match=f"schema {SCHEMA + 1}; this version reads"):
        EventReader(directory).read(1, 1)
    with EventWriter(directory) as writer:
        assert writer.removed
    assert EventReader(directory).newest_seq == 0


def test_events_of_another_version_are_reported_as_foreign(tmp_path: Path) -> None:
    newer: Any = Published(1, 0, {"type": "AdapterPainted"})  # type: ignore[arg-type]
    write(tmp_path, (newer,))
    with pytest.raises(LogForeign, match="intact"):
        EventReader(tmp_path).read(1, 1)
