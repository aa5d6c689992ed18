"""Who may wait for a batch, and in which order: admission, priorities, and fair turns of adapters.

Turns are those of deficit round robin with tokens as the cost. An adapter's quantum is its weight
times that of a weight of 1. If the sequence of adapter a, with all before it in a's own queue,
costs C tokens, Q(b) is the quantum of each adapter b and L the largest cost of one sequence, then
before it is served, every other adapter of its priority is served at most

    ceil((C + D) / Q(a)) * Q(b) + L

tokens, with D the tokens that a has generated beyond its credit (Shreedhar and Varghese, 1995). So
a wait depends on the number of waiting adapters, the weights and the sequences of the same adapter,
and not on the number or the length of the sequences of others.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Final, Generic, TypeVar

from loradock.engine.errors import Conflict, NotResident, NotServed, Overloaded
from loradock.engine.punica.mapping import BASE
from loradock.engine.residency.arena import Arena
from loradock.messages.commands import StartGeneration, StartInference
from loradock.messages.ids import NO_SLOT, AdapterId, Generation, RequestId, Slot

QUANTUM_TOKENS: Final = 512
"""The tokens that an adapter of weight 1 is served per turn."""

T = TypeVar("T")


class SlotTable:
    """The adapter in each slot: `residents[slot]` is an adapter id, or None for an empty slot.

    `fingerprint_of`: returns the fingerprint of an adapter's files by its id, or None if it is
    unknown; then a version is one writing of a slot. `weight_of`: returns an adapter's share of the
    steps for which several wait.
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

    def place_of(self, adapter_id: AdapterId) -> tuple[Slot, Generation] | None:
        """Return the slot that holds an adapter, and the slot's version; None if none does."""
        if adapter_id not in self.residents:
            return None
        slot = self.residents.index(adapter_id)
        return slot, self._arena.generations[slot]

    def check(self, command: StartInference) -> None:
        """Raise `NotResident` unless the slot holds this adapter in this version of the slot."""
        if command.slot == NO_SLOT and command.adapter_id == BASE:
            return
        if not 0 <= command.slot < len(self.residents):
            raise NotResident(
                f"slot of adapter {command.adapter_id} must be 0 to {len(self.residents) - 1}, or "
                f"{NO_SLOT} for the base model alone, got {command.slot}"
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
    """Raise unless a request may join the queue; a refused request leaves no trace.

    Raises `Overloaded` for a full queue, `Conflict` for an id in `active_ids`, and
    `NotResident` for an adapter that is not in its slot.
    """
    if waiting >= waiting_max:
        raise Overloaded(
            f"{waiting} requests wait for a batch, the most allowed; try again when some have ended"
        )
    if command.request_id in active_ids:
        raise Conflict(f"request {command.request_id!r} is running; use another request_id")
    slots.check(command)


def other_task(served: str, command: StartInference) -> NotServed:
    """Return the refusal of a request of another task than the engine's (L016)."""
    requested = "generate" if isinstance(command, StartGeneration) else command.task
    return NotServed(
        f"this engine's model is served to {served}, not to {requested}; use an engine that was "
        f"started with task {requested}, and a model for it"
    )


class _Line(Generic[T]):
    """The waiting items of one adapter and priority with their costs, and the adapter's credit."""

    def __init__(self, quantum: int) -> None:
        self.quantum: Final = quantum
        self.credit = 0
        self.items: deque[tuple[T, int]] = deque()

    @property
    def rounds_needed(self) -> int:
        """The rounds after which its credit pays for its first item, 0 or less if it does now."""
        return -((self.credit - self.items[0][1]) // self.quantum)


class WaitingQueue(Generic[T]):
    """Waiting items: the smallest priority first, in turns of its adapters, the oldest first.

    The cost of an item is given when it is added. `charge` accounts for tokens that are generated
    afterwards.
    """

    def __init__(
        self,
        weight_of: Callable[[AdapterId], int] = lambda _: 1,
        quantum_tokens: int = QUANTUM_TOKENS,
    ) -> None:
        """`weight_of` returns an adapter's weight, at least 1, whenever it begins to wait."""
        self._weight_of = weight_of
        self._quantum_tokens = quantum_tokens
        # By priority. The adapter whose turn it is comes first.
        self._lines: dict[int, OrderedDict[AdapterId, _Line[T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return self._count

    def __iter__(self) -> Iterator[T]:
        """Yield all items, adapter by adapter."""
        for lines in self._lines.values():
            for line in lines.values():
                yield from (item for item, _ in line.items)

    @property
    def priority(self) -> int:
        """The priority that is next; the queue must not be empty."""
        return min(self._lines)

    @property
    def adapters(self) -> tuple[AdapterId, ...]:
        """The adapters with items of the priority that is next, in the order of their turns."""
        return tuple(self._lines[self.priority]) if self._lines else ()

    def append(self, adapter: AdapterId, item: T, cost: int, priority: int = 0) -> None:
        """Add an item after the others of its adapter and priority."""
        self._line_of(adapter, priority).append((item, cost))

    def append_first(self, adapter: AdapterId, item: T, cost: int, priority: int = 0) -> None:
        """Add an item before the others of its adapter and priority."""
        self._line_of(adapter, priority).appendleft((item, cost))

    def charge(self, adapter: AdapterId, tokens: int) -> None:
        """Count tokens generated for an adapter; nothing if none of its items waits."""
        for lines in self._lines.values():
            if adapter in lines:
                lines[adapter].credit -= tokens

    def first(self) -> T:
        """Return the item that `pop` would remove; the queue must not be empty."""
        _, line = self._advance()
        return line.items[0][0]

    def pop(self) -> T:
        """Remove and return the next item; the queue must not be empty."""
        adapter, line = self._advance()
        item, cost = line.items.popleft()
        line.credit -= cost
        self._count_removal(self.priority, adapter)
        return item

    def remove(self, adapter: AdapterId, item: T) -> bool:
        """Remove an item; return whether it was waiting."""
        for priority, lines in self._lines.items():
            items = lines[adapter].items if adapter in lines else ()
            found = next((entry for entry in items if entry[0] is item), None)
            if found is not None:
                lines[adapter].items.remove(found)
                self._count_removal(priority, adapter)
                return True
        return False

    def serve_next(self, adapter: AdapterId) -> None:
        """Make it the turn of an adapter that `adapters` contains."""
        lines = self._lines[self.priority]
        lines.move_to_end(adapter, last=False)
        line = lines[adapter]
        line.credit = max(line.credit, line.items[0][1])

    def _line_of(self, adapter: AdapterId, priority: int) -> deque[tuple[T, int]]:
        """Return the items to which one is added."""
        lines = self._lines.setdefault(priority, OrderedDict())
        if adapter not in lines:
            lines[adapter] = _Line(self._quantum_tokens * self._weight_of(adapter))
        self._count += 1
        return lines[adapter].items

    def _advance(self) -> tuple[AdapterId, _Line[T]]:
        """Give credit in turn until the first adapter can pay for its first item; return it."""
        lines = self._lines[self.priority]
        rounds = min(line.rounds_needed for line in lines.values())
        if rounds > 1:
            # The rounds in which no adapter can pay are counted at once.
            for line in lines.values():
                line.credit += (rounds - 1) * line.quantum
        while True:
            adapter, line = next(iter(lines.items()))
            if line.credit >= line.items[0][1]:
                return adapter, line
            line.credit += line.quantum
            lines.move_to_end(adapter)

    def _count_removal(self, priority: int, adapter: AdapterId) -> None:
        """Count an item that was removed, and drop what has become empty."""
        self._count -= 1
        lines = self._lines[priority]
        if not lines[adapter].items:
            del lines[adapter]
        if not lines:
            del self._lines[priority]
