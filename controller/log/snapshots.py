"""Snapshots: files from which a log is continued without its earlier records.

A snapshot is named after the last record that it contains, with twenty digits and `.snap`:

    marker 4 | checksum 16 | msgpack body

`checksum` is xxh3_128 of the body. A snapshot is made from the log alone and verified when it is
written and when it is read; one that does not verify is skipped, and the one before it is used.
The world in it has every field that `controller/core/restore.py` can't compute from the others,
with the order of the entries: inputs after a restored world lead to the same actions as before.
"""

import re
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import xxhash
from msgspec import Struct

from loradock.controller.core.answers import Answer
from loradock.controller.core.controller import Controller
from loradock.controller.core.counters import Counters
from loradock.controller.core.indexes import DigestDict, TierName
from loradock.controller.core.limits import (
    RULES,
    Limits,
    LimitsError,
    limits_from,
    limits_to,
)
from loradock.controller.core.rankings import RankingState
from loradock.controller.core.restore import derive
from loradock.controller.core.world import (
    Adapter,
    AttachedEngine,
    Operation,
    PendingRequest,
    Tier,
    World,
)
from loradock.controller.log.format import UNDECODABLE, LogError
from loradock.controller.log.policies import PolicyUnknownError, check_policy
from loradock.controller.log.segments import LogPosition, contradicts, skipped_inputs
from loradock.controller.log.storage import DISK, Storage, UnreadableError, write_file
from loradock.messages.ids import AdapterId, Epoch, OpId, RequestId, Seq
from loradock.messages.records import FORMAT
from loradock.messages.views import Warnings

SNAPSHOTS_KEPT: Final = 2
MARKS_MAX: Final = 4096

SNAPSHOT_MARKER: Final = b"LDS2"
_BODY_AT: Final = len(SNAPSHOT_MARKER) + 16
_NAME: Final = re.compile(r"[0-9]{20}\.snap")


class SnapshotInvalidError(LogError):
    """A snapshot that can't be used: its bytes are changed, or another version wrote it."""


class Mark(NamedTuple):
    """The state of the numbers when a snapshot was made, by which retention finds old files."""

    seq: Seq
    time_ns: int
    events_seq: Seq


class Snapshot(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The content of a file; `marks`: of the snapshots before it, and its own.

    `digest` is that of the world after record `position.link.seq`.
    """

    format: int
    rules: int
    policy: str
    limits: dict[str, int]
    position: LogPosition
    digest: str
    marks: tuple[Mark, ...]
    world: msgspec.Raw

    @property
    def seq(self) -> Seq:
        """The number of the last record that the snapshot contains."""
        return self.position.link.seq


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Snapshot).decode


class WorldState(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The fields of a world, under their names; values of maps that know their key are lists."""

    seq: Seq
    time_ns: int
    wall_offset_ns: int
    epoch: Epoch
    next_op: OpId
    next_adapter_id: AdapterId
    next_generation: int
    events_seq: Seq
    lru_counter: int
    answered: int
    refused: int
    engine: AttachedEngine | None
    engine_ready: bool
    unknown_operations: dict[OpId, int]
    adapters: list[Adapter]
    answers: list[Answer]
    operations: dict[OpId, Operation]
    pending_requests: dict[RequestId, PendingRequest]
    tiers: dict[TierName, Tier]
    totals: Counters
    past_counters: Counters
    base_counters: Counters
    answers_chain: bytes
    warnings: dict[AdapterId, Warnings] = {}
    rankings: dict[TierName, RankingState] = {}
    policy_failure: str = ""


_OTHERS: Final = ("adapters", "answers", "warnings", "rankings")
"""The fields that are rebuilt: of the first two the values are stored, as lists."""

_SAME: Final = tuple(name for name in WorldState.__struct_fields__ if name not in _OTHERS)
"""The fields that are stored as they are."""

_id: Final = attrgetter("id")
_encode_state: Final = msgspec.msgpack.Encoder().encode
_decode_state: Final = msgspec.msgpack.Decoder(WorldState).decode


def encode_world(world: World) -> bytes:
    """Return the world's state in msgpack."""
    values: dict[str, Any] = {
        **{name: getattr(world, name) for name in _SAME},
        "adapters": list(world.adapters.values()),
        "answers": list(world.answers.by_id.values()),
        "warnings": world.warnings,
        "rankings": {tier: ranking.state() for tier, ranking in world.rankings.items()},
    }
    return _encode_state([values[name] for name in WorldState.__struct_fields__])


def restore_world(world: World, data: bytes, limits: Limits) -> None:
    """Give a new world the state in `data`, which was encoded under these limits.

    Raises `msgspec.DecodeError`, `UnicodeDecodeError` or `RecursionError` for other bytes.
    """
    state = _decode_state(data)
    for name in _SAME:
        setattr(world, name, getattr(state, name))
    world.adapters = DigestDict.of(zip(map(_id, state.adapters), state.adapters, strict=True))
    world.warnings = DigestDict.of(state.warnings.items())
    world.answers.restore(state.answers)
    derive(world, limits)
    if world.policy_failure:
        world.rankings = {}
    for tier, ranking in world.rankings.items():
        ranking.restore(state.rankings[tier])


def snapshot_path(directory: Path, seq: Seq) -> Path:
    """Return the path of the snapshot after record `seq`."""
    return directory / f"{seq:020}.snap"


def snapshot_paths(directory: Path, storage: Storage = DISK) -> list[Path]:
    """Return the paths of all snapshots, oldest first."""
    names = sorted(filter(_NAME.fullmatch, storage.names(directory)))
    return [directory / name for name in names]


def take_snapshot(
    controller: Controller, position: LogPosition, marks: tuple[Mark, ...] = ()
) -> Snapshot:
    """Return the snapshot of a controller that has handled the records before `position`."""
    world = controller.world
    mark = Mark(world.seq, world.time_ns, world.events_seq)
    return Snapshot(
        format=FORMAT,
        rules=RULES,
        policy=controller.policy_name,
        limits=limits_to(controller.limits),
        position=position,
        digest=controller.digest(),
        marks=(*_thinned(marks), mark),
        world=msgspec.Raw(encode_world(world)),
    )


def _thinned(marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
    """Return every second mark if there are too many."""
    return marks if len(marks) < MARKS_MAX else marks[::2]


def write_snapshot(directory: Path, snapshot: Snapshot, storage: Storage = DISK) -> Path:
    """Write a snapshot, read it back, and return its path; raises `OSError` and `LogError`.

    One that is not read back as it was written is removed.
    """
    path = snapshot_path(directory, snapshot.seq)
    body = _encode(snapshot)
    write_file(path, SNAPSHOT_MARKER + xxhash.xxh3_128_digest(body) + body, storage)
    try:
        restored = restore_controller(read_snapshot(path, storage), path)
        if encode_world(restored.world) != bytes(snapshot.world):
            raise SnapshotInvalidError(f"{path}: it is restored to another world")
    except SnapshotInvalidError:
        storage.remove(path)
        raise
    return path


def read_snapshot(path: Path, storage: Storage = DISK) -> Snapshot:
    """Read a snapshot of the current rules; raises `SnapshotInvalidError`, and `OSError`."""
    try:
        data = storage.read(path)
    except UnreadableError as error:
        raise SnapshotInvalidError(f"{path}: {error}") from error
    snapshot = decode_snapshot(data, path)
    if path.name != snapshot_path(path.parent, snapshot.seq).name:
        raise SnapshotInvalidError(f"{path}: it is the snapshot after record {snapshot.seq}")
    return snapshot


def decode_snapshot(data: bytes, path: Path) -> Snapshot:
    """Decode the content of a file; raises `SnapshotInvalidError` with its path."""
    body = memoryview(data)[_BODY_AT:]
    if data[:_BODY_AT] != SNAPSHOT_MARKER + xxhash.xxh3_128_digest(body):
        raise SnapshotInvalidError(f"{path}: its bytes are not those that were written")
    try:
        snapshot = _decode(body)
    except UNDECODABLE as error:
        raise SnapshotInvalidError(f"{path}: it is intact, but unknown here: {error}") from error
    if snapshot.format != FORMAT or snapshot.rules != RULES:
        raise SnapshotInvalidError(
            f"{path}: format {snapshot.format} and rules {snapshot.rules}; this version reads "
            f"snapshots of format {FORMAT} and rules {RULES}"
        )
    return snapshot


def restore_controller(snapshot: Snapshot, path: Path, *, checked: bool = False) -> Controller:
    """Return the controller of a snapshot; its digest is compared."""
    try:
        check_policy(snapshot.policy)
        limits = limits_from(snapshot.limits)
        controller = Controller(limits, snapshot.policy, checked=checked)
        restore_world(controller.world, snapshot.world, limits)
    except (LimitsError, PolicyUnknownError, *UNDECODABLE) as error:
        raise SnapshotInvalidError(f"{path}: it is intact, but unknown here: {error}") from error
    if controller.digest() != snapshot.digest:
        raise SnapshotInvalidError(
            f"{path}: the digest was {snapshot.digest}, the restored one is {controller.digest()}"
        )
    return controller


def read_valid(
    path: Path, storage: Storage = DISK, *, checked: bool = False
) -> tuple[Snapshot, Controller]:
    """Read and restore a snapshot; raises `SnapshotInvalidError` also for another log's."""
    snapshot = read_snapshot(path, storage)
    if contradicts(path.parent, snapshot.position, storage):
        raise SnapshotInvalidError(
            f"{path}: it is intact, but of another log: record {snapshot.seq} is another one here"
        )
    return snapshot, restore_controller(snapshot, path, checked=checked)


class Restored(NamedTuple):
    """The newest snapshot that can be used, None if there is none, and why later ones can't.

    `skips` are the inputs after it that records skip.
    """

    snapshot: Snapshot | None
    controller: Controller | None
    skipped: tuple[str, ...]
    skips: frozenset[Seq] = frozenset()


def restore_newest(
    directory: Path, until: Seq | None = None, *, checked: bool = False, storage: Storage = DISK
) -> Restored:
    """Restore the newest snapshot that verifies and contains no record after `until`."""
    skipped = []
    for path in reversed(snapshot_paths(directory, storage)):
        if until is not None and int(path.stem) > until:
            continue
        try:
            skips = _skips_after(path, storage)
            snapshot, controller = read_valid(path, storage, checked=checked)
        except FileNotFoundError:
            # A snapshotter has removed it after writing a later one.
            continue
        except SnapshotInvalidError as error:
            skipped.append(str(error))
        else:
            return Restored(snapshot, controller, tuple(skipped), skips)
    return Restored(None, None, tuple(skipped))


def newest_after(directory: Path, seq: Seq, storage: Storage = DISK) -> Path | None:
    """Return the newest snapshot with records after `seq` whose bytes verify, None without one."""
    for path in reversed(snapshot_paths(directory, storage)):
        if int(path.stem) > seq:
            with suppress(SnapshotInvalidError):
                read_snapshot(path, storage)
                return path
    return None


def _skips_after(path: Path, storage: Storage) -> frozenset[Seq]:
    """Return the inputs that records after a snapshot skip.

    Raises `SnapshotInvalidError` if the snapshot contains one of them.
    """
    seq = int(path.stem)
    skips = skipped_inputs(path.parent, storage, seq + 1)
    if contained := [s for s in skips if s <= seq]:
        raise SnapshotInvalidError(f"{path}: it contains record {contained[0]}, which is skipped")
    return skips


def drop_snapshots(directory: Path, first_seq: Seq, storage: Storage = DISK) -> list[Path]:
    """Remove the snapshots that contain record `first_seq`, and return their paths."""
    dropped = [path for path in snapshot_paths(directory, storage) if int(path.stem) >= first_seq]
    for path in dropped:
        storage.remove(path)
    if dropped:
        storage.sync_directory(directory)
    return dropped
