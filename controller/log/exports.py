"""Export of a log's state as a document that no rules number limits, and its import as a new log.

An export has the adapters by name, without requests, operations and answers. An import makes a log
whose snapshot has them evicted, with their goals, so that the first engine to attach gets them
again. Numbers continue, so neither an engine nor a subscriber of the old log sees one twice.
"""

import shutil
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from loradock.controller.core.controller import Controller
from loradock.controller.core.counters import Counters
from loradock.controller.core.invariants import check
from loradock.controller.core.limits import (
    RULES,
    LimitsError,
    known_limits,
    limits_from,
    limits_to,
)
from loradock.controller.core.world import RESIDENT, Adapter, World
from loradock.controller.log.format import CHAIN_START, ChainLink, LogError, frame_header
from loradock.controller.log.policies import PolicyUnknownError, check_policy
from loradock.controller.log.replay import replay, replay_approximately
from loradock.controller.log.segments import LogPosition, segment_path, walk
from loradock.controller.log.snapshots import take_snapshot, write_snapshot
from loradock.controller.log.storage import DISK, write_file
from loradock.messages.ids import (
    EVICTED,
    UNREGISTERED,
    AdapterId,
    AdapterName,
    AdapterState,
    Bytes,
    Epoch,
    OpId,
    Seq,
)
from loradock.messages.ids import Path as AdapterPath
from loradock.messages.records import FORMAT, Header
from loradock.messages.views import Warnings

Count = Annotated[int, Meta(ge=0, le=2**53)]


class ExportedAdapter(Struct, frozen=True, forbid_unknown_fields=True):
    """The current version of an adapter; sizes in bytes, `last_used_ns` a wall time (UTC)."""

    name: AdapterName
    path: AdapterPath
    goal: AdapterState
    held: bool = False
    fingerprint: str = ""
    rank: Count = 0
    load_bytes: Bytes = 0
    blob_bytes: Bytes = 0
    last_used_ns: int = 0
    uses: Count = 0
    loads: Count = 0
    hits: Count = 0
    evictions: Count = 0
    failures: Count = 0
    warnings: Warnings = ()


class ExportedNumbers(Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers that the imported log continues with."""

    seq: Seq = 0
    epoch: Epoch = 0
    events_seq: Seq = 0
    next_op: OpId = 1
    next_adapter_id: AdapterId = 1
    next_generation: Count = 1


class ExportedState(Struct, frozen=True, forbid_unknown_fields=True):
    """The document; adapters in the order of their last use.

    `is_exact` is False if a log was interpreted by other rules than its own.
    """

    kind: Literal["loradock state"]
    version: Literal[1]
    rules: int
    is_exact: bool
    policy: str
    limits: dict[str, int]
    time_ns: Seq
    wall_offset_ns: int
    numbers: ExportedNumbers
    adapters: tuple[ExportedAdapter, ...]


_SAME: Final = (
    *("name", "path", "goal", "held", "fingerprint", "rank", "load_bytes", "blob_bytes"),
    "last_used_ns",
)
"""The fields of an adapter's record that an export has too."""

_COUNTS: Final = ("uses", "loads", "hits", "evictions", "failures")
"""The fields of an adapter's counters that an export has too."""


class ImportRefusedError(LogError):
    """A document that can't be imported, or a place where it can't be imported to."""


def export_state(directory: Path) -> ExportedState:
    """Return the state of the log in `directory`; raises `LogError` and `LimitsError`."""
    rules = {segment.header.rules for segment in walk(directory)}
    is_own = rules == {RULES}
    result = replay(directory) if is_own else replay_approximately(directory)
    controller = result.controller
    if controller is None:
        raise LogError(f"{directory}: the log is empty")
    if result.divergence is not None:
        raise LogError(
            f"{directory}: before record {result.divergence.seq} the recorded digest differs; "
            "export it with the version that wrote it"
        )
    world = controller.world
    return ExportedState(
        kind="loradock state",
        version=1,
        rules=max(rules),
        is_exact=is_own,
        policy=controller.policy_name,
        limits=limits_to(controller.limits),
        time_ns=world.time_ns,
        wall_offset_ns=world.wall_offset_ns,
        numbers=ExportedNumbers(
            *(getattr(world, name) for name in ExportedNumbers.__struct_fields__)
        ),
        adapters=_adapters(world),
    )


def _adapters(world: World) -> tuple[ExportedAdapter, ...]:
    """Return the versions that names stand for, without those that were never loaded."""
    current = [world.adapters[adapter_id] for adapter_id in world.names.values()]
    return tuple(
        ExportedAdapter(
            **{name: getattr(adapter, name) for name in _SAME},
            **{name: getattr(adapter.counters, name) for name in _COUNTS},
            warnings=world.warnings.get(adapter.id, ()),
        )
        for adapter in sorted(current, key=lambda a: a.lru_stamp)
        if UNREGISTERED not in (adapter.state, adapter.goal)
    )


def decode_export(data: bytes) -> ExportedState:
    """Read a document; raises `ImportRefusedError`."""
    try:
        return msgspec.json.decode(data, type=ExportedState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImportRefusedError(f"it is not an export that this version reads: {error}") from error


def import_state(directory: Path, state: ExportedState) -> Seq:
    """Make the log in `directory`, which must not exist; return its snapshot's record number.

    After an error or a crash there is no log, or all of it. Raises `LogError` and `OSError`.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise ImportRefusedError(f"{directory} has files already; import into another directory")
    controller = _controller(state)
    draft = directory.with_name(f"{directory.name}.import")
    if draft.is_dir():
        shutil.rmtree(draft)
    DISK.make_directory(draft)
    seq = controller.world.seq
    link = ChainLink(seq, controller.world.epoch, CHAIN_START.checksum)
    write_snapshot(draft, take_snapshot(controller, LogPosition(seq, 0, link)))
    header = Header(FORMAT, RULES, state.policy, limits_to(controller.limits), seq + 1)
    write_file(segment_path(draft, seq + 1), frame_header(header, link)[0])
    DISK.rename(draft, directory)
    DISK.sync_directory(directory.parent)
    return seq


def _controller(state: ExportedState) -> Controller:
    """Return a controller that knows the adapters, all of them evicted."""
    try:
        check_policy(state.policy)
    except PolicyUnknownError as error:
        raise ImportRefusedError(str(error)) from error
    try:
        limits = limits_from(known_limits(state.limits))
    except LimitsError as error:
        raise ImportRefusedError(str(error)) from error
    if len(state.adapters) > limits.known_adapters_max:
        raise ImportRefusedError(
            f"{len(state.adapters)} adapters; known_adapters_max is {limits.known_adapters_max}"
        )
    controller = Controller(limits, state.policy)
    world = controller.world
    for name in ExportedNumbers.__struct_fields__:
        setattr(world, name, getattr(state.numbers, name))
    # The snapshot stands for one record at least.
    world.seq = max(world.seq, 1)
    world.time_ns, world.wall_offset_ns = state.time_ns, state.wall_offset_ns
    for exported in state.adapters:
        _add(world, exported)
    check(world, limits)
    return controller


def _counters(exported: ExportedAdapter) -> Counters:
    return Counters(
        hits=exported.hits,
        misses=max(0, exported.uses - exported.hits),
        loads=exported.loads,
        unloads=exported.loads,
        evictions=exported.evictions,
        failures=exported.failures,
    )


def _add(world: World, exported: ExportedAdapter) -> None:
    if exported.name in world.names:
        raise ImportRefusedError(f"adapter {exported.name!r} is there twice")
    if exported.goal == UNREGISTERED or (exported.held and exported.goal not in RESIDENT):
        raise ImportRefusedError(f"adapter {exported.name!r} can't have goal {exported.goal}")
    adapter = Adapter(
        world.next_adapter_id,
        state=EVICTED,
        announced=exported.loads > 0,
        state_since_ns=world.time_ns,
        counters=_counters(exported),
        **{name: getattr(exported, name) for name in _SAME},
    )
    world.totals.add(adapter.counters)
    # The documents do not have which adapter caused an eviction.
    for counters in (world.past_counters, world.totals):
        counters.evictions_caused += exported.evictions
    world.next_adapter_id += 1
    world.lru_counter += 1
    adapter.lru_stamp = world.lru_counter
    world.adapters[adapter.id] = adapter
    world.names[adapter.name] = adapter.id
    if exported.warnings:
        world.warnings[adapter.id] = exported.warnings
    if adapter.held:
        world.held[adapter.id] = None
    if adapter.goal != EVICTED:
        world.promoting[adapter.id] = None
