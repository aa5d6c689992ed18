"""Bodies of requests: read within bounds of size and time, decoded into their Structs."""

import asyncio
from typing import Final, TypeVar

import msgspec
from starlette.types import Receive, Scope

from loradock.gateway.http.connection import connection_of
from loradock.gateway.http.errors import HttpError

Body = TypeVar("Body")

TEXT_BYTES_MAX: Final = 8 << 20
"""Bound on a body without images: no request of this length fits into a message."""


_JSON: Final = "application/json"


class Disconnected(Exception):  # noqa: N818 - named by what happened
    """The client closed the connection before its request was complete."""


def header_of(scope: Scope, name: bytes) -> str:
    """Return the first value of a header, named in lower case; empty where there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


async def read_body(scope: Scope, receive: Receive, bytes_max: int, timeout_s: float) -> bytes:
    """Return the whole body; raises `HttpError` if it is too long or arrives too slowly."""
    connection = connection_of(scope)
    if connection is not None and connection.has_received_all:
        return await _read(receive, bytes_max)
    length = header_of(scope, b"content-length")
    if length.isascii() and length.isdigit() and int(length) > bytes_max:
        raise _too_long(bytes_max)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, bytes_max)
    except TimeoutError as error:
        raise HttpError(408, f"the body did not arrive within {timeout_s:g} s") from error


async def _read(receive: Receive, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise _too_long(bytes_max)
        more = message.get("more_body", False)
        if not more and not parts:
            return part
        parts.append(part)
    return b"".join(parts)


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
            415, f"the content type is {declared or 'missing'!r}; application/json is needed"
        )


def decode(decoder: "msgspec.json.Decoder[Body]", body: bytes) -> Body:
    """Return the decoded body; raises `HttpError` for one that is not as documented.

    Only the main thread may call it: its stack suffices for the depth at which decoding stops.
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
