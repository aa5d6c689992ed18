"""Cutting a damaged log where its damage begins.

What it is: the plan, which tells what would be lost, and the cut. What it is not: mending; a
record that does not continue the chain is never taken back into it. One rule: nothing is deleted;
whatever is cut off lies beside the log in `.damaged` files.
"""

import os
from pathlib import Path
from typing import NamedTuple

from controller.log.format import LogDamaged, whole_frames
from controller.log.segments import lock_directory, segment_paths, verify
from messages.ids import Seq


class RepairPlan(NamedTuple):
    """Cut `file` at `offset`, and set aside the segments behind it.

    `lost_records` verify alone and would go, among `lost_bytes` in all.
    """

    file: Path
    offset: int
    seq: Seq
    reason: str
    lost_bytes: int
    lost_records: int
    later_files: tuple[Path, ...]


def repair_plan(directory: Path) -> RepairPlan | None:
    """What `repair` would do and lose; None where nothing is damaged."""
    damage = verify(directory).damage
    return None if damage is None else _plan(directory, damage)


def _plan(directory: Path, damage: LogDamaged) -> RepairPlan:
    later = tuple(path for path in segment_paths(directory) if path.name > damage.file.name)
    lost_bytes = lost_records = 0
    for path in (damage.file, *later):
        data = path.read_bytes()
        start = damage.offset if path == damage.file else 0
        lost_bytes += len(data) - start
        # A segment's first frame is its header, not a record.
        lost_records += sum(1 for offset, _ in whole_frames(data, start) if offset > 0)
    return RepairPlan(
        damage.file, damage.offset, damage.seq, damage.reason, lost_bytes, lost_records, later
    )


def repair(directory: Path) -> RepairPlan | None:
    """Cut a damaged log as planned and tell what was cut; `LogBusy` while somebody writes it.

    Interrupted at any step, it leaves a log that can be repaired again.
    """
    fd = lock_directory(directory)
    try:
        plan = repair_plan(directory)
        if plan is not None:
            _cut(plan)
            os.fsync(fd)
        return plan
    finally:
        os.close(fd)


def _cut(plan: RepairPlan) -> None:
    # The damage itself goes last: until then the log is still seen to be damaged there.
    for path in plan.later_files:
        os.rename(path, _free_name(path))
    if plan.offset == 0:
        os.rename(plan.file, _free_name(plan.file))
        return
    with plan.file.open("r+b") as segment:
        segment.seek(plan.offset)
        with _free_name(plan.file).open("xb") as kept:
            kept.write(segment.read())
            kept.flush()
            os.fsync(kept.fileno())
        segment.truncate(plan.offset)
        os.fsync(segment.fileno())


def _free_name(path: Path) -> Path:
    number = 0
    while (name := path.with_name(f"{path.name}.{number}.damaged")).exists():
        number += 1
    return name
