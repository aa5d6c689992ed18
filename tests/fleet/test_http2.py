"""The gRPC server of the picker, frame by frame: no socket, and bytes in any portions."""

import random
import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from loradock.fleet import http2
from loradock.fleet.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Connection,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGE = 1 << 30


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    def __bytes__(self) -> bytes:
        size = len(self.payload).to_bytes(3)
        return size + struct.pack(">BBI", self.kind, self.flags, self.stream) + self.payload


def frames(data: bytes) -> Iterator[Frame]:
    while data:
        size = int.from_bytes(data[:3])
        yield Frame(*struct.unpack(">BBI", data[3:9]), data[9 : 9 + size])
        data = data[9 + size :]


class Call:
    """Repeats each message twice; `end` is the last one, `bad` is malformed."""

    def __init__(self) -> None:
        self.is_over = False

    def on_message(self, data: bytes) -> list[bytes]:
        if data == b"bad":
            raise ValueError(data)
        self.is_over = data == b"end"
        return [data, data]


class Peer:
    """A client of the server, and the transport between them."""

    def __init__(self, window: int = LARGE) -> None:
        self.output = b""
        self.is_closed = False
        self.opened: set[Connection] = set()
        self.server = Connection(Call, self.opened)
        self.server.connection_made(self)  # type: ignore[arg-type]
        self.send(PREFACE, Frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window)))

    def write(self, data: bytes) -> None:
        self.output += data

    def close(self) -> None:
        self.is_closed = True

    def send(self, *parts: bytes | Frame) -> None:
        self.server.data_received(b"".join(map(bytes, parts)))

    def received(self) -> list[Frame]:
        """Return the frames since the last call."""
        found, self.output = [*frames(self.output)], b""
        return found


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4) + data


def begin(stream: int) -> Frame:
    # Whatever is in a header block, it is not read.
    return Frame(HEADERS, END_HEADERS, stream, b"\xff\xff")


def data(stream: int, payload: bytes, flags: int = 0) -> Frame:
    return Frame(DATA, flags, stream, payload)


def answers(found: list[Frame], stream: int) -> tuple[bytes, bytes]:
    """Return the data of a stream, and its trailers; the order of its frames is checked."""
    own = [one for one in found if one.stream == stream]
    assert own[0].kind == own[-1].kind == HEADERS
    assert [one.flags for one in own] == [END_HEADERS, *[0] * (len(own) - 2), 5]
    assert {one.kind for one in own[1:-1]} <= {DATA}
    return b"".join(one.payload for one in own[1:-1]), own[-1].payload


def test_a_call_is_answered_however_its_bytes_arrive() -> None:
    seed = random.randrange(1 << 32)
    generator = random.Random(seed)
    sent = b"".join(
        map(
            bytes,
            (
                begin(1), begin(3), data(1, message(b"a")[:3]), data(3, message(b"b" * 70)),
                Frame(PING, 0, 0, b"12345678"), data(1, message(b"a")[3:] + message(b"c")),
                Frame(0x42, 7, 5, b"of a later version"),
                data(3, b"\x03" + message(b"d") + b"000", PADDED | END_STREAM),
                data(1, b"", END_STREAM),
            ),
        )
    )  # fmt: skip
    for size_max in (1, 3, 1000):
        peer, at = Peer(), 0
        while at < len(sent):
            size = generator.randint(1, size_max)
            peer.send(sent[at : at + size])
            at += size
        found = peer.received()
        assert answers(found, 1) == (message(b"a") * 2 + message(b"c") * 2, http2._OK), seed
        assert answers(found, 3) == (message(b"b" * 70) * 2 + message(b"d") * 2, http2._OK)
        assert Frame(PING, ACK, 0, b"12345678") in found
        assert Frame(SETTINGS, ACK, 0, b"") in found
        assert not peer.is_closed


def test_no_more_is_sent_than_the_windows_allow() -> None:
    peer, payload = Peer(window=100), message(b"x" * 40_000) * 2
    peer.send(begin(1), *(data(1, message(b"x" * 40_000)[at : at + 9000])
                          for at in range(0, 40_005, 9000)))  # fmt: skip
    peer.send(begin(3), data(3, message(b"y" * 20)), data(1, b"", END_STREAM))
    first = [one for one in peer.received() if one.kind == DATA]
    sent = {1: b"", 3: b""}
    for one in first:
        sent[one.stream] += one.payload
    assert {stream: len(part) for stream, part in sent.items()} == {1: 100, 3: 50}
    connection, allowed = 65_535 - 150, 100
    while len(sent[1]) < len(payload):
        for stream, size in ((1, 7000), (0, 3000)):
            peer.send(Frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4)))
            allowed += size if stream else 0
            connection += 0 if stream else size
            for one in peer.received():
                if one.kind == DATA:
                    assert len(one.payload) <= 16_384
                    sent[1] += one.payload
                    connection -= len(one.payload)
            assert connection >= 0
            assert len(sent[1]) <= allowed
    assert sent[1] == payload


def test_new_settings_change_the_windows_of_running_calls() -> None:
    peer = Peer(window=0)
    peer.send(begin(1), data(1, message(b"a"), END_STREAM))
    assert [one for one in peer.received() if one.stream == 1] == []
    peer.send(Frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1000)))
    assert answers(peer.received(), 1)[0] == message(b"a") * 2


def test_a_call_that_is_over_ends_at_once_and_ignores_the_rest() -> None:
    peer = Peer()
    peer.send(begin(1), data(1, message(b"end") + message(b"a")))
    assert answers(peer.received(), 1) == (message(b"end") * 2, http2._OK)
    peer.send(data(1, message(b"a")), Frame(HEADERS, END_HEADERS | END_STREAM, 1, b""))
    assert peer.received() == []
    assert not peer.server._streams


def test_a_call_that_was_given_up_is_forgotten() -> None:
    peer = Peer(window=0)
    peer.send(begin(1), data(1, message(b"a")), Frame(RST_STREAM, 0, 1, bytes(4)))
    assert not peer.server._streams
    peer.send(begin(3))
    peer.server.connection_lost(None)
    assert not peer.server._streams
    assert not peer.opened


def test_a_malformed_message_ends_its_call_alone() -> None:
    peer = Peer()
    peer.send(begin(1), begin(3), data(1, message(b"bad")), data(3, message(b"end")))
    found = peer.received()
    assert answers(found, 1) == (b"", http2._INTERNAL)
    assert answers(found, 3) == (message(b"end") * 2, http2._OK)


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", PREFACE + b"\xff\xff\xff" + bytes(6),
     PREFACE + bytes(begin(1)) + bytes(data(1, b"\1" + bytes(4))),
     PREFACE + bytes(Frame(WINDOW_UPDATE, 0, 0, b"1"))],
)  # fmt: skip
def test_a_peer_that_speaks_otherwise_is_disconnected(sent: bytes) -> None:
    peer = Peer()
    peer.server = Connection(Call, peer.opened)
    peer.server.connection_made(peer)  # type: ignore[arg-type]
    peer.received()
    peer.send(sent)
    assert peer.received()[-1].kind == GOAWAY
    assert peer.is_closed


def test_a_long_connection_gets_new_windows() -> None:
    peer = Peer()
    peer.server._arrived = 1 << 30
    peer.received()
    peer.send(begin(1), data(1, message(b"a")))
    update = peer.received()[0]
    size = (1 << 30) + len(message(b"a"))
    assert update == Frame(WINDOW_UPDATE, 0, 0, size.to_bytes(4))
    assert peer.server._arrived == 0
