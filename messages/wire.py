"""The wire format: one frame per message, with magic, version, channel, epoch, seq, msgpack body.

For any bytes, `decode` either returns a message of the channel's type or raises `WireError`.
Recursion is bounded by the types: no field is untyped and unknown fields are refused, so a decoder
descends no further than its Structs, however deeply a frame is nested.
"""

import struct
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from messages.commands import Command
from messages.errors import ErrorCode
from messages.events import Published
from messages.ids import Epoch, Seq
from messages.reports import Report
from messages.requests import IMAGES_BYTES_MAX, Generate, IllustratedPrompt, Reply, Request

PROTOCOL_VERSION: Final = 1
FRAME_BYTES_MAX: Final = 1 << 20
"""Bound on a request without its images, in bytes; only prompts are long."""

ILLUSTRATED_BYTES_MAX: Final = IMAGES_BYTES_MAX + FRAME_BYTES_MAX
"""Bound on a request with its images, in bytes."""

REPLY_BYTES_MAX: Final = 256 << 20
"""Bound on a reply or a report, in bytes: a list of 100,000 adapters fits."""

_MAGIC: Final = b"LD"
_HEADER: Final = struct.Struct(">2sBcQQ")

T = TypeVar("T")


class WireError(Exception):
    """Bytes that are not a message of this channel; always `L012`."""

    code = ErrorCode.MALFORMED


class DecodedFrame(NamedTuple, Generic[T]):
    """A decoded frame: the sender's epoch, the frame's number, and the message."""

    epoch: Epoch
    seq: Seq
    message: T


class Channel(Generic[T]):
    """Encoder and decoder of one direction."""

    def __init__(self, name: str, letter: bytes, message_type: Any, bytes_max: int) -> None:
        self.name = name
        self.prefix: Final = _MAGIC + bytes([PROTOCOL_VERSION]) + letter
        self.bytes_max: Final = bytes_max
        self._letter = letter
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(message_type).decode

    def encode(self, message: T, epoch: Epoch = 0, seq: Seq = 0) -> bytes:
        """Return the frame of `message`."""
        header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, self._letter, epoch, seq)
        return header + self._encode(message)

    def decode(self, frame: bytes) -> DecodedFrame[T]:
        """Decode a frame; raises `WireError` unless it is a message of this channel."""
        if len(frame) > self.bytes_max:
            raise WireError(f"{self.name} of {len(frame)} bytes; at most {self.bytes_max} are read")
        if frame[:4] != self.prefix:
            raise WireError(self._describe_foreign(frame))
        try:
            _, _, _, epoch, seq = _HEADER.unpack_from(frame)
            return DecodedFrame(epoch, seq, self._read(memoryview(frame)[_HEADER.size :]))
        except (msgspec.DecodeError, struct.error, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a {self.name}: {error}") from error

    def _read(self, body: memoryview) -> T:
        message: T = self._decode(body)
        return message

    def _describe_foreign(self, frame: bytes) -> str:
        if frame[:2] != _MAGIC or len(frame) < 4:
            return f"not a LoRADock frame: it starts with {frame[:4]!r}, not {self.prefix!r}"
        if frame[2] != PROTOCOL_VERSION:
            return f"protocol version {frame[2]}; this side uses version {PROTOCOL_VERSION}"
        return f"a frame of channel {frame[3:4]!r} where a {self.name} was expected"


# The tag of `Generate`, which follows the byte with the number of fields.
_GENERATE: Final = msgspec.msgpack.encode(Generate.__name__)


class _Requests(Channel[Request]):
    """Requests, of which only a `Generate` may be long, by its images.

    No other request is decoded from a long frame: arrays take many times their bytes in memory.
    """

    def _read(self, body: memoryview) -> Request:
        size = _HEADER.size + len(body)
        if size <= FRAME_BYTES_MAX:
            return super()._read(body)
        images = 0
        if body[1 : 1 + len(_GENERATE)] == _GENERATE:
            request = super()._read(body)
            images = _image_bytes(request)
            if size - images <= FRAME_BYTES_MAX and images <= IMAGES_BYTES_MAX:
                return request
        raise WireError(
            f"request of {size - images} bytes and {images} bytes of images; at most "
            f"{FRAME_BYTES_MAX} and {IMAGES_BYTES_MAX} are read"
        )


def _image_bytes(request: Request) -> int:
    match request:
        case Generate(prompt=IllustratedPrompt(images=images)):
            return sum(map(len, images))
    return 0


REQUESTS: Final[Channel[Request]] = _Requests("request", b"Q", Request, ILLUSTRATED_BYTES_MAX)
REPLIES: Final[Channel[Reply]] = Channel("reply", b"A", Reply, REPLY_BYTES_MAX)
COMMANDS: Final[Channel[Command]] = Channel(
    "command", b"C", Command, ILLUSTRATED_BYTES_MAX + FRAME_BYTES_MAX
)
REPORTS: Final[Channel[Report]] = Channel("report", b"R", Report, REPLY_BYTES_MAX)
EVENTS: Final[Channel[tuple[Published, ...]]] = Channel(
    "event batch", b"E", tuple[Published, ...], REPLY_BYTES_MAX
)
"""All events of a group in one frame, with the last one's number. An empty batch is a heartbeat."""
