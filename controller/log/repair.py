"""Repair of a damaged log: a single flipped bit is flipped back, other damage is cut off.

Where a valid snapshot begins after the damaged segment, no restart needs that one and those before
it: they are renamed, and nothing is cut.

No byte is lost: a changed file replaces the original, whose copy stays next to it with the ending
`.damaged`. A record after the damage is never moved back into the chain. An interrupted
repair leaves a log that can be repaired again.
"""

import errno
from pathlib import Path
from typing import NamedTuple

from loradock.controller.log.flipped_bits import (
    REPAIR_BYTES_MAX,
    Flip,
    SearchTooLongError,
    flipped_bit,
    with_flip,
)
from loradock.controller.log.format import LogDamaged, LogFull, whole_frames
from loradock.controller.log.segments import lock_directory, segment_paths, verify
from loradock.controller.log.snapshots import (
    SnapshotInvalidError,
    read_snapshot,
    restore_controller,
    snapshot_paths,
)
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.ids import Seq


class RepairPlan(NamedTuple):
    """A repair of the first damage: `flip` is flipped back, or `file` is cut at `offset`.

    Only a cut loses something: `lost_bytes` are cut off, with `lost_records` records that verify
    alone. `later_files` are then renamed: segments, and snapshots that contain lost records. If
    `snapshot` is not None, `unneeded_files` are renamed instead: it has what they led to.
    """

    file: Path
    offset: int
    seq: Seq
    reason: str
    flip: Flip | None
    lost_bytes: int
    lost_records: int
    later_files: tuple[Path, ...]
    snapshot: Path | None = None
    unneeded_files: tuple[Path, ...] = ()


def repair_plan(directory: Path, storage: Storage = DISK) -> RepairPlan | None:
    """Return what `repair` would do; None if nothing is damaged."""
    damage = verify(directory, storage).damage
    if damage is None:
        return None
    try:
        flip, reason = _flip_of(damage, storage), damage.reason
    except SearchTooLongError:
        flip, reason = None, f"{damage.reason} (too long to search it for a flipped bit)"
    plan = RepairPlan(damage.file, damage.offset, damage.seq, reason, flip, 0, 0, ())
    if flip is not None:
        return plan
    snapshot = _snapshot_after(directory, damage.file, storage)
    if snapshot is None:
        return _cut_plan(directory, damage, plan, storage)
    unneeded = [p for p in segment_paths(directory, storage) if p.name <= damage.file.name]
    return plan._replace(snapshot=snapshot, unneeded_files=tuple(unneeded))


def repair(directory: Path, storage: Storage = DISK) -> RepairPlan | None:
    """Repair the first damage and return the plan; other damage may follow it.

    Raises `LogBusy` while a process writes the log, and `LogFull` without space for the copies.
    """
    fd = lock_directory(directory, storage)
    try:
        plan = repair_plan(directory, storage)
        if plan is not None:
            _carry_out(plan, fd, storage)
            storage.sync(fd)
        return plan
    except OSError as error:
        raise LogFull(f"{directory}: not repaired: {error}; make space and repeat") from error
    finally:
        storage.close(fd)


def _flip_of(damage: LogDamaged, storage: Storage) -> Flip | None:
    """Return the flipped bit that is the damage; None if it is something else."""
    if damage.link is None:
        return None
    data, is_header = storage.read(damage.file), damage.offset == 0
    return flipped_bit(data, damage.offset, damage.link, is_header, REPAIR_BYTES_MAX)


def _snapshot_after(directory: Path, segment: Path, storage: Storage) -> Path | None:
    """Return a valid snapshot after which no record of this segment or one before it is read."""
    for path in reversed(snapshot_paths(directory, storage)):
        try:
            snapshot = read_snapshot(path, storage)
            restore_controller(snapshot, path)
        except SnapshotInvalidError:
            continue
        if snapshot.position.segment > int(segment.stem):
            return path
    return None


def _cut_plan(
    directory: Path, damage: LogDamaged, plan: RepairPlan, storage: Storage
) -> RepairPlan:
    later = [path for path in segment_paths(directory, storage) if path.name > damage.file.name]
    lost_bytes = lost_records = 0
    for path in (damage.file, *later):
        data = storage.read(path)
        start = damage.offset if path == damage.file else 0
        lost_bytes += len(data) - start
        # A segment's first frame is its header, not a record.
        lost_records += sum(1 for offset, _ in whole_frames(data, start) if offset > 0)
    later += [p for p in snapshot_paths(directory, storage) if int(p.stem) >= damage.seq]
    return plan._replace(lost_bytes=lost_bytes, lost_records=lost_records, later_files=tuple(later))


def _carry_out(plan: RepairPlan, directory_fd: int, storage: Storage) -> None:
    # The damage itself is removed last: until then `verify` still finds it.
    for path in (*plan.later_files, *plan.unneeded_files):
        storage.rename(path, _free_name(path, storage))
    if plan.snapshot is not None:
        return
    if plan.offset == 0 and plan.flip is None:
        storage.rename(plan.file, _free_name(plan.file, storage))
        return
    data = storage.read(plan.file)
    changed = data[: plan.offset] if plan.flip is None else with_flip(data, plan.flip)
    _write(_free_name(plan.file, storage), data, storage)
    draft = plan.file.with_name("repair.new")
    _write(draft, changed, storage)
    storage.sync(directory_fd)
    storage.rename(draft, plan.file)


def _write(path: Path, data: bytes, storage: Storage) -> None:
    """Write a file durably; its name is not durable yet."""
    fd = storage.create(path)
    try:
        if (count := storage.write(fd, data)) != len(data):
            raise OSError(errno.ENOSPC, f"{count} of {len(data)} bytes of {path} were written")
        storage.sync(fd)
    finally:
        storage.close(fd)


def _free_name(path: Path, storage: Storage) -> Path:
    names, number = set(storage.names(path.parent)), 0
    while (name := f"{path.name}.{number}.damaged") in names:
        number += 1
    return path.with_name(name)
