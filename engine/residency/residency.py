"""The residency commands, which move adapters between files, host memory and slots.

Every operation ends in exactly one report, and a failed operation has changed nothing. The
exception is an error that no report can express, such as a failing device: it is raised, and ends
the engine.

All methods are called by one thread at a time, between two forward passes. During one, only what
`can_begin_beside_step` allows is executed, and only `collect_beside_step` is called: both leave the
arena's rows, and the adapters in slots, as they are.

Reading and packing take long and change nothing here, so they are jobs, whose results are applied
later. An engine process runs them on threads; a program that embeds the model runs them inline
(`loradock.engine.jobs.InlineJobs`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeGuard

import structlog

from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.errors import (
    Conflict,
    DeviceOutOfMemory,
    EngineError,
    UnknownAdapter,
    code_of,
    details_of,
    is_out_of_memory,
    text_of,
)
from loradock.engine.jobs import Jobs
from loradock.engine.layout import ModuleShape
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.host_adapters import CheckedAdapters, HostAdapter
from loradock.engine.residency.pinned import PinnedMemory
from loradock.engine.residency.staging import Blob, stage
from loradock.messages import commands, reports
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import (
    BASE_MODEL,
    CPU_CACHED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    AdapterId,
    AdapterState,
    Generation,
    OpId,
    Slot,
)

_log = structlog.get_logger()

ResidencyCommand = (
    commands.CheckAdapter
    | commands.LoadWeights
    | commands.StageWeights
    | commands.UnstageWeights
    | commands.WriteSlot
    | commands.ResetSlot
    | commands.PreemptSlot
    | commands.DropWeights
)

_HOST_COMMANDS: Final = (
    commands.CheckAdapter,
    commands.LoadWeights,
    commands.StageWeights,
    commands.UnstageWeights,
    commands.DropWeights,
)
"""The commands for adapters that are in no slot."""

Read = Callable[[commands.CheckAdapter | commands.LoadWeights], LoadedAdapter]
"""Returns an adapter, read and checked; called as a job."""


class OperationJob(NamedTuple):
    """The tag of a job: `done` applies the result of the operation and returns its report."""

    op: OpId
    done: Callable[[Any], reports.OperationReport]


class Residency:
    """The adapters on the host and in an arena's slots, and the commands that move them.

    `read` reads the files of an adapter. `report` is called with every report, in order. `pinned`:
    the memory of staged blobs, None for pageable memory. `residents[slot]` is the adapter in a
    slot, None if absent; `residents` and `host_adapters` are read by other modules and changed only
    here.
    """

    def __init__(
        self,
        arena: Arena,
        modules: Sequence[ModuleShape],
        read: Read,
        jobs: Jobs[OperationJob],
        report: Callable[[reports.OperationReport], None],
        pinned: PinnedMemory | None,
    ) -> None:
        self.arena: Final = arena
        self.residents: Final[list[AdapterId | None]] = [None] * arena.max_loras
        self.host_adapters: Final[dict[AdapterId, HostAdapter]] = {}
        self.checked: Final = CheckedAdapters()
        self._modules = modules
        self._read = read
        self._jobs = jobs
        self._report = report
        self._pinned = pinned
        self._in_flight: dict[OpId, AdapterId] = {}
        self._copies: dict[Slot, commands.WriteSlot] = {}
        # The generation of each slot that was reported as reset and still has its adapter.
        self._vacated: dict[Slot, Generation] = {}
        # Complete copies that were reported during a step and whose slots are not published yet.
        self._unpublished: list[commands.WriteSlot] = []
        self._handlers: Final[dict[type, Callable[[Any], None]]] = {
            commands.CheckAdapter: self.check_adapter,
            commands.LoadWeights: self.load_weights,
            commands.StageWeights: self.stage_weights,
            commands.UnstageWeights: self.unstage_weights,
            commands.WriteSlot: self.write_slot,
            commands.ResetSlot: self.reset_slot,
            commands.PreemptSlot: self.vacate_slot,
            commands.DropWeights: self.drop_weights,
        }

    @property
    def is_copying(self) -> bool:
        """True if a copy to the device has no report yet; only collecting reports it."""
        return bool(self._copies)

    @property
    def running(self) -> Iterator[OpId]:
        """The operations that have no report yet."""
        return iter(self._in_flight)

    def fingerprint_of(self, adapter_id: AdapterId) -> str | None:
        """Return the fingerprint of an adapter, None if it is not on the host."""
        adapter = self.host_adapters.get(adapter_id)
        return None if adapter is None else adapter.source.fingerprint

    def host_use(self) -> tuple[int, int]:
        """Return the bytes of adapters in pageable memory, checked or loaded, and in staged."""
        pageable, staged = self.checked.size_bytes, 0
        for adapter in self.host_adapters.values():
            if adapter.is_staged:
                staged += adapter.blob_bytes
            else:
                pageable += adapter.weights.size_bytes
        return pageable, staged

    def can_begin_beside_step(self, command: commands.Command) -> TypeGuard[ResidencyCommand]:
        """Return whether a command can be executed during a forward pass, which won't notice it.

        A write is, if no other adapter has to be moved or cleared for it: its copy is, and not its
        row.
        """
        if isinstance(command, commands.WriteSlot):
            adapter = self.host_adapters.get(command.adapter_id)
            if adapter is None or command.adapter_id in map(
                self.residents.__getitem__, self._vacated
            ):
                return False
            return self.arena.has_hole(adapter.blob_bytes)
        return isinstance(command, _HOST_COMMANDS)

    def execute(self, command: ResidencyCommand) -> None:
        """Execute a command, or start it."""
        try:
            self._handlers[type(command)](command)
        except Exception as error:
            self._fail_or_raise(command.op, error)

    def collect(self, *, wait: bool = False) -> None:
        """Apply the results of jobs and copies that have ended; `wait`: wait for the copies."""
        self.publish()
        self._collect_jobs()
        for slot in [slot for slot in self._copies if wait or self.arena.is_copied(slot)]:
            self._finish_copy(slot)

    def collect_beside_step(self) -> None:
        """Apply the results of jobs that have ended, and report the slots that were copied.

        `publish` has to be called after the step, before a command names such a slot.
        """
        self._collect_jobs()
        for slot in [slot for slot in self._copies if self.arena.is_copied_well(slot)]:
            command = self._copies.pop(slot)
            self._unpublished.append(command)
            self._report(reports.SlotWritten(command.op))

    def publish(self) -> None:
        """Publish the slots that were reported during a step; an error ends the engine."""
        while self._unpublished:
            self._publish(self._unpublished.pop(0))

    def _collect_jobs(self) -> None:
        for job, future in self._jobs.take_finished():
            del self._in_flight[job.op]
            error = future.exception()
            if error is None:
                self._report(job.done(future.result()))
            else:
                self.fail(job.op, error)

    def close(self) -> None:
        """Start no further jobs, and wait for running copies."""
        self._jobs.close()
        self.arena.close()

    def fail(self, op: OpId, error: BaseException) -> None:
        """Report that an operation failed, with the error's code and text."""
        code = code_of(error)
        if code == ErrorCode.ENGINE_GONE:
            _log.error("operation failed unexpectedly", error=repr(error), exc_info=error)
        text = text_of(error) or type(error).__name__
        self._report(reports.OperationFailed(op, code, text, details_of(error)))

    def _fail_or_raise(self, op: OpId, error: Exception) -> None:
        """Report an error that ends one operation; others, as of a failing device, are raised."""
        if not isinstance(error, EngineError) and not is_out_of_memory(error):
            raise error
        self.fail(op, error)

    def check_adapter(self, command: commands.CheckAdapter) -> None:
        """Start to read and check an adapter; what was read waits for its load."""

        def checked(loaded: LoadedAdapter) -> reports.AdapterChecked:
            self.checked.add(command, loaded)
            return reports.AdapterChecked(
                command.op,
                loaded.fingerprint,
                loaded.rank,
                loaded.host_bytes,
                loaded.blob_bytes,
                loaded.warnings,
            )

        self._start(command.op, BASE_MODEL, partial(self._read_fitting, command), checked)

    def _read_fitting(self, command: commands.CheckAdapter) -> LoadedAdapter:
        """Read an adapter; raises `DeviceOutOfMemory` for one that is larger than the empty arena.

        A job, so only the arena's constant size is used.
        """
        loaded = self._read(command)
        if loaded.blob_bytes > self.arena.capacity_bytes:
            raise DeviceOutOfMemory(
                f"adapter {command.adapter!r} needs {loaded.blob_bytes} bytes of device memory, "
                f"the arena has {self.arena.capacity_bytes}; raise device_bytes_max or serve a "
                "smaller adapter"
            )
        return loaded

    def load_weights(self, command: commands.LoadWeights) -> None:
        """Load what the adapter's check has read, or start to read and check it again.

        Raises `Conflict` (L010) if the fingerprint is not the one that is named.
        """
        if command.adapter_id in self.host_adapters or command.adapter_id == BASE_MODEL:
            raise Conflict(f"adapter {command.adapter_id} is loaded already; drop it first")
        self._require_no_operation(command.adapter_id)
        checked = self.checked.take(command.adapter_id)
        if checked is not None:
            self._report(self._load(command, _with_fingerprint(checked, command)))
            return

        def read() -> LoadedAdapter:
            return _with_fingerprint(self._read(command), command)

        self._start(command.op, command.adapter_id, read, partial(self._load, command))

    def _load(self, command: commands.LoadWeights, loaded: LoadedAdapter) -> reports.WeightsLoaded:
        self.host_adapters[command.adapter_id] = HostAdapter.of(command, loaded)
        return reports.WeightsLoaded(command.op)

    def stage_weights(self, command: commands.StageWeights) -> None:
        """Start to pack an adapter into one blob, which replaces its pageable form."""
        adapter = self._require(command.adapter_id, CPU_CACHED)

        def staged(blob: Blob) -> reports.WeightsStaged:
            adapter.weights, adapter.is_staged = blob, True
            return reports.WeightsStaged(command.op)

        self._start(command.op, command.adapter_id, partial(self._pack, adapter.weights), staged)

    def unstage_weights(self, command: commands.UnstageWeights) -> None:
        """Start to move a blob back to pageable memory."""
        adapter, blob = self._require_staged(command.adapter_id)

        def unstaged(blob: Blob) -> reports.WeightsUnstaged:
            adapter.weights, adapter.is_staged = blob, False
            return reports.WeightsUnstaged(command.op)

        self._start(command.op, command.adapter_id, blob.to_pageable, unstaged)

    def write_slot(self, command: commands.WriteSlot) -> None:
        """Start to copy a blob into a slot; once it is copied, `collect` publishes the slot."""
        _, blob = self._require_staged(command.adapter_id)
        self._make_way(command.adapter_id, blob)
        replaced = self._vacated.get(command.slot, 0)
        self.arena.begin_write(command.slot, command.generation, blob, replaced)
        self._in_flight[command.op] = command.adapter_id
        self._copies[command.slot] = command

    def reset_slot(self, command: commands.ResetSlot) -> None:
        """Clear a slot; sequences that use it fail at the next step."""
        self.vacate_slot(command)
        self._clear(command.slot)

    def vacate_slot(self, command: commands.ResetSlot | commands.PreemptSlot) -> None:
        """Report a slot as reset; it keeps its adapter until the copy of another one is complete.

        So the sequences that leave the slot are computed during that copy.
        """
        if command.slot in self._vacated:
            self._clear(command.slot)
        self.arena.check_generation(command.slot, command.generation)
        adapter = self.host_adapters[self.residents[command.slot] or BASE_MODEL]
        adapter.slot, adapter.generation = NO_SLOT, 0
        self._vacated[command.slot] = command.generation
        self._report(reports.SlotReset(command.op))

    def _make_way(self, adapter_id: AdapterId, blob: Blob) -> None:
        """Clear the vacated slots with this adapter, and all if there is no hole for its blob."""
        has_hole = self.arena.has_hole(blob.size_bytes)
        for slot in tuple(self._vacated):
            if not has_hole or self.residents[slot] == adapter_id:
                self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        """Clear a vacated slot."""
        self.arena.reset(slot, self._vacated.pop(slot))
        self.residents[slot] = None

    def drop_weights(self, command: commands.DropWeights) -> None:
        """Forget an adapter; L010 while it is in a slot or one of its operations is unfinished."""
        self._require(command.adapter_id, CPU_CACHED, PINNED)
        del self.host_adapters[command.adapter_id]
        self._report(reports.WeightsDropped(command.op))

    def inventory(self) -> tuple[reports.InventoryAdapter, ...]:
        """Return every adapter on the host, with its state and slot."""
        return tuple(adapter.inventory() for adapter in self.host_adapters.values())

    def _start(
        self,
        op: OpId,
        adapter_id: AdapterId,
        job: Callable[[], Any],
        done: Callable[[Any], reports.OperationReport],
    ) -> None:
        self._in_flight[op] = adapter_id
        self._jobs.start(OperationJob(op, done), job)

    def _pack(self, weights: LoRAModel | Blob) -> Blob:
        """Return the blob of an adapter that is not staged; a job, so it changes nothing here."""
        if isinstance(weights, Blob):
            return weights if self._pinned is None else weights.to_pinned(self._pinned)
        return stage(weights, self._modules, self.arena.dtype, self._pinned)

    def _finish_copy(self, slot: Slot) -> None:
        command = self._copies.pop(slot)
        try:
            self._publish(command)
        except Exception as error:
            self._fail_or_raise(command.op, error)
            return
        self._report(reports.SlotWritten(command.op))

    def _publish(self, command: commands.WriteSlot) -> None:
        """Let a slot have its adapter; raises what the copy raised, and then it has none."""
        del self._in_flight[command.op]
        if command.slot in self._vacated:
            self._clear(command.slot)
        self.arena.finish_write(command.slot)
        adapter = self.host_adapters[command.adapter_id]
        adapter.slot, adapter.generation = command.slot, command.generation
        self.residents[command.slot] = command.adapter_id

    def _require(self, adapter_id: AdapterId, *states: AdapterState) -> HostAdapter:
        """Return an adapter that is in one of `states` and has no unfinished operation."""
        self._require_no_operation(adapter_id)
        adapter = self.host_adapters.get(adapter_id)
        if adapter is None:
            raise UnknownAdapter(f"adapter {adapter_id} is not loaded; load it first")
        if adapter.state not in states:
            slot = f" {adapter.slot}" if adapter.state == GPU_SLOT else ""
            raise Conflict(
                f"{adapter.source.adapter} is {adapter.state}{slot}; this needs it to be "
                f"{' or '.join(states)}"
            )
        return adapter

    def _require_staged(self, adapter_id: AdapterId) -> tuple[HostAdapter, Blob]:
        adapter = self._require(adapter_id, PINNED)
        if not isinstance(adapter.weights, Blob):
            raise RuntimeError(f"adapter {adapter_id} is {adapter.state} without a blob")
        return adapter, adapter.weights

    def _require_no_operation(self, adapter_id: AdapterId) -> None:
        for op, in_flight_id in self._in_flight.items():
            if in_flight_id == adapter_id:
                raise Conflict(f"operation {op} on adapter {adapter_id} has not ended; wait for it")


def _with_fingerprint(loaded: LoadedAdapter, command: commands.LoadWeights) -> LoadedAdapter:
    """Return the adapter if it has the fingerprint that a load names; else raise `Conflict`.

    A follower has no fingerprint: rank 0 computes it, from the same files.
    """
    if loaded.fingerprint not in ("", command.fingerprint):
        raise Conflict(
            f"the files of {command.adapter} have fingerprint {loaded.fingerprint}, those that "
            f"were checked had {command.fingerprint}; load them with replace"
        )
    return loaded
