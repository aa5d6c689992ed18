"""Images of chats: which addresses are contacted."""

import socket
from typing import Any

import pytest

from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference import images


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: Any) -> None:
    def lookup(host: Any, port: int, **options: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("::1", "fe80::1%eth0", "::ffff:127.0.0.1", "100.64.0.1"),
    ],
)
def test_an_allowed_name_with_an_internal_address_is_not_contacted(
    monkeypatch: pytest.MonkeyPatch, address: Any
) -> None:
    resolves_to(monkeypatch, address)
    with pytest.raises(HttpError, match="no public address"):
        images.fetch_image("https://cdn.example/a.png", ["cdn.example"])


def test_the_connection_is_made_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolves_to(monkeypatch, "127.0.0.1", "93.184.216.34")
    contacted = []

    class Refusing(socket.socket):
        def connect(self, address: Any) -> None:
            contacted.append(address)
            raise ConnectionRefusedError("refused by the test")

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(HttpError, match="can't be fetched"):
        images.fetch_image("http://CDN.example:8080/a.png", ["cdn.example"])
    assert contacted == [("93.184.216.34", 8080)]


def test_other_hosts_are_refused_before_they_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(*arguments: Any, **options: Any) -> None:
        raise AssertionError("looked up")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for url in ("https://evil.example/", "https://cdn.example.evil/", "https://u@evil.example/"):
        with pytest.raises(HttpError, match="allow it with"):
            images.fetch_image(url, ["cdn.example"])
