"""Whether a request may take a place in an engine's queue.

What it is: one check. What it is not: a queue. One rule: whoever is refused here has changed
nothing, and who is not has an id that nobody else has while it runs.
"""

from collections.abc import Container

from engine.errors import Conflict, EngineOverloaded
from messages.commands import StartInference
from messages.ids import RequestId


def admit(
    command: StartInference, waiting: int, waiting_max: int, alive: Container[RequestId]
) -> None:
    """Raise `EngineOverloaded` where too many wait, `Conflict` where its id is among `alive`."""
    if waiting >= waiting_max:
        raise EngineOverloaded(
            f"{waiting} requests wait for a place in a batch, the most that may; try again when "
            "some have ended"
        )
    if command.request_id in alive:
        raise Conflict(f"request {command.request_id!r} is running; use another request_id")
