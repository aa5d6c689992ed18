"""Clients by token: which connection they are answered on, and which are forgotten."""

from loradock.controller.server.clients import ClientTable


def token(number: int) -> bytes:
    return number.to_bytes(12)


def test_a_client_is_answered_on_the_connection_of_its_last_frame() -> None:
    table = ClientTable()
    client = table.admit(b"first", token(1), "")
    assert table.route_of(client.name) == b"first"
    assert table.admit(b"second", token(1), "") is client
    assert table.route_of(client.name) == b"second"
    assert table.route_of("unknown") is None
    assert len(table) == 1


def test_a_token_of_another_user_is_another_client() -> None:
    table = ClientTable()
    names = {table.admit(b"route", token(1), user).name for user in ("", "ada", "bob")}
    assert len(names) == len(table) == 3


def test_the_client_whose_last_frame_is_the_oldest_is_forgotten_first() -> None:
    table = ClientTable(count_max=3)
    clients = [table.admit(bytes([n]), token(n), "") for n in range(3)]
    table.admit(b"\0", token(0), "")
    table.admit(b"new", token(9), "")
    routes = [table.route_of(client.name) for client in clients]
    assert routes == [b"\0", None, b"\2"]


def test_a_connection_with_many_tokens_makes_only_its_own_forgotten() -> None:
    table = ClientTable(count_max=1000, per_route_max=4)
    mine = table.admit(b"mine", token(1), "")
    for number in range(100, 5000):
        table.admit(b"flood", token(number), "")
    assert table.route_of(mine.name) == b"mine"
    assert len(table) == 5
    moved = table.admit(b"mine", token(4999), "")
    assert table.route_of(moved.name) == b"mine"
    assert len(table) == 5


def test_the_hash_of_a_private_body_is_of_its_bytes_and_its_client() -> None:
    table = ClientTable()
    clients = [table.admit(b"r", token(n), "") for n in range(4)]
    hashes = {client.hash_private(body) for client in clients for body in (b"", b"a", b"b" * 9999)}
    assert len(hashes) == 12
    assert all(0 <= found < 2**64 for found in hashes)
    assert clients[0].hash_private(b"a") == ClientTable().admit(b"x", token(0), "").hash_private(
        b"a"
    )
