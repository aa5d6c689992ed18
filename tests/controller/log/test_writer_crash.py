"""Crashes and power cuts at every step lose no confirmed record and leave no corruption."""

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loradock.controller.log.segments import verify
from loradock.controller.log.writer import Log
from loradock.messages.records import Record
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import (
    HEADER,
    Crash,
    CrashingDisk,
    make_records,
    records_in,
    write_with,
)


def crashed_run(
    directory: Path, disk: CrashingDisk, policy: Any = "group"
) -> tuple[list[Record], list[Record]]:
    """Return the records appended until the crash, and those of them that were confirmed."""
    records, appended, confirmed, log = make_records(24), [], [], None
    try:
        for _ in range(2):
            log = Log(directory, HEADER, sync=policy, segment_bytes_max=700)
            for start in range(len(confirmed), len(confirmed) + 12, 3):
                group = records[start : start + 3]
                appended += group
                log.append(group, epoch=1)
                confirmed += group
            log.close()
    except Crash:
        if log is not None:
            with suppress(Crash):
                log.close()
    return appended, confirmed


def crashed_again(directory: Path, disk: CrashingDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        write_with(disk, patch)
        with suppress(Crash), Log(directory, HEADER, segment_bytes_max=700):
            pass


@pytest.mark.parametrize("power", ["on", "cut"])
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_crash_at_any_step_loses_nothing_that_was_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, power: str
) -> None:
    rng = Random(fresh_seed())
    for at in range(1, 1000):
        directory = tmp_path / str(at)
        disk = CrashingDisk(at, when)
        with monkeypatch.context() as patch:
            write_with(disk, patch)
            appended, confirmed = crashed_run(directory, disk)
        if not disk.is_dead:
            assert at > 30
            assert len(confirmed) == 24
            return
        if power == "cut":
            disk.cut_power(directory, rng)
        for again in range(1, 7):
            crashed_again(directory, CrashingDisk(again, when), monkeypatch)
        with Log(directory, HEADER, segment_bytes_max=700) as log:
            found = records_in(directory)
            assert found == appended[: len(found)]
            assert len(found) >= len(confirmed)
            assert log.next_seq == len(found) + 1
            log.append(make_records(3, 100), epoch=2)
        assert records_in(directory) == found + make_records(3, 100)
        assert verify(directory).corruption is None
    pytest.fail("the run did not end")


@pytest.mark.parametrize("policy", ["interval", "never"])
def test_without_syncs_a_lost_end_is_not_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    rng = Random(fresh_seed())
    for at in range(1, 100):
        directory = tmp_path / str(at)
        disk = CrashingDisk(at, "before")
        with monkeypatch.context() as patch:
            write_with(disk, patch)
            appended, _ = crashed_run(directory, disk, policy)
        disk.cut_power(directory, rng)
        Log(directory, HEADER).close()
        found = records_in(directory)
        assert found == appended[: len(found)]
    assert not disk.is_dead
