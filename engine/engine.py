"""The engine: one method per command, and the facts that its reports tell.

What it is: the only writer of adapters, slots and generations in this process. What it is not: a
process or a socket (`worker`), or a decider (the controller). One rule: every operation ends in
exactly one report, and one that failed has changed nothing.

All methods are called by one thread. Files are read and packed by others, whose results wait for
`poll`; so nothing moves while a forward pass runs.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import structlog
import torch

from engine.adapters import LoadedAdapter, read_adapter
from engine.arena import Arena
from engine.config import EngineConfig, LoRAConfig
from engine.errors import Conflict, EngineError, UnknownAdapter
from engine.generate import Generator
from engine.kernels import choose_kernels
from engine.lora import LoRAModel
from engine.model import PreparedModel
from engine.punica import BASE, PunicaWrapper
from engine.registry import HeldAdapter, SeenOperations
from engine.staging import Blob, stage
from engine.work import WorkPool
from messages import commands, reports
from messages.errors import ErrorCode
from messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED, AdapterId, AdapterState, OpId, Slot

_log = structlog.get_logger()

EngineCommand = commands.Operation | commands.StopGeneration | commands.ResendTokens
"""What an engine does; the link's own commands (beats, inventory requests) are the worker's."""


class _Job(NamedTuple):
    """An operation on the file threads, and what its result changes; `done` makes the report."""

    op: OpId
    done: Callable[[Any], reports.OperationReport]


class Engine:
    """Holds a model and its adapters; `submit` commands, `step` while not idle, `poll` reports.

    `wake` is called from a file thread whenever `poll` has something new to collect.
    """

    def __init__(
        self,
        model: PreparedModel,
        config: EngineConfig,
        lora_config: LoRAConfig,
        engine_id: str,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine_id: Final = engine_id
        self._model = model
        self._config = config
        lora_config.verify_with_device(model.device)
        self._lora_config = lora_config.verify_with_model_config(model.model.config)
        self._shapes = {shape.name: shape for shape in model.shapes}
        slots_max, dtype = lora_config.max_loras, self._lora_config.dtype
        device_bytes_max = config.device_bytes_max
        self._arena = Arena(slots_max, model.shapes, device_bytes_max, dtype, model.device)
        kernels = choose_kernels(model.device.type)
        punica = PunicaWrapper(model.device, lora_config.max_lora_rank, kernels)
        model.bind(self._arena, punica)
        self._residents: list[AdapterId | None] = [None] * slots_max
        self._outbox: list[reports.Report] = []
        self._generator = Generator(
            model, punica, self._arena, self._residents, config, self._outbox.append
        )
        self._pool: WorkPool[_Job] = WorkPool(config.file_threads, wake)
        self._held: dict[AdapterId, HeldAdapter] = {}
        self._busy: dict[OpId, AdapterId] = {}
        self._copies: dict[Slot, commands.WriteSlot] = {}
        self._seen = SeenOperations()
        self._handlers: dict[type, Callable[[Any], None]] = {
            commands.CheckAdapter: self.check_adapter,
            commands.LoadWeights: self.load_weights,
            commands.StageWeights: self.stage_weights,
            commands.UnstageWeights: self.unstage_weights,
            commands.WriteSlot: self.write_slot,
            commands.ResetSlot: self.reset_slot,
            commands.DropWeights: self.drop_weights,
            commands.SetMapping: self.set_mapping,
            commands.StartGeneration: self.start_generation,
            commands.StopGeneration: self.stop_generation,
        }

    @property
    def is_idle(self) -> bool:
        """Whether `step` would do nothing."""
        return self._generator.is_idle

    @property
    def is_copying(self) -> bool:
        """Whether a copy to the device is on its way; only `poll` sees it arrive."""
        return bool(self._copies)

    @property
    def last_op(self) -> OpId:
        """The highest operation that was submitted."""
        return self._seen.last

    def submit(self, command: EngineCommand) -> None:
        """Do a command or begin it; one that was seen before is not done again."""
        if isinstance(command, commands.ResendTokens):
            self.resend_tokens(command)
        elif self._seen.add(command.op):
            try:
                self._handlers[type(command)](command)
            except (EngineError, torch.OutOfMemoryError) as error:
                self._fail(command.op, error)

    def step(self) -> None:
        """Bring every running generation one token on, if there are any."""
        if not self._generator.is_idle:
            self._generator.step()

    def poll(self) -> list[reports.Report]:
        """Everything that happened since the last call, in order."""
        for job, future in self._pool.take():
            del self._busy[job.op]
            error = future.exception()
            if error is None:
                self._outbox.append(job.done(future.result()))
            else:
                self._fail(job.op, error)
        for slot in [slot for slot in self._copies if self._arena.is_copied(slot)]:
            self._finish_copy(slot)
        told = self._outbox.copy()
        self._outbox.clear()
        return told

    def close(self) -> None:
        """Start nothing more, and wait for copies that run."""
        self._pool.close()
        self._arena.close()

    def check_adapter(self, command: commands.CheckAdapter) -> None:
        """Read and check an adapter's files on a file thread; keep nothing."""

        def checked(loaded: LoadedAdapter) -> reports.AdapterChecked:
            return reports.AdapterChecked(
                command.op, loaded.fingerprint, loaded.rank, loaded.host_bytes, loaded.blob_bytes
            )

        self._start(command.op, BASE, partial(self._read, command), checked)

    def load_weights(self, command: commands.LoadWeights) -> None:
        """Read and check an adapter on a file thread and keep it; L010 if its bytes changed."""
        if command.adapter_id in self._held or command.adapter_id == BASE:
            raise Conflict(f"adapter {command.adapter_id} is loaded already; drop it first")
        self._require_free(command.adapter_id)

        def read() -> LoadedAdapter:
            loaded = self._read(command)
            if loaded.fingerprint != command.fingerprint:
                raise Conflict(
                    f"{command.adapter}: its files have fingerprint {loaded.fingerprint}, checked "
                    f"were {command.fingerprint}; they have changed, load them with replace"
                )
            return loaded

        def loaded(adapter: LoadedAdapter) -> reports.WeightsLoaded:
            self._held[command.adapter_id] = HeldAdapter(command, adapter, adapter.model)
            return reports.WeightsLoaded(command.op)

        self._start(command.op, command.adapter_id, read, loaded)

    def stage_weights(self, command: commands.StageWeights) -> None:
        """Pack an adapter into one blob on a file thread; its pageable form goes."""
        held = self._require(command.adapter_id, CPU_CACHED)

        def staged(blob: Blob) -> reports.WeightsStaged:
            held.weights, held.is_staged = blob, True
            return reports.WeightsStaged(command.op)

        self._start(command.op, command.adapter_id, partial(self._pack, held.weights), staged)

    def unstage_weights(self, command: commands.UnstageWeights) -> None:
        """Move a blob back to pageable memory on a file thread."""
        held, blob = self._require_staged(command.adapter_id)

        def unstaged(blob: Blob) -> reports.WeightsUnstaged:
            held.weights, held.is_staged = blob, False
            return reports.WeightsUnstaged(command.op)

        self._start(command.op, command.adapter_id, blob.to_pageable, unstaged)

    def write_slot(self, command: commands.WriteSlot) -> None:
        """Begin the copy of a blob into a slot; the row is entered when the copy is complete."""
        _, blob = self._require_staged(command.adapter_id)
        self._arena.begin_write(command.slot, command.generation, blob)
        self._busy[command.op] = command.adapter_id
        self._copies[command.slot] = command
        if self._arena.is_copied(command.slot):
            self._finish_copy(command.slot)

    def reset_slot(self, command: commands.ResetSlot) -> None:
        """Clear a slot; rows that generate with it fail at the next step."""
        self._arena.reset(command.slot, command.generation)
        held = self._held[self._residents[command.slot] or BASE]
        held.slot, held.generation = NO_SLOT, 0
        self._residents[command.slot] = None
        self._outbox.append(reports.SlotReset(command.op))

    def drop_weights(self, command: commands.DropWeights) -> None:
        """Forget an adapter; L010 while it is in a slot or something is done to it."""
        self._require(command.adapter_id, CPU_CACHED, PINNED)
        del self._held[command.adapter_id]
        self._outbox.append(reports.WeightsDropped(command.op))

    def set_mapping(self, command: commands.SetMapping) -> None:
        """Confirm a batch's active set: every slot has the generation that is named, now."""
        for reference in command.active:
            self._arena.check_generation(reference.slot, reference.generation)
        self._outbox.append(reports.MappingSet(command.op))

    def start_generation(self, command: commands.StartGeneration) -> None:
        """Queue a generation; it ends with a report of its own."""
        self._generator.start(command)

    def stop_generation(self, command: commands.StopGeneration) -> None:
        """End a generation as cancelled; nothing where it has ended already."""
        self._generator.stop(command.target)

    def resend_tokens(self, command: commands.ResendTokens) -> None:
        """Send an output again from its first token, if it is still known."""
        self._generator.resend(command.request_id)

    def inventory(self) -> reports.EngineInventory:
        """Who this engine is and what it holds, as of the last `poll`."""
        return reports.EngineInventory(
            engine_id=self.engine_id,
            pid=os.getpid(),
            model=self._config.model_directory.resolve().name,
            slots_max=len(self._residents),
            device_bytes_max=self._config.device_bytes_max,
            last_op=self.last_op,
            running=tuple(sorted((*self._busy, *self._generator.operations))),
            adapters=tuple(held.inventory() for held in self._held.values()),
        )

    def _start(
        self,
        op: OpId,
        adapter_id: AdapterId,
        job: Callable[[], Any],
        done: Callable[[Any], reports.OperationReport],
    ) -> None:
        self._busy[op] = adapter_id
        self._pool.start(_Job(op, done), job)

    def _read(self, command: commands.CheckAdapter | commands.LoadWeights) -> LoadedAdapter:
        return read_adapter(
            command.path or command.adapter,
            self._config.adapter_roots,
            self._shapes,
            self._lora_config,
            self._config.adapter_bounds,
            command.adapter,
        )

    def _pack(self, weights: LoRAModel | Blob) -> Blob:
        """The blob of an adapter that is not staged; runs on a file thread and changes nothing."""
        pins = self._config.pins
        if isinstance(weights, Blob):
            return weights.to_pinned() if pins else weights
        return stage(weights, self._model.shapes, self._lora_config.dtype, pins)

    def _finish_copy(self, slot: Slot) -> None:
        command = self._copies.pop(slot)
        del self._busy[command.op]
        try:
            self._arena.finish_write(slot)
        except (EngineError, torch.OutOfMemoryError) as error:
            self._fail(command.op, error)
            return
        held = self._held[command.adapter_id]
        held.slot, held.generation = slot, command.generation
        self._residents[slot] = command.adapter_id
        self._outbox.append(reports.SlotWritten(command.op))

    def _require(self, adapter_id: AdapterId, *states: AdapterState) -> HeldAdapter:
        """The adapter, if it is in one of `states` and nothing is being done to it."""
        self._require_free(adapter_id)
        held = self._held.get(adapter_id)
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

    def _fail(self, op: OpId, error: BaseException) -> None:
        self._outbox.append(reports.OperationFailed(op, _code_of(error), str(error)))


def _code_of(error: BaseException) -> ErrorCode:
    """What a client is told; what nobody foresaw counts as the engine not being able to answer."""
    match error:
        case EngineError():
            return error.code
        case torch.OutOfMemoryError():
            return ErrorCode.DEVICE_OUT_OF_MEMORY
        case MemoryError():
            return ErrorCode.NO_ROOM
    _log.error("operation failed unexpectedly", error=repr(error), exc_info=error)
    return ErrorCode.ENGINE_GONE
