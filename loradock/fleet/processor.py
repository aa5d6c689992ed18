"""The endpoint picker protocol: Envoy's external processing, which sets the destination header.

The protocol is that of the Gateway API Inference Extension: all docks in order are in the header
`x-gateway-destination-endpoint`, and in the metadata of `envoy.lb`. A gateway streams the body
(`FULL_DUPLEX_STREAMED`) or sends it whole (`BUFFERED`), as our own front does, which can then serve
without the picker. A request that names its adapter in the header `X-LoRADock-Adapter` is decided
before its body is read.
"""

import hmac
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from loradock.fleet.ext_proc import (
    BODY_NONE,
    BODY_STREAMED,
    OVERWRITE_OR_ADD,
    ProcessingResponse,
)
from loradock.fleet.picker import Picker

DESTINATION: Final = "x-gateway-destination-endpoint"
ADAPTER_HEADER: Final = "x-loradock-adapter"
STATUS_PATH: Final = "/fleet/status"

_NAMESPACE: Final = "envoy.lb"
_CHUNK_BYTES: Final = 62_000
"""The largest part of a body that is sent back; Envoy's own bound is 64 KiB."""

_NO_BODY: Final = {"request_body_mode": BODY_NONE}


class _Body(Struct, frozen=True):
    model: str | None = None


class Processor:
    """Answers the messages about each request; `key` is the fleet's, which the status needs.

    `prefix` precedes the address of each dock in the header.
    """

    def __init__(self, picker: Picker, key: str, prefix: str = "") -> None:
        self._prefix = prefix
        self._picker = picker
        self._key = f"Bearer {key}".encode()

    async def process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answer the messages about one request."""
        del context
        is_streamed, body = False, bytearray()
        async for request in requests:
            if request.HasField("protocol_config"):
                is_streamed = request.protocol_config.request_body_mode == BODY_STREAMED
            if request.HasField("request_headers"):
                response = self._on_headers(request.request_headers, is_streamed)
                if response is not None:
                    yield response
            elif request.HasField("request_body"):
                body += request.request_body.body
                if request.request_body.end_of_stream:
                    for response in self._on_body(bytes(body), is_streamed):
                        yield response
            elif request.HasField("request_trailers"):
                yield ProcessingResponse(request_trailers={})

    def _on_headers(self, message: Any, is_streamed: bool) -> Any | None:
        """Return the response; None if it follows the body."""
        headers = _headers(message.headers)
        name = headers.get(ADAPTER_HEADER, b"").decode("latin-1")
        if headers.get(":path", b"").partition(b"?")[0] == STATUS_PATH.encode():
            return self._status(headers)
        if message.end_of_stream:
            return _headers_response(self._mutation(name), is_streamed)
        if is_streamed:
            return None
        if name:
            return _headers_response(self._mutation(name), is_streamed, _NO_BODY)
        return ProcessingResponse(request_headers={})

    def _on_body(self, body: bytes, is_streamed: bool) -> list[Any]:
        chosen = self._mutation(model_of(body))
        if is_streamed:
            return [_headers_response(chosen, is_streamed), *_chunks(body)]
        return [ProcessingResponse(request_body={"response": {"header_mutation": chosen}})]

    def _mutation(self, model: str) -> dict[str, Any]:
        """Return the change of headers for a request's model; none if no dock is known."""
        # BASE:ADAPTER names the adapter too.
        name = model if self._picker.knows(model) else model.rpartition(":")[2]
        docks = self._picker.pick(name, time.monotonic()).docks
        order = ",".join(f"{self._prefix}{dock}" for dock in docks)
        if not docks:
            # A client's own choice does not count either.
            return {"remove_headers": [DESTINATION]}
        header = {"key": DESTINATION, "raw_value": order.encode()}
        return {"set_headers": [{"header": header, "append_action": OVERWRITE_OR_ADD}]}

    def _status(self, headers: Mapping[str, bytes]) -> Any:
        found = headers.get("authorization", b"")
        if not hmac.compare_digest(found, self._key):
            return _immediate(401, b'{"error": "the key of fleet.toml is needed"}')
        shown = self._picker.shown(time.monotonic())
        return _immediate(200, msgspec.json.encode(shown))


def model_of(body: bytes) -> str:
    """Return the model that a request's body names; empty if it names none."""
    try:
        return msgspec.json.decode(body, type=_Body).model or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # A dock says what is wrong.
        return ""


def _headers(headers: Any) -> dict[str, bytes]:
    return {one.key: one.raw_value or one.value.encode() for one in headers.headers}


def _headers_response(
    mutation: dict[str, Any], is_streamed: bool, mode: dict[str, Any] | None = None
) -> Any:
    response = ProcessingResponse(
        request_headers={"response": {"header_mutation": mutation}}, mode_override=mode
    )
    if is_streamed and "set_headers" in mutation:
        docks = mutation["set_headers"][0]["header"]["raw_value"].decode()
        response.dynamic_metadata.update({_NAMESPACE: {DESTINATION: docks}})
    return response


def _chunks(body: bytes) -> list[Any]:
    starts = range(0, max(1, len(body)), _CHUNK_BYTES)
    parts = [
        {
            "body": body[start : start + _CHUNK_BYTES],
            "end_of_stream": start + _CHUNK_BYTES >= len(body),
        }
        for start in starts
    ]
    return [
        ProcessingResponse(
            request_body={"response": {"body_mutation": {"streamed_response": part}}}
        )
        for part in parts
    ]


def _immediate(status: int, body: bytes) -> Any:
    return ProcessingResponse(immediate_response={"status": {"code": status}, "body": body})
