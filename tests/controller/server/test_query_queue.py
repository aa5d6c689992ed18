"""Waiting queries: the clients are served in turn, and their number is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.server import query_queue
from loradock.controller.server.query_queue import QUERIES_PER_CLIENT_MAX, QueryQueue
from loradock.messages.requests import ShowStatus


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
    monkeypatch.setattr(query_queue, "QUERIES_MAX", len(queue))
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
