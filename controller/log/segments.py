"""The log's files: a directory of segments, read from front to back.

What it is: names, the lock, reading and the verdict on a directory. What it is not: the writer;
nothing here changes a file. One rule: what can't be read up to its end raises, and only the end of
the last segment may be torn.

A segment is called by its first record: twenty digits and `.log`. Other files are not the log's.
"""

import fcntl
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from controller.log.format import (
    START,
    Link,
    LogBusy,
    LogDamaged,
    LogForeign,
    Scan,
    read_header,
    read_record,
    whole_frame,
)
from messages.ids import Epoch, Seq
from messages.records import Header, Record

Entry = tuple[Seq, Epoch, Record]

_SEGMENT_NAME: Final = re.compile(r"[0-9]{20}\.log")


def segment_path(directory: Path, first_seq: Seq) -> Path:
    """Where the segment that begins with record `first_seq` lies."""
    return directory / f"{first_seq:020}.log"


def segment_paths(directory: Path) -> list[Path]:
    """All segments, oldest first."""
    return sorted(p for p in directory.iterdir() if _SEGMENT_NAME.fullmatch(p.name))


def lock_directory(directory: Path) -> int:
    """Open a log's directory for writing alone; the descriptor holds the lock until closed."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise LogBusy(f"{directory}: another process writes this log; end it first") from error
    return fd


class Segment:
    """One file of the log, read once; what it must continue is `link`, None where not known.

    `header` is None where the file ends before its header does. `scan` tells where the records
    end and `torn_bytes` what follows them, once they have been read.
    """

    def __init__(self, file: Path, link: Link | None, is_last: bool) -> None:
        self.file = file
        self.first_seq = int(file.stem)
        self.torn_bytes = 0
        self.header: Header | None = None
        self._is_last = is_last
        self.before = START if link is None and self.first_seq == START.seq + 1 else link
        self.scan = Scan(file.read_bytes(), 0, self.before or Link(self.first_seq - 1, 0, b""))
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
            raise self._damaged(f"its header says that it begins with record {header.first_seq}")
        self.header = header
        self.scan = Scan(self.scan.data, frame.end, frame.link)

    def frames(self) -> Iterator[tuple[Seq, Epoch, bytes]]:
        """Number, epoch and body of each record, up to the end or a torn tail."""
        if self.header is not None:
            yield from self.scan.frames()
        self._judge_the_rest()

    def entries(self, first_seq: Seq = 0) -> Iterator[Entry]:
        """Number, epoch and record, from `first_seq` on."""
        for seq, epoch, body in self.frames():
            if seq >= first_seq:
                yield seq, epoch, read_record(body, seq, self.file)

    def _judge_the_rest(self) -> None:
        rest = len(self.scan.data) - self.scan.offset
        if self.header is not None and not rest:
            return
        if reason := self.scan.damage():
            raise self._damaged(reason)
        if not self._is_last:
            raise self._damaged("it ends in the middle of a record, but a later segment exists")
        if self.before is None:
            raise self._damaged("its header is not whole, and no segment before it is there")
        self.torn_bytes = rest

    def _damaged(self, reason: str) -> LogDamaged:
        return LogDamaged(self.file, self.scan.offset, self.scan.link.seq + 1, reason)


def walk(directory: Path, first_seq: Seq = 0) -> Iterator[Segment]:
    """The segments that hold records from `first_seq` on; each is checked whole before the next."""
    paths = segment_paths(directory)
    while len(paths) > 1 and int(paths[1].stem) <= first_seq:
        del paths[0]
    link: Link | None = None
    for path in paths:
        segment = Segment(path, link, path is paths[-1])
        yield segment
        # A reader that left early still gets the rest checked.
        for _ in segment.frames():
            pass
        link = segment.scan.link


def segments(
    directory: Path, first_seq: Seq = 0, rules: Collection[int] | None = None
) -> Iterator[tuple[Header, Iterator[Entry]]]:
    """Each segment's header with its (seq, epoch, record)s from `first_seq` on.

    Reading ends before a torn tail. Raises `LogDamaged`, and `LogForeign` for a format, a message,
    or (where `rules` are given) a rules number that is not known.
    """
    for segment in walk(directory, first_seq):
        header = segment.header
        if header is None:
            continue
        if rules is not None and header.rules not in rules:
            raise LogForeign(
                f"{segment.file}: decided by rules {header.rules}; this version knows "
                f"{sorted(rules)}; use one that knows them"
            )
        yield header, segment.entries(first_seq)


def read(
    directory: Path, first_seq: Seq = 0, rules: Collection[int] | None = None
) -> Iterator[Entry]:
    """Every (seq, epoch, record) from `first_seq` on, as `segments` reads them."""
    for _, entries in segments(directory, first_seq, rules):
        yield from entries


class Verdict(NamedTuple):
    """What a log holds: numbers are 0 where nothing is there; the tail's torn bytes are no loss."""

    segments: int
    records: int
    first_seq: Seq
    last_seq: Seq
    torn_bytes: int
    damage: LogDamaged | None


def verify(directory: Path) -> Verdict:
    """Read a log whole and tell what was found; changes nothing, and damage does not raise."""
    count = records = first_seq = last_seq = torn_bytes = 0
    damage = None
    try:
        for segment in walk(directory):
            count += 1
            for last_seq, _, _ in segment.entries():
                first_seq = first_seq or last_seq
                records += 1
            torn_bytes = segment.torn_bytes
    except LogDamaged as found:
        damage = found
    return Verdict(count, records, first_seq, last_seq, torn_bytes, damage)
