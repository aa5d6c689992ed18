"""The endpoint picker protocol: Envoy's external processing, which sets the destination header.

The protocol is that of the Gateway API Inference Extension: all docks in order are in the header
`x-gateway-destination-endpoint`, and in the metadata of `envoy.lb`. A gateway streams the body
(`FULL_DUPLEX_STREAMED`) or sends it whole (`BUFFERED`). Our own front reads the model itself from
bodies of the usual size, and sends it with the headers, in one message; for others it sends the
body. A request that names its adapter in the header `X-LoRADock-Adapter` needs neither.
"""

import hmac
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError
from msgspec import Struct

from loradock.fleet.ext_proc import (
    BODY_BUFFERED,
    BODY_BYTES_MAX,
    BODY_STREAMED,
    OVERWRITE_OR_ADD,
    ProcessingRequest,
    ProcessingResponse,
)
from loradock.fleet.picker import Picker

DESTINATION: Final = "x-gateway-destination-endpoint"
ADAPTER_HEADER: Final = "x-loradock-adapter"
STATUS_PATH: Final = "/fleet/status"

NAMESPACE: Final = "loradock"
MODEL: Final = "model"
"""Where our own proxy puts the model that a request's body names."""

_ENVOY_LB: Final = "envoy.lb"
_CHUNK_BYTES: Final = 62_000
"""The largest part of a body that is sent back; Envoy's own bound is 64 KiB."""

_TOO_LONG: Final = f'{{"error": "a body must have at most {BODY_BYTES_MAX} bytes"}}'.encode()
_WITH_BODY: Final = {"request_body_mode": BODY_BUFFERED}


class _Body(Struct, frozen=True):
    model: str | None = None


class Processor:
    """Decides about requests; `key` is the fleet's, which the status needs.

    `prefix` precedes the address of each dock in the header.
    """

    def __init__(self, picker: Picker, key: str, prefix: str = "") -> None:
        self._prefix = prefix
        self._picker = picker
        self._key = f"Bearer {key}".encode()

    def begin(self) -> "Exchange":
        """Return the exchange of messages about a new request."""
        return Exchange(self)

    def status_of(self, headers: Mapping[str, bytes]) -> Any:
        """Return the response to a request for the status."""
        found = headers.get("authorization", b"")
        if not hmac.compare_digest(found, self._key):
            return _immediate(401, b'{"error": "the key of fleet.toml is needed"}')
        shown = self._picker.shown(time.monotonic())
        return _immediate(200, msgspec.json.encode(shown))

    def decide(self, model: str) -> dict[str, Any]:
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


class Exchange:
    """The messages about one request.

    With our own front it is over with the decision. A gateway that streams bodies can send the
    dock's response too, and loses it if nobody sends it back.
    """

    def __init__(self, processor: Processor) -> None:
        self.is_over = False
        self._processor = processor
        self._is_streamed = self._is_response_streamed = False
        self._body = bytearray()

    def on_message(self, data: bytes) -> list[bytes]:
        """Return the responses to a message; raises `ValueError` for one that is malformed."""
        try:
            request = ProcessingRequest.FromString(data)
        except DecodeError as error:
            raise ValueError(f"it is no ProcessingRequest: {error}") from error
        if request.HasField("protocol_config"):
            config = request.protocol_config
            self._is_streamed = config.request_body_mode == BODY_STREAMED
            self._is_response_streamed = config.response_body_mode == BODY_STREAMED
        found = self._responses(request) or self._unchanged(request)
        return [response.SerializeToString() for response in found]

    def _responses(self, request: Any) -> list[Any]:
        if request.HasField("request_headers"):
            return self._on_headers(request.request_headers, _model_in(request.metadata_context))
        if request.HasField("request_body"):
            self._body += request.request_body.body
            if len(self._body) > BODY_BYTES_MAX:
                self.is_over = True
                return [_immediate(413, _TOO_LONG)]
            ends = request.request_body.end_of_stream
            # A body that is not streamed is whole, also if trailers follow.
            return self._on_body(ends=ends) if ends or not self._is_streamed else []
        if request.HasField("request_trailers"):
            return [*self._on_body(ends=False), ProcessingResponse(request_trailers={})]
        return []

    def _unchanged(self, request: Any) -> list[Any]:
        """Return the response to a message about the dock's response, which stays as it is."""
        if request.HasField("response_headers"):
            return [ProcessingResponse(response_headers={})]
        if request.HasField("response_trailers"):
            return [ProcessingResponse(response_trailers={})]
        if not request.HasField("response_body"):
            return []
        if not self._is_response_streamed:
            return [ProcessingResponse(response_body={})]
        body = request.response_body
        return _chunks("response_body", body.body, ends=body.end_of_stream)

    def _on_headers(self, message: Any, model: str) -> list[Any]:
        headers = {one.key: one.raw_value or one.value.encode() for one in message.headers.headers}
        if headers.get(":path", b"").partition(b"?")[0] == STATUS_PATH.encode():
            self.is_over = True
            return [self._processor.status_of(headers)]
        model = headers.get(ADAPTER_HEADER, b"").decode("latin-1") or model
        if message.end_of_stream or (model and not self._is_streamed):
            return [_headers_response(self._decide(model), self._is_streamed)]
        if self._is_streamed:
            # It follows the body.
            return []
        return [ProcessingResponse(request_headers={}, mode_override=_WITH_BODY)]

    def _on_body(self, *, ends: bool) -> list[Any]:
        """Return the responses to a whole body, which `ends` the request unless trailers follow."""
        chosen = self._decide(model_of(self._body))
        if self._is_streamed:
            return [
                _headers_response(chosen, self._is_streamed),
                *_chunks("request_body", bytes(self._body), ends=ends),
            ]
        return [ProcessingResponse(request_body={"response": {"header_mutation": chosen}})]

    def _decide(self, model: str) -> dict[str, Any]:
        self.is_over = not self._is_streamed
        return self._processor.decide(model)


def _model_in(metadata: Any) -> str:
    """Return the model that the proxy has found in the body; empty if it has found none."""
    for one in metadata.filter_metadata:
        if one.key == NAMESPACE and MODEL in one.value.fields:
            return str(one.value.fields[MODEL].string_value)
    return ""


def model_of(body: bytes | bytearray) -> str:
    """Return the model that a request's body names; empty if it names none."""
    try:
        return msgspec.json.decode(body, type=_Body).model or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # A dock says what is wrong.
        return ""


def _headers_response(mutation: dict[str, Any], is_streamed: bool) -> Any:
    response = ProcessingResponse(request_headers={"response": {"header_mutation": mutation}})
    if is_streamed and "set_headers" in mutation:
        docks = mutation["set_headers"][0]["header"]["raw_value"].decode()
        response.dynamic_metadata.update({_ENVOY_LB: {DESTINATION: docks}})
    return response


def _chunks(kind: str, body: bytes, *, ends: bool) -> list[Any]:
    starts = range(0, max(1, len(body)), _CHUNK_BYTES)
    parts = [
        {
            "body": body[start : start + _CHUNK_BYTES],
            "end_of_stream": ends and start + _CHUNK_BYTES >= len(body),
        }
        for start in starts
    ]
    return [
        ProcessingResponse(**{kind: {"response": {"body_mutation": {"streamed_response": part}}}})
        for part in parts
    ]


def _immediate(status: int, body: bytes) -> Any:
    return ProcessingResponse(immediate_response={"status": {"code": status}, "body": body})
