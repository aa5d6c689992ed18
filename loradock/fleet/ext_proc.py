"""The messages of Envoy's external processing that the picker reads and writes.

They have the names and numbers of `envoy.service.ext_proc.v3`, and those of its fields that are
used; others are skipped. The package with all messages of Envoy, `xds-protos`, overwrites files of
OpenTelemetry's package, which then can't be imported.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_PACKAGE: Final = "loradock.ext_proc"

BODY_BYTES_MAX: Final = 64 << 20
"""The longest body of a request; as long as docks accept by default."""

# Modes of a body, and what a header does to another one of its name.
BODY_BUFFERED: Final = 2
BODY_STREAMED: Final = 4
OVERWRITE_OR_ADD: Final = 2

_MESSAGES: Final = {
    "HeaderValue": "1 string key, 2 string value, 3 bytes raw_value",
    "HeaderMap": "1 HeaderValue* headers",
    "HeaderValueOption": "1 HeaderValue header, 3 int32 append_action",
    "HeaderMutation": "1 HeaderValueOption* set_headers, 2 string* remove_headers",
    "ProcessingMode": "3 int32 request_body_mode",
    "ProtocolConfiguration": "1 int32 request_body_mode, 2 int32 response_body_mode",
    "HttpHeaders": "1 HeaderMap headers, 3 bool end_of_stream",
    "HttpBody": "1 bytes body, 2 bool end_of_stream",
    "HttpTrailers": "",
    # A map has such entries on the wire.
    "NamedMetadata": "1 string key, 2 Struct value",
    "Metadata": "1 NamedMetadata* filter_metadata",
    "ProcessingRequest": (
        "2 HttpHeaders request_headers, 3 HttpHeaders response_headers, "
        "4 HttpBody request_body, 5 HttpBody response_body, "
        "6 HttpTrailers request_trailers, 7 HttpTrailers response_trailers, "
        "8 Metadata metadata_context, 11 ProtocolConfiguration protocol_config"
    ),
    "StreamedBodyResponse": "1 bytes body, 2 bool end_of_stream",
    "BodyMutation": "3 StreamedBodyResponse streamed_response",
    "CommonResponse": "2 HeaderMutation header_mutation, 3 BodyMutation body_mutation",
    "HeadersResponse": "1 CommonResponse response",
    "BodyResponse": "1 CommonResponse response",
    "TrailersResponse": "",
    "HttpStatus": "1 int32 code",
    "ImmediateResponse": "1 HttpStatus status, 3 bytes body",
    "ProcessingResponse": (
        "1 HeadersResponse request_headers, 2 HeadersResponse response_headers, "
        "3 BodyResponse request_body, 4 BodyResponse response_body, "
        "5 TrailersResponse request_trailers, 6 TrailersResponse response_trailers, "
        "7 ImmediateResponse immediate_response, 8 Struct dynamic_metadata, "
        "9 ProcessingMode mode_override"
    ),
}
"""Fields as `number type name`; a repeated one's type ends with an asterisk. Enums are numbers."""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "string": _Field.TYPE_STRING,
}


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="loradock/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            number, kind, field_name = field.split()
            one = message.field.add(name=field_name, number=int(number))
            one.label = _Field.LABEL_REPEATED if kind[-1] == "*" else _Field.LABEL_OPTIONAL
            scalar = _SCALARS.get(kind.rstrip("*"))
            if scalar is not None:
                one.type = scalar
            else:
                package = "google.protobuf" if kind == "Struct" else _PACKAGE
                one.type, one.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind.rstrip('*')}"
    return file


_pool: Final = descriptor_pool.Default()
_pool.AddSerializedFile(_file().SerializeToString())


def _class_of(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest: Final = _class_of("ProcessingRequest")
ProcessingResponse: Final = _class_of("ProcessingResponse")
"""Made with one argument per field; a message can be a dictionary of its fields."""


class Exchange(Protocol):
    """The messages about one request of a client."""

    is_over: bool
    """Whether it has no more responses."""

    def on_message(self, data: bytes) -> list[bytes]:
        """Return the responses to a message; raises `ValueError` for one that is malformed."""


async def start(address: str, begin: Callable[[], Exchange]) -> grpc.aio.Server:
    """Return a server at `HOST:PORT` or `unix:PATH`, which begins an exchange for each request.

    Raises `OSError` if the address can't be used.
    """

    async def process(_: Any, context: Any) -> None:
        exchange = begin()
        while not exchange.is_over and (message := await context.read()) is not grpc.aio.EOF:
            try:
                responses = exchange.on_message(message)
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            for response in responses:
                await context.write(response)

    method = grpc.stream_stream_rpc_method_handler(process)
    # A message can have a whole body, and gRPC's own bound is 4 MiB.
    bytes_max = BODY_BYTES_MAX + (1 << 20)
    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", bytes_max)]
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(_SERVICE, {"Process": method})]
    )
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    await server.start()
    return server
