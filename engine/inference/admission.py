"""Whether a request may take a place in an engine's queue.

What it is: one check. What it is not: a queue. One rule: whoever is refused here has changed
nothing, and who is not has an id that nobody else has while it runs.
"""

from collections.abc import Container, Sequence

from engine.errors import Conflict, EngineOverloaded, NotResident
from engine.punica.mapping import BASE
from engine.residency.arena import Arena
from messages.commands import StartInference
from messages.ids import NO_SLOT, RequestId


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


class Slots:
    """The slots as requests see them; `residents[slot]` is the adapter in it, None where empty."""

    def __init__(self, arena: Arena, residents: Sequence[int | None]) -> None:
        self._arena = arena
        self.residents = residents

    def check(self, command: StartInference) -> None:
        """Raise `NotResident` unless the slot holds this adapter in this generation."""
        if command.slot == NO_SLOT and command.adapter_id == BASE:
            return
        if not 0 <= command.slot < len(self.residents):
            raise NotResident(
                f"adapter {command.adapter_id} in slot {command.slot}; slots are "
                f"0 to {len(self.residents) - 1}, and {NO_SLOT} for the base model alone"
            )
        self._arena.check_generation(command.slot, command.generation)
        if self.residents[command.slot] != command.adapter_id:
            raise NotResident(
                f"slot {command.slot} holds adapter {self.residents[command.slot]}, "
                f"not {command.adapter_id}; activate it again"
            )
