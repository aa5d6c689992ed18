"""Where adapters are: the residency commands, done.

What it is: the only writer of adapters, slots and generations in a process, with one method per
residency command. What it is not: a decider (the controller), a reader of files (it is given one)
or a server of requests (`generate`). One rule: every operation ends in exactly one report, and one
that failed has changed nothing.

All methods are called by one thread, between two forward passes. What takes long and touches
nothing of ours (reading, packing) is a job for `jobs`; its result is entered by `collect`. An
engine gives jobs to other threads; whoever has no other thread does them at once
(`work.InlineJobs`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import structlog
import torch

from engine.adapters.lora_model import LoRAModel
from engine.adapters.reader import LoadedAdapter
from engine.errors import Conflict, EngineError, UnknownAdapter, code_of
from engine.jobs import Jobs
from engine.layout import ModuleShape
from engine.residency.arena import Arena
from engine.residency.host_adapter import HeldAdapter
from engine.residency.staging import Blob, stage
from messages import commands, reports
from messages.errors import ErrorCode
from messages.ids import (
    BASE_MODEL,
    CPU_CACHED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    AdapterId,
    AdapterState,
    OpId,
    Slot,
)

_log = structlog.get_logger()

Read = Callable[[commands.CheckAdapter | commands.LoadWeights], LoadedAdapter]
"""Brings an adapter's weights, read and checked; called as a job."""


class Job(NamedTuple):
    """An operation under way elsewhere, and what its result changes; `done` makes the report."""

    op: OpId
    done: Callable[[Any], reports.OperationReport]


class Residency:
    """Holds adapters on the host and in an arena's slots.

    `residents[slot]`: who is there, None where nobody is; read by others, written here. `pins`:
    whether blobs are page-locked. `tell` is called with every report, in order. `held` and
    `running` are for reading only.
    """

    def __init__(
        self,
        arena: Arena,
        modules: Sequence[ModuleShape],
        read: Read,
        jobs: Jobs[Job],
        tell: Callable[[reports.OperationReport], None],
        pins: bool,
    ) -> None:
        self.arena: Final = arena
        self.residents: Final[list[AdapterId | None]] = [None] * arena.slots_max
        self.held: Final[dict[AdapterId, HeldAdapter]] = {}
        self._modules = modules
        self._read = read
        self._jobs = jobs
        self._tell = tell
        self._pins = pins
        self._busy: dict[OpId, AdapterId] = {}
        self._copies: dict[Slot, commands.WriteSlot] = {}
        self.handlers: Final[dict[type, Callable[[Any], None]]] = {
            commands.CheckAdapter: self.check_adapter,
            commands.LoadWeights: self.load_weights,
            commands.StageWeights: self.stage_weights,
            commands.UnstageWeights: self.unstage_weights,
            commands.WriteSlot: self.write_slot,
            commands.ResetSlot: self.reset_slot,
            commands.DropWeights: self.drop_weights,
            commands.SetMapping: self.set_mapping,
        }

    @property
    def is_copying(self) -> bool:
        """Whether a copy to the device is on its way; only `collect` sees it arrive."""
        return bool(self._copies)

    @property
    def running(self) -> Iterator[OpId]:
        """The operations without a report."""
        return iter(self._busy)

    def do(self, command: commands.Operation) -> None:
        """Do a residency command or begin it."""
        try:
            self.handlers[type(command)](command)
        except (EngineError, torch.OutOfMemoryError) as error:
            self.fail(command.op, error)

    def collect(self, *, wait: bool = False) -> None:
        """Enter the results of jobs and copies that have ended; `wait` waits for the copies."""
        for job, future in self._jobs.take():
            del self._busy[job.op]
            error = future.exception()
            if error is None:
                self._tell(job.done(future.result()))
            else:
                self.fail(job.op, error)
        for slot in [slot for slot in self._copies if wait or self.arena.is_copied(slot)]:
            self._finish_copy(slot)

    def close(self) -> None:
        """Start nothing more, and wait for copies that run."""
        self._jobs.close()
        self.arena.close()

    def fail(self, op: OpId, error: BaseException) -> None:
        """Report that an operation failed, and why."""
        code = code_of(error)
        if code == ErrorCode.ENGINE_GONE:
            _log.error("operation failed unexpectedly", error=repr(error), exc_info=error)
        self._tell(reports.OperationFailed(op, code, str(error)))

    def check_adapter(self, command: commands.CheckAdapter) -> None:
        """Have an adapter read and checked; keep nothing."""

        def checked(loaded: LoadedAdapter) -> reports.AdapterChecked:
            return reports.AdapterChecked(
                command.op, loaded.fingerprint, loaded.rank, loaded.host_bytes, loaded.blob_bytes
            )

        self._start(command.op, BASE_MODEL, partial(self._read, command), checked)

    def load_weights(self, command: commands.LoadWeights) -> None:
        """Have an adapter read and checked, and keep it; L010 if its bytes changed."""
        if command.adapter_id in self.held or command.adapter_id == BASE_MODEL:
            raise Conflict(f"adapter {command.adapter_id} is loaded already; drop it first")
        self._require_free(command.adapter_id)

        def read() -> LoadedAdapter:
            loaded = self._read(command)
            # A follower has none: it read the very files of which rank 0 has made it.
            if loaded.fingerprint not in ("", command.fingerprint):
                raise Conflict(
                    f"{command.adapter}: its files have fingerprint {loaded.fingerprint}, checked "
                    f"were {command.fingerprint}; they have changed, load them with replace"
                )
            return loaded

        def loaded(adapter: LoadedAdapter) -> reports.WeightsLoaded:
            self.held[command.adapter_id] = HeldAdapter.of(command, adapter)
            return reports.WeightsLoaded(command.op)

        self._start(command.op, command.adapter_id, read, loaded)

    def stage_weights(self, command: commands.StageWeights) -> None:
        """Have an adapter packed into one blob; its pageable form goes."""
        held = self._require(command.adapter_id, CPU_CACHED)

        def staged(blob: Blob) -> reports.WeightsStaged:
            held.weights, held.is_staged = blob, True
            return reports.WeightsStaged(command.op)

        self._start(command.op, command.adapter_id, partial(self._pack, held.weights), staged)

    def unstage_weights(self, command: commands.UnstageWeights) -> None:
        """Have a blob moved back to pageable memory."""
        held, blob = self._require_staged(command.adapter_id)

        def unstaged(blob: Blob) -> reports.WeightsUnstaged:
            held.weights, held.is_staged = blob, False
            return reports.WeightsUnstaged(command.op)

        self._start(command.op, command.adapter_id, blob.to_pageable, unstaged)

    def write_slot(self, command: commands.WriteSlot) -> None:
        """Begin the copy of a blob into a slot; the row is entered when the copy is complete."""
        _, blob = self._require_staged(command.adapter_id)
        self.arena.begin_write(command.slot, command.generation, blob)
        self._busy[command.op] = command.adapter_id
        self._copies[command.slot] = command
        if self.arena.is_copied(command.slot):
            self._finish_copy(command.slot)

    def reset_slot(self, command: commands.ResetSlot) -> None:
        """Clear a slot; rows that generate with it fail at the next step."""
        self.arena.reset(command.slot, command.generation)
        held = self.held[self.residents[command.slot] or BASE_MODEL]
        held.slot, held.generation = NO_SLOT, 0
        self.residents[command.slot] = None
        self._tell(reports.SlotReset(command.op))

    def drop_weights(self, command: commands.DropWeights) -> None:
        """Forget an adapter; L010 while it is in a slot or something is done to it."""
        self._require(command.adapter_id, CPU_CACHED, PINNED)
        del self.held[command.adapter_id]
        self._tell(reports.WeightsDropped(command.op))

    def set_mapping(self, command: commands.SetMapping) -> None:
        """Confirm a batch's active set: every slot has the generation that is named, now."""
        for reference in command.active:
            self.arena.check_generation(reference.slot, reference.generation)
        self._tell(reports.MappingSet(command.op))

    def inventory(self) -> tuple[reports.InventoryAdapter, ...]:
        """Every adapter that is held, and where."""
        return tuple(held.inventory() for held in self.held.values())

    def _start(
        self,
        op: OpId,
        adapter_id: AdapterId,
        job: Callable[[], Any],
        done: Callable[[Any], reports.OperationReport],
    ) -> None:
        self._busy[op] = adapter_id
        self._jobs.start(Job(op, done), job)

    def _pack(self, weights: LoRAModel | Blob) -> Blob:
        """The blob of an adapter that is not staged; a job, so it changes nothing."""
        if isinstance(weights, Blob):
            return weights.to_pinned() if self._pins else weights
        return stage(weights, self._modules, self.arena.dtype, self._pins)

    def _finish_copy(self, slot: Slot) -> None:
        command = self._copies.pop(slot)
        del self._busy[command.op]
        try:
            self.arena.finish_write(slot)
        except (EngineError, torch.OutOfMemoryError) as error:
            self.fail(command.op, error)
            return
        held = self.held[command.adapter_id]
        held.slot, held.generation = slot, command.generation
        self.residents[slot] = command.adapter_id
        self._tell(reports.SlotWritten(command.op))

    def _require(self, adapter_id: AdapterId, *states: AdapterState) -> HeldAdapter:
        """The adapter, if it is in one of `states` and nothing is being done to it."""
        self._require_free(adapter_id)
        held = self.held.get(adapter_id)
        if held is None:
            raise UnknownAdapter(f"adapter {adapter_id} is not loaded; load it first")
        if held.state not in states:
            where = f"{held.state} {held.slot}" if held.state == GPU_SLOT else held.state
            raise Conflict(
                f"{held.source.adapter} is {where}; this needs it to be {' or '.join(states)}"
            )
        return held

    def _require_staged(self, adapter_id: AdapterId) -> tuple[HeldAdapter, Blob]:
        held = self._require(adapter_id, PINNED)
        if not isinstance(held.weights, Blob):
            raise RuntimeError(f"adapter {adapter_id} is {held.state} without a blob")
        return held, held.weights

    def _require_free(self, adapter_id: AdapterId) -> None:
        for op, busy_id in self._busy.items():
            if busy_id == adapter_id:
                raise Conflict(f"operation {op} on adapter {adapter_id} has not ended; wait for it")
