"""The engine: the base model, its adapters and its inference, driven by commands.

It has one queue of commands in and one of reports out, and no socket. Every operation ends in
exactly one report, and a failed operation has changed nothing.

All methods are called by one thread at a time. Only `submit_beside` and `poll_beside` are called
during a step: they execute and apply what no step notices. Everything else, so every change of a
slot or a sequence, happens between two forward passes.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NoReturn

import msgspec

from loradock.engine.adapters.lora_model import LoadedAdapter
from loradock.engine.adapters.reader import KnownFiles, read_adapter, read_opened
from loradock.engine.adapters.reader_process import ReaderProcess
from loradock.engine.config import DEFAULT_BOUNDS, EngineConfig, LoRAConfig
from loradock.engine.errors import EngineError, NotServed
from loradock.engine.jobs import CollectiveJobs, Jobs, ThreadedJobs
from loradock.engine.memory import allocated_bytes
from loradock.engine.models.binding import bind_lora, kernels_for
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.parallel import ParallelGroup
from loradock.engine.residency.pinned import PinnedMemory
from loradock.engine.residency.residency import OperationJob, Residency
from loradock.engine.serving.queue import SlotTable
from loradock.engine.serving.scheduler import SlotTurns, choose_scheduler
from loradock.engine.serving.warm_up import warm_up
from loradock.engine.worker.meter import Meter
from loradock.messages import commands, reports
from loradock.messages.ids import AdapterId, OpId
from loradock.messages.views import Batching, EngineStatistics

_Executable = commands.Operation | commands.StopGeneration
REASON_CHARACTERS_MAX: Final = 400
"""The most characters of a reason that each heartbeat repeats; the log has all of it."""

EngineCommand = _Executable | commands.ResendTokens
"""The commands of an engine; the worker handles those of the link (beats, inventory requests)."""


class Engine:
    """A model and its adapters: `submit` commands, `step` while not idle, `poll` reports.

    `wake` is called from a job's thread when `poll` has something new to collect.
    """

    def __init__(
        self,
        model: CausalModel | PoolingModel,
        config: EngineConfig,
        lora_config: LoRAConfig,
        engine_id: str,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine_id: Final = engine_id
        self._config = config
        arena, punica, self._lora_config = bind_lora(model, lora_config, config.device_bytes_max)
        self._known_files = KnownFiles()
        self._adapter_target = model.adapter_target(self._lora_config)
        group = self._group = model.group
        self._reader_process = self._start_reader(model) if config.isolate_reading else None
        self._outbox: list[reports.Report] = []
        # Those of residency's operations are apart, because some are made during a step.
        self._residency_outbox: list[reports.OperationReport] = []
        jobs: Jobs[OperationJob] = _jobs_of(group, config.file_threads, wake)
        report = self._residency_outbox.append
        pinned = PinnedMemory(config.pinned_bytes_max) if config.pins else None
        self.residency: Final = Residency(arena, model.shapes, self._read, jobs, report, pinned)
        warm_up(model, punica, arena.max_loras, config.max_num_seqs)
        self._dtype = str(model.dtype).removeprefix("torch.")
        # A separate pool, so that adapters don't wait for images to be decoded, with a thread more
        # for structures.
        prompt_jobs: Jobs[OpId] = _jobs_of(group, config.file_threads + 1, wake)
        residency = self.residency
        slots = SlotTable(arena, residency.residents, residency.fingerprint_of, self._weight_of)
        emit = self._outbox.append
        self._inference = choose_scheduler(model, punica, slots, config, emit, prompt_jobs)
        self._batching: Batching = model.batching if isinstance(model, CausalModel) else ""
        self._batching_refusal = next(iter(model.refusals), "")[:REASON_CHARACTERS_MAX]
        self._turns = SlotTurns(self._inference, residency.execute)
        self.last_op: OpId = 0
        """The highest operation that was submitted."""
        self._meter = Meter()

    @property
    def is_idle(self) -> bool:
        """True if `step` would do nothing."""
        return self._inference.is_idle

    @property
    def is_copying(self) -> bool:
        """True if a copy to the device is unfinished; only `poll` finishes it."""
        return self.residency.is_copying

    @property
    def has_jobs(self) -> bool:
        """True if files or images are being read, or adapters packed, on this or another rank."""
        return any(self.residency.running) or self._inference.is_reading

    def submit(self, command: EngineCommand) -> None:
        """Execute a command, or start it."""
        self.residency.publish()
        if isinstance(command, commands.ResendTokens):
            self._inference.resend(command.request_id)
        else:
            self.last_op = max(self.last_op, command.op)
            self._execute(command)
            self._outbox += self._residency_reports()

    def submit_beside(self, command: EngineCommand) -> bool:
        """Execute a command during a step; False for a command that has to wait for its end."""
        if not self.residency.can_begin_beside_step(command):
            return False
        self.last_op = max(self.last_op, command.op)
        self.residency.execute(command)
        return True

    def poll_beside(self) -> list[reports.OperationReport]:
        """Return the reports of residency's operations that have ended during a step, in order."""
        self.residency.collect_beside_step()
        return self._residency_reports()

    def step(self) -> None:
        """Run one forward pass, if a request waits for one."""
        if not self._inference.is_idle:
            self._meter.begin_step()
            self._inference.step()
            self._meter.end_step(*self._running_and_waiting())

    def poll(self, now_s: float | None = None) -> list[reports.Report]:
        """Return the reports since the last call, in order.

        `now_s`: rank 0's monotonic time, by which all ranks decide; None for this process's own.
        """
        now_s = time.monotonic() if now_s is None else now_s
        self.residency.collect()
        if self.residency.checked.size_bytes:
            self.residency.checked.expire(now_s)
        self._inference.collect()
        self._turns.after_step(now_s)
        collected = [*self._outbox, *self._residency_reports()]
        self._outbox.clear()
        return [self._meter.on_report(report) for report in collected]

    @property
    def running(self) -> tuple[OpId, ...]:
        """The generations and poolings that take part in the next step, in order."""
        return tuple(sorted(set(self._inference.running)))

    def statistics(self) -> EngineStatistics:
        """Return what this engine measured since its start, and its use of memory."""
        kv_use, arena = self._inference.kv_use, self.residency.arena
        running, waiting = self._running_and_waiting()
        host_bytes, pinned_bytes = self.residency.host_use()
        return msgspec.structs.replace(
            self._meter.statistics(len(running), len(waiting)),
            kernels=kernels_for(arena.device),
            slot_writes=arena.writes,
            slot_resets=arena.resets,
            kv_bytes=kv_use.size_bytes,
            kv_bytes_max=kv_use.size_bytes_max,
            kv_layout=kv_use.layout,
            kv_blocks=kv_use.blocks,
            kv_block_tokens=kv_use.block_tokens,
            shares_prefixes=kv_use.shares_prefixes,
            arena_bytes=arena.capacity_bytes - arena.free_bytes,
            arena_bytes_max=arena.capacity_bytes,
            host_bytes=host_bytes,
            pinned_bytes=pinned_bytes,
            allocated_bytes=allocated_bytes(arena.device),
            batching=kv_use.layout if kv_use.layout == "paged" else self._batching,
            batching_refusal=self._batching_refusal,
        )

    def close(self) -> None:
        """Start no further jobs, and wait for running copies."""
        self._inference.close()
        self.residency.close()
        if self._reader_process is not None:
            self._reader_process.close()

    def inventory(self) -> reports.EngineInventory:
        """Return the engine's id, capacity, operations and adapters, as of the last `poll`."""
        return reports.EngineInventory(
            engine_id=self.engine_id,
            pid=os.getpid(),
            model=self._config.model_directory.resolve().name,
            max_loras=len(self.residency.residents),
            device_bytes_max=self._config.device_bytes_max,
            last_op=self.last_op,
            running=tuple(sorted(self._running())),
            adapters=self.residency.inventory(),
            device=str(self._config.torch_device),
            dtype=self._dtype,
            suspended=tuple(self._inference.suspended),
        )

    def _residency_reports(self) -> list[reports.OperationReport]:
        """Return the reports of residency's operations since the last call."""
        collected = self._residency_outbox.copy()
        self._residency_outbox.clear()
        return collected

    def _running(self) -> Iterator[OpId]:
        yield from self.residency.running
        yield from self._turns.operations
        yield from self._inference.operations

    def _execute(self, command: _Executable) -> None:
        match command:
            case commands.StartGeneration() | commands.StartPooling():
                self._start_inference(command)
            case commands.StopGeneration():
                self._inference.stop(command.target)
            case commands.PreemptSlot():
                self._turns.add(command)
            case _:
                self.residency.execute(command)

    def _running_and_waiting(self) -> tuple[set[OpId], set[OpId]]:
        """Return the requests that take part in the next step, and those that do not."""
        # A request with several outputs may run in several sequences.
        running = set(self._inference.running)
        return running, set(self._inference.operations) - running

    def _start_inference(self, command: commands.StartInference) -> None:
        try:
            self._meter.arrived(command.op, command.request_id)
            self._inference.start(command)
        except EngineError as error:
            self.residency.fail(command.op, error)

    def _weight_of(self, adapter_id: AdapterId) -> int:
        """Return the weight of the name of an adapter; 1 by default and for the base model."""
        adapter = self.residency.host_adapters.get(adapter_id)
        name = "" if adapter is None else adapter.source.adapter
        return (self._config.adapter_weights or {}).get(name, 1)

    def _read(self, command: commands.CheckAdapter | commands.LoadWeights) -> LoadedAdapter:
        return read_adapter(
            command.path or command.adapter,
            self._config.adapter_roots,
            self._adapter_target,
            command.adapter,
            allow_pickled=self._config.allow_pickled_weights,
            is_follower=not self._group.is_leader,
            known_files=self._known_files,
            compares_tokenizer=isinstance(command, commands.CheckAdapter),
            reader_process=self._reader_process,
        )

    def _start_reader(self, model: CausalModel | PoolingModel) -> ReaderProcess:
        """Start the process that reads adapters, before this one has threads."""
        if not self._group.is_trivial:
            raise ValueError("isolate_reading needs an engine of one process")
        target = self._adapter_target
        if model.device.type != "cpu":
            # A forked process can't use the device.
            target = replace(target, read_base=_unread, base_parameter=_unread)
        bounds = target.bounded(DEFAULT_BOUNDS)
        return ReaderProcess(
            target,
            lambda files, request, allocate: read_opened(files, target, bounds, request, allocate),
        )


def _unread(*_: str) -> NoReturn:
    raise NotServed(
        "it has magnitudes, biases or copies of base weights, for which --isolate-reading can't "
        "read a base model on this device; start without it"
    )


def _jobs_of(group: ParallelGroup, threads: int, wake: Callable[[], None]) -> Jobs[Any]:
    """Return threads for jobs; of several ranks, jobs end once they ended on all of them."""
    if group.is_trivial:
        return ThreadedJobs(threads, wake)
    return CollectiveJobs(ThreadedJobs(threads, wake), group, _stamp_of)


def _stamp_of(result: Any) -> str:
    """Return what identifies the files that a result was read from; empty for other results."""
    return result.stamp if isinstance(result, LoadedAdapter) else ""
