"""Repair of a damaged log: it is cut where the damage begins.

Nothing is deleted: the bytes that are cut off are kept next to the log in `.damaged` files. A
record after the damage is never moved back into the chain.
"""

import os
from pathlib import Path
from typing import NamedTuple

from controller.log.format import LogDamaged, whole_frames
from controller.log.segments import lock_directory, segment_paths, verify
from messages.ids import Seq


class RepairPlan(NamedTuple):
    """A repair: `file` is cut at `offset`, and the later segments are moved away.

    `lost_bytes` are cut off; among them are `lost_records` records that verify alone.
    """

    file: Path
    offset: int
    seq: Seq
    reason: str
    lost_bytes: int
    lost_records: int
    later_files: tuple[Path, ...]


def repair_plan(directory: Path) -> RepairPlan | None:
    """Return what `repair` would cut; None if nothing is damaged."""
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
    """Cut a damaged log and return the plan; raise `LogBusy` while a process writes the log.

    An interrupted repair leaves a log that can be repaired again.
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
    # The damage itself is cut last: until then `verify` still finds it.
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
