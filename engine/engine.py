"""The engine: the base model, its adapters' residency, and its generations, behind `submit`.

What it is: one queue of commands in and one of reports out. What it is not: a process or a socket
(`worker`), or a decider (the controller). One rule: every operation ends in exactly one report, and
one that failed has changed nothing.

All methods are called by one thread. Files are read and packed by others, whose results wait for
`poll`; so nothing moves while a forward pass runs.
"""

import os
from collections.abc import Callable
from typing import Any, Final

from engine.adapters import LoadedAdapter, read_adapter
from engine.config import EngineConfig, LoRAConfig
from engine.equipment import equip
from engine.errors import EngineError, NotServed
from engine.generate import Generator
from engine.model import PreparedModel
from engine.naming import equivalences_of
from engine.registry import SeenOperations
from engine.residency import Residency
from engine.work import WorkPool
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
        model: PreparedModel,
        config: EngineConfig,
        lora_config: LoRAConfig,
        engine_id: str,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine_id: Final = engine_id
        self._config = config
        arena, punica, self._lora_config = equip(model, lora_config, config.device_bytes_max)
        self._shapes = {shape.name: shape for shape in model.shapes}
        self._equivalences = equivalences_of(model.model)
        self._outbox: list[reports.Report] = []
        tell = self._outbox.append
        self.residency: Final = Residency(
            arena, model.shapes, self._read, WorkPool(config.file_threads, wake), tell, config.pins
        )
        self._generator = Generator(
            model, punica, arena, self.residency.residents, config, self._outbox.append
        )
        self._seen = SeenOperations()
        self._handlers: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(self.residency.handlers, self.residency.do),
            commands.StartGeneration: self.start_generation,
            commands.StartPooling: self.start_pooling,
            commands.StopGeneration: self.stop_generation,
        }

    @property
    def is_idle(self) -> bool:
        """Whether `step` would do nothing."""
        return self._generator.is_idle

    @property
    def is_copying(self) -> bool:
        """Whether a copy to the device is on its way; only `poll` sees it arrive."""
        return self.residency.is_copying

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
        """Bring every running generation one token on, if there are any."""
        if not self._generator.is_idle:
            self._generator.step()

    def poll(self) -> list[reports.Report]:
        """Everything that happened since the last call, in order."""
        self.residency.collect()
        told = self._outbox.copy()
        self._outbox.clear()
        return told

    def close(self) -> None:
        """Start nothing more, and wait for copies that run."""
        self.residency.close()

    def start_generation(self, command: commands.StartGeneration) -> None:
        """Queue a generation; it ends with a report of its own."""
        try:
            self._generator.start(command)
        except EngineError as error:
            self.residency.fail(command.op, error)

    def start_pooling(self, command: commands.StartPooling) -> None:
        """Embed or classify: not what a generating model is for."""
        told = f"this engine generates; to {command.task}, serve a model that is for it"
        self.residency.fail(command.op, NotServed(told))

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
            slots_max=len(self.residency.residents),
            device_bytes_max=self._config.device_bytes_max,
            last_op=self.last_op,
            running=tuple(sorted((*self.residency.running, *self._generator.operations))),
            adapters=self.residency.inventory(),
        )

    def _read(self, command: commands.CheckAdapter | commands.LoadWeights) -> LoadedAdapter:
        return read_adapter(
            command.path or command.adapter,
            self._config.adapter_roots,
            self._shapes,
            self._lora_config,
            self._config.adapter_bounds,
            command.adapter,
            equivalences=self._equivalences,
            allow_pickled=self._config.allow_pickled_weights,
        )
