"""The log's bytes: how records are framed, chained and found again.

What it is: frames to bytes and back, and the errors of the log. What it is not: files; nothing
here opens, writes or syncs one. One rule: a frame verifies alone, and it continues the one before
it, so that what was lost in the middle is told from what was never finished at the end.

A frame is 40 bytes and a msgpack body, all numbers big-endian:

    marker 4 | checksum 8 | length of body 4 | seq 8 | epoch 8 | previous 8 | body

`checksum` is xxh3_64 of everything behind it, `previous` is the checksum of the frame before. A
record's `seq` is one more than the last; the header of a segment, which is the first frame of a
file and nothing else, repeats the last one's.

    LogError            the log can't be used as asked
    ├── LogDamaged      what was written is not there any more, before the tail
    ├── LogForeign      written by a format or by rules that this version does not know
    ├── LogBusy         another process writes this log
    ├── LogFull         no room; nothing was written, and a later append may succeed
    └── LogSyncFailed   the disk failed; nothing may be acknowledged until a restart
"""

# The errors are called by what happened, as the tree above reads.
# ruff: noqa: N818

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from messages.errors import ErrorCode
from messages.ids import Epoch, Seq
from messages.records import FORMAT, Header, Record
from messages.wire import REPLY_BYTES_MAX

MARKER: Final = b"LDR1"
HEAD_BYTES: Final = 40
RECORD_BYTES_MAX: Final = REPLY_BYTES_MAX + (1 << 16)
"""Whatever the wire lets in can be logged: the largest input is an engine's inventory."""

_HEAD: Final = struct.Struct(">4s8sIQQ8s")
_COVERED: Final = struct.Struct(">IQQ8s")
_COVERED_FROM: Final = len(MARKER) + 8

_digest: Final[Callable[[bytes], bytes]] = xxhash.xxh3_64_digest
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_header: Final = msgspec.msgpack.Decoder(Header).decode
_decode_record: Final = msgspec.msgpack.Decoder(Record).decode

UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class LogError(Exception):
    """The log can't be used as asked; `L014` to a client."""

    code = ErrorCode.LOG_UNAVAILABLE


class LogDamaged(LogError):
    """Record `seq` should be in `file` at `offset` (bytes), and something else is there."""

    def __init__(self, file: Path, offset: int, seq: Seq, reason: str) -> None:
        super().__init__(
            f"{file}: damaged at offset {offset}, where record {seq} should be: {reason}; "
            "`loradock log repair` tells what cutting there would lose"
        )
        self.file, self.offset, self.seq, self.reason = file, offset, seq, reason


class LogForeign(LogError):
    """Sound bytes that this version can't read."""


class LogBusy(LogError):
    """Another process has locked the log."""


class LogFull(LogError):
    """The disk has no room; the log is as it was before."""


class LogSyncFailed(LogError):
    """The disk failed a write, a cut or a sync; what it holds is known after a restart."""


class Link(NamedTuple):
    """What the next frame continues: the last one's numbers and checksum."""

    seq: Seq
    epoch: Epoch
    checksum: bytes


START: Final = Link(0, 0, bytes(8))
"""Before the first segment of a log; its first record is 1."""


class Frame(NamedTuple):
    """A frame that verifies alone: what it claims to continue, what continues it, where it ends.

    Only a header's `before` carries its own number; a record's continues the one below it.
    """

    before: Link
    link: Link
    body: bytes
    end: int


def _frame(body: bytes, seq: Seq, epoch: Epoch, previous: bytes) -> tuple[bytes, bytes]:
    covered = _COVERED.pack(len(body), seq, epoch, previous) + body
    checksum = _digest(covered)
    return MARKER + checksum + covered, checksum


def frame_header(header: Header, link: Link) -> tuple[bytes, Link]:
    """A segment's first frame, and the link that its first record continues."""
    frame, checksum = _frame(_encode(header), link.seq, link.epoch, link.checksum)
    return frame, Link(link.seq, link.epoch, checksum)


def frame_records(records: Sequence[Record], epoch: Epoch, link: Link) -> tuple[list[bytes], Link]:
    """One frame a record, chained, and the link behind the last; `ValueError` beyond a bound."""
    if epoch < link.epoch:
        raise ValueError(f"epoch {epoch} behind epoch {link.epoch}; a log never goes back")
    seq, _, checksum = link
    frames = []
    # This loop is the log's hot path; _frame is written out in it.
    for record in records:
        body = _encode(record)
        if len(body) > RECORD_BYTES_MAX:
            raise ValueError(f"a record of {len(body)} bytes; at most {RECORD_BYTES_MAX}")
        seq += 1
        covered = _COVERED.pack(len(body), seq, epoch, checksum) + body
        checksum = _digest(covered)
        frames.append(MARKER + checksum + covered)
    return frames, Link(seq, epoch, checksum)


def whole_frame(data: bytes, offset: int) -> Frame | None:
    """The frame at `offset`, if one is there that verifies alone."""
    if offset + HEAD_BYTES > len(data):
        return None
    marker, checksum, length, seq, epoch, previous = _HEAD.unpack_from(data, offset)
    end = offset + HEAD_BYTES + length
    if marker != MARKER or length > RECORD_BYTES_MAX or end > len(data):
        return None
    if _digest(data[offset + _COVERED_FROM : end]) != checksum:
        return None
    body = data[offset + HEAD_BYTES : end]
    return Frame(Link(seq, epoch, previous), Link(seq, epoch, checksum), body, end)


def whole_frames(data: bytes, offset: int) -> Iterator[tuple[int, Frame]]:
    """Every frame that verifies alone from `offset` on, wherever it begins, with its offset."""
    while (offset := data.find(MARKER, offset)) >= 0:
        frame = whole_frame(data, offset)
        if frame is not None:
            yield offset, frame
        offset = offset + len(MARKER) if frame is None else frame.end


class Scan:
    """A walk along the records of one segment's bytes, from a place on.

    `offset` and `link` are where it stands once `frames` has ended: at the end of the bytes, or
    at the first that are no record continuing the last.
    """

    def __init__(self, data: bytes, offset: int, link: Link) -> None:
        self.data = data
        self.offset = offset
        self.link = link

    def frames(self) -> Iterator[tuple[Seq, Epoch, bytes]]:
        """Number, epoch and body of each record."""
        data, offset, (seq, epoch, checksum) = self.data, self.offset, self.link
        size, unpack = len(data), _HEAD.unpack_from
        try:
            while offset + HEAD_BYTES <= size:
                marker, stated, length, number, life, previous = unpack(data, offset)
                body_at = offset + HEAD_BYTES
                end = body_at + length
                if marker != MARKER or length > RECORD_BYTES_MAX or end > size:
                    return
                if number != seq + 1 or previous != checksum or life < epoch:
                    return
                if _digest(data[offset + _COVERED_FROM : end]) != stated:
                    return
                offset, seq, epoch, checksum = end, number, life, stated
                yield seq, epoch, data[body_at:end]
        finally:
            self.offset, self.link = offset, Link(seq, epoch, checksum)

    def damage(self) -> str:
        """Why what follows is not a torn tail, or nothing: a torn tail holds no whole frame."""
        for offset, frame in whole_frames(self.data, self.offset):
            if offset == self.offset:
                return f"record {frame.link.seq} is there, which does not continue the last"
            return f"no whole record is there, but record {frame.link.seq} is at {offset}"
        return ""


def read_header(body: bytes, file: Path) -> Header:
    """A segment's header; `LogForeign` where its format is another than this version's."""
    try:
        found = _decode_format(body).format
        if found == FORMAT:
            return _decode_header(body)
    except UNDECODABLE as error:
        raise LogForeign(f"{file}: its first record is no header: {error}") from error
    raise LogForeign(f"{file}: format {found}; this version reads {FORMAT}; use one that wrote it")


def read_record(body: bytes, seq: Seq, file: Path) -> Record:
    """A record's message; `LogForeign` where this version has no such message."""
    try:
        return _decode_record(body)
    except UNDECODABLE as error:
        raise LogForeign(
            f"{file}: record {seq} is sound, but not one that this version knows: {error}; "
            "use the version that wrote it"
        ) from error


class _Format(msgspec.Struct, array_like=True):
    """A header of any format, as far as every version can read it."""

    format: int


_decode_format: Final[Callable[[bytes], Any]] = msgspec.msgpack.Decoder(_Format).decode
