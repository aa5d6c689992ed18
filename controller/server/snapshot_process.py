"""Snapshots of a running controller: a process of low priority makes them from the log.

It is started when enough inputs were handled since the last snapshot. If it fails or hangs, that is
reported, and the next one is due an interval later: nothing but the time of a restart depends on
it.
"""

import contextlib
import io
import os
import subprocess
import time
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import structlog

from loradock.controller.core.limits import LimitsError
from loradock.controller.log.format import LogError
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import segment_paths
from loradock.controller.log.snapshots import Snapshot
from loradock.controller.log.snapshotter import (
    EXIT_BUSY,
    NICENESS,
    SnapshotMade,
    SnapshotOrder,
    make_snapshot,
)
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.ids import Seq
from loradock.processes.subprocesses import process_command

SNAPSHOT_S_MAX: Final = 600.0
STOP_S_MAX: Final = 5.0
AT_STOP: Final = 0.2
"""The part of an interval after which a snapshot is made when the controller stops."""

OVERDUE: Final = 2
"""A start makes a snapshot if it had to handle the inputs of this many intervals."""

_SIZES_INTERVAL_S: Final = 1.0
_ERROR_CHARACTERS: Final = 2000

log = structlog.get_logger("controller")


class SnapshotProcess:
    """Starts snapshotters of a log one at a time and reports their results.

    `snapshot_seq`, `snapshot_time_ns`: of the last snapshot that is known, 0 without one.
    """

    def __init__(
        self,
        directory: Path,
        interval: int,
        retention: Retention,
        storage: Storage = DISK,
    ) -> None:
        """`interval`: inputs between two snapshots; 0 makes none, nor does another storage."""
        self._directory = directory
        self._storage = storage
        # Another process sees files of the disk only.
        self._interval = interval if storage is DISK else 0
        self._retention = retention
        self._process: subprocess.Popen[bytes] | None = None
        # In memory and not a pipe, which would be full of the names of many removed files.
        self._output: BinaryIO = io.BytesIO()
        self._started_s = 0.0
        # The record after which the last snapshot was started, or restored.
        self._last_seq = 0
        self.snapshot_seq = 0
        self.snapshot_time_ns = 0
        self._log_bytes = 0
        self._measured_s = -_SIZES_INTERVAL_S

    def on_recovered(self, snapshot: Snapshot | None, until: Seq) -> None:
        """Continue after the snapshot that the controller began with, or after one that is made.

        It is made here, up to record `until`, if the last one is far behind: a snapshotter ends
        with its server, so one that ends again and again would have ever longer starts.
        """
        if snapshot is not None:
            self._last_seq = self.snapshot_seq = snapshot.seq
            self.snapshot_time_ns = snapshot.marks[-1].time_ns
        if self._interval and until - self.snapshot_seq >= OVERDUE * self._interval:
            self._make(until)

    def tick(self, seq: Seq) -> None:
        """Report an ended snapshotter, and start the next if it is due after record `seq`."""
        if self._process is not None:
            self._end_if_done(self._process)
        elif self._interval and seq - self._last_seq >= self._interval:
            self._start(seq)

    def finish(self, seq: Seq) -> None:
        """Make a last snapshot if many inputs were handled; the time for it is bounded."""
        if self._process is None and self._interval:
            if seq - self._last_seq < self._interval * AT_STOP:
                return
            self._start(seq)
        if self._process is not None:
            try:
                self._process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                return
            self._end_if_done(self._process)

    def close(self) -> None:
        """End a running snapshotter; the next one makes its snapshot."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            self._output.close()

    def log_bytes(self) -> int:
        """Return the size of the log's segments, which is read once per second."""
        now = time.monotonic()
        if now - self._measured_s >= _SIZES_INTERVAL_S:
            self._measured_s = now
            self._log_bytes = log_bytes(self._directory, self._storage)
        return self._log_bytes

    def _make(self, seq: Seq) -> None:
        self._last_seq, self._started_s = seq, time.monotonic()
        try:
            made = make_snapshot(self._directory, SnapshotOrder(seq, self._retention))
        except (LogError, LimitsError, OSError) as error:
            log.warning("no snapshot was made", reason=str(error))
        else:
            if made is not None:
                self._report(made)

    def _start(self, seq: Seq) -> None:
        self._last_seq, self._started_s = seq, time.monotonic()
        order = msgspec.json.encode(SnapshotOrder(seq, self._retention)).decode()
        arguments = (str(self._directory), order, str(os.getpid()))
        command = [*process_command("snapshotter"), *arguments]
        try:
            self._output = os.fdopen(os.memfd_create("snapshot", os.MFD_CLOEXEC), "w+b")
            # In a separate session: only the parent receives a terminal's Ctrl-C.
            self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        except OSError as error:
            self._output.close()
            log.warning("a snapshot can't be made", error=str(error))

    def _end_if_done(self, process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is None:
            if time.monotonic() - self._started_s > SNAPSHOT_S_MAX:
                log.warning("the snapshotter hangs and is killed", pid=process.pid)
                self.close()
            return
        self._process = None
        _, errors = process.communicate()
        with self._output as file:
            file.seek(0)
            output = file.read()
        if process.returncode:
            report = log.info if process.returncode == EXIT_BUSY else log.warning
            reason = errors.decode(errors="replace")[-_ERROR_CHARACTERS:].strip()
            report("no snapshot was made", status=process.returncode, reason=reason)
            return
        made = msgspec.json.decode(output, type=SnapshotMade | None)
        if made is not None:
            self._report(made)

    def _report(self, made: SnapshotMade) -> None:
        self.snapshot_seq, self.snapshot_time_ns = made.seq, made.time_ns
        for reason in made.skipped:
            log.warning("a snapshot can't be used", reason=reason)
        log.info(
            "snapshot made",
            seq=made.seq,
            inputs=made.inputs,
            bytes=made.size_bytes,
            removed=len(made.removed),
            seconds=round(time.monotonic() - self._started_s, 3),
        )


def log_bytes(directory: Path, storage: Storage = DISK) -> int:
    """Return the size of a log's segments; retention can remove some meanwhile."""
    size_bytes = 0
    for path in segment_paths(directory, storage):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += storage.size_bytes(path)
    return size_bytes
