"""The log's writer: a record is durable once `append` returns, and a failing disk loses none."""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.log.format import LogBusy, LogForeign, LogFull, LogSyncFailed
from loradock.controller.log.segments import read, verify, walk
from loradock.controller.log.writer import Log, Recovered
from loradock.messages.errors import ErrorCode
from loradock.messages.records import Record, TimerFired
from tests.support.simulation.log_examples import (
    HEADER,
    TIME_NS,
    Disk,
    FailingDisk,
    files,
    make_records,
    records_in,
    write_with,
)
from tests.support.simulation.message_examples import strategy


def test_a_new_log_is_private_and_empty(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "log"
    with Log(directory, HEADER) as log:
        assert log.recovered == Recovered(1, 0, 0, None)
        assert log.next_seq == 1
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    file = directory / "00000000000000000001.log"
    assert list(directory.glob("*.log")) == [file]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert verify(directory) == (1, 0, 0, 0, 0, None)


@pytest.mark.usefixtures("without_fsync")
def test_records_are_numbered_from_one_and_keep_their_epoch(tmp_path: Path) -> None:
    records = make_records(60)
    with Log(tmp_path, HEADER) as log:
        assert log.append(records[:1], epoch=1) == 1
        assert log.append([], epoch=1) == 1
        assert log.append(records[1:40], epoch=1) == 40
    with Log(tmp_path, HEADER) as log:
        assert log.recovered == Recovered(41, 1, 0, None)
        assert log.append(records[40:], epoch=3) == 60
        assert log.next_seq == 61
    epochs = [1] * 40 + [3] * 20
    assert list(read(tmp_path)) == list(zip(range(1, 61), epochs, records, strict=True))


@pytest.mark.usefixtures("without_fsync")
def test_every_segment_has_the_header_that_it_was_written_with(tmp_path: Path) -> None:
    other = msgspec.structs.replace(HEADER, policy="lfu")
    for header in (HEADER, HEADER, other):
        with Log(tmp_path, header) as log:
            log.append(make_records(2), epoch=1)
    found = [(segment.header, len(list(segment.records()))) for segment in walk(tmp_path)]
    assert found == [
        (msgspec.structs.replace(HEADER, first_seq=1), 4),
        (msgspec.structs.replace(other, first_seq=5), 2),
    ]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.usefixtures("without_fsync")
def test_a_new_header_replaces_one_without_records(tmp_path: Path, count: int) -> None:
    if count:
        with Log(tmp_path, HEADER) as log:
            log.append(make_records(count), epoch=1)
        Log(tmp_path, msgspec.structs.replace(HEADER, policy="lfu")).close()
    else:
        Log(tmp_path, HEADER).close()
    with Log(tmp_path, msgspec.structs.replace(HEADER, policy="last")) as log:
        log.append(make_records(1), epoch=1)
    assert [segment.header.policy for segment in walk(tmp_path)] == ["lru"] * (count > 0) + ["last"]
    assert verify(tmp_path)[1:] == (count + 1, 1, count + 1, 0, None)


@pytest.mark.parametrize("rules", [HEADER.rules - 1, HEADER.rules + 1])
def test_a_log_of_other_rules_is_not_continued_nor_changed(tmp_path: Path, rules: int) -> None:
    with Log(tmp_path, msgspec.structs.replace(HEADER, rules=rules)) as log:
        log.append(make_records(1), epoch=1)
    [path] = files(tmp_path)
    before = path.read_bytes() + b"a torn tail"
    path.write_bytes(before)
    with pytest.raises(LogForeign, match=f"rules {rules}"):
        Log(tmp_path, HEADER)
    assert (files(tmp_path), path.read_bytes()) == ([path], before)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Log(tmp_path, HEADER), pytest.raises(LogBusy, match="another process"):
        Log(tmp_path, HEADER)
    Log(tmp_path, HEADER).close()


def test_a_closed_log_accepts_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path, HEADER)
    log.close()
    log.close()
    with pytest.raises(LogSyncFailed, match="closed"):
        log.append(make_records(1), epoch=1)


@pytest.mark.usefixtures("without_fsync")
def test_epochs_never_decrease(tmp_path: Path) -> None:
    with Log(tmp_path, HEADER) as log:
        log.append(make_records(1), epoch=5)
        with pytest.raises(ValueError, match="epoch 4 after epoch 5"):
            log.append(make_records(1), epoch=4)
        assert log.append(make_records(1), epoch=5) == 2


@pytest.mark.parametrize(
    ("policy", "writes", "syncs"),
    [("group", 3, 3), ("always", 9, 9), ("interval", 3, 2), ("never", 3, 0)],
)
def test_a_group_is_one_write_and_the_syncs_that_the_policy_specifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, writes: int, syncs: int
) -> None:
    with Log(tmp_path, HEADER, sync=policy, sync_interval_ms=10) as log:
        disk = write_with(Disk(), monkeypatch)
        # The groups end at 0, 9 and 10 ms.
        for end_ms in (0, 9, 10):
            times = [TIME_NS + (end_ms - back) * 1_000_000 for back in (2, 1, 0)]
            log.append([Record(time_ns, TimerFired()) for time_ns in times], epoch=1)
        assert (disk.calls.count("write"), disk.calls.count("fdatasync")) == (writes, syncs)
        disk.calls.clear()
        log.sync()
        log.sync()
        assert disk.calls.count("fdatasync") == (policy == "never")


@pytest.mark.usefixtures("without_fsync")
def test_a_segment_ends_when_it_is_full(tmp_path: Path) -> None:
    records = make_records(90)
    with Log(tmp_path, HEADER, segment_bytes_max=1000) as log:
        for start in range(0, 90, 3):
            log.append(records[start : start + 3], epoch=1)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.log"))]
    assert len(sizes) > 5
    assert all(1000 <= size < 2000 for size in sizes[:-1])
    assert records_in(tmp_path) == records
    with Log(tmp_path, HEADER, segment_bytes_max=1) as log:
        log.append(records[:1], epoch=1)
        log.append(records[:1], epoch=1)
    assert verify(tmp_path) == (len(sizes) + 2, 92, 1, 92, 0, None)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("room", [0, 1, 70, 400])
@pytest.mark.parametrize("policy", ["group", "always"])
def test_a_full_disk_refuses_a_group_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, room: int, policy: Any
) -> None:
    records = make_records(20)
    with Log(tmp_path, HEADER, sync=policy) as log:
        log.append(records[:5], epoch=1)
        before = next(tmp_path.glob("*.log")).read_bytes()
        disk = write_with(FailingDisk(room, write=error), monkeypatch)
        with pytest.raises(LogFull, match="nothing was written") as caught:
            log.append(records[5:10], epoch=2)
        assert caught.value.code is ErrorCode.LOG_UNAVAILABLE
        assert next(tmp_path.glob("*.log")).read_bytes() == before
        # A write that wrote nothing needs no cut, which a read-only file system would refuse.
        assert ("ftruncate" in disk.calls) == bool(room)
        assert disk.calls[-2:] == ["ftruncate", "fdatasync"] or not room
        disk.errors.clear()
        assert log.append(records[10:], epoch=2) == 15
    assert records_in(tmp_path) == records[:5] + records[10:]
    assert verify(tmp_path) == (1, 15, 1, 15, 0, None)


@pytest.mark.parametrize("bytes_max", [1, 1 << 20])
def test_a_file_system_that_was_made_read_only_refuses_groups_until_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    records, changes = make_records(12), ("write", "open", "ftruncate", "fdatasync", "rename")
    with Log(tmp_path, HEADER, segment_bytes_max=bytes_max) as log:
        log.append(records[:4], epoch=1)
        disk = write_with(FailingDisk(**dict.fromkeys(changes, errno.EROFS)), monkeypatch)
        for _ in range(2):
            with pytest.raises(LogFull, match="Read-only file system"):
                log.append(records[4:8], epoch=1)
        disk.errors.clear()
        assert log.append(records[8:], epoch=1) == 8
    assert records_in(tmp_path) == records[:4] + records[8:]


@pytest.mark.parametrize("fails", ["write", "open", "fdatasync", "rename"])
def test_a_disk_that_is_full_at_the_end_of_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    records = make_records(12)
    with Log(tmp_path, HEADER, segment_bytes_max=1) as log:
        log.append(records[:4], epoch=1)
        disk = write_with(FailingDisk(room=10, **{fails: errno.ENOSPC}), monkeypatch)
        for _ in range(2):
            with pytest.raises(LogFull):
                log.append(records[4:8], epoch=1)
        disk.errors.clear()
        assert log.append(records[8:], epoch=1) == 8
    assert records_in(tmp_path) == records[:4] + records[8:]
    assert len(list(walk(tmp_path))) == 2


BROKEN = [
    ("fdatasync", errno.EIO, {}),
    ("fdatasync", errno.ENOSPC, {}),
    ("fdatasync", errno.EIO, {"sync": "always"}),
    ("write", errno.EIO, {}),
    ("fsync", errno.EIO, {"segment_bytes_max": 1}),
    ("rename", errno.EIO, {"segment_bytes_max": 1}),
    ("open", errno.EMFILE, {"segment_bytes_max": 1}),
]


@pytest.mark.parametrize(("fails", "error", "options"), BROKEN)
def test_after_a_failed_disk_nothing_is_accepted_until_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, error: int, options: Any
) -> None:
    records = make_records(10)
    log = Log(tmp_path, HEADER, **options)
    log.append(records[:5], epoch=1)
    disk = write_with(FailingDisk(**{fails: error}), monkeypatch)
    with pytest.raises(LogSyncFailed, match="restart"):
        log.append(records[5:], epoch=1)
    disk.errors.clear()
    disk.calls.clear()
    for _ in range(2):
        with pytest.raises(LogSyncFailed):
            log.append(records[5:], epoch=1)
    with pytest.raises(LogSyncFailed):
        log.sync()
    log.close()
    assert set(disk.calls) == {"close"}
    with Log(tmp_path, HEADER, **options) as log:
        assert log.next_seq > 5
        assert records_in(tmp_path) == records[: log.next_seq - 1]


def test_a_cut_that_fails_is_a_failed_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fails in ("ftruncate", "fdatasync"):
        with Log(tmp_path, HEADER) as log:
            write_with(FailingDisk(10, write=errno.ENOSPC, **{fails: errno.EIO}), monkeypatch)
            for _ in range(2):
                with pytest.raises(LogSyncFailed):
                    log.append(make_records(5), epoch=1)
        monkeypatch.undo()


def test_a_directory_that_can_not_be_synced_is_a_failed_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoDirectorySync(Disk):
        def do(self, name: str, real: Any, *args: Any) -> Any:
            if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode):
                raise OSError(errno.EIO, "no")
            return super().do(name, real, *args)

    log = Log(tmp_path, HEADER, segment_bytes_max=1)
    log.append(make_records(1), epoch=1)
    write_with(NoDirectorySync(), monkeypatch)
    with pytest.raises(LogSyncFailed, match="directory"):
        log.append(make_records(1), epoch=1)
    log.close()
    monkeypatch.undo()
    with Log(tmp_path, HEADER) as log:
        assert log.recovered == Recovered(2, 1, 0, None)


@pytest.mark.usefixtures("without_fsync")
def test_every_descriptor_is_closed(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    with Log(tmp_path, HEADER, segment_bytes_max=1) as log:
        in_use = open_files()
        for _ in range(5):
            log.append(make_records(1), epoch=1)
        with pytest.raises(LogBusy) as caught:
            Log(tmp_path, HEADER)
        assert caught.value.code is ErrorCode.LOG_UNAVAILABLE
        assert open_files() == in_use == before + 2
    assert open_files() == before


@given(
    sessions=st.lists(
        st.tuples(
            st.lists(st.lists(strategy(Record), max_size=4), max_size=4),
            st.sampled_from(["group", "always", "interval", "never"]),
            st.sampled_from([1, 300, 1 << 20]),
        ),
        max_size=4,
    )
)
@settings(max_examples=60)
def test_what_was_written_is_read_back(sessions: list[Any]) -> None:
    expected: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "log"
        for epoch, (groups, policy, size) in enumerate(sessions, 1):
            with Log(directory, HEADER, sync=policy, segment_bytes_max=size) as log:
                assert log.next_seq == len(expected) + 1
                for group in groups:
                    log.append(group, epoch)
                    expected += [(len(expected) + i, epoch, r) for i, r in enumerate(group, 1)]
                assert list(read(directory)) == expected
        if sessions:
            assert verify(directory).records == len(expected)
