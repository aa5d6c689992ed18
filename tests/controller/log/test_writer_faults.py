"""If writes and syncs fail, what was acknowledged stays, and what was refused never appears."""

import errno
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from loradock.controller.log.format import LogFull, LogSyncFailed
from loradock.controller.log.segments import read, verify
from loradock.controller.log.writer import NO_SYNC_FAILED, Log
from loradock.messages.records import Record
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import HEADER, make_records
from tests.support.simulation.memory_storage import FALLIBLE, Faults, MemoryStorage

DIRECTORY = Path("/run/log")
OTHER_LIMITS = msgspec.structs.replace(HEADER, limits={"slots_max": 5})
GROUP = 3


class Run:
    """A process that appends groups of records, is started again after errors, and loses power.

    `kept` are the records that were acknowledged, or that a start has read: these count as logged.
    """

    def __init__(self, storage: MemoryStorage, records: list[Record], policy: Any) -> None:
        self.storage = storage
        self.policy = policy
        self.kept: list[Record] = []
        self._left = list(records)
        # The group whose fate only the next start finds.
        self._unknown: list[Record] = []
        self._log: Log | None = None

    def append(self) -> bool:
        """Append the next group; return whether there was one."""
        group, self._left = self._left[:GROUP], self._left[GROUP:]
        if not group:
            return False
        if self._log is None and not self.start():
            return True
        assert self._log is not None
        try:
            self._log.append(group, epoch=1)
            self.kept += group
        except LogFull:
            pass
        except LogSyncFailed:
            self._unknown = group
            self.end()
        return True

    def start(self, header: Any = HEADER) -> bool:
        """Open the log; return whether that succeeded."""
        try:
            self._log = Log(
                DIRECTORY, header, sync=self.policy, segment_bytes_max=700, storage=self.storage
            )
        except (LogFull, LogSyncFailed, OSError):
            self.end()
            return False
        self.check()
        return True

    def end(self) -> None:
        """End the process, in the middle of anything."""
        self.storage.crash()
        self._log = None

    def lose_power(self) -> None:
        """End the process and the machine."""
        self.end()
        self.storage.lose_power()

    def check(self) -> None:
        """The log has all records that count, and no others but those of unknown fate."""
        found = [record for _, _, record in read(DIRECTORY, storage=self.storage)]
        expected = self.kept + self._unknown
        assert len(found) >= len(self.kept)
        assert found == expected[: len(found)]
        assert verify(DIRECTORY, self.storage).corruption is None
        self.kept, self._unknown = found, []


def run(rng: Random, faults: Faults, policy: Any = "group", groups: int = 12) -> Run:
    storage = MemoryStorage(rng, faults)
    storage.make_directory(DIRECTORY)
    return Run(storage, make_records(groups * GROUP), policy)


@pytest.mark.parametrize("lost", ["power", "process", "nothing"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("policy", ["group", "always"])
def test_each_write_sync_and_rename_fails_once(policy: Any, error: int, lost: str) -> None:
    seed = fresh_seed()
    failed = set()
    for number in range(200):
        tried = run(Random(seed + number), Faults(), policy)
        storage = tried.storage
        storage.fail_call(number, error)
        has_failed = False
        while tried.append():
            if len(storage.calls) > number and not has_failed:
                has_failed = True
                if lost == "power":
                    tried.lose_power()
                elif lost == "process":
                    tried.end()
        storage.fail_nothing()
        tried.lose_power()
        assert tried.start()
        if not has_failed:
            assert number > 30
            assert failed >= {"create", "write", "sync_data", "sync", "rename"}
            return
        failed.add(storage.calls[number][0])
    pytest.fail("the run did not end")


def test_the_operations_that_fail_are_those_of_the_table() -> None:
    tried = run(Random(1), Faults(bytes_max=900))
    while tried.append():
        pass
    assert {name for name, _ in tried.storage.calls} <= set(FALLIBLE)


@pytest.mark.parametrize("part", range(10))
def test_any_mixture_of_failures_loses_nothing_that_counts(part: int) -> None:
    for number in range(40):
        rng = Random(fresh_seed() + 40 * part + number)
        faults = Faults(write_fails=rng.choice([0, 0.1]), sync_fails=rng.choice([0, 0.1, 0.4]))
        tried = run(rng, faults, rng.choice(["group", "always"]), groups=25)
        while tried.append():
            faults.bytes_max = rng.choice([1 << 40, 1 << 40, 2000])
            match rng.randrange(12):
                case 0:
                    tried.lose_power()
                case 1:
                    tried.end()
                case 2:
                    tried.end()
                    tried.start(OTHER_LIMITS)
        tried.storage.fail_nothing()
        tried.lose_power()
        assert tried.start(), number


@pytest.mark.parametrize("header", [HEADER, OTHER_LIMITS])
def test_a_segment_that_is_continued_is_synced_first(header: Any) -> None:
    """Its process was killed between the write and the sync."""
    storage = MemoryStorage()
    log = Log(DIRECTORY, HEADER, sync="never", storage=storage)
    log.append(make_records(GROUP), epoch=1)
    storage.crash()
    (segment,) = (path for path in storage.names(DIRECTORY) if path.endswith(".log"))
    assert storage.unsynced_bytes(DIRECTORY / segment) > 0
    synced = storage.synced[segment]
    with Log(DIRECTORY, header, storage=storage) as opened:
        assert opened.next_seq == GROUP + 1
        assert storage.synced[segment] > synced
        opened.append(make_records(1, GROUP + 1), epoch=1)
        storage.lose_power()
    assert [record for _, _, record in read(DIRECTORY, storage=storage)] == make_records(GROUP + 1)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("header", [HEADER, OTHER_LIMITS])
def test_after_a_failed_sync_the_segment_is_written_again(header: Any, is_full: bool) -> None:
    """The system has dropped the bytes, and its next sync succeeds without them."""
    storage = MemoryStorage()
    log = Log(DIRECTORY, HEADER, storage=storage)
    log.append(make_records(GROUP), epoch=1)
    storage.fail_call(len(storage.calls) + 1)
    # Nothing can be created on a full disk, not even a report of the failure.
    storage.faults.is_full = is_full
    with pytest.raises(LogSyncFailed):
        log.append(make_records(GROUP, GROUP + 1), epoch=1)
    storage.crash()
    storage.faults.is_full = False
    with Log(DIRECTORY, header, storage=storage) as opened:
        claimed = opened.next_seq - 1
        assert NO_SYNC_FAILED in storage.names(DIRECTORY)
        opened.append(make_records(1, claimed + 1), epoch=1)
        storage.lose_power()
    found = [record for _, _, record in read(DIRECTORY, storage=storage)]
    assert found == make_records(claimed + 1)


def test_a_start_that_fails_can_be_repeated() -> None:
    for number in range(50):
        storage = MemoryStorage(Random(number))
        log = Log(DIRECTORY, HEADER, storage=storage)
        log.append(make_records(GROUP), epoch=1)
        storage.fail_call(len(storage.calls) + 1)
        with pytest.raises(LogSyncFailed):
            log.append(make_records(1), epoch=1)
        storage.crash()
        calls = len(storage.calls)
        storage.fail_call(calls + number)
        with suppress(LogSyncFailed):
            Log(DIRECTORY, OTHER_LIMITS, storage=storage)
        ended = len(storage.calls) <= calls + number
        storage.lose_power()
        found = [record for _, _, record in read(DIRECTORY, storage=storage)]
        assert found[:GROUP] == make_records(GROUP)
        if ended:
            assert number > 5
            return
    pytest.fail("the start did not end")
