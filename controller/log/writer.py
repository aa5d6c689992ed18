"""The writer of the append-only log, which contains every input before it is handled.

A group of records is one write and one sync. `append` returns when its records are as durable as
the policy specifies, or raises and none of them counts. Its two parts, `begin_group` and
`end_group`, let the caller use the time of the sync. The log has no clock and no thread.

Nothing is acknowledged after a failed sync: what the disk then holds is only known by reading it
again. A crash of the machine in the middle of a write may leave a hole before a whole record; that
is corruption and not a torn tail, so an operator decides (`loradock.controller.log.repair`).
"""

import contextlib
import errno
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from loradock.controller.log.format import (
    CHAIN_START,
    LogForeign,
    LogFull,
    LogSyncFailed,
    frame_header,
    frame_records,
)
from loradock.controller.log.segments import (
    Segment,
    lock_directory,
    segment_path,
    segment_paths,
)
from loradock.controller.log.settings import SEGMENT_BYTES_MAX, SYNC_INTERVAL_MS, SyncPolicy
from loradock.controller.log.storage import DISK, Storage, Wait
from loradock.messages.ids import Epoch, Seq
from loradock.messages.records import Header, Record

NO_SYNC_FAILED: Final = "no-sync-failed"
"""Name of a file without which the next start writes the last segment again.

A failure removes it, which works on a full disk too, where a file that reports the failure could
not be created.
"""

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Recovered(NamedTuple):
    """Result of opening a log: the next record's number, and the bytes cut from a torn tail.

    `cut_from` is the segment that was cut, None if nothing was.
    """

    next_seq: Seq
    epoch: Epoch
    cut_bytes: int
    cut_from: Path | None


class Log:
    """A log opened for appending, by one process at a time: its directory is locked.

    With policy `interval` the caller has to call `sync` when it stops appending.
    """

    def __init__(
        self,
        directory: Path,
        header: Header,
        sync: SyncPolicy,
        interval_ms: int,
        bytes_max: int,
        storage: Storage,
    ) -> None:
        self.storage: Final = storage
        self.directory: Final = directory
        self._header = header
        self._policy: Final = sync
        self._interval_ns: Final = interval_ms * 1_000_000
        self._segment_bytes_max: Final = bytes_max
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

    @classmethod
    def open(
        cls,
        directory: Path,
        header: Header,
        *,
        sync: SyncPolicy = "group",
        sync_interval_ms: int = SYNC_INTERVAL_MS,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        storage: Storage = DISK,
    ) -> Self:
        """Open or create the log in `directory`, and cut a torn tail.

        `header.first_seq` is set here. A header that differs from the last segment's begins a new
        segment. A segment that has reached `segment_bytes_max` is ended by the next append. Only
        the last segment is read here. Raises `LogCorrupt`, `LogForeign`, `LogBusy`, `LogFull`,
        `LogSyncFailed`.
        """
        if not storage.is_directory(directory):
            storage.make_directory(directory)
        return cls(directory, header, sync, sync_interval_ms, segment_bytes_max, storage)

    @property
    def next_seq(self) -> Seq:
        """The number of the next record."""
        return self._link.seq + 1

    def append(self, records: Sequence[Record], epoch: Epoch) -> Seq:
        """Write a group and make it durable by the policy; return its last record's number.

        `LogFull`: the log is unchanged, and a later append may succeed. `LogSyncFailed`: the log
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
                if error.errno not in _NO_ROOM:
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
        try:
            self.storage.cut(self._fd, self._file_bytes)
            self.storage.sync_data(self._fd)
        except OSError as error:
            raise self._fail("cut", error) from error
        return LogFull(f"{self.directory}: no space left ({reason}); nothing was written")

    def _is_sync_due(self, now_ns: int) -> bool:
        if self._policy != "interval":
            return self._policy == "group"
        # A clock that is set back must not delay the next sync.
        if 0 <= now_ns - self._synced_ns < self._interval_ns:
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
        try:
            fd = self._write_segment(segment_path(self.directory, first_seq), frame)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise LogFull(f"{self.directory}: no space for a segment ({error})") from error
            raise self._fail("new segment", error) from error
        try:
            self.storage.sync(self._lock_fd)
        except OSError as error:
            self.storage.close(fd)
            raise self._fail("sync of the directory", error) from error
        self._fd, self._file_bytes = fd, len(frame)
        self._first_seq, self._link = first_seq, link

    def _write_segment(self, path: Path, frame: bytes) -> int:
        """Create a segment that contains `frame`, and return its descriptor.

        Its bytes are durable, its name is not yet. Until it is renamed the file is not part of the
        log: an error here leaves the log unchanged.
        """
        storage, draft = self.storage, path.with_name("segment.new")
        fd = storage.create(draft)
        try:
            count = storage.write(fd, frame)
            if count != len(frame):
                raise OSError(errno.ENOSPC, f"{count} of {len(frame)} bytes were written")
            storage.sync(fd)
            storage.rename(draft, path)
        except BaseException:
            storage.close(fd)
            raise
        return fd

    def _recover(self) -> Recovered:
        """Continue after the last whole record, in a segment with this log's header."""
        segment = _last_segment(self.directory, self.storage)
        if segment is None or segment.header is None:
            self._link = segment.before or CHAIN_START if segment else CHAIN_START
            self._begin_segment()
        else:
            self._continue_segment(segment, segment.header)
        self._mark()
        torn_bytes = segment.torn_bytes if segment else 0
        cut_from = segment.file if segment and torn_bytes else None
        return Recovered(self.next_seq, self._link.epoch, torn_bytes, cut_from)

    def _mark(self) -> None:
        """Create the file that a failure removes; raises `LogSyncFailed`."""
        if NO_SYNC_FAILED in self.storage.names(self.directory):
            return
        try:
            self.storage.close(self.storage.create(self.directory / NO_SYNC_FAILED))
        except OSError as error:
            # Without room for it, the next start writes a segment again that was durable.
            if error.errno not in _NO_ROOM:
                raise self._fail("mark", error) from error

    def _continue_segment(self, segment: Segment, header: Header) -> None:
        """Continue after the segment's last whole record; begin another for another header."""
        if header.rules > self._header.rules:
            raise LogForeign(
                f"{segment.file}: written by rules {header.rules}; this version writes by rules "
                f"{self._header.rules}; use one that knows them"
            )
        self._file_bytes, self._first_seq = segment.scan.offset, segment.first_seq
        self._link = segment.scan.link
        try:
            self._adopt(segment)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise LogFull(f"{self.directory}: no space to recover it ({error})") from error
            raise self._fail("recovery", error) from error
        if header == msgspec.structs.replace(self._header, first_seq=segment.first_seq):
            return
        if self._link.seq < segment.first_seq and segment.before is not None:
            # The segment has no record: the new header replaces its header.
            self._link = segment.before
        self._rotate()

    def _adopt(self, segment: Segment) -> None:
        """Make a segment durable up to its last whole record: its process may not have synced it.

        After a failed sync the system takes unwritten bytes for written ones, and no further sync
        writes them. So they are written again.
        """
        storage = self.storage
        if NO_SYNC_FAILED not in storage.names(self.directory):
            kept = segment.scan.data[: segment.scan.offset]
            self._fd = self._write_segment(segment.file, kept)
            storage.sync(self._lock_fd)
            return
        self._fd = storage.open_end(segment.file)
        if segment.torn_bytes:
            storage.cut(self._fd, self._file_bytes)
        storage.sync(self._fd)
        storage.sync(self._lock_fd)


def _last_segment(directory: Path, storage: Storage) -> Segment | None:
    """Read the last segment to its end; also the one before it if the last's header is torn."""
    paths = segment_paths(directory, storage)
    if not paths:
        return None
    segment = Segment(paths[-1], None, True, storage)
    if segment.header is None and len(paths) > 1:
        ended = Segment(paths[-2], None, False, storage)
        for _ in ended.frames():
            pass
        segment = Segment(paths[-1], ended.scan.link, True, storage)
    for _ in segment.frames():
        pass
    return segment
