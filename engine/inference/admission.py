"""Admission of requests: capacity in the queue, a unique id, and a resident adapter.

A refused request leaves no trace. An admitted one has an id unique among running requests.
"""

from collections.abc import Callable, Container, Sequence
from typing import Final

from loradock.engine.errors import Conflict, EngineOverloaded, NotResident
from loradock.engine.punica.mapping import BASE
from loradock.engine.residency.arena import Arena
from loradock.messages.commands import StartInference
from loradock.messages.ids import NO_SLOT, AdapterId, RequestId


class SlotTable:
    """The adapter in each slot: `residents[slot]` is an adapter id, or None for an empty slot.

    `fingerprint_of`: returns the fingerprint of an adapter's files by its id, or None if it is
    unknown; then a version is one writing of a slot. `weight_of`: returns an adapter's share of the
    steps where several wait.
    """

    def __init__(
        self,
        arena: Arena,
        residents: Sequence[int | None],
        fingerprint_of: Callable[[int], str | None] = lambda _: None,
        weight_of: Callable[[AdapterId], int] = lambda _: 1,
    ) -> None:
        self._arena = arena
        self._fingerprint_of = fingerprint_of
        self.residents = residents
        self.weight_of: Final = weight_of

    def version_of(self, command: StartInference) -> str:
        """Return what identifies the weights that a request needs; empty for the base model."""
        if command.adapter_id == BASE:
            return ""
        fingerprint = self._fingerprint_of(command.adapter_id)
        return fingerprint or f"{command.adapter_id} {command.slot} {command.generation}"

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


def check_admission(
    command: StartInference,
    slots: SlotTable,
    waiting: int,
    waiting_max: int,
    active_ids: Container[RequestId],
) -> None:
    """Raise unless a request may join the queue.

    Raises `EngineOverloaded` for a full queue, `Conflict` for an id in `active_ids`, and
    `NotResident` for an adapter that is not in its slot.
    """
    if waiting >= waiting_max:
        raise EngineOverloaded(
            f"{waiting} requests wait for a batch, the most that may; try again when some have "
            "ended"
        )
    if command.request_id in active_ids:
        raise Conflict(f"request {command.request_id!r} is running; use another request_id")
    slots.check(command)
