"""The interface that both schedulers share, and the choice between them by the model's task.

One engine has one task. A request for another task is refused (L016) before it is queued.
"""

from collections.abc import Callable
from typing import Any, Protocol

from loradock.engine.config import EngineConfig
from loradock.engine.errors import NotServed
from loradock.engine.inference.admission import SlotTable
from loradock.engine.inference.batch import KVUse
from loradock.engine.inference.generation_scheduler import GenerationScheduler
from loradock.engine.inference.pooling_scheduler import PoolingScheduler
from loradock.engine.jobs import Jobs
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.messages.commands import ResumeGeneration, StartGeneration, StartInference
from loradock.messages.ids import OpId, RequestId, Slot
from loradock.messages.reports import Report


class Scheduler(Protocol):
    """Waiting and running requests; used by one thread, which calls `step` while not idle."""

    @property
    def is_idle(self) -> bool:
        """Whether `step` would do nothing."""

    @property
    def operations(self) -> list[OpId]:
        """The operations that have not ended."""

    @property
    def suspended(self) -> list[OpId]:
        """The operations that wait for a slot."""

    @property
    def running(self) -> list[OpId]:
        """The operations that take part in the next step."""

    @property
    def kv_use(self) -> KVUse:
        """The memory of keys and values."""

    @property
    def is_reading(self) -> bool:
        """Whether a job processes a request's prompt; only `collect` detects the end."""

    def start(self, command: Any) -> None:
        """Queue a request of this task; raises `EngineError` where it can't be run."""

    def stop(self, target: OpId) -> None:
        """End the request that operation `target` started; do nothing where it has ended."""

    def has_progressed(self, slot: Slot, generation: int) -> bool:
        """Whether a slot may be taken from its requests, because they have used it."""

    def suspend(self, slot: Slot, generation: int) -> None:
        """Take the requests of a slot out of the batch."""

    def resume(self, command: ResumeGeneration) -> None:
        """Continue a suspended request in a slot."""

    def resend(self, request_id: RequestId) -> None:
        """Send an output again, if it is known."""

    def collect(self) -> None:
        """Collect the results of jobs that have ended."""

    def step(self) -> None:
        """Run one forward pass."""

    def close(self) -> None:
        """Start no more jobs."""


def choose_scheduler(
    model: CausalModel | PoolingModel,
    punica: PunicaWrapper,
    slots: SlotTable,
    config: EngineConfig,
    emit: Callable[[Report], None],
    jobs: Jobs[OpId],
) -> Scheduler:
    """Return the scheduler of this model's requests; `jobs` processes prompts with images.

    Raises `ValueError` for an option that this task does not have.
    """
    if isinstance(model, PoolingModel):
        if config.capture_steps:
            raise ValueError(
                f"capture_steps is on, and this model is served to {model.task}, which has no "
                "decode steps: leave it off"
            )
        return PoolingScheduler(model, punica, slots, config, emit)
    return GenerationScheduler(model, punica, slots, config, emit, jobs)


def check_task(served: str, command: StartInference) -> None:
    """Raise `NotServed` for a request of another task than the engine's."""
    requested = "generate" if isinstance(command, StartGeneration) else command.task
    if requested != served:
        raise NotServed(
            f"this engine's model is served to {served}, not to {requested}; use an engine that "
            f"was started with task {requested}, and a model for it"
        )
