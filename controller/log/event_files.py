"""Event files: published events by their number, read in time that depends on the answer alone.

They are made from the log and can be made again, so a torn or damaged tail is cut without loss.
A file is named after its first event, `events-` with twenty digits and `.evt`, and its events are
numbered without gaps. It is a sequence of frames, all numbers big-endian:

    marker 4 | checksum 8 | length of body 4 | first seq 8 | events 4 | body

`checksum` is xxh3_64 of everything after it; the body is a msgpack array of `Published`. Files and
frames are bounded, so an event is found by the names and by one file's frames.
"""

import errno
import re
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from loradock.controller.log.durable_files import CHUNK_BYTES, write_file
from loradock.controller.log.format import UNDECODABLE, LogForeign
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.events import Published
from loradock.messages.ids import Seq

FILE_BYTES_MAX: Final = 4 << 20
"""A file that has reached this size is ended; its last frame may exceed it."""

EVENTS_PER_FRAME: Final = 128
EVENTS_PER_READ: Final = 8192
"""The number of events of the files that a writer compares at once."""

_MARKER: Final = b"LDE1"
_HEAD: Final = struct.Struct(">4s8sIQI")
_COVERED: Final = struct.Struct(">IQI")
_COVERED_FROM: Final = len(_MARKER) + 8
_FILE_NAME: Final = re.compile(r"events-[0-9]{20}\.evt")
# The positions of the frames of this number of files are kept in memory.
_FILES_INDEXED: Final = 64

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[Published, ...]).decode


class EventFrame(NamedTuple):
    """The place of a frame in its file, and the numbers of its events."""

    offset: int
    end: int
    first_seq: Seq
    last_seq: Seq


def event_file_path(directory: Path, first_seq: Seq) -> Path:
    """Return the path of the file that begins with event `first_seq`."""
    return directory / f"events-{first_seq:020}.evt"


def event_files(directory: Path, storage: Storage = DISK) -> list[Path]:
    """Return the paths of all event files, oldest first."""
    return [
        directory / name for name in sorted(filter(_FILE_NAME.fullmatch, storage.names(directory)))
    ]


def event_files_before(directory: Path, seq: Seq, storage: Storage = DISK) -> list[Path]:
    """Return the files without an event from number `seq` on; the newest file is never returned."""
    paths = event_files(directory, storage)
    return [path for path, later in pairwise(paths) if first_seq_of(later) <= seq]


def first_seq_of(path: Path) -> Seq:
    """Return the number of a file's first event."""
    return int(path.stem.removeprefix("events-"))


def event_frame(events: Sequence[Published]) -> bytes:
    """Return the frame of events with consecutive numbers; there must be one at least."""
    body = _encode(events)
    covered = _COVERED.pack(len(body), events[0].seq, len(events)) + body
    return _MARKER + xxhash.xxh3_64_digest(covered) + covered


def event_frames(data: bytes, first_seq: Seq, offset: int = 0) -> list[EventFrame]:
    """Return the frames from `offset` on, up to the first that does not verify or continue."""
    frames: list[EventFrame] = []
    while offset + _HEAD.size <= len(data):
        marker, checksum, length, seq, count = _HEAD.unpack_from(data, offset)
        end = offset + _HEAD.size + length
        if marker != _MARKER or seq != first_seq or not count or end > len(data):
            break
        if xxhash.xxh3_64_digest(data[offset + _COVERED_FROM : end]) != checksum:
            break
        frames.append(EventFrame(offset, end, seq, seq + count - 1))
        offset, first_seq = end, seq + count
    return frames


def _events_in(data: bytes, offset: int, path: Path) -> tuple[Published, ...]:
    """Decode the events of a frame that verifies."""
    try:
        return _decode(memoryview(data)[offset + _HEAD.size :])
    except UNDECODABLE as error:
        raise LogForeign(f"{path}: its events are intact, but unknown here: {error}") from error


class EventWriter:
    """Appends events to the files of a directory, for one process at a time.

    `newest_seq` is the number of the last event, 0 for none. What was added is durable after
    `close`. Raises `OSError`: the files then contain a prefix of what was added, and the next
    writer continues after it.
    """

    def __init__(
        self, directory: Path, storage: Storage = DISK, file_bytes_max: int = FILE_BYTES_MAX
    ) -> None:
        self.newest_seq: Seq = 0
        self._directory = directory
        self._storage = storage
        self._file_bytes_max = file_bytes_max
        self._fd = -1
        self._file_bytes = 0
        # The events of the next frame.
        self._waiting: list[Published] = []
        # Events of the files that follow the last one that `add` compared.
        self._stored: deque[Published] = deque()
        self._reader: EventReader | None = None
        self._is_durable = False
        self._continue(None)

    def add(self, events: Sequence[Published]) -> None:
        """Append events in order; equal ones in the files are kept, so that readers find them.

        From the first on that differs or is missing, the files' events are replaced: the log may
        have been cut since. Numbers may begin anywhere, and after a gap: then another file begins.
        """
        for event in events:
            if event.seq <= self.newest_seq:
                if self._has(event):
                    self._make_durable()
                    continue
                self.cut_after(event.seq - 1)
            if event.seq != self.newest_seq + 1:
                self._write_frame()
                self._end_file()
            self._waiting.append(event)
            self.newest_seq = event.seq
            if len(self._waiting) >= EVENTS_PER_FRAME:
                self._write_frame()

    def _has(self, event: Published) -> bool:
        """Whether the files have an equal event."""
        if not self._stored or self._stored[0].seq != event.seq:
            if self._waiting:
                self._write_frame()
            self._reader = self._reader or EventReader(self._directory, self._storage)
            try:
                self._stored = deque(self._reader.read(event.seq, EVENTS_PER_READ))
            except LogForeign:
                # Of another version: this one writes them again.
                self._stored.clear()
        return bool(self._stored) and self._stored.popleft() == event

    def _make_durable(self) -> None:
        """Write the last file again if this writer continues one of which `add` has a part.

        A writer before added that part, and may have failed to sync it. After a failed sync the
        system takes unwritten bytes for written ones, and no further sync writes them. That writer
        ended then, so all earlier files are durable.
        """
        if self._is_durable or self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        self._storage.close(fd)
        path = event_files(self._directory, self._storage)[-1]
        write_file(path, self._storage.read(path, 0, self._file_bytes), self._storage)
        self._fd = self._storage.open_end(path)
        self._is_durable = True

    def cut_after(self, seq: Seq) -> None:
        """Drop the events after number `seq`: a log that was cut may have others there."""
        self._stored.clear()
        self._reader = None
        if seq < self.newest_seq:
            self._write_frame()
            self._end_file()
            self._continue(seq)

    def close(self) -> None:
        """Write and sync the rest; the files and their names are then durable."""
        try:
            self._write_frame()
        finally:
            self._end_file()
        self._storage.sync_directory(self._directory)

    def _continue(self, last_seq: Seq | None) -> None:
        """Continue after event `last_seq` (None: the last) of the whole frames in the last file."""
        self.newest_seq = 0
        for path in reversed(event_files(self._directory, self._storage)):
            first_seq = first_seq_of(path)
            data = self._storage.read(path)
            frames = event_frames(data, first_seq)
            if last_seq is not None:
                frames = [frame for frame in frames if frame.first_seq <= last_seq]
            if frames:
                self._adopt(path, data, frames, last_seq)
                return
            self._storage.remove(path)

    def _adopt(
        self, path: Path, data: bytes, frames: list[EventFrame], last_seq: Seq | None
    ) -> None:
        offset, end, _, newest = frames[-1]
        if last_seq is not None and newest > last_seq:
            # The frame is written again with the events that are kept.
            events = _events_in(data[:end], offset, path)
            self._waiting = [event for event in events if event.seq <= last_seq]
            end, newest = offset, last_seq
        self._fd = self._storage.open_end(path)
        self._file_bytes, self.newest_seq = end, newest
        if end < len(data):
            self._storage.cut(self._fd, end)

    def _write_frame(self) -> None:
        if not self._waiting:
            return
        if self._fd >= 0 and self._file_bytes >= self._file_bytes_max:
            self._end_file()
        if self._fd < 0:
            path = event_file_path(self._directory, self._waiting[0].seq)
            self._fd, self._file_bytes = self._storage.create(path), 0
        frame = event_frame(self._waiting)
        self._waiting = []
        count = self._storage.write(self._fd, frame)
        if count != len(frame):
            raise OSError(errno.ENOSPC, f"{count} of {len(frame)} bytes of events were written")
        chunks = self._file_bytes // CHUNK_BYTES
        self._file_bytes += count
        if self._file_bytes // CHUNK_BYTES > chunks:
            self._storage.sync_data(self._fd)

    def _end_file(self) -> None:
        """Sync and close the file: all files but the last are whole, also after a power cut."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                self._storage.sync(fd)
            finally:
                self._storage.close(fd)


class EventReader:
    """Reads events by number while another process may append to the files or remove old ones.

    Changes are noticed by `refresh`, which `read` calls if its first event is not found. Raises
    `OSError`, and `LogForeign` for events of another version. A reader belongs to one thread.
    """

    def __init__(self, directory: Path, storage: Storage = DISK) -> None:
        self._directory = directory
        self._storage = storage
        self._first_seqs: list[Seq] = []
        # The frames of files by the first event, the file that was used last at the end.
        self._frames: dict[Seq, list[EventFrame]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Notice new, longer, cut and removed files."""
        paths = event_files(self._directory, self._storage)
        self._first_seqs = [first_seq_of(path) for path in paths]
        self._frames.clear()

    @property
    def oldest_seq(self) -> Seq:
        """The number of the oldest event, 0 if there is none; as of the last refresh."""
        return self.next_seq(0)

    @property
    def newest_seq(self) -> Seq:
        """The number of the newest event, 0 if there is none; as of the last refresh."""
        for first_seq in reversed(self._first_seqs):
            if frames := self._frames_of(first_seq):
                return frames[-1].last_seq
        return 0

    def next_seq(self, seq: Seq) -> Seq:
        """Return the first number from `seq` on whose event is in the files, 0 if there is none."""
        for first_seq in self._first_seqs[max(0, bisect_right(self._first_seqs, seq) - 1) :]:
            frames = self._frames_of(first_seq)
            if frames and frames[-1].last_seq >= seq:
                return max(seq, first_seq)
        return 0

    def read(self, first_seq: Seq, count_max: int) -> tuple[Published, ...]:
        """Return up to `count_max` events from number `first_seq` on, without a gap.

        The answer is empty if event `first_seq` is not in the files. It may be shorter than what
        is there: a further call continues it.
        """
        events = list(self._rest_of_frame(first_seq))
        if not events:
            self.refresh()
            events += self._rest_of_frame(first_seq)
        while events and len(events) < count_max:
            following = self._rest_of_frame(first_seq + len(events))
            if not following:
                break
            events += following
        return tuple(events[:count_max])

    def _rest_of_frame(self, seq: Seq) -> tuple[Published, ...]:
        """Return the events from `seq` on of the frame that contains it; empty if none does."""
        position = bisect_right(self._first_seqs, seq) - 1
        if position < 0:
            return ()
        first_seq = self._first_seqs[position]
        frames = self._frames_of(first_seq)
        place = bisect_right(frames, seq, key=lambda frame: frame.first_seq) - 1
        if place < 0 or frames[place].last_seq < seq:
            return ()
        offset, end, frame_seq, _ = frames[place]
        path = event_file_path(self._directory, first_seq)
        try:
            data = self._storage.read(path, offset, end - offset)
        except FileNotFoundError:
            return ()
        # The file may have been cut and written again since its frames were read.
        if not event_frames(data, frame_seq):
            return ()
        return _events_in(data, 0, path)[seq - frame_seq :]

    def _frames_of(self, first_seq: Seq) -> list[EventFrame]:
        """Return the places of a file's frames, which are kept for the files used last."""
        frames = self._frames.pop(first_seq, None)
        if frames is None:
            try:
                data = self._storage.read(event_file_path(self._directory, first_seq))
            except FileNotFoundError:
                data = b""
            frames = event_frames(data, first_seq)
            if len(self._frames) >= _FILES_INDEXED:
                del self._frames[next(iter(self._frames))]
        self._frames[first_seq] = frames
        return frames
