"""The engine: the base model, its adapters' residency, and its inference, behind `submit`.

What it is: one queue of commands in and one of reports out. What it is not: a process or a socket
(`worker`), or a decider (the controller). One rule: every operation ends in exactly one report, and
one that failed has changed nothing.

All methods are called by one thread. Files are read and packed by others, whose results wait for
`poll`; so nothing moves while a forward pass runs.
"""

import os
from collections.abc import Callable
from typing import Any, Final

from engine.adapters.reader import LoadedAdapter, read_adapter
from engine.config import EngineConfig, LoRAConfig
from engine.errors import EngineError
from engine.inference.admission import Slots
from engine.inference.runner import inference_of, require_task
from engine.jobs import Jobs, WorkPool
from engine.models.binding import equip
from engine.models.causal_model import PreparedModel
from engine.models.pooling_model import PooledModel
from engine.parallel import ParallelGroup
from engine.residency.residency import Job, Residency
from engine.worker.collective_jobs import AgreedJobs
from engine.worker.seen_operations import SeenOperations
from messages import commands, reports
from messages.ids import OpId

EngineCommand = commands.Operation | commands.StopGeneration | commands.ResendTokens
"""What an engine does; the link's own commands (beats, inventory requests) are the worker's."""


class Engine:
    """Holds a model and its adapters; `submit` commands, `step` while not idle, `poll` reports.

    `wake` is called from a file thread whenever `poll` has something new to collect.
    """

    def __init__(
        self,
        model: PreparedModel | PooledModel,
        config: EngineConfig,
        lora_config: LoRAConfig,
        engine_id: str,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine_id: Final = engine_id
        self._config = config
        arena, punica, self._lora_config = equip(model, lora_config, config.device_bytes_max)
        self._side = model.side(self._lora_config)
        group = self._group = model.group
        self._outbox: list[reports.Report] = []
        tell = self._outbox.append
        jobs: Jobs[Job] = _jobs_of(group, config.file_threads, wake)
        self.residency: Final = Residency(arena, model.shapes, self._read, jobs, tell, config.pins)
        self._task = model.task
        # Threads of their own, so that no adapter waits behind photographs.
        images: Jobs[OpId] = _jobs_of(group, config.file_threads, wake)
        slots = Slots(arena, self.residency.residents)
        self._inference = inference_of(model, punica, slots, config, tell, images)
        self._seen = SeenOperations()
        self._handlers: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(self.residency.handlers, self.residency.do),
            commands.StartGeneration: self.start_inference,
            commands.StartPooling: self.start_inference,
            commands.StopGeneration: self.stop_generation,
        }

    @property
    def is_idle(self) -> bool:
        """Whether `step` would do nothing."""
        return self._inference.is_idle

    @property
    def is_copying(self) -> bool:
        """Whether a copy to the device is on its way; only `poll` sees it arrive."""
        return self.residency.is_copying

    @property
    def has_jobs(self) -> bool:
        """Whether files or images are being read, or adapters packed, here or on another rank."""
        return any(self.residency.running) or self._inference.is_reading

    @property
    def last_op(self) -> OpId:
        """The highest operation that was submitted."""
        return self._seen.last

    def submit(self, command: EngineCommand) -> None:
        """Do a command or begin it; one that was seen before is not done again."""
        if isinstance(command, commands.ResendTokens):
            self.resend_tokens(command)
        elif self._seen.add(command.op):
            self._handlers[type(command)](command)

    def step(self) -> None:
        """One forward pass, if anything waits for one."""
        if not self._inference.is_idle:
            self._inference.step()

    def poll(self) -> list[reports.Report]:
        """Everything that happened since the last call, in order."""
        self.residency.collect()
        self._inference.collect()
        told = self._outbox.copy()
        self._outbox.clear()
        return told

    def close(self) -> None:
        """Start nothing more, and wait for copies that run."""
        self._inference.close()
        self.residency.close()

    def start_inference(self, command: commands.StartInference) -> None:
        """Queue a request; it ends with a report of its own."""
        try:
            require_task(self._task, command)
            self._inference.start(command)
        except EngineError as error:
            self.residency.fail(command.op, error)

    def stop_generation(self, command: commands.StopGeneration) -> None:
        """End what an operation started; nothing where it has ended already."""
        self._inference.stop(command.target)

    def resend_tokens(self, command: commands.ResendTokens) -> None:
        """Send an output again from its beginning, if it is still known."""
        self._inference.resend(command.request_id)

    def inventory(self) -> reports.EngineInventory:
        """Who this engine is and what it holds, as of the last `poll`."""
        return reports.EngineInventory(
            engine_id=self.engine_id,
            pid=os.getpid(),
            model=self._config.model_directory.resolve().name,
            slots_max=len(self.residency.residents),
            device_bytes_max=self._config.device_bytes_max,
            last_op=self.last_op,
            running=tuple(sorted((*self.residency.running, *self._inference.operations))),
            adapters=self.residency.inventory(),
        )

    def _read(self, command: commands.CheckAdapter | commands.LoadWeights) -> LoadedAdapter:
        return read_adapter(
            command.path or command.adapter,
            self._config.adapter_roots,
            self._side,
            self._config.adapter_bounds,
            command.adapter,
            allow_pickled=self._config.allow_pickled_weights,
            is_follower=not self._group.leads,
        )


def _jobs_of(group: ParallelGroup, threads: int, wake: Callable[[], None]) -> Jobs[Any]:
    """What does a rank's jobs: threads, whose results count when all ranks have theirs."""
    if group.is_single:
        return WorkPool(threads, wake)
    return AgreedJobs(WorkPool(threads, wake), group, _stamp_of)


def _stamp_of(result: Any) -> str:
    """What a job's result was made from, where ranks may find different things."""
    return result.stamp if isinstance(result, LoadedAdapter) else ""
