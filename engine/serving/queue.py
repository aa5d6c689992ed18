"""Who can wait for a batch, and in which order: admission, priorities, fair turns of adapters and
of their clients.

Turns are those of deficit round robin with tokens as the cost. An adapter's quantum is its weight
times that of a weight of 1; within an adapter's turns, its clients take turns of equal quanta. If
the sequence of adapter a, with all before it in a's own queue, costs C tokens, Q(b) is the quantum
of each adapter b and L the largest cost of one sequence, then before it is served, every other
adapter of its priority is served at most

    ceil((C + D) / Q(a)) * Q(b) + L

tokens, with D the tokens that a has generated beyond its credit (Shreedhar and Varghese, 1995). So
a wait depends on the number of waiting adapters, the weights and the sequences of the same adapter,
and not on the number or the length of the sequences of others. The same bound holds for the clients
of one adapter, with 1 as the weight of each.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from loradock.engine.errors import Conflict, NotResident, NotServed, Overloaded
from loradock.engine.punica.mapping import BASE
from loradock.engine.residency.arena import Arena
from loradock.messages.commands import StartGeneration, StartInference
from loradock.messages.ids import NO_SLOT, AdapterId, Generation, RequestId, Slot, client_of

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
        self._arena.check_generation(command.slot, command.generation)
        if self.residents[command.slot] != command.adapter_id:
            raise NotResident(
                f"slot {command.slot} holds adapter {self.residents[command.slot]}, "
                f"not {command.adapter_id}; activate it again"
            )


def check_admission(
    command: StartInference,
    slots: SlotTable,
    waiting: Counter[str],
    waiting_max: int,
    active_ids: Container[RequestId],
) -> None:
    """Raise unless a request can join the queue; a refused request leaves no trace.

    waiting: the number of waiting requests of each client. A full queue accepts requests of clients
    with less than an equal share of its places, up to as many again.

    Raises `Overloaded` for a full queue, `Conflict` for an id in `active_ids`, and
    `NotResident` for an adapter that is not in its slot.
    """
    total, own = waiting.total(), waiting[client_key(command)]
    share = waiting_max // (len(waiting) + (not own))
    if total >= waiting_max and (own >= share or total >= 2 * waiting_max):
        raise Overloaded(
            f"{total} requests wait for a batch, {own} of them of this client; at most "
            f"{waiting_max} wait: try again when some have ended"
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


Owner = tuple[AdapterId, str]
"""Who waits: an adapter, and a client that uses it."""


def client_key(command: StartInference) -> str:
    """Return what tells the client that a request is for from others."""
    return f"{client_of(command.request_id)} {command.client}"


def owner_of(command: StartInference) -> Owner:
    """Return the owner of a request."""
    return command.adapter_id, client_key(command)


class _Line(Generic[T]):
    """The waiting items of one client of an adapter with their costs, and the client's credit."""

    def __init__(self, quantum: int) -> None:
        self.quantum: Final = quantum
        self.credit = 0
        self.items: deque[tuple[T, int]] = deque()

    @property
    def cost(self) -> int:
        """The cost of its first item."""
        return self.items[0][1]


class _Lines(Generic[T]):
    """The lines of one adapter and priority by client, and the adapter's credit.

    The client whose turn it is comes first.
    """

    def __init__(self, quantum: int) -> None:
        self.quantum: Final = quantum
        self.credit = 0
        self.by_client: OrderedDict[str, _Line[T]] = OrderedDict()

    @property
    def cost(self) -> int:
        """The cost of its next item."""
        return _advance(self.by_client)[1].cost


class _Waiting(Protocol):
    """What takes turns: it has credit, and its next item a cost."""

    credit: int

    @property
    def quantum(self) -> int: ...

    @property
    def cost(self) -> int: ...


_Key = TypeVar("_Key", bound=Hashable)
_Turn = TypeVar("_Turn", bound=_Waiting)


def _advance(turns: "OrderedDict[_Key, _Turn]") -> tuple[_Key, _Turn]:
    """Give credit in turn until the first one can pay for its next item; return it."""
    costs = {key: turn.cost for key, turn in turns.items()}
    # The rounds after which each can pay, 0 or less if it can now.
    rounds = min(-((turn.credit - costs[key]) // turn.quantum) for key, turn in turns.items())
    if rounds > 1:
        # The rounds in which none can pay are counted at once.
        for turn in turns.values():
            turn.credit += (rounds - 1) * turn.quantum
    while True:
        key, turn = next(iter(turns.items()))
        if turn.credit >= costs[key]:
            return key, turn
        turn.credit += turn.quantum
        turns.move_to_end(key)


class WaitingQueue(Generic[T]):
    """Waiting items: the smallest priority first, in turns of its adapters and of their clients.

    Those of one owner are in order, the oldest first. The cost of an item is given when it is
    added. `charge` accounts for tokens that are generated afterwards.
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
        self._lines: dict[int, OrderedDict[AdapterId, _Lines[T]]] = {}
        # The number of items of each client that has any.
        self.clients: Final[Counter[str]] = Counter()

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return self.clients.total()

    def __bool__(self) -> bool:
        """Return whether any item waits."""
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        """Yield all items, owner by owner."""
        for lines in self._lines.values():
            for by_client in lines.values():
                for line in by_client.by_client.values():
                    yield from (item for item, _ in line.items)

    @property
    def priority(self) -> int:
        """The priority that is next; the queue must not be empty."""
        return min(self._lines)

    @property
    def owners(self) -> tuple[Owner, ...]:
        """The owners with items of the priority that is next, in the order of their turns."""
        if not self._lines:
            return ()
        lines = self._lines[self.priority]
        return tuple((adapter, one) for adapter in lines for one in lines[adapter].by_client)

    def append(self, owner: Owner, item: T, cost: int, priority: int = 0) -> None:
        """Add an item after the others of its owner and priority."""
        self._line_of(owner, priority).append((item, cost))

    def append_first(self, owner: Owner, item: T, cost: int, priority: int = 0) -> None:
        """Add an item before the others of its owner and priority."""
        self._line_of(owner, priority).appendleft((item, cost))

    def charge(self, owner: Owner, tokens: int) -> None:
        """Count tokens generated for an owner; nothing if no item of its adapter waits."""
        adapter, client = owner
        for lines in self._lines.values():
            if adapter in lines:
                lines[adapter].credit -= tokens
                if client in lines[adapter].by_client:
                    lines[adapter].by_client[client].credit -= tokens

    def first(self) -> T:
        """Return the item that `pop` would remove; the queue must not be empty."""
        _, lines = _advance(self._lines[self.priority])
        _, line = _advance(lines.by_client)
        return line.items[0][0]

    def pop(self) -> T:
        """Remove and return the next item; the queue must not be empty."""
        adapter, lines = _advance(self._lines[self.priority])
        client, line = _advance(lines.by_client)
        item, cost = line.items.popleft()
        line.credit -= cost
        lines.credit -= cost
        self._count_removal(self.priority, (adapter, client))
        return item

    def remove(self, owner: Owner, item: T) -> bool:
        """Remove an item; return whether it was waiting."""
        adapter, client = owner
        for priority, lines in self._lines.items():
            line = lines[adapter].by_client.get(client) if adapter in lines else None
            items = line.items if line is not None else deque[tuple[T, int]]()
            found = next((entry for entry in items if entry[0] is item), None)
            if found is not None:
                items.remove(found)
                self._count_removal(priority, owner)
                return True
        return False

    def serve_next(self, owner: Owner) -> None:
        """Make it the turn of one of `owners`."""
        adapter, client = owner
        lines = self._lines[self.priority]
        own = lines[adapter].by_client
        own.move_to_end(client, last=False)
        own[client].credit = max(own[client].credit, own[client].cost)
        lines.move_to_end(adapter, last=False)
        lines[adapter].credit = max(lines[adapter].credit, own[client].cost)

    def _line_of(self, owner: Owner, priority: int) -> deque[tuple[T, int]]:
        """Return the items to which one is added."""
        adapter, client = owner
        lines = self._lines.setdefault(priority, OrderedDict())
        if adapter not in lines:
            lines[adapter] = _Lines(self._quantum_tokens * self._weight_of(adapter))
        own = lines[adapter].by_client
        if client not in own:
            own[client] = _Line(self._quantum_tokens)
        self.clients[client] += 1
        return own[client].items

    def _count_removal(self, priority: int, owner: Owner) -> None:
        """Count an item that was removed, and drop what has become empty."""
        adapter, client = owner
        self.clients[client] -= 1
        if not self.clients[client]:
            del self.clients[client]
        lines = self._lines[priority]
        own = lines[adapter].by_client
        if not own[client].items:
            del own[client]
        if not own:
            del lines[adapter]
        if not lines:
            del self._lines[priority]
