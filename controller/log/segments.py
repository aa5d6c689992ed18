"""The log's files: a directory of segments, their names, the lock, reading and verification.

Nothing here changes a file. Only the last segment can be torn, after its header, which is durable
before the segment has its name; other bytes that can't be read raise an error.

A segment is named after its first record, with twenty digits and `.log`. Other files are not part
of the log.
"""

import re
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from loradock.controller.log.format import (
    CHAIN_START,
    ChainLink,
    LogBusy,
    LogCorrupt,
    LogForeign,
    Scan,
    frame_before,
    read_header,
    read_record,
    whole_frame,
)
from loradock.controller.log.storage import DISK, Storage, UnreadableError
from loradock.messages.ids import Epoch, Seq
from loradock.messages.records import Header, InputSkipped, Record

NumberedRecord = tuple[Seq, Epoch, Record]
"""A record with its number and its epoch."""

NO_SYNC_FAILED: Final = "no-sync-failed"
"""Name of a file without which the next start writes the last segment again.

A failure removes it, which works on a full disk too, where a file that reports the failure could
not be created. It has the number of the last segment, so that its loss is noticed.
"""

EVENTS_NAME: Final = "events.sqlite"
LOCK_NAME: Final = "snapshotter.lock"
REPAIRING: Final = "repair.unfinished"
"""Name of a file that is there while a repair changes the log."""

_SEGMENT_NAME: Final = re.compile(r"[0-9]{20}\.log")
_FILE_NAME: Final = re.compile(r"[0-9]{20}\.(log|snap)")
_OTHER_FILES: Final = frozenset({EVENTS_NAME, LOCK_NAME, NO_SYNC_FAILED})
_SKIP: Final = InputSkipped.__name__.encode()


class LogPosition(NamedTuple):
    """The place of the next record: a segment, the offset in it, and the chain before it."""

    segment: Seq
    offset: int
    link: ChainLink


def segment_path(directory: Path, first_seq: Seq) -> Path:
    """Return the path of the segment that begins with record `first_seq`."""
    return directory / f"{first_seq:020}.log"


def segment_paths(directory: Path, storage: Storage = DISK) -> list[Path]:
    """Return the paths of all segments, oldest first."""
    names = sorted(filter(_SEGMENT_NAME.fullmatch, storage.names(directory)))
    return [directory / name for name in names]


def check_files(directory: Path, storage: Storage = DISK) -> None:
    """Raise `LogCorrupt` for a FIFO or a directory instead of a file, and for half a repair."""
    for name in sorted(storage.names(directory)):
        if name == REPAIRING:
            raise LogCorrupt(directory / name, 0, 0, "a repair was not finished")
        if is_of_log(name) and not storage.is_regular(directory / name):
            raise LogCorrupt(directory / name, 0, 0, "it is not a regular file")


def is_of_log(name: str) -> bool:
    """Return whether a file of this name is a part of the log."""
    return name in _OTHER_FILES or _FILE_NAME.fullmatch(name) is not None


def mark_content(first_seq: Seq) -> bytes:
    """Return the content of `NO_SYNC_FAILED` while this segment is the last one."""
    name = f"{first_seq:020}".encode()
    return name + b" " + xxhash.xxh3_64_hexdigest(name).encode()


def marked_segment(directory: Path, storage: Storage = DISK) -> Seq:
    """Return the number of the last segment by `NO_SYNC_FAILED`, 0 if that does not tell it."""
    try:
        content = storage.read(directory / NO_SYNC_FAILED)
    except (FileNotFoundError, UnreadableError):
        return 0
    digits = content[:20]
    known = digits.isdigit() and content == mark_content(int(digits))
    return int(digits) if known else 0


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

    Once the records have been read, `scan` is at their end and `torn_bytes` is the number of bytes
    after it. Raises `LogCorrupt` without a whole header.
    """

    def __init__(
        self, file: Path, link: ChainLink | None, is_last: bool, storage: Storage = DISK
    ) -> None:
        self.file = file
        self.first_seq = int(file.stem)
        self.torn_bytes = 0
        self._is_last = is_last
        if link is None and self.first_seq == CHAIN_START.seq + 1:
            link = CHAIN_START
        start = link or ChainLink(self.first_seq - 1, 0, b"")
        try:
            self.scan = Scan(storage.read(file), 0, start)
        except UnreadableError as error:
            raise LogCorrupt(file, 0, self.first_seq, str(error)) from error
        self.header, self.before = self._read_header(link)

    def _read_header(self, link: ChainLink | None) -> tuple[Header, ChainLink]:
        frame = whole_frame(self.scan.data, 0)
        if frame is None:
            raise self._corrupt(self.scan.corruption() or "its header is incomplete")
        if frame.before != (link or frame.before) or frame.before.seq != self.first_seq - 1:
            raise self._corrupt("it does not continue the segment before it")
        header = read_header(frame.body, self.file)
        if header.first_seq != self.first_seq:
            raise self._corrupt(f"its header specifies {header.first_seq} as its first record")
        self.scan = Scan(self.scan.data, frame.end, frame.link)
        return header, frame.before

    def check_rules(self, rules: int) -> None:
        """Raise `LogForeign` if the segment was written by other rules."""
        if self.header.rules != rules:
            raise LogForeign(
                f"{self.file}: written by rules {self.header.rules}; this version replays rules "
                f"{rules}; carry its state over with `loradock log export` and `loradock log "
                "import`, or use the version that wrote it"
            )

    def frames(self) -> Generator[tuple[Seq, Epoch, bytes]]:
        """Yield number, epoch and body of each record, up to the end or a torn tail."""
        yield from self.scan.frames()
        self._check_rest()

    def records(self, first_seq: Seq = 0) -> Iterator[NumberedRecord]:
        """Yield number, epoch and record, from `first_seq` on."""
        for seq, epoch, body in self.frames():
            if seq >= first_seq:
                yield seq, epoch, read_record(body, seq, self.file)

    def _check_rest(self) -> None:
        rest = len(self.scan.data) - self.scan.offset
        if not rest:
            return
        if reason := self.scan.corruption():
            raise self._corrupt(reason)
        if not self._is_last:
            raise self._corrupt("it ends in the middle of a record, but a later segment exists")
        self.torn_bytes = rest

    def _corrupt(self, reason: str) -> LogCorrupt:
        return LogCorrupt(self.file, self.scan.offset, self.scan.link.seq + 1, reason)


def walk(directory: Path, first_seq: Seq = 0, storage: Storage = DISK) -> Iterator[Segment]:
    """Yield the segments with records from `first_seq` on; each is checked before the next."""
    yield from _walk(_paths_from(directory, first_seq, storage), None, storage)


def walk_from_start(directory: Path, storage: Storage = DISK) -> Iterator[Segment]:
    """Yield all segments; raises `LogCorrupt` if the log does not begin with record 1."""
    paths = segment_paths(directory, storage)
    if paths and int(paths[0].stem) != 1:
        raise _missing(paths[0], 1, "and no snapshot contains it")
    yield from _walk(paths, None, storage)


def walk_after(
    directory: Path, position: LogPosition, storage: Storage = DISK
) -> Iterator[Segment]:
    """Yield the segments with records after `position`; raises `LogCorrupt` if some are missing."""
    paths = [p for p in segment_paths(directory, storage) if int(p.stem) >= position.segment]
    next_seq = position.link.seq + 1
    first = paths[0] if paths else segment_path(directory, next_seq)
    if not paths or int(first.stem) not in (position.segment, next_seq):
        raise _missing(first, next_seq, "which follows the last snapshot")
    segment = Segment(first, None, len(paths) == 1, storage)
    if int(first.stem) == next_seq and segment.before == position.link:
        # The snapshot ends with the segment before this one, which is no longer needed.
        yield from _walk(paths, position.link, storage)
        return
    _skip_to(segment, position)
    yield segment
    for _ in segment.frames():
        pass
    yield from _walk(paths[1:], segment.scan.link, storage)


def _walk(paths: list[Path], link: ChainLink | None, storage: Storage) -> Iterator[Segment]:
    """Yield segments that continue one another, and `link` if that is known."""
    for path in paths:
        segment = Segment(path, link, path is paths[-1], storage)
        yield segment
        # The rest is checked also if the caller did not read all records.
        for _ in segment.frames():
            pass
        link = segment.scan.link


def _skip_to(segment: Segment, position: LogPosition) -> None:
    """Continue a segment at a position in it: what is before it is not read as records."""
    if position.offset > len(segment.scan.data):
        for _ in segment.frames():
            pass
        seq = segment.scan.link.seq + 1
        raise _missing(segment.file, seq, f"but a snapshot contains record {position.link.seq}")
    segment.scan = Scan(segment.scan.data, position.offset, position.link)


def _missing(file: Path, seq: int, why: str) -> LogCorrupt:
    return LogCorrupt(file, 0, seq, f"the record is missing, {why}")


def _paths_from(directory: Path, first_seq: Seq, storage: Storage) -> list[Path]:
    """Return the paths of the segments with records from `first_seq` on."""
    paths = segment_paths(directory, storage)
    while len(paths) > 1 and int(paths[1].stem) <= first_seq:
        del paths[0]
    return paths


def read(directory: Path, first_seq: Seq = 0, storage: Storage = DISK) -> Iterator[NumberedRecord]:
    """Yield every record from `first_seq` on.

    Reading ends before a torn tail. Raises `LogCorrupt`, and `LogForeign` for an unknown format or
    message.
    """
    for segment in walk(directory, first_seq, storage):
        yield from segment.records(first_seq)


def contradicts(directory: Path, position: LogPosition, storage: Storage = DISK) -> bool:
    """Return whether the segments have another record, or header, at the end of this position."""
    seq, checksum = position.link.seq, position.link.checksum
    near = [path for path in segment_paths(directory, storage) if int(path.stem) <= seq + 1][-2:]
    found: set[bytes] = set()
    # The segment that the position names comes first: nearly always, its frame decides.
    for path in sorted(near, key=lambda path: int(path.stem) != position.segment):
        try:
            data = storage.read(path)
        except UnreadableError:
            continue
        if int(path.stem) == position.segment:
            last = frame_before(data, position.offset)
            if last is not None and last.link.checksum == checksum:
                return False
        found.update(_checksums_at(data, seq))
    return bool(found) and checksum not in found


def _checksums_at(data: bytes, seq: Seq) -> Iterator[bytes]:
    """Yield the checksums of a segment's links whose last record is `seq`."""
    header = whole_frame(data, 0)
    if header is None:
        return
    if header.link.seq == seq:
        yield header.before.checksum
        yield header.link.checksum
        return
    scan = Scan(data, header.end, header.link)
    with closing(scan.frames()) as frames:
        for number, _, _ in frames:
            if number == seq:
                break
    if scan.link.seq == seq:
        yield scan.link.checksum


def skipped_inputs(directory: Path, storage: Storage = DISK, first_seq: Seq = 0) -> frozenset[Seq]:
    """Return the inputs that records from `first_seq` on skip; raises `LogError`.

    A segment is decoded only if the name of the message occurs in its bytes.
    """
    paths = _paths_from(directory, first_seq, storage)
    found: set[Seq] = set()
    for path in paths:
        if _SKIP not in storage.read(path):
            continue
        segment = Segment(path, None, path is paths[-1], storage)
        for _, _, record in segment.records(first_seq):
            if isinstance(record.input, InputSkipped):
                found.add(record.input.seq)
    return frozenset(found)


class Verdict(NamedTuple):
    """Content of a log; numbers are 0 for an empty log. A torn tail is not corruption."""

    segments: int
    records: int
    first_seq: Seq
    last_seq: Seq
    torn_bytes: int
    corruption: LogCorrupt | None


def verify(directory: Path, storage: Storage = DISK) -> Verdict:
    """Read a whole log; corruption is returned and not raised, and nothing is changed."""
    count = records = first_seq = last_seq = torn_bytes = 0
    corruption = None
    try:
        for segment in walk(directory, storage=storage):
            count += 1
            for last_seq, _, _ in segment.records():
                first_seq = first_seq or last_seq
                records += 1
            torn_bytes = segment.torn_bytes
    except LogCorrupt as found:
        corruption = found
    return Verdict(count, records, first_seq, last_seq, torn_bytes, corruption)
