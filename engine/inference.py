"""What an engine runs for its clients, whatever its model is for.

What it is: what `Generator` and `Pooler` have in common, and the choice between them. What it is
not: either of them. One rule: one engine has one task, and a request for another is refused (L016)
before it takes a place anywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.arena import Arena
from engine.config import EngineConfig
from engine.errors import NotServed
from engine.generate import Generator
from engine.model import PreparedModel
from engine.pooled_model import PooledModel
from engine.pooler import Pooler
from engine.punica import PunicaWrapper
from messages.commands import StartGeneration, StartInference
from messages.ids import AdapterId, OpId, RequestId
from messages.reports import Report


class Inference(Protocol):
    """Requests that wait and run; driven by one thread, which calls `step` while not idle."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do in a step."""

    @property
    def operations(self) -> list[OpId]:
        """The operations that have not ended."""

    def start(self, command: Any) -> None:
        """Queue a request of this task; raises `EngineError` where it can't be run."""

    def stop(self, target: OpId) -> None:
        """End what operation `target` started, if it has not ended by itself."""

    def resend(self, request_id: RequestId) -> None:
        """Send an output again, if it is still known."""

    def step(self) -> None:
        """One forward pass."""


def inference_of(
    model: PreparedModel | PooledModel,
    punica: PunicaWrapper,
    arena: Arena,
    residents: Sequence[AdapterId | None],
    config: EngineConfig,
    emit: Callable[[Report], None],
) -> Inference:
    """What runs this model's requests."""
    if isinstance(model, PooledModel):
        return Pooler(model, punica, arena, residents, config, emit)
    return Generator(model, punica, arena, residents, config, emit)


def require_task(served: str, command: StartInference) -> None:
    """Raise `NotServed` where a request is not what the engine is for."""
    asked = "generate" if isinstance(command, StartGeneration) else command.task
    if asked != served:
        raise NotServed(
            f"this engine's model is served to {served}, not to {asked}; ask an engine that was "
            f"started with task {asked}, and a model that is for it"
        )
