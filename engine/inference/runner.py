"""What an engine runs for its clients, whatever its model is for.

What it is: what `Generator` and `Pooler` have in common, and the choice between them. What it is
not: either of them. One rule: one engine has one task, and a request for another is refused (L016)
before it takes a place anywhere.
"""

from collections.abc import Callable
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.errors import NotServed
from engine.inference.admission import Slots
from engine.inference.generator import Generator
from engine.inference.pooler import Pooler
from engine.jobs import Jobs
from engine.models.causal_model import PreparedModel
from engine.models.pooling_model import PooledModel
from engine.punica.wrapper import PunicaWrapper
from messages.commands import StartGeneration, StartInference
from messages.ids import OpId, RequestId
from messages.reports import Report


class Inference(Protocol):
    """Requests that wait and run; driven by one thread, which calls `step` while not idle."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do in a step."""

    @property
    def operations(self) -> list[OpId]:
        """The operations that have not ended."""

    @property
    def is_reading(self) -> bool:
        """Whether a request is being read by a job, whose end only `collect` sees."""

    def start(self, command: Any) -> None:
        """Queue a request of this task; raises `EngineError` where it can't be run."""

    def stop(self, target: OpId) -> None:
        """End what operation `target` started, if it has not ended by itself."""

    def resend(self, request_id: RequestId) -> None:
        """Send an output again, if it is still known."""

    def collect(self) -> None:
        """Take what jobs have read."""

    def step(self) -> None:
        """One forward pass."""

    def close(self) -> None:
        """Start nothing more."""


def inference_of(
    model: PreparedModel | PooledModel,
    punica: PunicaWrapper,
    slots: Slots,
    config: EngineConfig,
    emit: Callable[[Report], None],
    jobs: Jobs[OpId],
) -> Inference:
    """What runs this model's requests; `jobs` reads what takes long.

    Raises `ValueError` for what this task has not.
    """
    if isinstance(model, PooledModel):
        if config.capture_steps:
            raise ValueError(
                f"capture_steps is on, and this model is served to {model.task}, which has no "
                "decode steps: leave it off"
            )
        return Pooler(model, punica, slots, config, emit)
    return Generator(model, punica, slots, config, emit, jobs)


def require_task(served: str, command: StartInference) -> None:
    """Raise `NotServed` where a request is not what the engine is for."""
    asked = "generate" if isinstance(command, StartGeneration) else command.task
    if asked != served:
        raise NotServed(
            f"this engine's model is served to {served}, not to {asked}; ask an engine that was "
            f"started with task {asked}, and a model that is for it"
        )
