"""The writer of the append-only log, which contains every input before it is handled.

A group of records is one write and one sync. `append` returns when its records are as durable as
the policy specifies, or raises and none of them counts. Its two parts, `begin_group` and
`end_group`, let the caller use the time of the sync. The log has no clock and no thread.

Nothing is acknowledged after a failed sync: what the disk then holds is only known by reading it
again. A crash of the machine in the middle of a write can leave a hole before a whole record; that
is corruption and not a torn tail, so an operator decides (`loradock.controller.log.repair`).
"""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from loradock.controller.log.format import (
    CHAIN_START,
    LogCorrupt,
    LogFull,
    LogSyncFailed,
    frame_header,
    frame_records,
)
from loradock.controller.log.segments import (
    NO_SYNC_FAILED,
    Segment,
    check_files,
    lock_directory,
    mark_content,
    marked_segment,
    segment_path,
    segment_paths,
)
from loradock.controller.log.settings import SEGMENT_BYTES_MAX, SYNC_INTERVAL_MS, SyncPolicy
from loradock.controller.log.snapshots import newest_after
from loradock.controller.log.storage import (
    DISK,
    NO_ROOM,
    Storage,
    Wait,
    free_name,
    replace_file,
    write_file,
)
from loradock.messages.ids import Epoch, Seq
from loradock.messages.records import Header, Record


class Recovered(NamedTuple):
    """Result of opening a log: the next record's number, and the bytes cut from a torn tail.

    `cut_from` is the segment that was cut, and `kept_in` has the bytes; None if nothing was cut.
    """

    next_seq: Seq
    epoch: Epoch
    cut_bytes: int = 0
    cut_from: Path | None = None
    kept_in: Path | None = None


class Log:
    """A log opened for appending, by one process at a time: its directory is locked.

    With policy `interval` the caller has to call `sync` when it stops appending.
    """

    def __init__(
        self,
        directory: Path,
        header: Header,
        *,
        sync: SyncPolicy = "group",
        sync_interval_ms: int = SYNC_INTERVAL_MS,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        storage: Storage = DISK,
    ) -> None:
        """Open or create the log in `directory`, and cut a torn tail, whose bytes are kept.

        `header.first_seq` is set here. A header that differs from the last segment's begins a new
        segment. A segment that has reached `segment_bytes_max` is ended by the next append. Only
        the last segment is read here, and a snapshot that has later records: then records are
        missing, and nothing is changed. Nor is it if other rules wrote that segment. Raises
        `LogCorrupt`, `LogForeign`, `LogBusy`, `LogFull`, `LogSyncFailed`.
        """
        if not storage.is_directory(directory):
            storage.make_directory(directory)
        self.storage: Final = storage
        self.directory: Final = directory
        self._header = header
        self._policy: Final = sync
        self._interval_ns: Final = sync_interval_ms * 1_000_000
        self._segment_bytes_max: Final = segment_bytes_max
        self._synced_ns = 0
        self._has_unsynced = False
        # Waits for the sync in progress. Nothing is written meanwhile, so that it covers all.
        self._wait: Wait | None = None
        self._failed = ""
        self._fd = -1
        self._file_bytes = 0
        self._first_seq = 0
        self._link = CHAIN_START
        self._lock_fd = lock_directory(directory, storage)
        try:
            self.recovered: Final = self._recover()
        except BaseException:
            self.close()
            raise

    @property
    def next_seq(self) -> Seq:
        """The number of the next record."""
        return self._link.seq + 1

    def append(self, records: Sequence[Record], epoch: Epoch) -> Seq:
        """Write a group and make it durable by the policy; return its last record's number.

        `LogFull`: the log is unchanged, and a later append can succeed. `LogSyncFailed`: the log
        accepts nothing more, and no record of this group may be acknowledged.
        """
        last_seq = self.begin_group(records, epoch)
        self.end_group()
        return last_seq

    def begin_group(self, records: Sequence[Record], epoch: Epoch) -> Seq:
        """Write a group and begin its sync; return its last record's number.

        Nothing that follows from it may leave the process before `end_group` has returned. Raises
        as `append` does.
        """
        self.end_group()
        self._refuse_if_failed()
        if not records:
            return self._link.seq
        if self._file_bytes >= self._segment_bytes_max and self._link.seq >= self._first_seq:
            self._rotate()
        frames, link = frame_records(records, epoch, self._link)
        self._write(frames if self._policy == "always" else (b"".join(frames),))
        self._link = link
        if self._is_sync_due(records[-1].time_ns):
            self._begin_sync()
        return link.seq

    def end_group(self) -> None:
        """Wait until the last group is as durable as the policy specifies.

        Raises `LogSyncFailed`.
        """
        if self._wait is None:
            return
        wait, self._wait = self._wait, None
        try:
            wait()
        except OSError as error:
            raise self._fail("sync", error) from error
        self._has_unsynced = False

    @property
    def has_record(self) -> bool:
        """True if the current segment has a record."""
        return self._link.seq >= self._first_seq

    def change_header(self, header: Header) -> None:
        """Continue in a segment with another header; the current one must have a record.

        Raises as `append` does.
        """
        self._refuse_if_failed()
        before, self._header = self._header, header
        try:
            self._rotate()
        except LogFull:
            self._header = before
            raise

    def sync(self) -> None:
        """Make all appended records durable; raises `LogSyncFailed`."""
        self.end_group()
        self._refuse_if_failed()
        if self._has_unsynced:
            self._begin_sync()
            self.end_group()

    def _begin_sync(self) -> None:
        try:
            self._wait = self.storage.start_sync(self._fd)
        except OSError as error:
            raise self._fail("sync", error) from error

    def close(self) -> None:
        """Sync the rest, unless the disk has failed before, and unlock the log."""
        try:
            if not self._failed and self._fd >= 0:
                self.sync()
        finally:
            for fd in (self._fd, self._lock_fd):
                if fd >= 0:
                    self.storage.close(fd)
            self._fd = self._lock_fd = -1
            self._failed = self._failed or "it is closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_if_failed(self) -> None:
        if self._failed:
            raise LogSyncFailed(f"{self.directory}: {self._failed}; restart to read the log again")

    def _fail(self, operation: str, error: OSError) -> LogSyncFailed:
        self._failed = f"a {operation} failed: {error}"
        with contextlib.suppress(OSError):
            self.storage.remove(self.directory / NO_SYNC_FAILED)
        return LogSyncFailed(f"{self.directory}: {self._failed}; restart to read the log again")

    def _write(self, chunks: Iterable[bytes]) -> None:
        written = self._file_bytes
        for chunk in chunks:
            try:
                count = self.storage.write(self._fd, chunk)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise self._fail("write", error) from error
                raise self._cut_group(str(error)) from error
            if count != len(chunk):
                raise self._cut_group(f"{count} of {len(chunk)} bytes were written")
            written += count
            self._has_unsynced = True
            if self._policy == "always":
                self.sync()
        self._file_bytes = written

    def _cut_group(self, reason: str) -> LogFull:
        """Cut the bytes of a refused group, durably: a crash must not restore them."""
        path = segment_path(self.directory, self._first_seq)
        try:
            # A file system that was made read-only refuses the cut too.
            if self.storage.size_bytes(path) != self._file_bytes:
                self.storage.cut(self._fd, self._file_bytes)
                self.storage.sync_data(self._fd)
        except OSError as error:
            raise self._fail("cut", error) from error
        return LogFull(f"{self.directory}: no bytes can be added ({reason}); nothing was written")

    def _is_sync_due(self, now_ns: int) -> bool:
        if self._policy != "interval":
            return self._policy == "group"
        if now_ns - self._synced_ns < self._interval_ns:
            return False
        self._synced_ns = now_ns
        return True

    def _rotate(self) -> None:
        """Begin the next segment, after all records of this one are durable."""
        self.sync()
        ended = self._fd
        self._begin_segment()
        self.storage.close(ended)

    def _begin_segment(self) -> None:
        """Create the next segment: when its name appears, its header is durable."""
        first_seq = self._link.seq + 1
        header = msgspec.structs.replace(self._header, first_seq=first_seq)
        frame, link = frame_header(header, self._link)
        path = segment_path(self.directory, first_seq)
        try:
            replace_file(path, frame, self.storage)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise LogFull(f"{self.directory}: no segment can be added ({error})") from error
            raise self._fail("new segment", error) from error
        try:
            fd = self.storage.open_end(path)
            self.storage.sync(self._lock_fd)
        except OSError as error:
            raise self._fail("sync of the directory", error) from error
        self._fd, self._file_bytes = fd, len(frame)
        self._first_seq, self._link = first_seq, link
        self._mark()

    def _recover(self) -> Recovered:
        """Continue after the last whole record, in a segment with this log's header."""
        check_files(self.directory, self.storage)
        segment = _last_segment(self.directory, self.storage)
        self._check_end(segment)
        if segment is None:
            self._begin_segment()
            return Recovered(self.next_seq, self._link.epoch)
        kept_in = self._continue_segment(segment)
        cut_from = segment.file if segment.torn_bytes else None
        return Recovered(self.next_seq, self._link.epoch, segment.torn_bytes, cut_from, kept_in)

    def _check_end(self, segment: Segment | None) -> None:
        """Raise `LogCorrupt` if there were records after the last segment."""
        link = segment.scan.link if segment else CHAIN_START
        file = segment.file if segment else segment_path(self.directory, 1)
        offset = segment.scan.offset if segment else 0
        snapshot = newest_after(self.directory, link.seq, self.storage)
        if snapshot is not None:
            reason = f"the log ends before it, and {snapshot.name} has the records up to "
            raise LogCorrupt(file, offset, link.seq + 1, f"{reason}{int(snapshot.stem)}")
        if marked_segment(self.directory, self.storage) > (segment.first_seq if segment else 0):
            reason = "the log ends before it, and a later segment is missing"
            raise LogCorrupt(file, offset, link.seq + 1, reason)

    def _mark(self) -> None:
        """Write the file that a failure removes; raises `LogSyncFailed`."""
        path, content = self.directory / NO_SYNC_FAILED, mark_content(self._first_seq)
        try:
            names = self.storage.names(self.directory)
            if path.name not in names or self.storage.read(path) != content:
                replace_file(path, content, self.storage)
        except OSError as error:
            # Without room for it, the next start writes a segment again that was durable.
            if error.errno not in NO_ROOM:
                raise self._fail("mark", error) from error

    def _continue_segment(self, segment: Segment) -> Path | None:
        """Continue after the segment's last whole record; begin another for another header.

        Returns the file that keeps what is cut.
        """
        segment.check_rules(self._header.rules)
        self._file_bytes, self._first_seq = segment.scan.offset, segment.first_seq
        self._link = segment.scan.link
        try:
            kept_in = self._adopt(segment)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise LogFull(
                    f"{self.directory}: it can't be recovered ({error}); make space"
                ) from error
            raise self._fail("recovery", error) from error
        if segment.header == msgspec.structs.replace(self._header, first_seq=segment.first_seq):
            self._mark()
            return kept_in
        if self._link.seq < segment.first_seq:
            # The segment has no record: the new header replaces its header.
            self._link = segment.before
        self._rotate()
        return kept_in

    def _adopt(self, segment: Segment) -> Path | None:
        """Make a segment durable up to its last whole record: its process may not have synced it.

        After a failed sync the system takes unwritten bytes for written ones, and no further sync
        writes them. So they are written again.
        """
        storage, data, end = self.storage, segment.scan.data, segment.scan.offset
        kept_in = None
        if segment.torn_bytes:
            # They can be of a record that was acknowledged, if the disk has lost the rest of it.
            kept_in = free_name(segment.file, "cut", storage)
            write_file(kept_in, data[end:], storage)
        if NO_SYNC_FAILED not in storage.names(self.directory):
            write_file(segment.file, data[:end], storage)
            self._fd = storage.open_end(segment.file)
            return kept_in
        self._fd = storage.open_end(segment.file)
        if segment.torn_bytes:
            storage.cut(self._fd, end)
        storage.sync(self._fd)
        storage.sync(self._lock_fd)
        return kept_in


def _last_segment(directory: Path, storage: Storage) -> Segment | None:
    """Read the last segment to its end."""
    paths = segment_paths(directory, storage)
    if not paths:
        return None
    segment = Segment(paths[-1], None, True, storage)
    for _ in segment.frames():
        pass
    return segment
