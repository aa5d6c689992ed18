"""The log's bytes: every change is detected, and distinguished from an unfinished write."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from loradock.controller.log.format import (
    CHAIN_START,
    HEAD_BYTES,
    MARKER,
    ChainLink,
    LogForeign,
    Scan,
    frame_header,
    frame_records,
    read_header,
    read_record,
    whole_frame,
    whole_frames,
)
from loradock.messages.records import Record, TimerFired
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import HEADER, make_records

COUNT = 1000


class Image:
    """A segment in memory: its bytes, and each record's start, end and the link it continues."""

    def __init__(self, count: int) -> None:
        self.records = make_records(count)
        head, link = frame_header(HEADER, CHAIN_START)
        frames, _ = frame_records(self.records, 1, link)
        self.data = head + b"".join(frames)
        self.begin = ChainLink(0, 0, link.checksum)
        self.header_bytes = len(head)
        self.record_places: list[tuple[int, int, ChainLink]] = []
        offset = len(head)
        for frame in frames:
            self.record_places.append((offset, offset + len(frame), link))
            parsed = whole_frame(self.data, offset)
            assert parsed is not None
            link, offset = parsed.link, offset + len(frame)

    def frame(self, place: int) -> bytes:
        """Return the bytes of a record."""
        start, end, _ = self.record_places[place]
        return self.data[start:end]


@pytest.fixture(scope="module")
def image() -> Image:
    return Image(COUNT)


def test_the_bytes_never_change() -> None:
    head, link = frame_header(msgspec.structs.replace(HEADER, first_seq=1), CHAIN_START)
    records = [Record(1, TimerFired(), "d", 5, 6), Record(2, TimerFired())]
    frames, link = frame_records(records, 3, link)
    assert [head.hex(), *(frame.hex() for frame in frames)] == [
        "4c4452317a5a89a31dccb33100000027000000000000000000000000000000000000000000000000"
        "950201a36c727582a9736c6f74735f6d617804b1686f73745f61646170746572735f6d61781001",
        "4c44523190d7cab5bf138c2d00000012000000000000000100000000000000037a5a89a31dccb331"
        "950191aa54696d65724669726564a1640506",
        "4c445231b177934b9f0b92d5000000110000000000000002000000000000000390d7cab5bf138c2d"
        "950291aa54696d65724669726564a00000",
    ]
    assert link == ChainLink(2, 3, frames[1][4:12])


def test_another_format_is_refused() -> None:
    header = msgspec.structs.replace(HEADER, format=1, first_seq=1)
    parsed = whole_frame(frame_header(header, CHAIN_START)[0], 0)
    assert parsed is not None
    with pytest.raises(LogForeign, match="format 1; this version reads format 2"):
        read_header(parsed.body, Path("x"))


def test_a_segment_is_read_back(image: Image) -> None:
    scan = Scan(image.data, image.header_bytes, image.begin)
    bodies = [body for _, _, body in scan.frames()]
    assert [read_record(body, 1, Path("x")) for body in bodies] == image.records
    assert (scan.offset, scan.link.seq) == (len(image.data), COUNT)
    assert not scan.corruption()
    assert len(list(whole_frames(image.data, 0))) == COUNT + 1


def test_a_segment_cut_at_any_byte_has_its_longest_whole_prefix(image: Image) -> None:
    """A scan only reads forward, so each starts at the record that is cut."""
    for start, end, link in image.record_places:
        for cut in range(start, end):
            scan = Scan(image.data[start:cut], 0, link)
            assert next(scan.frames(), None) is None
            assert (scan.offset, scan.link) == (0, link)
            assert not scan.corruption(), f"cut at {cut}"


def test_every_flip_of_one_bit_is_detected(image: Image) -> None:
    """A scan only reads forward, so each starts at the record whose bit is flipped."""
    data: Any = bytearray(image.data)
    for start, end, link in image.record_places:
        is_last = end == len(data)
        for offset in range(start, end):
            for bit in range(8):
                data[offset] ^= 1 << bit
                scan = Scan(data, start, link)
                assert next(scan.frames(), None) is None, f"bit {bit} at {offset} was not detected"
                # Without a whole frame after it, it can't be told from a torn tail.
                assert bool(scan.corruption()) != is_last, f"bit {bit} at {offset}"
                data[offset] ^= 1 << bit
    assert data == image.data


def test_no_record_in_a_place_that_is_not_its_own_is_accepted(image: Image) -> None:
    """At least 100,000 records are spliced, swapped, repeated, or of other logs."""
    seed = fresh_seed()
    rng, count = Random(seed), 0
    links = [link for _, _, link in image.record_places]
    foreign = foreign_frames(image)
    for place, link in enumerate(links):
        near = {place - 1, place + 1, *(rng.randrange(COUNT) for _ in range(110))} - {place}
        others = [image.frame(other) for other in near if 0 <= other < COUNT]
        for frame in (*others, *(frames[place] for frames in foreign)):
            scan = Scan(frame, 0, link)
            assert next(scan.frames(), None) is None, f"record at place {place}"
            assert "does not continue" in scan.corruption()
            count += 1
    assert count > 100_000


def foreign_frames(image: Image) -> list[list[bytes]]:
    """Return the same records as other logs would have them: at each place with the same number."""
    other_header, _ = frame_header(HEADER, ChainLink(0, 1, bytes(8)))
    starts = [
        ChainLink(0, 0, bytes(8)),
        ChainLink(0, 0, image.begin.checksum[::-1]),
        ChainLink(0, 0, other_header[4:12]),
    ]
    logs = [frame_records(image.records, 1, start)[0] for start in starts]
    later_epoch, _ = frame_records(image.records, 2, image.begin)
    changed = [msgspec.structs.replace(image.records[0], time_ns=1), *image.records[1:]]
    fork, _ = frame_records(changed, 1, image.begin)
    # The first record of these two continues the chain: it is the first of another valid log.
    return [*logs, [logs[0][0], *later_epoch[1:]], [logs[0][0], *fork[1:]]]


def test_every_flip_in_a_header_is_detected(image: Image) -> None:
    data: Any = bytearray(image.data)
    for offset in range(image.header_bytes):
        for bit in range(8):
            data[offset] ^= 1 << bit
            assert whole_frame(data, 0) is None
            assert Scan(data, 0, CHAIN_START).corruption()
            data[offset] ^= 1 << bit


def stopped(data: bytes, image: Image) -> tuple[int, str]:
    """Return the number of records read, and the corruption that stopped the scan."""
    scan = Scan(data, image.header_bytes, image.begin)
    return sum(1 for _ in scan.frames()), scan.corruption()


def test_bytes_at_the_end_that_are_not_a_record_are_a_torn_tail(image: Image) -> None:
    rng = Random(fresh_seed())
    for tail in (b"\x00" * 10_000, rng.randbytes(10_000), MARKER * 1000, MARKER + b"\xff" * 99):
        assert stopped(image.data + tail, image) == (COUNT, "")
        assert stopped(image.data[:-9] + tail, image) == (COUNT - 1, "")


def test_records_out_of_place_are_corruption(image: Image) -> None:
    data, record_places = image.data, image.record_places
    (a, b, _), (_, c, _), (_, d, _) = record_places[100:103]
    last = record_places[-1][0]
    cases = {
        "one missing": (100, data[:a] + data[b:]),
        "one twice": (101, data[:b] + data[a:]),
        "two in the wrong order": (100, data[:a] + data[b:c] + data[a:b] + data[c:]),
        "an old one at the end": (COUNT, data + data[a:b]),
        "many old ones at the end": (COUNT, data + b"\x00" + data[a:d]),
        "a marker before the last": (COUNT - 1, data[:last] + MARKER + data[last:]),
        "junk between": (100, data[:a] + b"junk" + data[a:]),
        "bytes missing": (100, data[: a + 7] + data[a + 9 :]),
        "zeros over one": (100, data[:a] + bytes(b - a) + data[b:]),
        "zeros over many": (100, data[:a] + bytes(20_000 - a) + data[20_000:]),
        "the end zeroed but for the last": (100, data[:a] + bytes(len(data) - a) + data[c:d]),
    }
    for name, (records, changed) in cases.items():
        count, corruption = stopped(changed, image)
        assert (count, bool(corruption)) == (records, True), name


def test_a_record_of_another_chain_is_corruption(image: Image) -> None:
    start, end, link = image.record_places[-1]
    for other in (
        ChainLink(link.seq, link.epoch, bytes(8)),
        ChainLink(link.seq + 1, link.epoch, link.checksum),
        ChainLink(link.seq - 1, link.epoch, link.checksum),
    ):
        frames, _ = frame_records(image.records[-1:], 1, other)
        count, corruption = stopped(image.data[:start] + frames[0], image)
        assert count == COUNT - 1
        assert "does not continue" in corruption
    frames, _ = frame_records(image.records[-1:], 0, ChainLink(link.seq, 0, link.checksum))
    assert stopped(image.data[:start] + frames[0], image)[0] == COUNT - 1
    assert end == len(image.data)


def test_a_length_beyond_the_bytes_or_the_bound_is_not_followed(image: Image) -> None:
    start, _, link = image.record_places[5]
    for length in (2**32 - 1, len(image.data), 300 << 20):
        data = bytearray(image.data)
        data[start + 12 : start + 16] = length.to_bytes(4, "big")
        assert whole_frame(bytes(data), start) is None
        assert next(Scan(bytes(data), start, link).frames(), None) is None


def test_an_interrupted_scan_can_be_continued(image: Image) -> None:
    scan = Scan(image.data, image.header_bytes, image.begin)
    for seq, _, _ in scan.frames():
        if seq == 10:
            break
    assert scan.offset in (image.header_bytes, image.record_places[9][1])
    assert [seq for seq, _, _ in scan.frames()][-1] == COUNT


def test_a_record_that_is_too_long_is_not_framed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loradock.controller.log.format.RECORD_BYTES_MAX", 100)
    fits, too_long = Record(1, TimerFired(), "c" * 60), Record(1, TimerFired(), "c" * 100)
    assert len(frame_records([fits], 1, CHAIN_START)[0]) == 1
    with pytest.raises(ValueError, match="at most 100"):
        frame_records([fits, too_long], 1, CHAIN_START)
    data = frame_records([fits], 1, CHAIN_START)[0][0]
    monkeypatch.setattr(
        "loradock.controller.log.format.RECORD_BYTES_MAX", len(data) - HEAD_BYTES - 1
    )
    assert whole_frame(data, 0) is None
    assert next(Scan(data, 0, CHAIN_START).frames(), None) is None


def test_intact_bytes_of_another_version_are_reported_as_foreign() -> None:
    file = Path("00000000000000000001.log")
    newer = msgspec.msgpack.encode([3, "a header", ["of", "another", "shape"]])
    with pytest.raises(LogForeign, match="format 3; this version reads format 2"):
        read_header(newer, file)
    for body in (b"", b"\xc1", msgspec.msgpack.encode({"format": 1}), b"\x91" * 100_000):
        with pytest.raises(LogForeign, match="not a header"):
            read_header(body, file)
    for body in (
        b"",
        msgspec.msgpack.encode([1, ["AdapterPainted", "blue"]]),
        msgspec.msgpack.encode([1, ["TimerFired"], "", 0, 0, "of a later version"]),
        b"\x93\x01" + b"\x91" * 100_000,
    ):
        with pytest.raises(LogForeign, match="record 17 is intact"):
            read_record(body, 17, file)
