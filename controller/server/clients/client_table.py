"""Clients by their session tokens, and the connection that each one's replies are sent to.

A token proves that a frame is of a client, on any connection. So a client that reconnects is
answered on its new connection, and no peer receives another client's replies by choosing a routing
id.
"""

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from loradock.messages.ids import client_name
from loradock.messages.wire import Body

CLIENTS_MAX: Final = 65_536
"""Bound on the clients with a route; a forgotten one is known again with its next frame."""

CLIENTS_PER_ROUTE_MAX: Final = 16
"""Bound on the clients of one connection, so that it can't make the others forgotten."""

_HASH_BYTES: Final = 8


class Client:
    """A client: its public name, its secret token, and the connection of its last frame."""

    __slots__ = ("key", "name", "route")

    def __init__(self, token: bytes, user: str, route: bytes) -> None:
        self.key: Final = (user, token)
        self.name: Final = client_name(token, user)
        self.route = route

    def hash_private(self, body: Body) -> int:
        """Return the hash by which a repetition of a request with a payload is known.

        It is keyed by the token, so that the log does not reveal which prompts were equal or lets
        a short prompt be guessed.
        """
        keyed = blake2b(xxh3_128_digest(body), key=self.key[1], digest_size=_HASH_BYTES)
        return int.from_bytes(keyed.digest())


hash_public: Final[Callable[[Body], int]] = xxh3_64_intdigest
"""Return the hash by which a repetition of a request is known whose content is in the log."""


class ClientTable:
    """The clients that have sent a frame; the one whose last frame is the oldest is first."""

    def __init__(
        self, count_max: int = CLIENTS_MAX, per_route_max: int = CLIENTS_PER_ROUTE_MAX
    ) -> None:
        self._count_max: Final = count_max
        self._per_route_max: Final = per_route_max
        self._by_key: OrderedDict[tuple[str, bytes], Client] = OrderedDict()
        self._by_name: dict[str, Client] = {}
        self._by_route: dict[bytes, list[Client]] = {}

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._by_key)

    def admit(self, route: bytes, token: bytes, user: str) -> Client:
        """Return the client that sent a frame over the connection `route`, with a user's key."""
        key = (user, token)
        client = self._by_key.get(key)
        if client is not None and client.route == route:
            self._by_key.move_to_end(key)
            return client
        if client is not None:
            self._forget(client)
            client.route = route
        else:
            client = Client(token, user, route)
        self._by_key[key] = self._by_name[client.name] = client
        same_route = self._by_route.setdefault(route, [])
        same_route.append(client)
        if len(same_route) > self._per_route_max:
            self._forget(same_route[0])
        if len(self._by_key) > self._count_max:
            self._forget(next(iter(self._by_key.values())))
        return client

    def route_of(self, name: str) -> bytes | None:
        """Return the connection to a client; None if it has to send a frame first."""
        client = self._by_name.get(name)
        return None if client is None else client.route

    def _forget(self, client: Client) -> None:
        del self._by_key[client.key], self._by_name[client.name]
        same_route = self._by_route[client.route]
        same_route.remove(client)
        if not same_route:
            del self._by_route[client.route]
