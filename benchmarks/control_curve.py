"""The figure `control.curve`: requests and replies over TCP with CURVE, against the same without.

The server is a process that decodes requests and replies as the echo does. With CURVE its sockets
are the controller's own, with authentication and the user of each frame; without, a bare ROUTER.
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from benchmarks.figures import Figure, interleave
from controller.client.sockets import connection_to, open_requests
from controller.shell.access.keys import AllowedKey, KeyStore, new_pair
from controller.shell.access.permissions import Access
from controller.shell.connection_guard import GuardThread
from controller.shell.listener import Listener, receive, remote_addresses
from messages.key_files import write_key_pair
from messages.requests import AdapterDone, HoldAdapter
from messages.wire import REPLIES, REQUESTS

OUTSTANDING = 64
REQUESTS_PER_ROUND = 10_000
ROUNDS = 5


def run() -> Iterator[Figure]:
    """Measure the figure."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        directory = Path(name)
        store, pair = KeyStore(directory), new_pair()
        store.server_pair()
        store.allow(AllowedKey("bench", pair.public, "operate"))
        write_key_pair(directory / "bench.key", pair)
        curve, plain = _address(), _address()
        with _server(curve, directory, "curve"), _server(plain, directory, "plain"):
            connection = connection_to(
                address=curve, key=directory / "bench.key", server_key=store.server_public_path
            )
            encrypted = open_requests(zmq.Context.instance(), connection)
            bare = zmq.Context.instance().socket(zmq.DEALER)
            bare.connect(plain)
            with encrypted, bare:
                ours, theirs = interleave(lambda: _rate(encrypted), lambda: _rate(bare), ROUNDS)
    yield Figure(
        "control.curve",
        ours,
        "requests/s",
        f"the same over plain TCP: {theirs:,.0f}/s",
        ours / theirs,
        "ratio >= 0.6",
        ours / theirs >= 0.6,
    )


def _address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{min(free.getsockname()[1], 65_000)}"


@contextmanager
def _server(address: str, directory: Path, kind: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.control_curve", address, str(directory), kind]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _rate(connected: "zmq.Socket[bytes]") -> float:
    """Return requests per second with `OUTSTANDING` requests in flight."""
    frame = REQUESTS.encode((HoldAdapter("client-1234567", "upper"),))
    connected.send(frame)
    connected.recv()
    started = time.perf_counter()
    for _ in range(OUTSTANDING):
        connected.send(frame)
    for _ in range(REQUESTS_PER_ROUND - OUTSTANDING):
        connected.recv()
        connected.send(frame)
    for _ in range(OUTSTANDING):
        connected.recv()
    return REQUESTS_PER_ROUND / (time.perf_counter() - started)


def main() -> None:
    """Run `python -m benchmarks.control_curve ADDRESS DIRECTORY curve|plain`: serve until ended."""
    address, directory, kind = sys.argv[1:]
    if kind == "curve":
        store = KeyStore(Path(directory))
        listener = Listener(
            remote_addresses(address), store.server_pair(), Access(store), is_remote=True
        )
        # No connection is accepted before its monitor is read.
        GuardThread((), listener.accepted().wait)
        while listener.requests.poll():
            for peer, _, frame in listener.receive_requests():
                _answer(listener.requests, peer, frame)
    bare = zmq.Context().socket(zmq.ROUTER)
    bare.bind(address)
    while bare.poll():
        for peer, frame in receive(bare):
            _answer(bare, peer, frame)


def _answer(router: "zmq.Socket[bytes]", peer: bytes, frame: bytes) -> None:
    [request] = REQUESTS.decode(frame).message
    reply = AdapterDone(request.request_id, "upper", "gpu-slot", 0, 1)
    router.send(peer, zmq.SNDMORE)
    router.send(REPLIES.encode((reply,)))


if __name__ == "__main__":
    main()
