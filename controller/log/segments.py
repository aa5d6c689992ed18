"""The log's files: a directory of segments, their names, the lock, reading and verification.

Nothing here changes a file. Only the end of the last segment may be torn; other bytes that can't be
read raise an error, also a last record in which one bit is flipped.

A segment is named after its first record, with twenty digits and `.log`. Other files are not part
of the log.
"""

import re
from collections.abc import Collection, Generator, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from loradock.controller.log.flipped_bits import START_BYTES_MAX, SearchTooLongError, flipped_bit
from loradock.controller.log.format import (
    CHAIN_START,
    ChainLink,
    LogBusy,
    LogDamaged,
    LogForeign,
    Scan,
    read_header,
    read_record,
    whole_frame,
)
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.ids import Epoch, Seq
from loradock.messages.records import Header, Record

NumberedRecord = tuple[Seq, Epoch, Record]
"""A record with its number and its epoch."""

_SEGMENT_NAME: Final = re.compile(r"[0-9]{20}\.log")


def segment_path(directory: Path, first_seq: Seq) -> Path:
    """Return the path of the segment that begins with record `first_seq`."""
    return directory / f"{first_seq:020}.log"


def segment_paths(directory: Path, storage: Storage = DISK) -> list[Path]:
    """Return the paths of all segments, oldest first."""
    names = sorted(filter(_SEGMENT_NAME.fullmatch, storage.names(directory)))
    return [directory / name for name in names]


def lock_directory(directory: Path, storage: Storage = DISK) -> int:
    """Lock a log's directory for one writer; the lock ends when the descriptor is closed."""
    fd = storage.open_directory(directory)
    try:
        storage.lock(fd)
    except BlockingIOError as error:
        storage.close(fd)
        raise LogBusy(f"{directory}: another process writes this log; stop it first") from error
    return fd


class Segment:
    """One file of the log, read once; it must continue `link`, None if that is not known.

    `header` is None if the file ends before its header does. Once the records have been read,
    `scan` is at their end and `torn_bytes` is the number of bytes after it.
    """

    def __init__(
        self, file: Path, link: ChainLink | None, is_last: bool, storage: Storage = DISK
    ) -> None:
        self.file = file
        self.first_seq = int(file.stem)
        self.torn_bytes = 0
        self.header: Header | None = None
        self._is_last = is_last
        self.before = (
            CHAIN_START if link is None and self.first_seq == CHAIN_START.seq + 1 else link
        )
        self.scan = Scan(
            storage.read(file), 0, self.before or ChainLink(self.first_seq - 1, 0, b"")
        )
        self._read_header()

    def _read_header(self) -> None:
        frame = whole_frame(self.scan.data, 0)
        if frame is None:
            return
        self.before = self.before or frame.before
        if frame.before != self.before or frame.before.seq != self.first_seq - 1:
            raise self._damaged("it does not continue the segment before it")
        header = read_header(frame.body, self.file)
        if header.first_seq != self.first_seq:
            raise self._damaged(f"its header specifies {header.first_seq} as its first record")
        self.header = header
        self.scan = Scan(self.scan.data, frame.end, frame.link)

    def frames(self) -> Generator[tuple[Seq, Epoch, bytes]]:
        """Yield number, epoch and body of each record, up to the end or a torn tail."""
        if self.header is not None:
            yield from self.scan.frames()
        self._check_rest()

    def records(self, first_seq: Seq = 0) -> Iterator[NumberedRecord]:
        """Yield number, epoch and record, from `first_seq` on."""
        if self.header is None:
            self._check_rest()
            return
        for seq, epoch, body in self.frames():
            if seq >= first_seq:
                yield seq, epoch, read_record(body, seq, self.file, self.header.format)

    def _check_rest(self) -> None:
        rest = len(self.scan.data) - self.scan.offset
        if self.header is not None and not rest:
            return
        if reason := self.scan.damage():
            raise self._damaged(reason)
        if not self._is_last:
            raise self._damaged("it ends in the middle of a record, but a later segment exists")
        if self.before is None:
            raise self._damaged("its header is incomplete, and there is no segment before it")
        if reason := self._flipped_reason():
            raise self._damaged(reason)
        self.torn_bytes = rest

    def _flipped_reason(self) -> str:
        """Return why the rest is one frame that was written whole, '' if it was not."""
        scan = self.scan
        try:
            flip = flipped_bit(
                scan.data, scan.offset, scan.link, self.header is None, START_BYTES_MAX
            )
        except SearchTooLongError:
            return "a whole record may be there, too long to search it for a flipped bit"
        return (
            f"a whole record is there, in which a bit is flipped at {flip.offset}" if flip else ""
        )

    def _damaged(self, reason: str) -> LogDamaged:
        offset, link = self.scan.offset, self.scan.link
        return LogDamaged(self.file, offset, link.seq + 1, reason, link)


def walk(directory: Path, first_seq: Seq = 0, storage: Storage = DISK) -> Iterator[Segment]:
    """Yield the segments with records from `first_seq` on; each is checked before the next."""
    paths = segment_paths(directory, storage)
    while len(paths) > 1 and int(paths[1].stem) <= first_seq:
        del paths[0]
    link: ChainLink | None = None
    for path in paths:
        segment = Segment(path, link, path is paths[-1], storage)
        yield segment
        # The rest is checked also if the caller did not read all records.
        for _ in segment.frames():
            pass
        link = segment.scan.link


def segments(
    directory: Path,
    first_seq: Seq = 0,
    rules: Collection[int] | None = None,
    storage: Storage = DISK,
) -> Iterator[tuple[Header, Iterator[NumberedRecord]]]:
    """Yield each segment's header with its records from `first_seq` on.

    Reading ends before a torn tail. Raises `LogDamaged`, and `LogForeign` for an unknown format or
    message, or for a rules number that is not in `rules` (if `rules` is not None).
    """
    for segment in walk(directory, first_seq, storage):
        header = segment.header
        if header is None:
            continue
        if rules is not None and header.rules not in rules:
            raise LogForeign(
                f"{segment.file}: written by rules {header.rules}; this version knows "
                f"{sorted(rules)}; use one that knows them"
            )
        yield header, segment.records(first_seq)


def read(
    directory: Path,
    first_seq: Seq = 0,
    rules: Collection[int] | None = None,
    storage: Storage = DISK,
) -> Iterator[NumberedRecord]:
    """Yield every record from `first_seq` on; raises as `segments` does."""
    for _, records in segments(directory, first_seq, rules, storage):
        yield from records


class Verdict(NamedTuple):
    """Content of a log; numbers are 0 for an empty log. Torn bytes of the tail are not damage."""

    segments: int
    records: int
    first_seq: Seq
    last_seq: Seq
    torn_bytes: int
    damage: LogDamaged | None


def verify(directory: Path, storage: Storage = DISK) -> Verdict:
    """Read a whole log; damage is returned and not raised, and nothing is changed."""
    count = records = first_seq = last_seq = torn_bytes = 0
    damage = None
    try:
        for segment in walk(directory, storage=storage):
            count += 1
            for last_seq, _, _ in segment.records():
                first_seq = first_seq or last_seq
                records += 1
            torn_bytes = segment.torn_bytes
    except LogDamaged as found:
        damage = found
    return Verdict(count, records, first_seq, last_seq, torn_bytes, damage)
