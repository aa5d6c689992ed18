"""Endpoints: a route's body, its handler, and what is documented about it.

A request that its client abandons is cancelled, in every phase.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loradock.client import LoradockError
from loradock.gateway.http.bodies import (
    TEXT_BYTES_MAX,
    Disconnected,
    check_json_type,
    decode,
    read_body,
)
from loradock.gateway.http.disconnects import watch_of
from loradock.gateway.http.errors import HttpError, Shape, error_of, error_response
from loradock.gateway.http.streams import EventStream

Answer = Response | EventStream
Handler = Callable[..., Awaitable[Answer]]
"""Called with the `Request`, and with the decoded body where the endpoint has one."""

Access = Literal["public", "key", "updating"]
"""Which requests are accepted: all, those with a key, or those with a key while the gateway lets
clients change adapters."""


class Limits(Struct, frozen=True):
    """Bounds of what is received."""

    body_bytes_max: int
    receive_timeout_s: float


class Endpoint(Struct, frozen=True, kw_only=True):
    """One method of one path.

    `body` and `answer` are the types of the JSON; None where there is none, or where it is text.
    `failure` is the type of errors that have a shape of their own, next to `ErrorBody`.
    `shape`: the protocol of all others. `has_images`: bodies may have the configured length instead
    of `TEXT_BYTES_MAX`.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    summary: str
    body: Any = None
    answer: Any = None
    failure: Any = None
    shape: Shape = "openai"
    media_type: str = "application/json"
    streams: bool = False
    access: Access = "key"
    has_images: bool = False
    errors: tuple[int, ...] = ()


class EndpointApp:
    """The ASGI application of one endpoint."""

    def __init__(self, endpoint: Endpoint, limits: Limits) -> None:
        bytes_max = limits.body_bytes_max
        self._bytes_max: Final = (
            bytes_max if endpoint.has_images else min(bytes_max, TEXT_BYTES_MAX)
        )
        self._timeout_s: Final = limits.receive_timeout_s
        self._handler: Final = endpoint.handler
        self._shape: Final = endpoint.shape
        self._decoder = None if endpoint.body is None else msgspec.json.Decoder(endpoint.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            arguments = await self._arguments(scope, receive)
        except Disconnected:
            return
        except HttpError as error:
            await error_response(error, self._shape)(scope, receive, send)
            return
        watch = watch_of(scope, receive)
        try:
            await self._serve(arguments, scope, receive, send)
        except asyncio.CancelledError:
            # The server cancels too, when it ends; only a client that left is handled here.
            if not watch.take_cancellation():
                raise
        finally:
            watch.end()

    async def _arguments(self, scope: Scope, receive: Receive) -> tuple[Any, ...]:
        request = Request(scope)
        body = await read_body(scope, receive, self._bytes_max, self._timeout_s)
        if self._decoder is None:
            return (request,)
        check_json_type(scope)
        return request, decode(self._decoder, body)

    async def _serve(
        self, arguments: tuple[Any, ...], scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer = await self._answer(arguments)
        if isinstance(answer, EventStream):
            await answer.send(send, only_head=scope["method"] == "HEAD")
        else:
            await answer(scope, receive, send)

    async def _answer(self, arguments: tuple[Any, ...]) -> Answer:
        try:
            return await self._handler(*arguments)
        except HttpError as error:
            return error_response(error, self._shape)
        except LoradockError as error:
            return error_response(error_of(error), self._shape)
