"""Event files: every event is found by its number, and no change of the bytes is believed."""

import errno
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.log.event_files import (
    EVENTS_PER_FRAME,
    EventReader,
    EventWriter,
    event_files,
    event_files_before,
    event_frame,
    event_frames,
    first_seq_of,
)
from loradock.controller.log.format import LogForeign
from loradock.controller.log.storage import Storage
from loradock.messages.events import AdapterCached, Published
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import flip
from tests.support.simulation.memory_storage import MemoryStorage

pytestmark = pytest.mark.usefixtures("without_fsync")

COUNT = 3000


def published(first: int, last: int, name: str = "a") -> tuple[Published, ...]:
    return tuple(
        Published(seq, 10 * seq, AdapterCached(f"{name}-{seq}")) for seq in range(first, last + 1)
    )


def write(directory: Path, *parts: tuple[Published, ...], file_bytes_max: int = 1 << 14) -> int:
    """Write each part with a writer of its own; return the number of the newest event."""
    for part in parts:
        writer = EventWriter(directory, file_bytes_max=file_bytes_max)
        writer.add(part)
        writer.close()
    return writer.newest_seq


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Events in five files or more, which three writers wrote."""
    assert write(tmp_path, published(1, 700), published(701, 701), published(702, COUNT)) == COUNT
    assert len(event_files(tmp_path)) >= 5
    return tmp_path


class CountingStorage(Storage):
    """Counts the bytes that are read."""

    bytes_read = 0

    def read(self, path: Path, offset: int = 0, size_bytes: int = -1) -> bytes:
        """Read and count."""
        data = super().read(path, offset, size_bytes)
        self.bytes_read += len(data)
        return data


def test_without_files_there_are_no_events(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert (reader.oldest_seq, reader.newest_seq, reader.next_seq(1)) == (0, 0, 0)
    assert reader.read(1, 10) == ()
    EventWriter(tmp_path).close()
    assert event_files(tmp_path) == []


@pytest.mark.parametrize("count_max", [1, 127, 128, 129, 1024, 4096])
def test_every_event_is_found_by_its_number(directory: Path, count_max: int) -> None:
    reader, events = EventReader(directory), published(1, COUNT)
    assert (reader.oldest_seq, reader.newest_seq) == (1, COUNT)
    for first_seq in (1, 2, 700, 701, 702, *range(3, COUNT, 97), COUNT - 1, COUNT):
        assert reader.next_seq(first_seq) == first_seq
        assert reader.read(first_seq, count_max) == events[first_seq - 1 :][:count_max]
    for first_seq in (0, COUNT + 1, 2**63):
        assert reader.read(first_seq, count_max) == ()


def test_what_is_read_depends_on_the_answer_and_not_on_the_number_of_events(tmp_path: Path) -> None:
    costs = []
    for count in (COUNT, 10 * COUNT):
        directory = tmp_path / str(count)
        directory.mkdir()
        write(directory, published(1, count))
        storage = CountingStorage()
        reader = EventReader(directory, storage)
        assert len(reader.read(count // 2, EVENTS_PER_FRAME)) == EVENTS_PER_FRAME
        costs.append(storage.bytes_read)
    assert costs[1] <= 2 * costs[0]


def test_equal_events_that_are_there_are_kept(directory: Path) -> None:
    before = {path: path.read_bytes() for path in event_files(directory)}
    assert write(directory, published(1, COUNT), published(50, 60)) == COUNT
    assert {path: path.read_bytes() for path in event_files(directory)} == before


def test_a_fetch_finds_every_event_while_a_fold_of_the_whole_log_writes_them(
    directory: Path,
) -> None:
    writer, reader = EventWriter(directory, file_bytes_max=1 << 14), EventReader(directory)
    for start in range(1, COUNT + 1, 250):
        writer.add(published(start, start + 249))
        # A reader of another process begins anew, or finds its files changed.
        for found in (reader, EventReader(directory)):
            assert found.read(1, COUNT + 1) == published(1, COUNT)
    writer.close()


@pytest.mark.parametrize("changed", [1, 2, 127, 1500, COUNT])
def test_events_from_the_first_that_differs_are_replaced(directory: Path, changed: int) -> None:
    parts = (published(1, changed - 1), published(changed, COUNT - 1, "new"))
    writer = EventWriter(directory, file_bytes_max=1 << 14)
    for event in (*parts[0], *parts[1]):
        writer.add((event,))
    writer.cut_after(COUNT - 1)
    writer.close()
    assert EventReader(directory).read(1, COUNT + 1) == (*parts[0], *parts[1])


def test_a_gap_begins_another_file(tmp_path: Path) -> None:
    write(tmp_path, published(11, 20), published(31, 40))
    assert [first_seq_of(path) for path in event_files(tmp_path)] == [11, 31]
    reader = EventReader(tmp_path)
    assert [reader.next_seq(seq) for seq in (1, 11, 20, 21, 30, 31, 40, 41)] == [
        *(11, 11, 20, 31, 31, 31, 40, 0)
    ]
    assert reader.read(15, 100) == published(15, 20)
    assert (reader.oldest_seq, reader.newest_seq) == (11, 40)


def test_a_reader_notices_what_was_written_and_removed_since(directory: Path) -> None:
    reader = EventReader(directory)
    assert reader.read(COUNT, 10) == published(COUNT, COUNT)
    write(directory, published(COUNT + 1, COUNT + 300))
    assert reader.read(COUNT + 1, 1000) == published(COUNT + 1, COUNT + 300)
    for path in event_files_before(directory, 1500):
        path.unlink()
    assert reader.read(1, 1) == ()
    first = first_seq_of(event_files(directory)[0])
    assert reader.oldest_seq == reader.next_seq(1) == first <= 1500
    assert reader.read(1500, 10) == published(1500, 1509)


def test_the_files_before_an_event_do_not_contain_it(directory: Path) -> None:
    paths = event_files(directory)
    for seq in range(COUNT + 10):
        before = event_files_before(directory, seq)
        kept = paths[len(before) :]
        assert paths[: len(before)] == before
        assert kept
        assert not before or first_seq_of(kept[0]) <= seq
        assert len(kept) == 1 or first_seq_of(kept[1]) > seq


@pytest.mark.parametrize("seq", [0, 1, 127, 128, 129, 699, 700, 701, 702, 1500, COUNT, COUNT + 5])
def test_events_after_a_number_can_be_replaced(directory: Path, seq: int) -> None:
    reader = EventReader(directory)
    reader.read(1, COUNT)
    writer = EventWriter(directory)
    writer.cut_after(seq)
    kept = min(seq, COUNT)
    assert writer.newest_seq == kept
    writer.add(published(kept + 1, kept + 200, "new"))
    writer.close()
    expected = (*published(1, kept), *published(kept + 1, kept + 200, "new"))
    assert EventReader(directory).read(1, 2 * COUNT) == expected
    # A reader from before finds them too, and never another log's event.
    found: tuple[Published, ...] = ()
    while part := reader.read(len(found) + 1, 2 * COUNT):
        found += part
    assert found == expected


def test_a_file_cut_at_any_byte_is_continued_after_its_last_whole_frame(tmp_path: Path) -> None:
    events = published(1, 300)
    write(tmp_path, *(events[start : start + 60] for start in range(0, 300, 60)))
    (path,) = event_files(tmp_path)
    data = path.read_bytes()
    ends = [frame.end for frame in event_frames(data, 1)]
    for cut in range(len(data) + 1):
        assert [frame.end for frame in event_frames(data[:cut], 1)] == [
            end for end in ends if end <= cut
        ]
    for cut in (*range(0, len(data), 97), *ends):
        path.write_bytes(data[:cut])
        assert EventReader(tmp_path).newest_seq == 60 * sum(end <= cut for end in ends)
        assert write(tmp_path, events) == 300
        assert EventReader(tmp_path).read(1, 1000) == events


def test_a_flip_of_any_bit_is_never_believed() -> None:
    data = bytearray(event_frame(published(1, 5)) + event_frame(published(6, 9)))
    first, second = event_frames(bytes(data), 1)
    for offset in range(len(data)):
        for bit in range(8):
            data[offset] ^= 1 << bit
            assert event_frames(bytes(data), 1) == ([first] if offset >= first.end else [])
            data[offset] ^= 1 << bit
    assert event_frames(bytes(data), 1) == [first, second]


def test_damage_hides_a_file_s_later_events_and_no_others(directory: Path) -> None:
    rng = Random(fresh_seed())
    for path in event_files(directory)[:-1]:
        offset = rng.randrange(path.stat().st_size)
        flip(path, offset)
        reader = EventReader(directory)
        found: list[Published] = []
        seq = reader.next_seq(1)
        while seq:
            events = reader.read(seq, COUNT)
            found += events
            seq = reader.next_seq(events[-1].seq + 1)
        lost = COUNT - len(found)
        later = [first_seq_of(other) for other in event_files(directory) if other > path]
        assert 0 < lost <= later[0] - first_seq_of(path)
        assert set(found) < set(published(1, COUNT))
        flip(path, offset)


def test_a_damaged_last_file_is_made_again(directory: Path) -> None:
    last = event_files(directory)[-1]
    flip(last, 5)
    writer = EventWriter(directory)
    assert writer.newest_seq == first_seq_of(last) - 1
    writer.add(published(1, COUNT))
    writer.close()
    assert EventReader(directory).read(1, COUNT) == published(1, COUNT)


def test_a_full_disk_leaves_whole_frames(tmp_path: Path) -> None:
    class FullStorage(Storage):
        room = 5000

        def write(self, fd: int, data: bytes) -> int:
            count = super().write(fd, data[: self.room])
            self.room -= count
            return count

    writer = EventWriter(tmp_path, FullStorage())
    with pytest.raises(OSError, match="bytes of events") as caught:
        writer.add(published(1, COUNT))
    assert caught.value.errno == errno.ENOSPC
    writer.close()
    newest = EventReader(tmp_path).newest_seq
    assert newest % EVENTS_PER_FRAME == 0
    assert EventReader(tmp_path).read(1, COUNT) == published(1, newest)
    assert write(tmp_path, published(1, COUNT)) == COUNT
    assert EventReader(tmp_path).read(1, COUNT) == published(1, COUNT)


@pytest.mark.parametrize("file_bytes_max", [1, 2000, 1 << 20])
@pytest.mark.parametrize("seed", range(5))
def test_events_that_were_not_synced_are_written_again(seed: int, file_bytes_max: int) -> None:
    """A failed sync loses bytes that the process still sees, and the next sync succeeds."""
    directory, storage = Path("/log"), MemoryStorage(Random(seed))
    storage.make_directory(directory)
    for first, last in ((1, 40), (41, 90)):
        storage.faults.sync_fails = 0.5 if first > 1 else 0.0
        for _ in range(100):
            writer = EventWriter(directory, storage, file_bytes_max)
            try:
                # What has no snapshot yet is added again.
                writer.add(published(first, last))
                writer.close()
            except OSError:
                storage.crash()
            else:
                break
    storage.lose_power()
    assert EventReader(directory, storage).read(1, 200) == published(1, 90)


def test_events_of_another_version_are_reported_as_foreign(tmp_path: Path) -> None:
    newer: Any = Published(1, 0, {"type": "AdapterPainted"})  # type: ignore[arg-type]
    (tmp_path / f"events-{1:020}.evt").write_bytes(event_frame([newer]))
    with pytest.raises(LogForeign, match="intact"):
        EventReader(tmp_path).read(1, 1)


@given(
    starts=st.lists(st.integers(0, 300), max_size=6),
    size=st.integers(1, 200),
    file_bytes_max=st.sampled_from([1, 2000, 1 << 20]),
)
def test_overlapping_folds_write_each_event_once(
    tmp_path_factory: pytest.TempPathFactory, starts: list[int], size: int, file_bytes_max: int
) -> None:
    """Each fold begins at or before the end of the last one, as after a skipped snapshot."""
    directory, newest = tmp_path_factory.mktemp("events"), 0
    for start in starts:
        first = min(start, newest) + 1
        newest = max(newest, first + size - 1)
        part = published(first, first + size - 1)
        assert write(directory, part, file_bytes_max=file_bytes_max) == newest
    assert EventReader(directory).read(1, 4000) == published(1, newest)
