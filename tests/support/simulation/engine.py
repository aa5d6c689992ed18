"""A simulated engine without a model, and an independent oracle of what an engine can do.

It keeps its own records of adapters, slots, generations and bytes, and asserts before every
operation that it is possible within the budgets. It shares no accounting with the controller. The
test decides when an operation ends and how; device operations end in the order of their arrival.
"""

from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from loradock.controller.core.limits import Limits
from loradock.messages import commands, reports
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED, AdapterState
from tests.support.simulation.engine_records import Content, EngineAdapter, RunningOperation

Files = dict[str, Content]

_OF_ADAPTER = (
    commands.LoadWeights,
    commands.StageWeights,
    commands.UnstageWeights,
    commands.WriteSlot,
    commands.DropWeights,
)
_ON_DEVICE = (
    commands.WriteSlot,
    commands.ResetSlot,
)
_WRITES = (commands.WriteSlot,)
_RESETS = (commands.ResetSlot, commands.PreemptSlot)


@dataclass
class SimulatedEngine:
    """One engine process: `receive` takes commands, `complete` ends one, `outbox` has reports."""

    engine_id: str
    limits: Limits
    files: Files
    max_loras: int
    device_bytes_max: int
    adapters: dict[int, EngineAdapter] = field(default_factory=dict)
    running: dict[int, RunningOperation] = field(default_factory=dict)
    outbox: list[Any] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    generations_seen: set[int] = field(default_factory=set)

    def receive(self, command: Any) -> None:
        """Start a command; one whose number was seen is ignored."""
        if isinstance(command, commands.RequestInventory):
            self.outbox.append(self.inventory(command.acknowledged))
            return
        if command.op in self.seen:
            return
        self.seen.add(command.op)
        if isinstance(command, commands.StopGeneration):
            target = self.running.get(command.target)
            if target is not None:
                target.stopped = True
            return
        operation, before = RunningOperation(command), self.usage()
        _BEGIN[type(command)](self, command, operation)
        self.running[command.op] = operation
        self._require_budgets(before)

    def inventory(self, answers: int = 0) -> reports.EngineInventory:
        """Return the engine's identity and adapters, in answer to a numbered request."""
        return reports.EngineInventory(
            self.engine_id,
            1,
            "model",
            self.max_loras,
            self.device_bytes_max,
            max(self.seen, default=0),
            tuple(sorted(self.running)),
            tuple(adapter.inventory() for adapter in self.adapters.values()),
            answers,
            suspended=tuple(op for op, work in sorted(self.running.items()) if work.suspended),
        )

    def completable(self) -> list[int]:
        """Return the operations that may end next; on the device, only the oldest one may.

        A suspended generation may end only if it is stopped, or while no other adapter is in its
        slot yet.
        """
        running = self.running.items()
        device = [op for op, work in running if isinstance(work.command, _ON_DEVICE)]
        taken = {adapter.slot for adapter in self.adapters.values()}
        taken |= {work.command.slot for _, work in running if isinstance(work.command, _WRITES)}
        waiting = [
            op
            for op, work in running
            if work.suspended and not work.stopped and work.command.slot in taken
        ]
        return [op for op in self.running if op not in device[1:] and op not in waiting]

    def complete(self, op: int, code: ErrorCode | None = None) -> None:
        """End an operation; with a code, it fails and changes nothing."""
        assert op in self.completable(), f"{op} can't end before {self.running}"
        operation = self.running.pop(op)
        code = code or self._failure_of(operation)
        if code is not None:
            text = f"operation {op} failed with {code}"
            self.outbox.append(reports.OperationFailed(op, code, text))
        else:
            command = operation.command
            self.outbox.append(_END[type(command)](self, command, operation))

    def _failure_of(self, operation: RunningOperation) -> ErrorCode | None:
        """Return the code that the operation fails with because of the files, if it does."""
        command = operation.command
        if isinstance(command, commands.CheckAdapter) and command.path not in self.files:
            return ErrorCode.NOT_FOUND
        if isinstance(command, commands.LoadWeights):
            content = self.files.get(command.path)
            if content is None:
                return ErrorCode.NOT_FOUND
            if content.fingerprint != command.fingerprint:
                return ErrorCode.CONFLICT
        return None

    def in_slot(self, slot: int, generation: int) -> EngineAdapter:
        """Return the adapter in a slot of this generation; asserts that the slot has it."""
        for adapter in self.adapters.values():
            if (adapter.slot, adapter.generation) == (slot, generation):
                return adapter
        raise AssertionError(f"slot {slot} is not of generation {generation}: {self.adapters}")

    # Starts of operations: each asserts that the operation is possible.

    def _begin_check(self, command: commands.CheckAdapter, operation: RunningOperation) -> None:
        assert command.adapter_id not in self.adapters, f"{command} is of a loaded adapter"

    def _begin_load(self, command: commands.LoadWeights, operation: RunningOperation) -> None:
        assert command.adapter_id not in self.adapters, f"{command} is of a loaded adapter"
        self._require_free(command.adapter_id)
        content = self.files.get(command.path)
        if content is not None and content.fingerprint == command.fingerprint:
            operation.content = content

    def _begin_stage(self, command: commands.StageWeights, operation: RunningOperation) -> None:
        self._require(command.adapter_id, CPU_CACHED)

    def _begin_unstage(self, command: commands.UnstageWeights, operation: RunningOperation) -> None:
        self._require(command.adapter_id, PINNED)

    def _begin_drop(self, command: commands.DropWeights, operation: RunningOperation) -> None:
        self._require(command.adapter_id, CPU_CACHED, PINNED)

    def _begin_write(self, command: commands.WriteSlot, operation: RunningOperation) -> None:
        self._require(command.adapter_id, PINNED)
        assert 0 <= command.slot < self.max_loras, f"{command}: there are {self.max_loras} slots"
        assert command.slot not in self._slots_taken(), f"{command}: the slot is taken"
        assert command.generation not in self.generations_seen, f"{command}: generation again"
        older = [a.generation for a in self.adapters.values() if a.slot == command.slot]
        assert command.generation > max(older, default=0), f"{command}: an old generation"
        self.generations_seen.add(command.generation)

    def _begin_reset(self, command: commands.ResetSlot, operation: RunningOperation) -> None:
        self._require_free(self.in_slot(command.slot, command.generation).adapter_id)
        for other in self.running.values():
            assert not _uses(other, command.slot), f"{command} under {other.command}"

    def _begin_preemption(self, command: commands.PreemptSlot, operation: RunningOperation) -> None:
        self._require_free(self.in_slot(command.slot, command.generation).adapter_id)
        for other in self.running.values():
            if _uses(other, command.slot):
                is_generation = isinstance(other.command, commands.StartGeneration)
                assert is_generation, f"{command} under {other.command}"

    def _begin_inference(
        self, command: commands.StartInference, operation: RunningOperation
    ) -> None:
        if command.adapter_id:
            adapter = self.in_slot(command.slot, command.generation)
            assert adapter.adapter_id == command.adapter_id, f"{command} meets {adapter}"
            self._require_free(adapter.adapter_id)
            operation.content = adapter.content
        else:
            assert (command.slot, command.generation) == (NO_SLOT, 0), f"{command}"

    def _require(self, adapter_id: int, *states: AdapterState) -> None:
        assert adapter_id in self.adapters, f"adapter {adapter_id} is not loaded"
        state = self.adapters[adapter_id].state
        assert state in states, f"adapter {adapter_id} is {state}, not {states}"
        self._require_free(adapter_id)

    def _require_free(self, adapter_id: int) -> None:
        for op, operation in self.running.items():
            command = operation.command
            if isinstance(command, _OF_ADAPTER):
                assert command.adapter_id != adapter_id, f"{op} moves {adapter_id} already"
            if isinstance(command, _RESETS):
                moved = self.in_slot(command.slot, command.generation)
                assert moved.adapter_id != adapter_id, f"{op} moves {adapter_id} already"

    def _slots_taken(self) -> list[int]:
        writing = [
            operation.command.slot
            for operation in self.running.values()
            if isinstance(operation.command, commands.WriteSlot)
        ]
        return [a.slot for a in self.adapters.values() if a.slot != NO_SLOT] + writing

    # Ends of operations.

    def _end_check(self, command: commands.CheckAdapter, operation: RunningOperation) -> Any:
        content = self.files[command.path]
        return reports.AdapterChecked(
            command.op,
            content.fingerprint,
            content.rank,
            content.load_bytes,
            content.blob_bytes,
            content.warnings,
        )

    def _end_load(self, command: commands.LoadWeights, operation: RunningOperation) -> Any:
        self.adapters[command.adapter_id] = EngineAdapter(
            command.adapter_id, command.adapter, command.path, self.files[command.path]
        )
        return reports.WeightsLoaded(command.op)

    def _end_stage(self, command: commands.StageWeights, operation: RunningOperation) -> Any:
        adapter = self.adapters[command.adapter_id]
        adapter.state, adapter.packed = PINNED, True
        return reports.WeightsStaged(command.op)

    def _end_unstage(self, command: commands.UnstageWeights, operation: RunningOperation) -> Any:
        self.adapters[command.adapter_id].state = CPU_CACHED
        return reports.WeightsUnstaged(command.op)

    def _end_write(self, command: commands.WriteSlot, operation: RunningOperation) -> Any:
        adapter = self.adapters[command.adapter_id]
        adapter.state, adapter.slot, adapter.generation = GPU_SLOT, command.slot, command.generation
        for other in self.running.values():
            if other.suspended and other.command.adapter_id == command.adapter_id:
                place = {"slot": command.slot, "generation": command.generation}
                other.command, other.suspended = structs.replace(other.command, **place), False
        return reports.SlotWritten(command.op)

    def _end_reset(self, command: Any, operation: RunningOperation) -> Any:
        adapter = self.in_slot(command.slot, command.generation)
        adapter.state, adapter.slot, adapter.generation = PINNED, NO_SLOT, 0
        return reports.SlotReset(command.op)

    def _end_preemption(self, command: commands.PreemptSlot, operation: RunningOperation) -> Any:
        for other in self.running.values():
            if _uses(other, command.slot):
                other.suspended = True
        return self._end_reset(command, operation)

    def _end_drop(self, command: commands.DropWeights, operation: RunningOperation) -> Any:
        del self.adapters[command.adapter_id]
        return reports.WeightsDropped(command.op)

    def _end_inference(self, command: commands.StartInference, operation: RunningOperation) -> Any:
        if command.adapter_id and not operation.suspended:
            adapter = self.in_slot(command.slot, command.generation)
            assert adapter.content == operation.content, f"{command} ended on other content"
        if isinstance(command, commands.StartPooling):
            return reports.PoolingEnded(command.op, 0 if operation.stopped else 2, 7)
        reason: reports.FinishReason = "cancelled" if operation.stopped else "stop"
        return reports.GenerationEnded(command.op, reason, 3, 5)

    # Budgets.

    def usage(self) -> dict[str, int]:
        """Return the places and bytes in use by adapters and running operations."""
        used = dict.fromkeys(("host_places", "host", "pinned", "slots", "device"), 0)
        for adapter in self.adapters.values():
            used["host_places"] += 1
            if adapter.state == CPU_CACHED:
                used["host"] += _pageable_bytes(adapter)
            else:
                used["pinned"] += adapter.content.blob_bytes
            if adapter.state == GPU_SLOT:
                used["slots"] += 1
                used["device"] += adapter.content.blob_bytes
        for operation in self.running.values():
            self._add_running(used, operation)
        return used

    def _add_running(self, used: dict[str, int], operation: RunningOperation) -> None:
        match operation.command:
            case commands.LoadWeights():
                used["host_places"] += 1
                content = operation.content
                used["host"] += 0 if content is None else content.load_bytes
            case commands.StageWeights(adapter_id=adapter_id):
                used["pinned"] += self.adapters[adapter_id].content.blob_bytes
            case commands.UnstageWeights(adapter_id=adapter_id):
                used["host"] += self.adapters[adapter_id].content.blob_bytes
            case commands.WriteSlot(adapter_id=adapter_id):
                used["slots"] += 1
                used["device"] += self.adapters[adapter_id].content.blob_bytes

    def _require_budgets(self, before: dict[str, int]) -> None:
        used, limits = self.usage(), self.limits
        bounds = {
            "host_places": limits.max_cpu_loras,
            "host": limits.host_bytes_max,
            "pinned": limits.pinned_bytes_max,
            "slots": min(limits.max_loras, self.max_loras),
            "device": min(limits.device_bytes_max, self.device_bytes_max),
        }
        for what, bound in bounds.items():
            # The engine may have been started with more than a bound; nothing may be added then.
            allowed = max(bound, before[what])
            assert used[what] <= allowed, f"{used[what]} of {what}, {bound} allowed: {self.running}"


def _pageable_bytes(adapter: EngineAdapter) -> int:
    return adapter.content.blob_bytes if adapter.packed else adapter.content.load_bytes


def _uses(operation: RunningOperation, slot: int) -> bool:
    command = operation.command
    if operation.suspended:
        return False
    return isinstance(command, commands.StartInference) and command.slot == slot


_BEGIN: dict[type, Any] = {
    commands.CheckAdapter: SimulatedEngine._begin_check,
    commands.LoadWeights: SimulatedEngine._begin_load,
    commands.StageWeights: SimulatedEngine._begin_stage,
    commands.UnstageWeights: SimulatedEngine._begin_unstage,
    commands.WriteSlot: SimulatedEngine._begin_write,
    commands.ResetSlot: SimulatedEngine._begin_reset,
    commands.PreemptSlot: SimulatedEngine._begin_preemption,
    commands.DropWeights: SimulatedEngine._begin_drop,
    commands.StartGeneration: SimulatedEngine._begin_inference,
    commands.StartPooling: SimulatedEngine._begin_inference,
}

_END: dict[type, Any] = {
    commands.CheckAdapter: SimulatedEngine._end_check,
    commands.LoadWeights: SimulatedEngine._end_load,
    commands.StageWeights: SimulatedEngine._end_stage,
    commands.UnstageWeights: SimulatedEngine._end_unstage,
    commands.WriteSlot: SimulatedEngine._end_write,
    commands.ResetSlot: SimulatedEngine._end_reset,
    commands.PreemptSlot: SimulatedEngine._end_preemption,
    commands.DropWeights: SimulatedEngine._end_drop,
    commands.StartGeneration: SimulatedEngine._end_inference,
    commands.StartPooling: SimulatedEngine._end_inference,
}
