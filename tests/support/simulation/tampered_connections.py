"""Connections whose bytes are changed in transit: real clients with CURVE, and a proxy.

A client's side of a connection is a greeting in three parts, the commands HELLO and INITIATE, and
MESSAGE frames. The proxy can change each of them before the server reads it, which needs no
cryptography of our own; without it, bytes of any kind are sent by a bare socket.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

import zmq

from loradock.processes.key_files import KeyPair
from tests.support.simulation.key_examples import use_keys
from tests.support.waiting import HANG_S

HOST: Final = "127.0.0.1"
GREETING_BYTES: Final = (10, 1, 53)
"""The parts of a greeting: a side sends the next one when it has read the other's."""

SIGNATURE, VERSION, MECHANISM, HELLO, INITIATE, MESSAGE = range(6)
"""Places of what a client sends."""

_PADDING_OF_HELLO: Final = range(2 + 6 + 2, 2 + 6 + 2 + 72)
"""Bytes of the command that nothing authenticates."""
_COMMAND, _LONG = 4, 2

Edit = Callable[[int, bytes], bytes]
"""Returns what the server reads instead of a frame, by its place; nothing ends the connection."""


class Outcome(NamedTuple):
    """What the server sent until the connection ended: whether it admitted, and its replies."""

    is_admitted: bool
    replies: int


def unchanged(_place: int, frame: bytes) -> bytes:
    return frame


def with_flipped_bit(place: int, rng: random.Random) -> Edit:
    """Return an edit that flips one bit of the body of the frame at `place`."""

    def flipped(at: int, frame: bytes) -> bytes:
        if at != place:
            return frame
        head = len(frame) - len(body_of(frame))
        allowed = [n for n in range(head, len(frame)) if at != HELLO or n not in _PADDING_OF_HELLO]
        changed = bytearray(frame)
        changed[rng.choice(allowed)] ^= 1 << rng.randrange(8)
        return bytes(changed)

    return flipped


def with_noise(place: int, rng: random.Random) -> Edit:
    """Return an edit that changes the frame at `place`, its head included, or what follows it."""
    kinds = (*OF_BYTES, *OF_FRAMES) if place >= HELLO else OF_BYTES
    kind, seed = rng.choice(kinds), rng.randrange(2**32)
    return lambda at, frame: kind(random.Random(seed), frame) if at == place else frame


def frame_of(body: bytes, flags: int = _COMMAND) -> bytes:
    """Return a frame of ZMTP 3."""
    if len(body) > 255:
        return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def body_of(frame: bytes) -> bytes:
    """Return the body of a frame."""
    return frame[9 if frame[0] & _LONG else 2 :]


def _cut(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def _shorter(rng: random.Random, frame: bytes) -> bytes:
    return frame_of(body_of(frame)[: rng.randrange(len(body_of(frame)))], frame[0] & ~_LONG)


def _longer(rng: random.Random, frame: bytes) -> bytes:
    more = rng.randbytes(rng.choice((1, 100, 70_000, 1 << 20)))
    return frame_of(body_of(frame) + more, frame[0] & ~_LONG)


def _wrong_size(rng: random.Random, frame: bytes) -> bytes:
    size = rng.choice((0, 1, 2**16, 2**31, 2**40, 2**63 - 1, 2**64 - 1))
    return bytes([frame[0] | _LONG]) + size.to_bytes(8, "big") + body_of(frame)


def _other_flags(rng: random.Random, frame: bytes) -> bytes:
    return bytes([frame[0] ^ rng.choice((1, 4, 5))]) + frame[1:]


def _twice(_rng: random.Random, frame: bytes) -> bytes:
    return frame + frame


def _garbage_after(rng: random.Random, frame: bytes) -> bytes:
    return frame + rng.randbytes(rng.choice((1, 40, 5000)))


def _garbage(rng: random.Random, frame: bytes) -> bytes:
    return rng.randbytes(len(frame))


def _other_command(rng: random.Random, _frame: bytes) -> bytes:
    name = rng.choice(
        (b"READY", b"ERROR", b"WELCOME", b"PING", b"SUBSCRIBE", b"MESSAGE", b"", b"X")
    )
    return frame_of(bytes([len(name)]) + name + rng.randbytes(rng.choice((0, 1, 8, 500))))


OF_BYTES: Final = (_cut, _twice, _garbage_after, _garbage)
OF_FRAMES: Final = (_shorter, _longer, _wrong_size, _other_flags, _other_command)


class _Connection:
    """One connection through the proxy; `ends`: it ends after the client's first message."""

    def __init__(self, port: int, edit: Edit, *, ends: bool) -> None:
        self.is_admitted = False
        self.replies = 0
        self.ended = asyncio.Event()
        self._port = port
        self._edit = edit
        self._ends = ends

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward in both directions until the server ends the connection, or has answered."""
        from_server, to_server = await asyncio.open_connection(HOST, self._port)
        ways = {
            asyncio.ensure_future(self._forward_to_server(reader, to_server)),
            asyncio.ensure_future(self._forward_to_client(from_server, writer)),
        }
        try:
            await asyncio.wait(ways, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for one in (to_server, writer):
                one.close()
            self.ended.set()

    async def _forward_to_server(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        place = 0
        async for frame in _frames(reader):
            edited = self._edit(place, frame)
            writer.write(edited)
            await writer.drain()
            if len(edited) < len(frame) or (self._ends and place == MESSAGE):
                # The server may wait for a rest that never comes.
                return
            place += 1

    async def _forward_to_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        place = 0
        async for frame in _frames(reader):
            if place > MECHANISM:
                self.is_admitted |= body_of(frame).startswith(b"\5READY")
                self.replies += body_of(frame).startswith(b"\7MESSAGE")
            place += 1
            writer.write(frame)
            if self.replies:
                return


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the greeting and the frames of one side until it ends."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        for size in GREETING_BYTES:
            yield await reader.readexactly(size)
        while True:
            head = await reader.readexactly(1)
            head += await reader.readexactly(8 if head[0] & _LONG else 1)
            yield head + await reader.readexactly(int.from_bytes(head[1:], "big"))


@asynccontextmanager
async def _proxy(port: int, edit: Edit, *, ends: bool) -> AsyncIterator[tuple[str, _Connection]]:
    connection = _Connection(port, edit, ends=ends)
    server = await asyncio.start_server(connection.run, HOST, 0)
    try:
        yield f"tcp://{HOST}:{server.sockets[0].getsockname()[1]}", connection
    finally:
        server.close()


async def send_through_proxy(
    context: "zmq.Context[zmq.Socket[bytes]]",
    port: int,
    keys: tuple[KeyPair, str] | None,
    edit: Edit,
    message: bytes,
    *,
    ends: bool = False,
) -> Outcome:
    """Connect a client with these keys, send one message, and return what the server did."""
    async with _proxy(port, edit, ends=ends) as (address, connection):
        socket = context.socket(zmq.DEALER)
        socket.linger, socket.reconnect_ivl = 0, -1
        if keys is not None:
            use_keys(socket, *keys)
        socket.connect(address)
        socket.send(message)
        await asyncio.wait_for(connection.ended.wait(), HANG_S)
        socket.close()
    return Outcome(connection.is_admitted, connection.replies)


async def send_bytes(port: int, data: bytes, *, until_closed: bool) -> bytes:
    """Send bytes on a connection of their own; return the server's if it has to close it."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    received = b""
    with suppress(ConnectionError):
        await writer.drain()
        if until_closed:
            received = await asyncio.wait_for(reader.read(), HANG_S)
    writer.close()
    return received
