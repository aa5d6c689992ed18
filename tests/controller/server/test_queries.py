"""Waiting queries: their share of the loop, the clients' turns, and bounds on their number."""

from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.server import queries
from loradock.controller.server.queries import (
    BUSY_NS,
    BUSY_SLICE_NS,
    PAUSE_FACTOR,
    PAUSE_NS_MAX,
    QUERIES_PER_CLIENT_MAX,
    QUIET_SLICE_NS,
    QueryBudget,
    QueryQueue,
)
from loradock.messages.requests import ShowStatus

QUERIES_NS = st.lists(st.integers(1_000, 1_000_000), min_size=1, max_size=200)


def run(budget: QueryBudget, queries_ns: list[int], arrives: bool) -> tuple[int, int]:
    """Answer queries that take these times; return the time in slices, and all of it."""
    now = spent = 0
    waiting = list(queries_ns)
    while waiting:
        if arrives:
            budget.on_request(now)
        assert budget.begin(now) == (budget.wait_ns(now) == 0)
        if budget.wait_ns(now):
            now += budget.wait_ns(now)
            continue
        started = now
        while waiting:
            now += waiting.pop()
            if budget.is_over(now):
                break
        spent += now - started
        budget.end(now)
    return spent, now + budget.wait_ns(now)


@given(queries_ns=QUERIES_NS)
def test_queries_have_a_small_share_while_other_requests_arrive(queries_ns: list[int]) -> None:
    spent, total = run(QueryBudget(), queries_ns, arrives=True)
    assert spent == sum(queries_ns)
    assert total >= (1 + PAUSE_FACTOR) * spent


@given(queries_ns=QUERIES_NS)
def test_queries_wait_for_nothing_while_no_other_request_arrives(queries_ns: list[int]) -> None:
    assert run(QueryBudget(), queries_ns, arrives=False) == (sum(queries_ns), sum(queries_ns))


def test_a_slice_in_which_the_process_did_not_run_is_no_long_pause() -> None:
    budget = QueryBudget()
    budget.on_request(10**10)
    assert budget.begin(0)
    budget.end(10**10)
    assert budget.wait_ns(10**10) == PAUSE_NS_MAX


def test_slices_are_short_only_for_some_time_after_a_request() -> None:
    budget = QueryBudget()
    budget.on_request(0)
    for now, slice_ns in ((1, BUSY_SLICE_NS), (BUSY_NS, QUIET_SLICE_NS)):
        assert budget.begin(now)
        assert not budget.is_over(now + slice_ns - 1)
        assert budget.is_over(now + slice_ns)


def add(queue: QueryQueue[ShowStatus], client: bytes, request_id: str = "r") -> bool:
    return queue.add(client, request_id, ShowStatus(request_id))


def filled(clients: list[bytes]) -> QueryQueue[ShowStatus]:
    queue: QueryQueue[ShowStatus] = QueryQueue()
    for number, client in enumerate(clients):
        assert add(queue, client, f"r-{number}")
    return queue


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=QUERIES_PER_CLIENT_MAX))
def test_every_waiting_client_is_served_between_two_answers_to_another(
    clients: list[bytes],
) -> None:
    queue = filled(clients)
    taken: list[tuple[bytes, int]] = []
    waiting = {client: clients.count(client) for client in set(clients)}
    since = {client: set(waiting) - {client} for client in waiting}
    while queue:
        client, query = queue.take()
        # Nothing that waits was passed over twice by the same client.
        last = [other for other, _ in taken[::-1]]
        if client in last:
            between = set(last[: last.index(client)])
            assert {other for other in since[client] if waiting[other]} <= between
        waiting[client] -= 1
        taken.append((client, int(query.request_id.removeprefix("r-"))))
    for client in set(clients):
        order = [number for taker, number in taken if taker == client]
        assert order == sorted(order)
    assert sorted(number for _, number in taken) == list(range(len(clients)))


def test_the_waiting_queries_are_bounded_per_client_and_together(monkeypatch) -> None:
    queue = filled([b"a"] * QUERIES_PER_CLIENT_MAX)
    assert not add(queue, b"a")
    assert add(queue, b"b")
    monkeypatch.setattr(queries, "QUERIES_MAX", len(queue))
    assert not add(queue, b"c")
    queue.take()
    assert add(queue, b"c")


def test_a_repeated_query_is_added_once() -> None:
    queue: QueryQueue[ShowStatus] = QueryQueue()
    for _ in range(100):
        assert add(queue, b"a")
    assert add(queue, b"b")
    assert [queue.take() for _ in range(len(queue))] == [
        (b"a", ShowStatus("r")),
        (b"b", ShowStatus("r")),
    ]
    assert add(queue, b"a")
    assert len(queue) == 1
