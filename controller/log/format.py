"""The log's byte format: frames, their chain, and the errors of the log.

A frame verifies alone and continues the one before it, so that a loss in the middle can be
distinguished from an unfinished write at the end. Nothing here opens, writes or syncs a file.

A frame is 40 bytes and a msgpack body, all numbers big-endian:

    marker 4 | checksum 8 | length of body 4 | seq 8 | epoch 8 | previous 8 | body

`checksum` is xxh3_64 of everything after it, `previous` is the checksum of the frame before. A
record's `seq` is one more than the last; the header of a segment, which is the first frame of each
file, repeats the last one's.

    LogError            the log can't be used
    ├── LogCorrupt      bytes that were written are missing or changed, before the tail
    ├── LogForeign      written by a format or by rules that this version does not know
    ├── LogBusy         another process writes this log
    ├── LogFull         no space; nothing was written, and a later append can succeed
    └── LogSyncFailed   the disk failed; nothing may be acknowledged until a restart
"""

# The errors are named after the event, as the tree above reads.
# ruff: noqa: N818

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from loradock.messages.errors import ErrorCode
from loradock.messages.ids import Epoch, Seq
from loradock.messages.records import FORMAT, Header, Record
from loradock.messages.wire import REPLY_BYTES_MAX

MARKER: Final = b"LDR1"
HEAD_BYTES: Final = 40
RECORD_BYTES_MAX: Final = REPLY_BYTES_MAX + (1 << 16)
"""Any input that the wire accepts can be logged; the largest is an engine's inventory."""

FRAME_BYTES_MAX: Final = HEAD_BYTES + RECORD_BYTES_MAX

_HEAD: Final = struct.Struct(">4s8sIQQ8s")
_COVERED: Final = struct.Struct(">IQQ8s")
_COVERED_FROM: Final = len(MARKER) + 8

_digest: Final[Callable[[bytes | bytearray], bytes]] = xxhash.xxh3_64_digest
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_header: Final = msgspec.msgpack.Decoder(Header).decode

decode_record: Final = msgspec.msgpack.Decoder(Record).decode
"""Decodes a record; raises `UNDECODABLE`."""

UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class LogError(Exception):
    """The log can't be used; code `L014` for clients."""

    code = ErrorCode.LOG_UNAVAILABLE


class LogCorrupt(LogError):
    """Other bytes are in `file` at `offset` (bytes), where record `seq` should be.

    A `seq` of 0 means the file as a whole.
    """

    def __init__(self, file: Path, offset: int, seq: Seq, reason: str) -> None:
        place = f"corrupt at offset {offset}, where record {seq} should be: " if seq else ""
        super().__init__(f"{file}: {place}{reason}; `loradock log repair` shows what can be done")
        self.file, self.offset, self.seq, self.reason = file, offset, seq, reason


class LogForeign(LogError):
    """Valid bytes that this version can't read."""


class LogBusy(LogError):
    """Another process has locked the log."""


class LogFull(LogError):
    """The disk has no space left; the log is unchanged."""


class LogSyncFailed(LogError):
    """The disk failed a write, a cut or a sync; only a restart finds what it holds."""


class ChainLink(NamedTuple):
    """The end of a chain, which the next frame continues: the last frame's numbers and checksum."""

    seq: Seq
    epoch: Epoch
    checksum: bytes


CHAIN_START: Final = ChainLink(0, 0, bytes(8))
"""The end of an empty chain; a log's first record is 1."""


class LogFrame(NamedTuple):
    """A frame that verifies alone; `end` is the offset of the byte after it.

    `before` is the link that the frame claims to continue, with the frame's own `seq`: that is the
    last record's number for a header, but one too high for a record. `link` is the link after it.
    """

    before: ChainLink
    link: ChainLink
    body: bytes
    end: int


def _frame(body: bytes, seq: Seq, epoch: Epoch, previous: bytes) -> tuple[bytes, bytes]:
    covered = _COVERED.pack(len(body), seq, epoch, previous) + body
    checksum = _digest(covered)
    return MARKER + checksum + covered, checksum


def frame_header(header: Header, link: ChainLink) -> tuple[bytes, ChainLink]:
    """Return a segment's first frame, and the link that its first record continues."""
    frame, checksum = _frame(_encode(header), link.seq, link.epoch, link.checksum)
    return frame, ChainLink(link.seq, link.epoch, checksum)


def frame_body(body: bytes, seq: Seq, epoch: Epoch, link: ChainLink) -> tuple[bytes, ChainLink]:
    """Return the frame of an encoded record that continues `link`, and the link after it."""
    frame, checksum = _frame(body, seq, epoch, link.checksum)
    return frame, ChainLink(seq, epoch, checksum)


def frame_records(
    records: Sequence[Record], epoch: Epoch, link: ChainLink
) -> tuple[list[bytes], ChainLink]:
    """Return a frame per record and the link after the last; `ValueError` beyond a bound."""
    if epoch < link.epoch:
        raise ValueError(f"epoch {epoch} after epoch {link.epoch}; epochs never decrease")
    seq, _, checksum = link
    frames = []
    # The hot path of the log: `_frame` is inlined.
    for record in records:
        body = _encode(record)
        if len(body) > RECORD_BYTES_MAX:
            raise ValueError(
                f"a record of {len(body)} bytes; at most {RECORD_BYTES_MAX} are allowed"
            )
        seq += 1
        covered = _COVERED.pack(len(body), seq, epoch, checksum) + body
        checksum = _digest(covered)
        frames.append(MARKER + checksum + covered)
    return frames, ChainLink(seq, epoch, checksum)


def whole_frame(data: bytes | bytearray, offset: int) -> LogFrame | None:
    """Return the frame at `offset`; None unless one begins there that verifies alone."""
    if offset + HEAD_BYTES > len(data):
        return None
    marker, checksum, length, seq, epoch, previous = _HEAD.unpack_from(data, offset)
    end = offset + HEAD_BYTES + length
    if marker != MARKER or length > RECORD_BYTES_MAX or end > len(data):
        return None
    if _digest(data[offset + _COVERED_FROM : end]) != checksum:
        return None
    body = bytes(data[offset + HEAD_BYTES : end])
    return LogFrame(ChainLink(seq, epoch, previous), ChainLink(seq, epoch, checksum), body, end)


def frame_before(data: bytes, end: int) -> LogFrame | None:
    """Return the frame that ends at offset `end`; None unless one is there that verifies alone."""
    offset = end
    while (offset := data.rfind(MARKER, 0, offset)) >= 0 and end - offset <= FRAME_BYTES_MAX:
        frame = whole_frame(data, offset)
        if frame is not None and frame.end == end:
            return frame
    return None


def whole_frames(data: bytes, offset: int) -> Iterator[tuple[int, LogFrame]]:
    """Yield the offset and frame of all that verify alone from `offset` on, at any byte."""
    while (offset := data.find(MARKER, offset)) >= 0:
        frame = whole_frame(data, offset)
        if frame is not None:
            yield offset, frame
        offset = offset + len(MARKER) if frame is None else frame.end


class Scan:
    """An iteration over the records in one segment's bytes, from an offset on.

    After `frames`, `offset` and `link` are those after the last record: at the end of the bytes, or
    at the first bytes that are not a record which continues the chain.
    """

    def __init__(self, data: bytes, offset: int, link: ChainLink) -> None:
        self.data = data
        self.offset = offset
        self.link = link

    def frames(self) -> Generator[tuple[Seq, Epoch, bytes]]:
        """Yield number, epoch and body of each record."""
        data, offset, (seq, epoch, checksum) = self.data, self.offset, self.link
        size, unpack = len(data), _HEAD.unpack_from
        try:
            while offset + HEAD_BYTES <= size:
                marker, stated, length, record_seq, record_epoch, previous = unpack(data, offset)
                body_at = offset + HEAD_BYTES
                end = body_at + length
                if marker != MARKER or length > RECORD_BYTES_MAX or end > size:
                    return
                if record_seq != seq + 1 or previous != checksum or record_epoch < epoch:
                    return
                if _digest(data[offset + _COVERED_FROM : end]) != stated:
                    return
                offset, seq, epoch, checksum = end, record_seq, record_epoch, stated
                yield seq, epoch, data[body_at:end]
        finally:
            self.offset, self.link = offset, ChainLink(seq, epoch, checksum)

    def corruption(self) -> str:
        """Return why the rest can't be a torn tail, '' if it can: that has no whole frame."""
        for offset, frame in whole_frames(self.data, self.offset):
            if offset == self.offset:
                return f"record {frame.link.seq} is there, which does not continue the last one"
            return f"no whole record is there, but record {frame.link.seq} is at {offset}"
        return ""


def read_header(body: bytes, file: Path) -> Header:
    """Decode a segment's header; `LogForeign` for a format that this version can't read."""
    try:
        format_number = _decode_format(body).format
        if format_number == FORMAT:
            return _decode_header(body)
    except UNDECODABLE as error:
        raise LogForeign(f"{file}: its first frame is not a header: {error}") from error
    raise LogForeign(
        f"{file}: format {format_number}; this version reads format {FORMAT}; "
        "use the version that wrote it"
    )


def read_record(body: bytes, seq: Seq, file: Path) -> Record:
    """Decode a record; `LogForeign` if this version does not know its message."""
    try:
        return decode_record(body)
    except UNDECODABLE as error:
        raise foreign_record(seq, file, error) from error


def foreign_record(seq: Seq, file: Path, error: Exception) -> LogForeign:
    """Return the error for a record whose decoder raises."""
    return LogForeign(
        f"{file}: record {seq} is intact, but this version can't read it: {error}; "
        "use the version that wrote it"
    )


class _AnyHeader(msgspec.Struct, array_like=True):
    """The part of a header that is equal in all formats."""

    format: int


_decode_format: Final[Callable[[bytes], Any]] = msgspec.msgpack.Decoder(_AnyHeader).decode
