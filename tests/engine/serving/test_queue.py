"""Waiting sequences: adapters, and the clients of each, take turns; none waits for the amount of
another's work.
"""

from collections import Counter, deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loradock.engine.serving.queue import Owner, WaitingQueue

COSTS = st.integers(1, 2000)
ADAPTERS = st.integers(0, 4)
OWNERS = st.tuples(ADAPTERS, st.sampled_from("ab"))


class QueueMachine(RuleBasedStateMachine):
    """Every item is served once, and items of one adapter in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: WaitingQueue[int] = WaitingQueue(quantum_tokens=500)
        self.model: dict[Owner, deque[int]] = {}
        self.numbers = iter(range(10**9))

    @rule(owner=OWNERS, cost=COSTS)
    def append(self, owner: Owner, cost: int) -> None:
        item = next(self.numbers)
        self.queue.append(owner, item, cost)
        self.model.setdefault(owner, deque()).append(item)

    @rule(owner=OWNERS, cost=COSTS)
    def append_first(self, owner: Owner, cost: int) -> None:
        item = next(self.numbers)
        self.queue.append_first(owner, item, cost)
        self.model.setdefault(owner, deque()).appendleft(item)

    @rule(owner=OWNERS, tokens=COSTS)
    def charge(self, owner: Owner, tokens: int) -> None:
        self.queue.charge(owner, tokens)

    @precondition(lambda self: len(self.queue))
    @rule()
    def pop(self) -> None:
        first = self.queue.first()
        assert self.queue.pop() == first
        owners = [owner for owner, items in self.model.items() if items and items[0] == first]
        assert len(owners) == 1
        self._forget(owners[0], first)

    @rule(owner=OWNERS, data=st.data())
    def remove(self, owner: Owner, data: Any) -> None:
        items = self.model.get(owner, deque())
        item = data.draw(st.sampled_from([*items, -1]))
        assert self.queue.remove(owner, item) == (item != -1)
        if item != -1:
            self._forget(owner, item)

    @precondition(lambda self: len(self.queue))
    @rule(data=st.data())
    def serve_next(self, data: Any) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        self.queue.serve_next(owner)
        assert self.queue.first() == self.model[owner][0]

    def _forget(self, owner: Owner, item: int) -> None:
        self.model[owner].remove(item)
        if not self.model[owner]:
            del self.model[owner]

    @invariant()
    def has_the_same_items(self) -> None:
        expected = [item for items in self.model.values() for item in items]
        assert len(self.queue) == len(expected)
        assert sorted(self.queue) == sorted(expected)
        assert sorted(self.queue.owners) == sorted(self.model)
        clients = Counter[str]()
        for (_, client), items in self.model.items():
            clients[client] += len(items)
        assert self.queue.clients == clients


TestQueueMachine = QueueMachine.TestCase


@given(
    costs=st.lists(st.tuples(ADAPTERS, COSTS), min_size=2, max_size=60),
    quantum=st.sampled_from([1, 100, 1000]),
)
def test_waiting_adapters_are_served_equal_amounts(
    costs: list[tuple[int, int]], quantum: int
) -> None:
    queue: WaitingQueue[tuple[int, int, int]] = WaitingQueue(quantum_tokens=quantum)
    waiting: Counter[int] = Counter()
    for number, (adapter, cost) in enumerate(costs):
        queue.append((adapter, ""), (adapter, cost, number), cost)
        waiting[adapter] += 1
    served: Counter[int] = Counter()
    largest = max(cost for _, cost in costs)
    always_waiting = set(waiting)
    while queue:
        adapter, cost, _ = queue.pop()
        served[adapter] += cost
        waiting[adapter] -= 1
        if not waiting[adapter]:
            always_waiting.discard(adapter)
        amounts = [served[one] for one in always_waiting]
        if amounts:
            assert max(amounts) - min(amounts) <= 2 * (quantum + largest)


def test_generated_tokens_count_against_an_adapter_that_waits() -> None:
    queue: WaitingQueue[str] = WaitingQueue(quantum_tokens=100)
    for _ in range(4):
        queue.append((1, ""), "talkative", 100)
        queue.append((2, ""), "brief", 100)
    queue.charge((1, ""), 300)
    assert [queue.pop() for _ in range(3)] == ["brief"] * 3


@given(
    weights=st.tuples(*[st.integers(1, 5)] * 3),
    own=st.lists(COSTS, min_size=1, max_size=4),
    data=st.data(),
)
def test_a_wait_is_bounded_by_the_weights_and_the_own_costs(
    weights: tuple[int, int, int], own: list[int], data: Any
) -> None:
    quantum = 300
    queue: WaitingQueue[tuple[int, int]] = WaitingQueue(weights.__getitem__, quantum)
    others = [data.draw(st.lists(COSTS, min_size=1, max_size=30)) for _ in range(2)]
    for adapter, costs in enumerate((own, *others)):
        for cost in costs:
            queue.append((adapter, ""), (adapter, cost), cost)
    served, left = Counter[int](), len(own)
    while left:
        adapter, cost = queue.pop()
        served[adapter] += cost
        left -= adapter == 0
    rounds = -(-sum(own) // (quantum * weights[0]))
    largest = max(max(costs) for costs in others)
    for other in (1, 2):
        assert served[other] <= rounds * quantum * weights[other] + largest


def test_adapters_that_always_wait_are_served_by_their_weights() -> None:
    queue: WaitingQueue[int] = WaitingQueue({1: 1, 2: 3}.__getitem__, 100)
    for _ in range(400):
        queue.append((1, ""), 1, 50)
        queue.append((2, ""), 2, 50)
    served = Counter(queue.pop() for _ in range(400))
    assert served == {1: 100, 2: 300}


@given(
    own=st.lists(COSTS, min_size=1, max_size=4),
    others=st.lists(st.lists(COSTS, min_size=1, max_size=30), min_size=1, max_size=3),
)
def test_a_client_waits_for_its_own_amount_of_each_other_client(
    own: list[int], others: list[list[int]]
) -> None:
    """Of one adapter, next to which another one waits: the bound of the module's docstring."""
    quantum = 300
    queue: WaitingQueue[tuple[int, int]] = WaitingQueue(quantum_tokens=quantum)
    for client, costs in enumerate((own, *others)):
        for cost in costs:
            queue.append((1, str(client)), (client, cost), cost)
    served, left = Counter[int](), len(own)
    while left:
        client, cost = queue.pop()
        served[client] += cost
        left -= client == 0
    rounds = -(-sum(own) // quantum)
    for client, costs in enumerate(others, 1):
        assert served[client] <= rounds * quantum + max(costs)


def test_an_adapter_has_its_turns_however_many_clients_it_has() -> None:
    queue: WaitingQueue[int] = WaitingQueue(quantum_tokens=100)
    for number in range(400):
        queue.append((1, str(number % 40)), 1, 50)
        queue.append((2, ""), 2, 50)
    served = Counter(queue.pop() for _ in range(400))
    assert served == {1: 200, 2: 200}
