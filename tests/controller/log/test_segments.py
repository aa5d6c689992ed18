"""A directory of segments is read up to a torn tail, or refused with file, offset and seq."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from loradock.controller.log.format import (
    CHAIN_START,
    LogCorrupt,
    LogForeign,
    frame_header,
    frame_records,
    whole_frame,
    whole_frames,
)
from loradock.controller.log.segments import read, verify, walk
from loradock.controller.log.writer import Log
from loradock.messages.errors import ErrorCode
from loradock.messages.records import Record
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import HEADER, files, flip, make_records, write

COUNT = 60

pytestmark = pytest.mark.usefixtures("without_fsync")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log of five segments or more."""
    write(tmp_path / "log", make_records(COUNT), segment_bytes_max=1000)
    assert len(files(tmp_path / "log")) >= 5
    return tmp_path / "log"


def seq_of(file: Path) -> int:
    return int(file.stem)


def numbers(directory: Path, first_seq: int = 0) -> list[int]:
    return [seq for seq, _, _ in read(directory, first_seq)]


def corruption_in(directory: Path) -> tuple[str, int, int]:
    """Return the place of the corruption, which reading and verifying find without any change."""
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(LogCorrupt) as caught:
        numbers(directory)
    found = caught.value
    assert found.code is ErrorCode.LOG_UNAVAILABLE
    assert all(str(part) in str(found) for part in (found.file, found.offset, found.seq))
    verified = verify(directory).corruption
    assert verified is not None
    assert (verified.file, verified.offset, verified.seq) == (found.file, found.offset, found.seq)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    return found.file.name, found.offset, found.seq


def test_an_empty_directory_is_an_empty_log(tmp_path: Path) -> None:
    assert numbers(tmp_path) == []
    assert verify(tmp_path) == (0, 0, 0, 0, 0, None)


def test_a_log_is_read_from_any_record_on(directory: Path) -> None:
    everything = list(read(directory))
    assert [record for _, _, record in everything] == make_records(COUNT)
    for first_seq in range(COUNT + 3):
        assert list(read(directory, first_seq)) == everything[max(first_seq - 1, 0) :]
    assert len(list(walk(directory, seq_of(files(directory)[2])))) == len(files(directory)) - 2


def test_the_first_segments_can_be_dropped(directory: Path) -> None:
    first, second, third, *_ = files(directory)
    first.unlink()
    second.rename(second.with_suffix(".kept"))
    assert numbers(directory) == list(range(seq_of(third), COUNT + 1))
    assert verify(directory).first_seq == seq_of(third)
    write(directory, make_records(2))
    assert numbers(directory)[-1] == COUNT + 2


def test_reading_only_headers_checks_the_records_too(directory: Path) -> None:
    assert [segment.header.first_seq for segment in walk(directory)] == [
        seq_of(file) for file in files(directory)
    ]
    flip(files(directory)[2], 600)
    with pytest.raises(LogCorrupt):
        list(walk(directory))
    found, first_records = walk(directory), []
    with pytest.raises(LogCorrupt):
        first_records.extend(next(segment.records()) for segment in found)
    assert len(first_records) == 3


def test_a_format_that_is_not_known_is_refused(tmp_path: Path) -> None:
    header = msgspec.structs.replace(HEADER, format=3, first_seq=1)
    (tmp_path / f"{1:020}.log").write_bytes(frame_header(header, CHAIN_START)[0])
    for use in (numbers, verify, lambda d: Log(d, HEADER)):
        with pytest.raises(LogForeign, match="format 3"):
            use(tmp_path)


def test_the_last_segment_cut_at_any_byte_continues_after_its_longest_whole_prefix(
    tmp_path: Path,
) -> None:
    """After its header: that is durable before the file has its name. What is cut is kept."""
    records = make_records(COUNT)
    write(tmp_path / "whole", records, segment_bytes_max=1000)
    last = files(tmp_path / "whole")[-1]
    data, first_seq = last.read_bytes(), seq_of(last)
    header = whole_frame(data, 0)
    assert header is not None
    previous = first_seq - 1
    for cut in range(len(data) + 1):
        last.write_bytes(data[:cut])
        if cut < header.end:
            with pytest.raises(LogCorrupt, match="header is incomplete"):
                Log(tmp_path / "whole", HEADER)
            assert last.read_bytes() == data[:cut]
            continue
        whole = numbers(tmp_path / "whole")
        assert len(whole) >= previous
        with Log(tmp_path / "whole", HEADER) as log:
            assert log.next_seq == len(whole) + 1
            _, _, cut_bytes, cut_from, kept_in = log.recovered
            assert cut_from == (last if cut_bytes else None)
            assert last.stat().st_size == cut - cut_bytes
            assert (kept_in.read_bytes() if kept_in else b"") == data[cut - cut_bytes : cut]
            log.append(make_records(2, 500), epoch=1)
        found = [record for _, _, record in read(tmp_path / "whole")]
        assert found == records[: len(whole)] + make_records(2, 500)
        previous = len(whole)
    assert previous == COUNT


def test_a_flip_of_any_bit_is_corruption_before_the_last_record_and_else_a_torn_tail(
    directory: Path,
) -> None:
    """Random bits of whole files; `test_format` sweeps over every bit."""
    rng = Random(fresh_seed())
    for file in files(directory):
        size = file.stat().st_size
        last = [offset for offset, _ in whole_frames(file.read_bytes(), 0)][-1]
        for offset in {0, last, size - 1, *(rng.randrange(size) for _ in range(40))}:
            bit = rng.randrange(8)
            flip(file, offset, bit)
            if file == files(directory)[-1] and offset >= last:
                assert verify(directory)[1:] == (COUNT - 1, 1, COUNT - 1, size - last, None)
            else:
                name, at, _ = corruption_in(directory)
                assert name == file.name
                assert at <= offset
            flip(file, offset, bit)
    assert verify(directory).records == COUNT


def lose_a_segment(all_files: list[Path]) -> tuple[Path, int, int]:
    all_files[2].unlink()
    return all_files[3], 0, seq_of(all_files[2])


def swap_two_segments(all_files: list[Path]) -> tuple[Path, int, int]:
    spare = all_files[1].with_suffix(".spare")
    all_files[1].rename(spare)
    all_files[2].rename(all_files[1])
    spare.rename(all_files[2])
    return all_files[1], 0, seq_of(all_files[1])


def copy_a_segment_after_the_last(all_files: list[Path]) -> tuple[Path, int, int]:
    copy = all_files[1].with_name(f"{COUNT + 1:020}.log")
    shutil.copy(all_files[1], copy)
    return copy, 0, COUNT + 1


def copy_a_segment_between(all_files: list[Path]) -> tuple[Path, int, int]:
    copy = all_files[1].with_name(f"{seq_of(all_files[1]) + 1:020}.log")
    shutil.copy(all_files[1], copy)
    return copy, 0, seq_of(all_files[2])


def empty_a_middle_segment(all_files: list[Path]) -> tuple[Path, int, int]:
    os.truncate(all_files[2], 0)
    return all_files[2], 0, seq_of(all_files[2])


def cut_a_middle_segment_in_a_record(all_files: list[Path]) -> tuple[Path, int, int]:
    last = msgspec.msgpack.encode(make_records(COUNT)[seq_of(all_files[3]) - 2])
    size = all_files[2].stat().st_size
    os.truncate(all_files[2], size - 1)
    return all_files[2], size - 40 - len(last), seq_of(all_files[3]) - 1


def cut_a_middle_segment_between_records(all_files: list[Path]) -> tuple[Path, int, int]:
    last = msgspec.msgpack.encode(make_records(COUNT)[seq_of(all_files[3]) - 2])
    os.truncate(all_files[2], all_files[2].stat().st_size - 40 - len(last))
    return all_files[3], 0, seq_of(all_files[3]) - 1


def add_zeros_to_a_middle_segment(all_files: list[Path]) -> tuple[Path, int, int]:
    size = all_files[2].stat().st_size
    os.truncate(all_files[2], size + 4096)
    return all_files[2], size, seq_of(all_files[3])


def lose_the_header_of_the_first_segment(all_files: list[Path]) -> tuple[Path, int, int]:
    flip(all_files[0], 50)
    return all_files[0], 0, 1


def begin_a_second_log_in_the_last_segment(all_files: list[Path]) -> tuple[Path, int, int]:
    header = msgspec.structs.replace(HEADER, first_seq=seq_of(all_files[-1]))
    link = CHAIN_START._replace(seq=header.first_seq - 1, epoch=1)
    head, link = frame_header(header, link)
    frames, _ = frame_records(make_records(1), 1, link)
    all_files[-1].write_bytes(head + frames[0])
    return all_files[-1], 0, header.first_seq


def number_the_first_header_wrongly(all_files: list[Path]) -> tuple[Path, int, int]:
    kept = all_files[-1]
    for file in all_files[:-1]:
        file.unlink()
    header = msgspec.structs.replace(HEADER, first_seq=seq_of(kept))
    kept.write_bytes(frame_header(header, CHAIN_START._replace(seq=seq_of(kept)))[0])
    return kept, 0, seq_of(kept)


def let_a_header_name_another_beginning(all_files: list[Path]) -> tuple[Path, int, int]:
    for file in all_files[1:]:
        file.unlink()
    header = msgspec.structs.replace(HEADER, first_seq=2)
    all_files[0].write_bytes(frame_header(header, CHAIN_START)[0])
    return all_files[0], 0, 1


def call_a_segment_zero(all_files: list[Path]) -> tuple[Path, int, int]:
    zero = all_files[0].with_name(f"{0:020}.log")
    all_files[0].rename(zero)
    return zero, 0, 0


CORRUPTIONS = [
    lose_a_segment,
    swap_two_segments,
    copy_a_segment_after_the_last,
    copy_a_segment_between,
    empty_a_middle_segment,
    cut_a_middle_segment_in_a_record,
    cut_a_middle_segment_between_records,
    add_zeros_to_a_middle_segment,
    lose_the_header_of_the_first_segment,
    begin_a_second_log_in_the_last_segment,
    number_the_first_header_wrongly,
    let_a_header_name_another_beginning,
    call_a_segment_zero,
]


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda corruption: corruption.__name__)
def test_corruption_is_named_by_file_offset_and_seq(
    directory: Path, corruption: Callable[[list[Path]], tuple[Path, int, int]]
) -> None:
    file, offset, seq = corruption(files(directory))
    assert corruption_in(directory) == (file.name, offset, seq)


def test_opening_stops_at_corruption_in_the_last_segment(directory: Path) -> None:
    flip(files(directory)[-1], 200)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(LogCorrupt):
        Log(directory, HEADER)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize("tail", [bytes(4096), b"\xff" * 100, b"LDR1" * 50, b"L"])
def test_a_tail_that_is_not_a_record_is_cut_and_reported(directory: Path, tail: bytes) -> None:
    last = files(directory)[-1]
    with last.open("ab") as file:
        file.write(tail)
    assert verify(directory)[1:] == (COUNT, 1, COUNT, len(tail), None)
    assert numbers(directory)[-1] == COUNT
    with Log(directory, HEADER) as log:
        kept_in = last.with_name(f"{last.name}.0.cut")
        assert log.recovered == (COUNT + 1, 1, len(tail), last, kept_in)
        assert kept_in.read_bytes() == tail
    assert verify(directory).torn_bytes == 0


def test_other_files_are_not_the_logs(directory: Path) -> None:
    for name in ("segment.new", "notes.txt", "1.log", f"{7:020}.log.0.corrupt", f"{7:020}.log~"):
        (directory / name).write_bytes(b"LDR1 of another program")
    assert numbers(directory)[-1] == COUNT
    assert verify(directory).segments == len(files(directory)) - 1


def test_a_record_is_read_as_the_type_that_was_written(directory: Path) -> None:
    assert {type(record) for _, _, record in read(directory)} == {Record}
