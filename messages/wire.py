"""The wire format: frames of magic, version, channel, epoch, seq and a msgpack body.

The header of a frame with requests continues with the client's token. Frames with requests or
replies hold 1 to `BATCH_MAX` of them, frames of the engine link one message.

For any bytes, `decode` either returns a message of the channel's type or raises `WireError`.
Recursion is bounded by the types: no field is untyped and unknown fields are refused, so a decoder
descends no further than its Structs, however deeply a frame is nested.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Raw

from loradock.messages.commands import Command
from loradock.messages.errors import ErrorCode
from loradock.messages.events import Published
from loradock.messages.ids import Epoch, RequestId, Seq
from loradock.messages.prompts import IMAGES_BYTES_MAX, MultimodalPrompt
from loradock.messages.reports import Report
from loradock.messages.requests import CancelGeneration, Generate, Refused, Reply, Request

PROTOCOL_VERSION: Final = 2
FRAME_BYTES_MAX: Final = 1 << 20
"""Bound on a request without its images, in bytes; only prompts are long."""

ILLUSTRATED_BYTES_MAX: Final = IMAGES_BYTES_MAX + FRAME_BYTES_MAX
"""Bound on a request with its images, in bytes."""

REPLY_BYTES_MAX: Final = 256 << 20
"""Bound on a reply or a report, in bytes: a list of 100,000 adapters fits."""

BATCH_MAX: Final = 256
"""Bound on the requests, and on the replies, of one frame."""

TOKEN_BYTES: Final = 12
NO_TOKEN: Final = bytes(TOKEN_BYTES)

REQUEST_ID_LENGTH_MAX: Final = 64
"""Bound on an id that a client chooses. `RequestId` allows more: the controller adds a prefix."""

_MAGIC: Final = b"LD"
_HEADER: Final = struct.Struct(">2sBcQQ")

T = TypeVar("T")


class WireError(Exception):
    """Bytes that are not a message of this channel; always `L012`.

    `request_id` is the id of the frame's first request, empty if it can't be read.
    """

    code = ErrorCode.MALFORMED

    def __init__(self, message: str, request_id: RequestId = "") -> None:
        super().__init__(message)
        self.request_id = request_id


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
        self._encode: Final[Callable[[Any], bytes]] = msgspec.msgpack.Encoder().encode
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


Body = memoryview | Raw
"""The bytes of one request, inside its frame's."""


class ReceivedRequests(msgspec.Struct, frozen=True, gc=False):
    """A frame of a client: its token, its requests, and refusals of those that can't be read.

    `epoch` is the controller's start that the frame was sent to, 0 if the client does not say it.
    `bodies` are the bytes of `requests`, in the same order.
    """

    epoch: Epoch
    token: bytes
    requests: Sequence[Request]
    bodies: Sequence[Body]
    refused: tuple[Refused, ...] = ()


_EPOCH: Final = slice(4, 12)
_TOKEN: Final = slice(_HEADER.size, _HEADER.size + TOKEN_BYTES)
_BODY: Final = slice(_TOKEN.stop, None)

# The tag of `Generate`, which follows the bytes with the numbers of requests and of fields.
_ONE_ELEMENT: Final = 0x91
_GENERATE: Final = msgspec.msgpack.encode(Generate.__name__)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Requests = Annotated[tuple[Request, ...], Meta(min_length=1, max_length=BATCH_MAX)]
Replies = Annotated[tuple[Reply, ...], Meta(min_length=1, max_length=BATCH_MAX)]


def _array_head(count: int) -> bytes:
    """Return the first bytes of a msgpack array of up to 65,535 elements."""
    return bytes((0x90 + count,)) if count < 16 else b"\xdc" + count.to_bytes(2)


def batches(bodies: list[bytes], bytes_max: int) -> list[list[bytes]]:
    """Group encoded messages by the bounds of a frame; one that is longer than these is alone."""
    # The usual case first.
    if len(bodies) == 1:
        return [bodies]
    found: list[list[bytes]] = []
    size = 0
    for body in bodies:
        size += len(body)
        if not found or size > bytes_max or len(found[-1]) == BATCH_MAX:
            found.append([])
            size = len(body)
        found[-1].append(body)
    return found


class BatchChannel(Channel[tuple[T, ...]]):
    """A channel whose frames hold several messages.

    `encode_body` returns one message's part of a frame.
    """

    def __init__(self, name: str, letter: bytes, message_type: Any, bytes_max: int) -> None:
        super().__init__(name, letter, message_type, bytes_max)
        self.encode_body: Final[Callable[[T], bytes]] = self._encode

    def join(self, bodies: Sequence[bytes], epoch: Epoch = 0) -> bytes:
        """Return a frame with the messages that `encode_body` encoded."""
        head = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, self._letter, epoch, 0)
        return b"".join((head, _array_head(len(bodies)), *bodies))


class RequestChannel(BatchChannel[Request]):
    """Requests, of which only a `Generate` can be long, by its images, and only alone in a frame.

    No other request is decoded from a long frame: arrays take many times their bytes in memory.
    """

    def __init__(self) -> None:
        super().__init__("request", b"Q", Requests, ILLUSTRATED_BYTES_MAX)
        bodies = Annotated[tuple[Raw, ...], Meta(min_length=1, max_length=BATCH_MAX)]
        self._split = msgspec.msgpack.Decoder(bodies).decode
        self._decode_one = msgspec.msgpack.Decoder(Request).decode

    def encode(
        self, message: tuple[Request, ...], epoch: Epoch = 0, seq: Seq = 0, token: bytes = NO_TOKEN
    ) -> bytes:
        """Return a frame with requests of the client that `token` belongs to."""
        return self._head(epoch, seq, token) + self._encode(message)

    def decode_body(self, body: bytes) -> Request:
        """Return the request that `encode_body` encoded."""
        request: Request = self._decode_one(body)
        return request

    def check_body(self, body: bytes) -> None:
        """Raise an error of `decode` for a request that can't be read alone in a frame."""
        if _BODY.start + 1 + len(body) > FRAME_BYTES_MAX:
            self.decode(self.join_for(NO_TOKEN, (body,)))
        else:
            _checked(self._decode_one(body))

    def join_for(self, token: bytes, bodies: Sequence[bytes], epoch: Epoch = 0) -> bytes:
        """Return a frame of the client that `token` belongs to, as `join`."""
        return b"".join((self._head(epoch, 0, token), _array_head(len(bodies)), *bodies))

    def _head(self, epoch: Epoch, seq: Seq, token: bytes) -> bytes:
        return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, self._letter, epoch, seq) + token

    def decode_each(self, frame: bytes) -> ReceivedRequests:
        """Decode a frame's requests one by one; raises `WireError` if they can't be separated.

        Those that can't be read are refused, under their own ids if these can be read.
        """
        epoch = int.from_bytes(frame[_EPOCH])
        token, body = frame[_TOKEN], memoryview(frame)[_BODY]
        is_short = len(frame) <= FRAME_BYTES_MAX and frame[:4] == self.prefix
        try:
            # The hot path of requests: `decode` also reads the header's numbers.
            requests = self._decode_short(body) if is_short else self.decode(frame).message
            return ReceivedRequests(epoch, token, requests, self._bodies(body))
        except (WireError, *_UNREADABLE):
            if len(frame) > self.bytes_max or frame[:4] != self.prefix:
                raise
            try:
                bodies = self._split(body)
            except _UNREADABLE as error:
                raise WireError(f"not a {self.name}: {error}", _first_id(body)) from error
        found = self._read_each([memoryview(raw) for raw in bodies], len(frame))
        return ReceivedRequests(epoch, token, *found)

    def _bodies(self, body: memoryview) -> Sequence[Body]:
        """Return the bytes of each request of a frame that can be decoded."""
        bodies: Sequence[Body] = (body[1:],) if body[0] == _ONE_ELEMENT else self._split(body)
        return bodies

    def _read_each(
        self, bodies: list[memoryview], size: int
    ) -> tuple[tuple[Request, ...], list[memoryview], tuple[Refused, ...]]:
        """Return the requests that can be read, their bytes, and refusals of the others."""
        readable: list[tuple[Request, memoryview]] = []
        refused = []
        for body in bodies:
            try:
                if size > FRAME_BYTES_MAX:
                    raise _too_long(size, 0)
                readable.append((_checked(self._decode_one(body)), body))
            except (WireError, *_UNREADABLE) as error:
                text = str(error) if isinstance(error, WireError) else f"not a request: {error}"
                refused.append(Refused(_id_of(body), ErrorCode.MALFORMED, text))
        requests = tuple([request for request, _ in readable])
        return requests, [body for _, body in readable], tuple(refused)

    def _read(self, body: memoryview) -> tuple[Request, ...]:
        body = body[TOKEN_BYTES:]
        size = _BODY.start + len(body)
        if size <= FRAME_BYTES_MAX:
            return self._decode_short(body)
        images = 0
        if body[0] == _ONE_ELEMENT and body[2 : 2 + len(_GENERATE)] == _GENERATE:
            batch = super()._read(body)
            images = _image_bytes(batch[0])
            if size - images <= FRAME_BYTES_MAX and images <= IMAGES_BYTES_MAX:
                _checked(batch[0])
                return batch
        raise _too_long(size, images)

    def _decode_short(self, body: memoryview) -> tuple[Request, ...]:
        batch: tuple[Request, ...] = self._decode(body)
        for request in batch:
            if len(request.request_id) > REQUEST_ID_LENGTH_MAX or type(request) is CancelGeneration:
                _checked(request)
        return batch


def _too_long(size: int, images: int) -> WireError:
    return WireError(
        f"request of {size - images} bytes and {images} bytes of images; at most "
        f"{FRAME_BYTES_MAX} and {IMAGES_BYTES_MAX} are read"
    )


def _checked(request: Request) -> Request:
    """Return a request whose ids have a client's length; raises `WireError`."""
    longest = len(request.request_id)
    if type(request) is CancelGeneration:
        longest = max(longest, len(request.target))
    if longest > REQUEST_ID_LENGTH_MAX:
        raise WireError(
            f"an id of {longest} characters; at most {REQUEST_ID_LENGTH_MAX} are allowed"
        )
    return request


def _first_id(body: memoryview) -> RequestId:
    """Return the id of a frame's first request, as `_id_of`."""
    longer = {0xDC: 3, 0xDD: 5}
    return _id_of(body[longer.get(body[0], 1) :]) if body else ""


def _id_of(body: memoryview) -> RequestId:
    """Return the id of an unreadable request; empty if it is not at its place."""
    head = bytes(body[: 4 + 31 + REQUEST_ID_LENGTH_MAX])
    try:
        # An array of up to 15 elements, the tag of up to 31 bytes, then the id.
        is_short = head[1] >> 5 == 0b101
        at = 2 + (head[1] & 31)
        start = at + (2 if head[at] == 0xD9 else 1)
        length = head[at + 1] if head[at] == 0xD9 else head[at] & 31
        if head[0] >> 4 != 9 or not is_short or not (head[at] == 0xD9 or head[at] >> 5 == 0b101):
            return ""
        encoded = head[at : start + length]
        return msgspec.msgpack.decode(encoded, type=_ClientsId)
    except (IndexError, *_UNREADABLE):
        return ""


_ClientsId = Annotated[RequestId, Meta(max_length=REQUEST_ID_LENGTH_MAX)]


def _image_bytes(request: Request) -> int:
    match request:
        case Generate(prompt=MultimodalPrompt(images=images)):
            return sum(map(len, images))
    return 0


REQUESTS: Final = RequestChannel()
REPLIES: Final[BatchChannel[Reply]] = BatchChannel("reply", b"A", Replies, REPLY_BYTES_MAX)
COMMANDS: Final[Channel[Command]] = Channel(
    "command", b"C", Command, ILLUSTRATED_BYTES_MAX + FRAME_BYTES_MAX
)
REPORTS: Final[Channel[Report]] = Channel("report", b"R", Report, REPLY_BYTES_MAX)
EVENTS: Final[Channel[tuple[Published, ...]]] = Channel(
    "event batch", b"E", tuple[Published, ...], REPLY_BYTES_MAX
)
"""All events of a group in one frame, with the last one's number. An empty batch is a heartbeat."""
