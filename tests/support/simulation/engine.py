"""An engine without a model: it holds what it is told to hold, and refuses the impossible loudly.

What it is: an independent oracle. It keeps its own truth of adapters, slots, generations and bytes,
and asserts before every operation that it can be done within the budgets. What it is not: the
controller's accounts said again; it imports none of them. One rule: only the test decides when an
operation ends and how, but device operations end in the order in which they came.
"""

from dataclasses import dataclass, field
from typing import Any

from controller.core.limits import Limits
from messages import commands, reports
from messages.errors import ErrorCode
from messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED, AdapterState


@dataclass(frozen=True)
class Content:
    """What lies under a path: its identity, and what it takes as it is read and as it is packed."""

    fingerprint: str
    load_bytes: int
    blob_bytes: int
    rank: int = 8


@dataclass
class Held:
    """One adapter's weights in the engine's memory; `packed` once they were staged."""

    adapter_id: int
    name: str
    path: str
    content: Content
    state: AdapterState = CPU_CACHED
    packed: bool = False
    slot: int = NO_SLOT
    generation: int = 0

    def inventory(self) -> reports.InventoryAdapter:
        return reports.InventoryAdapter(
            self.adapter_id,
            self.name,
            self.path,
            self.content.fingerprint,
            self.content.rank,
            self.state,
            self.slot,
            self.generation,
            self.content.load_bytes,
            self.content.blob_bytes,
        )


@dataclass
class Job:
    """One operation that has begun; `stopped` is a generation that was asked to end."""

    command: Any
    content: Content | None = None
    stopped: bool = False


Files = dict[str, Content]

_OF_ADAPTER = (
    commands.LoadWeights,
    commands.StageWeights,
    commands.UnstageWeights,
    commands.WriteSlot,
    commands.DropWeights,
)
_ON_DEVICE = (commands.WriteSlot, commands.ResetSlot, commands.SetMapping)


@dataclass
class SimulatedEngine:
    """One engine's life. `receive` commands, `complete` what runs; reports gather in `outbox`."""

    engine_id: str
    limits: Limits
    files: Files
    slots_max: int
    device_bytes_max: int
    held: dict[int, Held] = field(default_factory=dict)
    running: dict[int, Job] = field(default_factory=dict)
    outbox: list[Any] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    generations_seen: set[int] = field(default_factory=set)

    def receive(self, command: Any) -> None:
        """Take a command; one whose number was seen is not done again."""
        if isinstance(command, commands.RequestInventory):
            self.outbox.append(self.inventory(command.acknowledged))
            return
        if command.op in self.seen:
            return
        self.seen.add(command.op)
        if isinstance(command, commands.StopGeneration):
            job = self.running.get(command.target)
            if job is not None:
                job.stopped = True
            return
        job, before = Job(command), self.usage()
        _BEGIN[type(command)](self, command, job)
        self.running[command.op] = job
        self._require_budgets(before)

    def inventory(self, answers: int = 0) -> reports.EngineInventory:
        """Who it is and what it holds now, in answer to a numbered question."""
        return reports.EngineInventory(
            self.engine_id,
            1,
            "model",
            self.slots_max,
            self.device_bytes_max,
            max(self.seen, default=0),
            tuple(sorted(self.running)),
            tuple(held.inventory() for held in self.held.values()),
            answers,
        )

    def completable(self) -> list[int]:
        """What may end next: everything, but on the device only the oldest."""
        device = [op for op, job in self.running.items() if isinstance(job.command, _ON_DEVICE)]
        return [op for op in self.running if op not in device[1:]]

    def complete(self, op: int, code: ErrorCode | None = None) -> None:
        """End an operation; with a code, it fails and changes nothing."""
        assert op in self.completable(), f"{op} can't end before {self.running}"
        job = self.running.pop(op)
        code = code or self._own_failure(job)
        if code is not None:
            told = f"operation {op} failed with {code}"
            self.outbox.append(reports.OperationFailed(op, code, told))
        else:
            self.outbox.append(_END[type(job.command)](self, job.command, job))

    def _own_failure(self, job: Job) -> ErrorCode | None:
        command = job.command
        if isinstance(command, commands.CheckAdapter) and command.path not in self.files:
            return ErrorCode.NOT_FOUND
        if isinstance(command, commands.LoadWeights):
            found = self.files.get(command.path)
            if found is None:
                return ErrorCode.NOT_FOUND
            if found.fingerprint != command.fingerprint:
                return ErrorCode.CONFLICT
        return None

    def in_slot(self, slot: int, generation: int) -> Held:
        """What a slot holds as this generation; a stale one is an error of the controller's."""
        for held in self.held.values():
            if (held.slot, held.generation) == (slot, generation):
                return held
        raise AssertionError(f"slot {slot} is not of generation {generation}: {self.held}")

    # Beginnings: what can't be done is refused here.

    def _begin_check(self, command: commands.CheckAdapter, job: Job) -> None:
        assert command.adapter_id not in self.held, f"{command} is of a loaded adapter"

    def _begin_load(self, command: commands.LoadWeights, job: Job) -> None:
        assert command.adapter_id not in self.held, f"{command} is of a loaded adapter"
        self._require_free(command.adapter_id)
        job.content = self.files.get(command.path)
        if job.content is not None and job.content.fingerprint != command.fingerprint:
            job.content = None

    def _begin_stage(self, command: commands.StageWeights, job: Job) -> None:
        self._require(command.adapter_id, CPU_CACHED)

    def _begin_pinned(self, command: commands.UnstageWeights, job: Job) -> None:
        self._require(command.adapter_id, PINNED)

    def _begin_drop(self, command: commands.DropWeights, job: Job) -> None:
        self._require(command.adapter_id, CPU_CACHED, PINNED)

    def _begin_write(self, command: commands.WriteSlot, job: Job) -> None:
        self._require(command.adapter_id, PINNED)
        assert 0 <= command.slot < self.slots_max, f"{command}: there are {self.slots_max} slots"
        assert command.slot not in self._slots_taken(), f"{command}: the slot is taken"
        assert command.generation not in self.generations_seen, f"{command}: generation again"
        newer = [held.generation for held in self.held.values() if held.slot == command.slot]
        assert command.generation > max(newer, default=0), f"{command}: an old generation"
        self.generations_seen.add(command.generation)

    def _begin_reset(self, command: commands.ResetSlot, job: Job) -> None:
        held = self.in_slot(command.slot, command.generation)
        self._require_free(held.adapter_id)
        for other in self.running.values():
            assert not _uses(other.command, command.slot), f"{command} under {other.command}"

    def _begin_mapping(self, command: commands.SetMapping, job: Job) -> None:
        for ref in command.active:
            self._require_free(self.in_slot(ref.slot, ref.generation).adapter_id)

    def _begin_inference(self, command: commands.StartInference, job: Job) -> None:
        if command.adapter_id:
            held = self.in_slot(command.slot, command.generation)
            assert held.adapter_id == command.adapter_id, f"{command} meets {held}"
            self._require_free(held.adapter_id)
            job.content = held.content
        else:
            assert (command.slot, command.generation) == (NO_SLOT, 0), f"{command}"

    def _require(self, adapter_id: int, *states: AdapterState) -> None:
        assert adapter_id in self.held, f"adapter {adapter_id} is not loaded"
        state = self.held[adapter_id].state
        assert state in states, f"adapter {adapter_id} is {state}, not {states}"
        self._require_free(adapter_id)

    def _require_free(self, adapter_id: int) -> None:
        for op, job in self.running.items():
            if isinstance(job.command, _OF_ADAPTER):
                assert job.command.adapter_id != adapter_id, f"{op} moves {adapter_id} already"
            if isinstance(job.command, commands.ResetSlot):
                moved = self.in_slot(job.command.slot, job.command.generation)
                assert moved.adapter_id != adapter_id, f"{op} moves {adapter_id} already"

    def _slots_taken(self) -> list[int]:
        writing = [
            job.command.slot
            for job in self.running.values()
            if isinstance(job.command, commands.WriteSlot)
        ]
        return [held.slot for held in self.held.values() if held.slot != NO_SLOT] + writing

    # Endings.

    def _end_check(self, command: commands.CheckAdapter, job: Job) -> Any:
        found = self.files[command.path]
        return reports.AdapterChecked(
            command.op, found.fingerprint, found.rank, found.load_bytes, found.blob_bytes
        )

    def _end_load(self, command: commands.LoadWeights, job: Job) -> Any:
        self.held[command.adapter_id] = Held(
            command.adapter_id, command.adapter, command.path, self.files[command.path]
        )
        return reports.WeightsLoaded(command.op)

    def _end_stage(self, command: commands.StageWeights, job: Job) -> Any:
        held = self.held[command.adapter_id]
        held.state, held.packed = PINNED, True
        return reports.WeightsStaged(command.op)

    def _end_unstage(self, command: commands.UnstageWeights, job: Job) -> Any:
        self.held[command.adapter_id].state = CPU_CACHED
        return reports.WeightsUnstaged(command.op)

    def _end_write(self, command: commands.WriteSlot, job: Job) -> Any:
        held = self.held[command.adapter_id]
        held.state, held.slot, held.generation = GPU_SLOT, command.slot, command.generation
        return reports.SlotWritten(command.op)

    def _end_reset(self, command: commands.ResetSlot, job: Job) -> Any:
        held = self.in_slot(command.slot, command.generation)
        held.state, held.slot, held.generation = PINNED, NO_SLOT, 0
        return reports.SlotReset(command.op)

    def _end_drop(self, command: commands.DropWeights, job: Job) -> Any:
        del self.held[command.adapter_id]
        return reports.WeightsDropped(command.op)

    def _end_mapping(self, command: commands.SetMapping, job: Job) -> Any:
        for ref in command.active:
            self.in_slot(ref.slot, ref.generation)
        return reports.MappingSet(command.op)

    def _end_inference(self, command: commands.StartInference, job: Job) -> Any:
        if command.adapter_id:
            held = self.in_slot(command.slot, command.generation)
            assert held.content == job.content, f"{command} ended on other content"
        if isinstance(command, commands.StartPooling):
            return reports.PoolingEnded(command.op, 0 if job.stopped else 2, 7)
        reason: reports.FinishReason = "cancelled" if job.stopped else "stop"
        return reports.GenerationEnded(command.op, reason, 3, 5)

    # Budgets.

    def usage(self) -> dict[str, int]:
        """Places and bytes that are taken, by what is held and by what runs."""
        used = dict.fromkeys(("host_places", "host", "pinned", "slots", "device"), 0)
        for held in self.held.values():
            used["host_places"] += 1
            if held.state == CPU_CACHED:
                used["host"] += _pageable(held)
            else:
                used["pinned"] += held.content.blob_bytes
            if held.state == GPU_SLOT:
                used["slots"] += 1
                used["device"] += held.content.blob_bytes
        for job in self.running.values():
            self._add_running(used, job)
        return used

    def _add_running(self, used: dict[str, int], job: Job) -> None:
        match job.command:
            case commands.LoadWeights():
                used["host_places"] += 1
                used["host"] += 0 if job.content is None else job.content.load_bytes
            case commands.StageWeights(adapter_id=adapter_id):
                used["pinned"] += self.held[adapter_id].content.blob_bytes
            case commands.UnstageWeights(adapter_id=adapter_id):
                used["host"] += self.held[adapter_id].content.blob_bytes
            case commands.WriteSlot(adapter_id=adapter_id):
                used["slots"] += 1
                used["device"] += self.held[adapter_id].content.blob_bytes

    def _require_budgets(self, before: dict[str, int]) -> None:
        used, limits = self.usage(), self.limits
        bounds = {
            "host_places": limits.host_adapters_max,
            "host": limits.host_bytes_max,
            "pinned": limits.pinned_bytes_max,
            "slots": min(limits.slots_max, self.slots_max),
            "device": min(limits.device_bytes_max, self.device_bytes_max),
        }
        for what, bound in bounds.items():
            # What it was started with may be beyond a bound; nothing may be added to that.
            allowed = max(bound, before[what])
            assert used[what] <= allowed, f"{used[what]} of {what}, {bound} allowed: {self.running}"


def _pageable(held: Held) -> int:
    return held.content.blob_bytes if held.packed else held.content.load_bytes


def _uses(command: Any, slot: int) -> bool:
    if isinstance(command, commands.SetMapping):
        return any(ref.slot == slot for ref in command.active)
    return isinstance(command, commands.StartInference) and command.slot == slot


_BEGIN: dict[type, Any] = {
    commands.CheckAdapter: SimulatedEngine._begin_check,
    commands.LoadWeights: SimulatedEngine._begin_load,
    commands.StageWeights: SimulatedEngine._begin_stage,
    commands.UnstageWeights: SimulatedEngine._begin_pinned,
    commands.WriteSlot: SimulatedEngine._begin_write,
    commands.ResetSlot: SimulatedEngine._begin_reset,
    commands.DropWeights: SimulatedEngine._begin_drop,
    commands.SetMapping: SimulatedEngine._begin_mapping,
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
    commands.DropWeights: SimulatedEngine._end_drop,
    commands.SetMapping: SimulatedEngine._end_mapping,
    commands.StartGeneration: SimulatedEngine._end_inference,
    commands.StartPooling: SimulatedEngine._end_inference,
}
