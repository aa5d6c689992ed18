"""Bytes to message and back, with no sockets.

What it is: one frame a message (magic, version, channel, epoch, seq, msgpack body), encoders and
typed decoders made once. What it is not: a transport. One rule: whatever arrives, `decode` either
returns a message of the channel's type or raises `WireError`, and nothing else.

Depth is bounded by the types: no field is untyped and unknown fields are refused, so a decoder
never descends further than its Structs do, however deeply a frame is nested.
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
"""The largest request that is read, images aside. Prompts are the only other long part of it."""

ILLUSTRATED_BYTES_MAX: Final = IMAGES_BYTES_MAX + FRAME_BYTES_MAX
"""The largest generation that is read, with its images."""

REPLY_BYTES_MAX: Final = 256 << 20
"""What a client or an inventory may have to read: a list of a hundred thousand adapters."""

_MAGIC: Final = b"LD"
_HEADER: Final = struct.Struct(">2sBcQQ")

T = TypeVar("T")


class WireError(Exception):
    """Bytes that are no message of this channel; always `L012`."""

    code = ErrorCode.MALFORMED


class Frame(NamedTuple, Generic[T]):
    """A decoded frame: who numbered it, and the message."""

    epoch: Epoch
    seq: Seq
    message: T


class Channel(Generic[T]):
    """One direction's codec: message to frame and back."""

    def __init__(self, name: str, letter: bytes, message_type: Any, bytes_max: int) -> None:
        self.name = name
        self.prefix: Final = _MAGIC + bytes([PROTOCOL_VERSION]) + letter
        self.bytes_max: Final = bytes_max
        self._letter = letter
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(message_type).decode

    def encode(self, message: T, epoch: Epoch = 0, seq: Seq = 0) -> bytes:
        """The frame that carries `message`."""
        header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, self._letter, epoch, seq)
        return header + self._encode(message)

    def decode(self, frame: bytes) -> Frame[T]:
        """The frame's message; raises `WireError` for anything else than one of this channel."""
        if len(frame) > self.bytes_max:
            raise WireError(f"{self.name} of {len(frame)} bytes; at most {self.bytes_max} are read")
        if frame[:4] != self.prefix:
            raise WireError(self._foreign(frame))
        try:
            _, _, _, epoch, seq = _HEADER.unpack_from(frame)
            return Frame(epoch, seq, self._read(memoryview(frame)[_HEADER.size :]))
        except (msgspec.DecodeError, struct.error, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a {self.name}: {error}") from error

    def _read(self, body: memoryview) -> T:
        message: T = self._decode(body)
        return message

    def _foreign(self, frame: bytes) -> str:
        if frame[:2] != _MAGIC or len(frame) < 4:
            return f"not a LoRADock frame: it starts with {frame[:4]!r}, not {self.prefix!r}"
        if frame[2] != PROTOCOL_VERSION:
            return f"protocol version {frame[2]}; this side speaks version {PROTOCOL_VERSION}"
        return f"a frame of channel {frame[3:4]!r} where a {self.name} was expected"


# A generation's tag, which follows the byte that tells how many fields there are.
_GENERATE: Final = msgspec.msgpack.encode(Generate.__name__)


class _Requests(Channel[Request]):
    """Requests, of which images alone make one long.

    No other kind is decoded from a long frame: arrays take many times their bytes in memory.
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
"""All events of a group in one frame; its `seq` is the last one's. An empty batch is a beat."""
