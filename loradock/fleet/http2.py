"""A server of one gRPC method that streams both ways, for proxies: HTTP/2 (RFC 9113) without TLS.

Every request is the same call, so header blocks are not decoded: those that are sent use no state
of HPACK (RFC 7541), and those that arrive are skipped. A call is handled where its bytes arrive,
without a task or a thread: gRPC's own library costs ten times as much processor time per call.
"""

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol, cast

import structlog

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD_BYTES: Final = 9

# Types of frames, and their flags.
DATA: Final = 0x0
HEADERS: Final = 0x1
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8

_INITIAL_WINDOW_SIZE: Final = 0x4
_WINDOW_DEFAULT: Final = 65_535
_WINDOW_MAX: Final = (1 << 31) - 1
_FRAME_BYTES_MAX: Final = 16_384

CALL_BYTES_MAX: Final = (64 << 20) + _WINDOW_DEFAULT
"""A call's window, which is not extended: a peer can send no more than this in one call."""

# Status 200 is an entry of the static table; names and values of the others are literals.
_RESPONSE: Final = b"\x88\x00\x0ccontent-type\x10application/grpc"


def _trailers(status: int) -> bytes:
    return b"\x00\x0bgrpc-status" + bytes([1 + (status > 9)]) + str(status).encode()


_OK: Final = _trailers(0)
_INTERNAL: Final = _trailers(13)

log = structlog.get_logger("fleet")


class Call(Protocol):
    """One call: what is answered to each of its messages."""

    is_over: bool
    """Whether it has no more answers."""

    def on_message(self, data: bytes) -> Iterable[bytes]:
        """Return the answers to a message; raises `ValueError` for one that is malformed."""


class ProtocolError(Exception):
    """A peer that does not speak HTTP/2, or gRPC, as this server needs it."""


class _Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class _Stream:
    """The bytes of a call that are not a whole message yet, and those that wait for the window."""

    __slots__ = ("call", "has_answered", "is_closing", "received", "waiting", "window")

    def __init__(self, call: Call, window: int) -> None:
        self.call = call
        self.window = window
        self.received = bytearray()
        self.waiting = bytearray()
        self.has_answered = False
        self.is_closing = False

    def messages(self, data: bytes) -> Iterable[bytes]:
        """Yield the messages that are whole with these bytes."""
        self.received += data
        while len(self.received) >= 5:
            is_compressed, size = struct.unpack_from(">?I", self.received)
            if is_compressed:
                raise ProtocolError("compressed messages were not negotiated")
            if len(self.received) < 5 + size:
                return
            message = bytes(self.received[5 : 5 + size])
            del self.received[: 5 + size]
            yield message


class Connection(asyncio.Protocol):
    """A connection of a proxy; `begin` returns the object that handles a new call."""

    def __init__(self, begin: Callable[[], Call], opened: "set[Connection]") -> None:
        self._begin = begin
        self._opened = opened
        self._received = bytearray()
        self._output = bytearray()
        self._has_preface = False
        self._streams: dict[int, _Stream] = {}
        self._last_stream = 0
        # What may be sent: over all streams, and at first over a new one.
        self._window = _WINDOW_DEFAULT
        self._stream_window = _WINDOW_DEFAULT
        # What has arrived since the window of the connection was extended.
        self._arrived = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings: windows so large that small calls need no updates."""
        self._transport = cast("asyncio.Transport", transport)
        self._opened.add(self)
        self._send(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, CALL_BYTES_MAX))
        self._send(WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW_MAX - _WINDOW_DEFAULT))
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the calls."""
        del error
        self._opened.discard(self)
        self._streams.clear()

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are whole with these bytes, and send what they lead to."""
        self._received += data
        try:
            for frame in self._frames():
                self._on_frame(frame)
        except (ProtocolError, struct.error) as error:
            log.warning("a proxy is disconnected", error=str(error))
            self._send(GOAWAY, 0, 0, struct.pack(">II", 0, 1))
            self._flush()
            self.close()
        self._flush()

    def _frames(self) -> Iterable[_Frame]:
        received, at = self._received, 0
        if not self._has_preface:
            if not _PREFACE.startswith(bytes(received[: len(_PREFACE)])):
                raise ProtocolError("the connection does not begin with the preface of HTTP/2")
            if len(received) < len(_PREFACE):
                return
            self._has_preface, at = True, len(_PREFACE)
        try:
            while len(received) - at >= _HEAD_BYTES:
                high, low, kind, flags, stream = struct.unpack_from(">BHBBI", received, at)
                size = (high << 16) + low
                if size > _FRAME_BYTES_MAX:
                    raise ProtocolError(f"a frame of {size} bytes exceeds {_FRAME_BYTES_MAX}")
                end = at + _HEAD_BYTES + size
                if len(received) < end:
                    return
                payload = bytes(received[at + _HEAD_BYTES : end])
                at = end
                yield _Frame(kind, flags, stream & _WINDOW_MAX, payload)
        finally:
            del received[:at]

    def _on_frame(self, frame: _Frame) -> None:
        if frame.kind == DATA:
            self._on_data(frame)
        elif frame.kind == HEADERS:
            self._on_headers(frame)
        elif frame.kind == RST_STREAM:
            self._streams.pop(frame.stream, None)
        elif frame.kind == SETTINGS and not frame.flags & ACK:
            self._on_settings(frame.payload)
        elif frame.kind == PING and not frame.flags & ACK:
            self._send(PING, ACK, 0, frame.payload)
        elif frame.kind == WINDOW_UPDATE:
            self._on_window(frame.stream, struct.unpack(">I", frame.payload)[0])
        # Others are of no matter, or of versions to come.

    def _on_headers(self, frame: _Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            if frame.stream <= self._last_stream:
                # It has been answered.
                return
            self._last_stream = frame.stream
            stream = self._streams[frame.stream] = _Stream(self._begin(), self._stream_window)
        if frame.flags & END_STREAM:
            self._close(frame.stream, stream)

    def _on_data(self, frame: _Frame) -> None:
        self._arrived += len(frame.payload)
        if self._arrived > _WINDOW_MAX // 2:
            self._send(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._arrived))
            self._arrived = 0
        stream = self._streams.get(frame.stream)
        if stream is None or stream.is_closing:
            # It has been answered.
            return
        data = frame.payload
        if frame.flags & PADDED:
            data = data[1 : len(data) - data[0]]
        try:
            for message in stream.messages(data):
                for answer in stream.call.on_message(message):
                    stream.waiting += struct.pack(">?I", False, len(answer)) + answer
                if stream.call.is_over:
                    break
        except ValueError as error:
            log.warning("a message of a proxy is malformed", error=str(error))
            self._fail(frame.stream, stream)
            return
        if stream.call.is_over or frame.flags & END_STREAM:
            self._close(frame.stream, stream)
        else:
            self._send_waiting(frame.stream, stream)

    def _on_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW_SIZE:
                grown, self._stream_window = value - self._stream_window, value
                for stream in self._streams.values():
                    stream.window += grown
        self._send(SETTINGS, ACK, 0, b"")
        self._send_all_waiting()

    def _on_window(self, number: int, size: int) -> None:
        if number == 0:
            self._window += size
            self._send_all_waiting()
        elif (stream := self._streams.get(number)) is not None:
            stream.window += size
            self._send_waiting(number, stream)

    def _close(self, number: int, stream: _Stream) -> None:
        """End a call once all its answers are sent."""
        stream.is_closing = True
        self._send_waiting(number, stream)

    def _fail(self, number: int, stream: _Stream) -> None:
        self._send_head(number, stream)
        self._send(HEADERS, END_HEADERS | END_STREAM, number, _INTERNAL)
        del self._streams[number]

    def _send_all_waiting(self) -> None:
        for number, stream in [*self._streams.items()]:
            if stream.waiting:
                self._send_waiting(number, stream)

    def _send_waiting(self, number: int, stream: _Stream) -> None:
        """Send answers as far as the windows allow."""
        while stream.waiting:
            size = min(len(stream.waiting), self._window, stream.window, _FRAME_BYTES_MAX)
            if size <= 0:
                return
            self._send_head(number, stream)
            self._send(DATA, 0, number, stream.waiting[:size])
            del stream.waiting[:size]
            self._window -= size
            stream.window -= size
        if stream.is_closing:
            self._send_head(number, stream)
            self._send(HEADERS, END_HEADERS | END_STREAM, number, _OK)
            del self._streams[number]

    def _send_head(self, number: int, stream: _Stream) -> None:
        if not stream.has_answered:
            stream.has_answered = True
            self._send(HEADERS, END_HEADERS, number, _RESPONSE)

    def _send(self, kind: int, flags: int, stream: int, payload: bytes | bytearray) -> None:
        size = len(payload)
        self._output += struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream)
        self._output += payload

    def _flush(self) -> None:
        if self._output and self._transport is not None:
            self._transport.write(bytes(self._output))
            self._output.clear()


class Server:
    """Serves calls at `HOST:PORT` or `unix:PATH` from `start` to `close`, in an event loop."""

    def __init__(self, begin: Callable[[], Call]) -> None:
        self._begin = begin
        self._opened: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listen: str) -> None:
        """Listen; raises `OSError`."""
        loop = asyncio.get_running_loop()
        if listen.startswith("unix:"):
            self._server = await loop.create_unix_server(self._connection, listen[5:])
        else:
            host, _, port = listen.rpartition(":")
            self._server = await loop.create_server(self._connection, host.strip("[]"), int(port))

    def _connection(self) -> Connection:
        return Connection(self._begin, self._opened)

    def close(self) -> None:
        """End all connections, and accept no more."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._opened]:
            connection.close()
