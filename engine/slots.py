"""Whether a request's adapter is still where the request says it is.

What it is: one check. What it is not: a keeper of slots (`residency`). One rule: an adapter that is
not in its slot in the generation that was named is an error (L007), never another adapter.
"""

from collections.abc import Sequence

from engine.errors import NotResident
from engine.punica.mapping import BASE
from engine.residency.arena import Arena
from messages.commands import StartInference
from messages.ids import NO_SLOT


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
