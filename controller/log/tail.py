"""The segments of a log from a snapshot on.

The first segment is read from the snapshot's position on, and must continue its chain; what is
before it is neither needed nor read as records.
"""

from collections.abc import Iterator
from pathlib import Path

from loradock.controller.log.format import LogDamaged, Scan
from loradock.controller.log.segments import Segment, segment_path, segment_paths
from loradock.controller.log.snapshots import LogPosition
from loradock.controller.log.storage import DISK, Storage


def walk_from_start(directory: Path, storage: Storage = DISK) -> Iterator[Segment]:
    """Yield all segments; raises `LogDamaged` where the log does not begin with record 1."""
    paths = segment_paths(directory, storage)
    if paths and int(paths[0].stem) != 1:
        raise _missing(paths[0], 1, "and no snapshot contains it")
    yield from _walk(paths, None, storage)


def walk_after(
    directory: Path, position: LogPosition, storage: Storage = DISK
) -> Iterator[Segment]:
    """Yield the segments with records after `position`; raises `LogDamaged` if some are missing."""
    paths = [p for p in segment_paths(directory, storage) if int(p.stem) >= position.segment]
    next_seq = position.link.seq + 1
    first = paths[0] if paths else segment_path(directory, next_seq)
    if not paths or int(first.stem) not in (position.segment, next_seq):
        raise _missing(first, next_seq, "which follows the last snapshot")
    if int(first.stem) == next_seq != position.segment:
        # The snapshot ends with the segment before this one, which is no longer needed.
        yield from _walk(paths, position, storage)
        return
    segment = Segment(first, None, len(paths) == 1, storage)
    _skip_to(segment, position)
    yield segment
    for _ in segment.frames():
        pass
    yield from _walk(paths[1:], position._replace(link=segment.scan.link), storage)


def _walk(paths: list[Path], position: LogPosition | None, storage: Storage) -> Iterator[Segment]:
    """Yield segments that continue one another, and the position if there is one."""
    link = None if position is None else position.link
    for path in paths:
        segment = Segment(path, link, path is paths[-1], storage)
        yield segment
        # The rest is checked also if the caller did not read all records.
        for _ in segment.frames():
            pass
        link = segment.scan.link


def _skip_to(segment: Segment, position: LogPosition) -> None:
    """Let a segment continue at a position in it."""
    if segment.header is None:
        return
    if position.offset > len(segment.scan.data):
        for _ in segment.frames():
            pass
        seq = segment.scan.link.seq + 1
        raise _missing(segment.file, seq, f"but a snapshot contains record {position.link.seq}")
    segment.scan = Scan(segment.scan.data, position.offset, position.link)


def _missing(file: Path, seq: int, why: str) -> LogDamaged:
    return LogDamaged(file, 0, seq, f"the record is missing, {why}")
