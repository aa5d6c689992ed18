"""Planted bugs of the log, the disk and snapshots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from loradock.controller.log import format as log_format
from loradock.controller.log import replay as log_replay
from loradock.controller.log import snapshots
from loradock.controller.log.events import EventWriter
from loradock.controller.log.format import LogFull, LogSyncFailed
from loradock.controller.log.writer import Log
from loradock.controller.server.inputs import InputHandler
from tests.support.campaign.bug_registry import Replacement, bug, nothing
from tests.support.campaign.disk import SimulatedDisk


@bug
def acknowledge_before_sync() -> Replacement:
    def end_group(self: Log) -> None:
        self._wait, self._has_unsynced = None, False

    return Log, "end_group", end_group


class _EqualToAll(bytes):
    """A checksum that equals every other one."""

    __hash__ = bytes.__hash__

    def __eq__(self, _other: object) -> bool:
        return True

    def __ne__(self, _other: object) -> bool:
        return False


@bug
def checksum_not_compared() -> Replacement:
    digest = log_format._digest
    return log_format, "_digest", lambda data: _EqualToAll(digest(data))


@bug
def torn_tail_kept() -> Replacement:
    original = Log._continue_segment

    def continue_segment(self: Log, *arguments: Any) -> None:
        with mock.patch.object(SimulatedDisk, "cut", nothing):
            original(self, *arguments)

    return Log, "_continue_segment", continue_segment


@bug
def refused_group_kept_in_file() -> Replacement:
    return Log, "_cut_group", lambda _self, reason: LogFull(reason)


@bug
def failed_sync_ignored() -> Replacement:
    original = Log.end_group

    def end_group(self: Log) -> None:
        try:
            original(self)
        except LogSyncFailed:
            self._failed, self._has_unsynced = "", False

    return Log, "end_group", end_group


@bug
def full_disk_ignored() -> Replacement:
    original = Log.begin_group

    def begin_group(self: Log, *arguments: Any) -> int:
        try:
            return original(self, *arguments)
        except LogFull:
            return self.next_seq - 1

    return Log, "begin_group", begin_group


@bug
def names_not_synced() -> Replacement:
    original = SimulatedDisk.sync

    def sync(self: SimulatedDisk, fd: int) -> None:
        if not isinstance(self._open[fd], Path):
            original(self, fd)

    return SimulatedDisk, "sync", sync


@bug
def group_logged_in_another_order() -> Replacement:
    original = Log.begin_group

    def begin_group(self: Log, records: Any, epoch: int) -> int:
        return original(self, list(reversed(records)), epoch)

    return Log, "begin_group", begin_group


def _forget_in_snapshot(field: str, empty: Callable[[], Any]) -> Replacement:
    original = snapshots.encode_world

    def encode_world(world: Any) -> bytes:
        with mock.patch.object(world, field, empty()):
            return original(world)

    return snapshots, "encode_world", encode_world


@bug
def requests_not_in_snapshot() -> Replacement:
    return _forget_in_snapshot("pending_requests", dict)


@bug
def events_of_snapshot_skipped() -> Replacement:
    original = EventWriter.add

    def add(self: EventWriter, events: Any) -> None:
        original(self, [event for event in events if event.seq % 7])

    return EventWriter, "add", add


@bug
def skips_not_replayed() -> Replacement:
    return log_replay, "skipped_inputs", lambda *_: frozenset()


@bug
def failed_input_not_undone() -> Replacement:
    return InputHandler, "_rebuild", nothing
