"""State of clients: their connections, their payloads, and the replies to them.

A token proves that a frame is of a client, on any connection. So a client that reconnects is
answered on its new connection, and no peer receives another client's replies by choosing a routing
id. Payloads (prompts, and inputs of embeddings and classifications) leave this module only for the
engine, are never logged, and are dropped with the answer.
"""

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from loradock.messages import requests
from loradock.messages.commands import StartGeneration, StartInference, StartPooling
from loradock.messages.ids import Epoch, RequestId, client_name
from loradock.messages.requests import Reply
from loradock.messages.wire import REPLIES, REQUESTS, Body, batches

CLIENTS_MAX: Final = 65_536
"""Bound on the clients with a route; a forgotten one is known again with its next frame."""

CLIENTS_PER_ROUTE_MAX: Final = 16
"""Bound on the clients of one connection, so that it can't make the others forgotten."""

PAYLOAD_BYTES_MAX: Final = 1 << 30
"""Bound on the payloads of unanswered requests, in bytes together.

Payloads of requests that are pending already, which clients resend after a restart, can take the
same number of bytes again.
"""

SHARED_BYTES_MAX: Final = 1 << 16
"""Bound on the replies that share a frame, in bytes; a longer reply is alone."""

_HASH_BYTES: Final = 8

Send = Callable[[bytes, bytes], None]
"""Sends a frame over a connection."""


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

    def user_of(self, name: str) -> str:
        """Return the user of a client, empty for a local one."""
        client = self._by_name.get(name)
        return "" if client is None else client.key[0]

    def _forget(self, client: Client) -> None:
        del self._by_key[client.key], self._by_name[client.name]
        same_route = self._by_route[client.route]
        same_route.remove(client)
        if not same_route:
            del self._by_route[client.route]


class Payloads:
    """Encoded requests: decoded, a prompt of token ids takes many times the memory."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, bytes] = {}
        # Whether a request's payload is kept. The dict's own method: every answer calls it.
        self.has: Final[Callable[[RequestId], bool]] = self._by_id.__contains__
        self.size_bytes = 0

    def store(self, request_id: RequestId, body: Body, is_pending: bool) -> bool:
        """Keep a request's payload unless it is kept already; False if the bound is reached.

        A pending request without its payload then ends as if that were lost.
        """
        if request_id in self._by_id:
            return True
        if self.size_bytes + memoryview(body).nbytes > PAYLOAD_BYTES_MAX * (1 + is_pending):
            return is_pending
        # A copy: the frame has other requests too.
        self._by_id[request_id] = stored = bytes(body)
        self.size_bytes += len(stored)
        return True

    def drop(self, request_id: RequestId) -> None:
        """Drop a request's payload, if there is one."""
        self.size_bytes -= len(self._by_id.pop(request_id, b""))

    def complete(self, command: StartInference) -> StartInference | None:
        """Return the command with its payload; None if an earlier process had it."""
        body = self._by_id.get(command.request_id)
        match None if body is None else REQUESTS.decode_body(body), command:
            case requests.Generate() as request, StartGeneration():
                return msgspec.structs.replace(
                    command,
                    prompt=request.prompt,
                    sampling=request.sampling,
                    priority=request.priority,
                    trace=request.trace,
                    client=request.client,
                )
            case (requests.Embed() | requests.Classify()) as request, StartPooling():
                return msgspec.structs.replace(
                    command,
                    inputs=request.inputs,
                    trace=request.trace,
                    truncation=request.truncation,
                    dimensions=request.dimensions if isinstance(request, requests.Embed) else 0,
                    client=request.client,
                )
        return None


class Outbox:
    """Encoded replies that wait for the end of the iteration, by connection and in order."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[bytes, list[bytes]] = {}

    def add(self, route: bytes, reply: Reply) -> None:
        """Send a reply over a connection at the next `flush`."""
        self._waiting.setdefault(route, []).append(REPLIES.encode_body(reply))

    def flush(self, epoch: Epoch) -> None:
        """Send all replies."""
        for route, bodies in self._waiting.items():
            for batch in batches(bodies, SHARED_BYTES_MAX):
                self._send(route, REPLIES.join(batch, epoch))
        self._waiting.clear()
