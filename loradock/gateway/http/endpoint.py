"""Endpoints: a decorated method of an object serves a method of a path.

    @post("/v1/embeddings", errors=INFERENCE, span="embeddings")
    async def embeddings(self, body: PoolingRequest) -> Embeddings:
        \"\"\"Embed inputs.\"\"\"

The signature has the types of the body and of the answer, and the docstring is the summary. An
endpoint that needs the head of a request has a parameter `request`. `EndpointApp` does the rest:
bounds on the body, decoding, errors, spans, and the end of a request that its client abandons: it
is cancelled in every phase.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Literal, Protocol, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from loradock.client import LoradockError
from loradock.gateway.http.errors import HttpError, Shape, error_of, error_response
from loradock.gateway.http.streams import ServerSentEvents
from loradock.gateway.recorder import SPAN, RequestSpan

TEXT_BYTES_MAX: Final = 8 << 20
"""Bound on a body without images: no request of this length fits into a message."""

INFERENCE: Final = (400, 404, 429, 503)
"""The statuses of errors of an inference."""
CHANGES: Final = (400, 403, 404, 409, 429, 503)
"""The statuses of errors of a change to adapters."""

CONNECTION: Final = "loradock.connection"
"""The name of the ASGI extension in which the gateway's own HTTP protocol is a `HttpConnection`."""

CLIENT: Final[ContextVar[str]] = ContextVar("client", default="")
"""Names the HTTP client of the current request, without its key or address."""

_UNCOUNTED_BYTES: Final = 256 << 10
_VALUES_MAX: Final = (
    (b",", 1 << 20, "commas"),
    (b"[", 1 << 17, "brackets"),
    (b"{", 1 << 17, "braces"),
)
"""Bounds on the values and on the lists and objects of a long body: decoding one takes 0.1 us."""

_JSON: Final = "application/json"

Reach = Literal["public", "key", "updating"]
"""Requests that are accepted: all, those with a key, or those with a key while the gateway lets
clients change adapters."""

Handler = Callable[..., Awaitable[Any]]
"""Called with `request` and `body`, if it has these parameters."""
HandlerT = TypeVar("HandlerT", bound=Handler)
Body = TypeVar("Body")


class Endpoint(Struct, frozen=True, kw_only=True):
    """One method of one path.

    `body` and `answer` are the types of the JSON, None if absent or text. `failure` is the type of
    errors in a separate shape, next to `ErrorBody`. `shape`: the protocol of all others.
    `has_images`: bodies can have the configured length instead of `TEXT_BYTES_MAX`. `span`: the
    operation in the name of its spans; empty: it has none.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    summary: str
    body: Any = None
    answer: Any = None
    failure: Any = None
    shape: Shape = "openai"
    media_type: str = _JSON
    streams: bool = False
    access: Reach = "key"
    has_images: bool = False
    errors: tuple[int, ...] = ()
    span: str = ""


def get(*paths: str, **options: Any) -> Callable[[HandlerT], HandlerT]:
    """Serve `GET` of paths with a method; `options` are further fields of its `Endpoint`."""
    return _served("GET", paths, options)


def post(*paths: str, **options: Any) -> Callable[[HandlerT], HandlerT]:
    """Serve `POST` of paths with a method; `options` are further fields of its `Endpoint`."""
    return _served("POST", paths, options)


def _served(
    method: Literal["GET", "POST"], paths: Iterable[str], options: dict[str, Any]
) -> Callable[[HandlerT], HandlerT]:
    def decorate(handler: HandlerT) -> HandlerT:
        routes = [{"method": method, "path": path, **options} for path in paths]
        vars(handler)["routes"] = (*routes, *vars(handler).get("routes", ()))
        return handler

    return decorate


def endpoints_of(owner: object) -> list[Endpoint]:
    """Return the endpoints of an object's class, in the order of their definition."""
    return [
        _endpoint(route, function.__get__(owner))
        for function in vars(type(owner)).values()
        for route in getattr(function, "routes", ())
    ]


def _endpoint(route: Mapping[str, Any], handler: Handler) -> Endpoint:
    hints = get_type_hints(handler)
    answers = get_args(hints["return"]) or (hints["return"],)
    kinds = [kind for kind in answers if kind not in (ServerSentEvents, Response, str)]
    # A list and a dictionary have type arguments too.
    is_union = ServerSentEvents in answers and bool(kinds)
    answer = kinds[0] if is_union else hints["return"] if kinds else None
    found = {
        "handler": handler,
        "summary": (inspect.getdoc(handler) or "").partition(".\n")[0].removesuffix("."),
        "body": hints.get("body"),
        "answer": answer,
        "streams": is_union,
        "media_type": "text/plain" if str in answers else _JSON,
    }
    return Endpoint(**{**found, **route})


class BodyLimits(Struct, frozen=True):
    """Bounds of what is received; `long_bodies` are decoded one at a time."""

    body_bytes_max: int
    receive_timeout_s: float
    long_bodies: asyncio.Lock


class Spans(Protocol):
    """Begins spans of requests."""

    def begin(self, operation: str, headers: Headers, body: Any) -> RequestSpan:
        """Begin the span of a request, below the span that its headers name."""


class Access(Protocol):
    """Who sends requests, and what they can reach."""

    def refusal(self, endpoint: Endpoint, scope: Scope) -> Response | None:
        """Return the answer to a request without access to an endpoint; None if it has access."""

    def client_of(self, scope: Scope) -> str:
        """Return the name of a request's client."""


class EndpointApp:
    """The ASGI application of one endpoint; `spans` None: its requests have no spans."""

    def __init__(
        self, endpoint: Endpoint, limits: BodyLimits, access: Access, spans: Spans | None
    ) -> None:
        bytes_max = limits.body_bytes_max
        self._bytes_max: Final = (
            bytes_max if endpoint.has_images else min(bytes_max, TEXT_BYTES_MAX)
        )
        self._limits: Final = limits
        self._endpoint: Final = endpoint
        self._access: Final = access
        self._spans: Final = spans if endpoint.span else None
        self._takes_request: Final = "request" in inspect.signature(endpoint.handler).parameters
        self._decoder = None if endpoint.body is None else msgspec.json.Decoder(endpoint.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        refusal = self._access.refusal(self._endpoint, scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        # The task is this request's.
        CLIENT.set(self._access.client_of(scope))
        try:
            arguments = await self._arguments(scope, receive)
        except Disconnected:
            return
        except HttpError as error:
            await error_response(error, self._endpoint.shape)(scope, receive, send)
            return
        watch = Watch(connection_of(scope))
        try:
            await self._serve(arguments, scope, receive, send)
        except asyncio.CancelledError:
            # The server cancels too, when it ends; only a client that left is handled here.
            if not watch.take_cancellation():
                raise
        finally:
            watch.end()

    async def _arguments(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        arguments = {"request": Request(scope)} if self._takes_request else {}
        body = await read_body(scope, receive, self._bytes_max, self._limits.receive_timeout_s)
        if self._decoder is None:
            return arguments
        check_json_type(scope)
        if len(body) <= _UNCOUNTED_BYTES:
            return {**arguments, "body": decode(self._decoder, body)}
        async with self._limits.long_bodies:
            began_s = time.perf_counter()
            decoded = decode(self._decoder, body)
            # Other tasks, some of which need several turns, have as long before the next long body.
            await asyncio.sleep(time.perf_counter() - began_s)
        return {**arguments, "body": decoded}

    async def _serve(
        self, arguments: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            if self._spans is None:
                answer = await self._endpoint.handler(**arguments)
            else:
                answer = await self._traced(self._spans, arguments, scope)
        except HttpError as error:
            answer = error_response(error, self._endpoint.shape)
        except LoradockError as error:
            answer = error_response(error_of(error), self._endpoint.shape)
        if isinstance(answer, ServerSentEvents):
            await answer.send(send, only_head=scope["method"] == "HEAD")
        else:
            await _response_of(answer)(scope, receive, send)

    async def _traced(self, spans: Spans, arguments: dict[str, Any], scope: Scope) -> Any:
        """Return the answer of a request whose span ends with it."""
        span = spans.begin(self._endpoint.span, Headers(scope=scope), arguments.get("body"))
        token = SPAN.set(span)
        try:
            answer = await self._endpoint.handler(**arguments)
        except BaseException as error:
            span.on_error(error)
            span.end()
            raise
        finally:
            SPAN.reset(token)
        if isinstance(answer, ServerSentEvents):
            return answer.ended_by(span.end)
        span.end()
        return answer


class JsonResponse(Response):
    """An answer in JSON, whose headers cost less than those of the general class."""

    def __init__(self, content: bytes, status: int) -> None:
        self.status_code = status
        self.body = content
        self.background = None
        length = str(len(content)).encode()
        self.raw_headers = [(b"content-length", length), (b"content-type", b"application/json")]


def json_response(value: Any, status: int = 200) -> Response:
    """Return an answer with a Struct, or anything else that msgspec encodes, as JSON."""
    return JsonResponse(msgspec.json.encode(value), status)


def _response_of(answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    return PlainTextResponse(answer) if isinstance(answer, str) else json_response(answer)


class Disconnected(Exception):  # noqa: N818 - named by what happened
    """The client closed the connection before its request was complete."""


def header_of(scope: Scope, name: bytes) -> str:
    """Return the first value of a header, named in lower case; empty if absent."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


async def read_body(
    scope: Scope, receive: Receive, bytes_max: int, timeout_s: float
) -> bytes | bytearray:
    """Return the whole body; raises `HttpError` if it is too long or arrives too slowly."""
    if connection_of(scope).has_received_all:
        return await _read(receive, bytes_max)
    length = header_of(scope, b"content-length")
    if length.isascii() and length.isdigit() and int(length) > bytes_max:
        raise _too_long(bytes_max)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, bytes_max)
    except TimeoutError as error:
        raise HttpError(408, f"the body did not arrive within {timeout_s:g} s") from error


async def _read(receive: Receive, bytes_max: int) -> bytes | bytearray:
    # A long body is never copied as a whole, and its values are counted as it arrives.
    body, counts = bytearray(), [0] * len(_VALUES_MAX)
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part: bytes = message.get("body", b"")
        if len(body) + len(part) > bytes_max:
            raise _too_long(bytes_max)
        more = message.get("more_body", False)
        if more or len(body) + len(part) > _UNCOUNTED_BYTES:
            _count_values(part, counts)
        if not more and not body:
            return part
        body += part
    return body


def _count_values(part: bytes, counts: list[int]) -> None:
    """Raise `HttpError` for JSON of so many values that decoding it would stop the event loop.

    `counts`: those of the parts before. Strings are counted as if they were JSON.
    """
    for kind, (character, most, what) in enumerate(_VALUES_MAX):
        counts[kind] += part.count(character)
        if counts[kind] > most:
            raise HttpError(413, f"the body must have at most {most} {what}")


def _too_long(bytes_max: int) -> HttpError:
    return HttpError(413, f"the body is too long; at most {bytes_max} bytes are read")


def check_json_type(scope: Scope) -> None:
    """Raise `HttpError` unless the body is declared as JSON."""
    declared = header_of(scope, b"content-type")
    if declared == _JSON:
        return
    declared = declared.partition(";")[0].strip().lower()
    if declared != _JSON:
        raise HttpError(
            415, f"the content type must be application/json, got {declared or 'none'!r}"
        )


def decode(decoder: "msgspec.json.Decoder[Body]", body: bytes | bytearray) -> Body:
    """Return the decoded body; raises `HttpError` for one that is not as documented.

    Only the main thread can call it: its stack suffices for the depth at which decoding stops.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise HttpError(400, str(error), _param_of(str(error))) from error
    except RecursionError as error:
        raise HttpError(400, "the JSON is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from error


def _param_of(message: str) -> str | None:
    """Return the top-level field that a message of msgspec names."""
    # Of a dictionary's key the path is "`key` in `$.field`".
    _, separator, path = message.rpartition("`$.")
    if separator:
        return path.removesuffix("`").partition(".")[0].partition("[")[0]
    _, separator, field = message.partition("field `")
    return field.partition("`")[0] if separator else None


class HttpConnection(Protocol):
    """A connection of the gateway's HTTP protocol; it executes one request at a time."""

    @property
    def has_received_all(self) -> bool:
        """Return whether no request is incomplete, so that reading a body does not wait."""

    def set_watch(self, watch: "Watch | None") -> None:
        """Report the loss of the connection to a watch, at once if it is lost; None: to none."""


def connection_of(scope: Scope) -> HttpConnection:
    """Return the connection of a request."""
    connection: HttpConnection = scope["extensions"][CONNECTION]
    return connection


class Watch:
    """Cancels the current task when its client leaves, until `end`."""

    def __init__(self, connection: HttpConnection) -> None:
        self._task = asyncio.current_task()
        self._has_left = False
        self._connection = connection
        connection.set_watch(self)

    def on_left(self) -> None:
        """Cancel the task."""
        self._has_left = True
        if self._task is not None:
            self._task.cancel()

    def take_cancellation(self) -> bool:
        """Return whether this watch alone cancelled the task; the cancellation is then over."""
        return self._has_left and self._task is not None and self._task.uncancel() == 0

    def end(self) -> None:
        """Stop watching."""
        self._connection.set_watch(None)
