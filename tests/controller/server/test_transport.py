"""The bounds on one iteration's frames, in the controller and in the engine."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from loradock.controller.server import listener, transport
from loradock.engine.worker import worker
from loradock.messages.addresses import endpoint
from tests.support.waiting import HANG_S, wait_until

LONG = b"x" * (24 << 20)
GONE_ROUTE = b"lgone"
"""A route over the local sockets, to a client that never connected."""


def received(part: bytes, *, has_more: bool) -> zmq.Frame:
    """Return a part as a socket returns it where it is not to be copied."""
    frame = zmq.Frame(part)
    frame.more = has_more
    return frame


class Queued:
    """A socket in which frames are queued, one per message."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = list(frames)
        self._peer_is_next = True

    def recv(self, _flags: int, copy: bool = True) -> Any:
        if not self.frames:
            raise zmq.Again
        self._peer_is_next = not self._peer_is_next
        part = self.frames.pop(0) if self._peer_is_next else b"peer"
        return part if copy else received(part, has_more=False)

    def recv_multipart(self, _flags: int) -> list[bytes]:
        if not self.frames:
            raise zmq.Again
        return [self.frames.pop(0)]

    def getsockopt(self, _option: int) -> int:
        return 0


def read_by_controller(queued: Any) -> int:
    return len(list(listener.receive(queued)))


def read_by_engine(queued: Any) -> int:
    before = len(queued.frames)
    # The frames are not commands: they are counted, and the engine gets none.
    worker.Worker(None, queued, worker.Wakeup(), ())._receive(print)  # type: ignore[arg-type]
    return before - len(queued.frames)


@pytest.mark.parametrize("read", [read_by_controller, read_by_engine])
@pytest.mark.parametrize(
    ("frames", "counts"),
    [
        ([], [0, 0]),
        ([b""] * 3, [3, 0]),
        ([LONG] * 7, [3, 3, 1, 0]),
        ([LONG, b"", b"", LONG, LONG, b"", LONG], [5, 2, 0]),
    ],
)
def test_an_iteration_reads_a_bounded_number_of_bytes(
    read: Any, frames: list[bytes], counts: list[int]
) -> None:
    assert listener.BYTES_PER_ITERATION == worker.BYTES_MAX == 64 << 20
    queued = Queued(*frames)
    assert [read(queued) for _ in counts] == counts


@pytest.mark.parametrize(
    ("read", "frames_max"),
    [(read_by_controller, listener.FRAMES_PER_ITERATION), (read_by_engine, worker.FRAMES_MAX)],
)
def test_an_iteration_reads_a_bounded_number_of_frames(read: Any, frames_max: int) -> None:
    queued = Queued(*[b"x"] * (frames_max + 5))
    assert [read(queued), read(queued), read(queued)] == [frames_max, 5, 0]


class Parts:
    """A socket with one message of many parts, then one of a single frame."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = [b"peer", *parts]
        self.ends = [False] * len(parts) + [True]
        self.parts += [b"other", b"frame"]
        self.ends += [False, True]
        self._more = False
        self.read = 0

    def recv(self, _flags: int, copy: bool = True) -> Any:
        if not self.parts:
            raise zmq.Again
        self._more = not self.ends.pop(0)
        self.read += 1
        part = self.parts.pop(0)
        return part if copy else received(part, has_more=self._more)

    def getsockopt(self, _option: int) -> int:
        return self._more


@pytest.mark.parametrize(
    ("part", "per_iteration"), [(b"x", listener.FRAMES_PER_ITERATION + 1), (LONG, 4)]
)
def test_the_parts_of_a_refused_message_are_read_within_the_bounds(
    part: bytes, per_iteration: int
) -> None:
    queued = Parts(*[part] * 3 * listener.FRAMES_PER_ITERATION)
    received, before = list(listener.receive(queued)), 0  # type: ignore[arg-type]
    assert received == [(b"peer", "", b"")]
    while len(received) == 1:
        assert 0 < queued.read - before <= per_iteration
        before = queued.read
        received += listener.receive(queued)  # type: ignore[arg-type]
    assert received[1:] == [(b"other", "", b"frame")]


def _arrived(opened: transport.Transport) -> list[tuple[bytes, str, bytes]]:
    """Return the requests that have arrived, each with its route and user."""
    opened.poll(0)
    return list(opened.receive_requests())


def _read(opened: transport.Transport, client: "zmq.Socket[bytes]") -> bytes:
    """Receive a reply, while the controller's iterations continue."""

    def has_frame() -> bool:
        opened.flush()
        return bool(client.poll(1))

    wait_until(has_frame)
    return client.recv()


def test_replies_beyond_the_bound_of_a_clients_queue_arrive_when_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_QUEUE_FRAMES_MAX", 4)
    count = 600
    with transport.Transport(tmp_path) as opened, zmq.Context() as context:
        client = context.socket(zmq.DEALER)
        client.linger, client.rcvhwm = 0, 1
        client.connect(endpoint(tmp_path, "requests.sock"))
        client.send(b"hello")
        peer = wait_until(lambda: _arrived(opened))[0][0]
        for number in range(count):
            opened.reply(peer, number.to_bytes(2) * 2000)
        opened.flush()
        assert opened._replies, "the queue was not full"
        replies = [_read(opened, client) for _ in range(count)]
        assert replies == [number.to_bytes(2) * 2000 for number in range(count)]
        client.close()


NAMES = ("requests.sock", "engine.sock", "events.sock")


def _exchange(opened: transport.Transport, client: "zmq.Socket[bytes]") -> None:
    """Send a frame and receive it as its reply."""
    client.send(b"hello")

    def is_received() -> bool:
        for route, _, frame in _arrived(opened):
            opened.reply(route, frame)
        opened.flush()
        return bool(client.poll(1))

    wait_until(is_received)
    assert client.recv() == b"hello"


def _connected(context: "zmq.Context[zmq.Socket[bytes]]", directory: Path) -> Any:
    client = context.socket(zmq.DEALER)
    client.linger = 0
    client.connect(endpoint(directory, "requests.sock"))
    return client


@pytest.mark.parametrize("has_directory", [True, False])
def test_sockets_whose_files_were_removed_are_bound_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, has_directory: bool
) -> None:
    monkeypatch.setattr(transport, "_FILES_NS", 0)
    run = directory / "run"
    with transport.Transport(directory) as opened, zmq.Context() as context:
        with _connected(context, directory) as before:
            _exchange(opened, before)
            for _ in range(3):
                for name in NAMES:
                    (run / name).unlink()
                if not has_directory:
                    run.rmdir()
                opened.poll(0)
                assert {*os.listdir(run)} == {*NAMES}
                assert run.stat().st_mode & 0o777 == 0o700
                with _connected(context, directory) as after:
                    _exchange(opened, after)
            # Connections that were made before stay.
            _exchange(opened, before)
        inodes = [(run / name).stat().st_ino for name in NAMES]
        opened.poll(0)
        assert [(run / name).stat().st_ino for name in NAMES] == inodes


def test_files_that_the_guard_hides_are_not_bound_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_FILES_NS", 0)
    run = directory / "run"
    with transport.Transport(directory) as opened:
        for name in NAMES:
            (run / name).rename(run / f"{name}.full")
        opened.poll(0)
        assert {*os.listdir(run)} == {f"{name}.full" for name in NAMES}


def test_a_reply_to_a_client_that_is_gone_is_dropped(tmp_path: Path) -> None:
    with transport.Transport(tmp_path) as opened:
        for reply in (b"short", b"x" * (1 << 20)):
            opened.reply(GONE_ROUTE, reply)
        assert list(opened.flush()) == [GONE_ROUTE]
        assert not opened._replies


def test_replies_to_a_client_that_does_not_read_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "UNREAD_BYTES_PER_CLIENT_MAX", 8 << 20)
    reply = b"x" * (1 << 20)
    with transport.Transport(tmp_path) as opened, zmq.Context() as context:
        client = context.socket(zmq.DEALER)
        client.linger, client.rcvhwm = 0, 1
        client.connect(endpoint(tmp_path, "requests.sock"))
        client.send(b"hello")
        peer = wait_until(lambda: _arrived(opened))[0][0]
        for _ in range(100):
            opened.reply(peer, reply)
            opened.flush()
        assert not opened.can_reply(peer)
        [unsent] = opened._replies.values()
        waiting = len(unsent)
        assert waiting == transport.UNSENT_BYTES_PER_CLIENT_MAX // len(reply)
        read = 0
        while len(unsent) == waiting:
            assert _read(opened, client) == reply
            read += 1
        opened.reply(peer, b"a refusal")
        while _read(opened, client) == reply:
            read += 1
        # Replies in the system's own buffers do not count as unread.
        assert 8 <= read - waiting < 50
        wait_until(lambda: opened.can_reply(peer))
        client.close()


GREETING = b"\xff" + bytes(7) + b"\1\x7f"
UNFINISHED = (
    *(b"", GREETING[:1], GREETING, GREETING + b"\3\0NULL" + bytes(48)),
    # Versions 1 and 2 of the protocol have no handshake that could take too long.
    *(b"\1\0", b"\1\0\6\0hello", b"GET / HTTP/1.1\r\n\r\n", GREETING + b"\1\5\0\0"),
)
"""What a peer sends that never becomes a client: silent ones, and those of older versions."""


def test_connections_that_do_not_finish_the_handshake_are_closed(directory: Path) -> None:
    assert listener._HANDSHAKE_MS == 2000
    with transport.Transport(directory):
        unfinished = []
        for name in ("requests.sock", "events.sock", "engine.sock"):
            for sent in UNFINISHED:
                peer = socket.socket(socket.AF_UNIX)
                unfinished.append(peer)
                peer.settimeout(HANG_S)
                peer.connect(str(directory / "run" / name))
                peer.sendall(sent)
        for peer in unfinished:
            # The other side's greeting, then the end.
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(4096):
                    continue
            peer.close()
