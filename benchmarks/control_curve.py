"""The figure `control.curve`: requests and replies over TCP with CURVE, against the same without.

The server is a process that decodes requests and replies as the echo does. With CURVE its sockets
are the controller's own, with authentication and the user of each frame; without, a bare ROUTER.
Both servers have one processor and the client has another, so that the scheduler's placement does
not differ between rounds. The ratio is the median of those of adjacent rounds: a change of the
machine's load affects both. The processor time per request is printed next to it.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import zmq

from benchmarks.figures import Figure
from loradock.client.sockets import connection_to, open_requests
from loradock.controller.server.access import Access
from loradock.controller.server.connection_guard import GuardThread, RemoteGuard
from loradock.controller.server.keys import AllowedKey, KeyStore, new_pair
from loradock.controller.server.listener import Listener, receive, remote_addresses
from loradock.messages.requests import AdapterDone, HoldAdapter
from loradock.messages.wire import REPLIES, REQUESTS
from loradock.processes.key_files import write_key_pair

OUTSTANDING = 64
REQUESTS_PER_ROUND = 20_000
ROUNDS = 15
REPLY_TIMEOUT_MS = 60_000
_PORTS = 3
"""The ports of a remote address."""
_DESCRIPTORS_MAX = 1024


class Round(NamedTuple):
    """Requests per second, and the processor time of client and server per request."""

    rate: float
    cpu_us: float


def run() -> Iterator[Figure]:
    """Measure the figure."""
    processors = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        try:
            # Threads of this process that are started from now on, those of its sockets too.
            os.sched_setaffinity(0, {max(processors)})
            pairs = _rounds(Path(name), min(processors))
        finally:
            os.sched_setaffinity(0, processors)
    curve, plain = (
        Round(*(median(column) for column in zip(*rounds, strict=True)))
        for rounds in zip(*pairs, strict=True)
    )
    ratio = median(ours.rate / theirs.rate for ours, theirs in pairs)
    yield Figure(
        "control.curve",
        curve.rate,
        f"requests/s, {curve.cpu_us:.1f} us of processor time each",
        f"the same over plain TCP: {plain.rate:,.0f}/s, {plain.cpu_us:.1f} us",
        ratio,
        "ratio >= 0.6",
        ratio >= 0.6,
    )


def _rounds(directory: Path, processor: int) -> list[tuple[Round, Round]]:
    """Return the rounds with CURVE and without, measured alternately on warm connections."""
    store, pair = KeyStore(directory), new_pair()
    store.server_pair()
    store.allow(AllowedKey("bench", pair.public, "operate"))
    write_key_pair(directory / "bench.key", pair)
    curve, plain = _addresses()
    with (
        _server(curve, directory, "curve", processor) as curve_pid,
        _server(plain, directory, "plain", processor) as plain_pid,
        zmq.Context() as context,
    ):
        connection = connection_to(
            address=curve, key=directory / "bench.key", server_key=store.server_public_path
        )
        with open_requests(context, connection) as encrypted, context.socket(zmq.DEALER) as bare:
            bare.connect(plain)
            ways = ((encrypted, curve_pid), (bare, plain_pid))
            for connected, pid in ways:
                connected.rcvtimeo = REPLY_TIMEOUT_MS
                _measure(connected, pid)
            pairs = []
            for number in range(ROUNDS):
                order = ways if number % 2 else ways[::-1]
                measured = {pid: _measure(connected, pid) for connected, pid in order}
                pairs.append((measured[curve_pid], measured[plain_pid]))
    return pairs


def _addresses() -> tuple[str, str]:
    """Return free addresses: one with the two ports after it, and one more."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        try:
            with ExitStack() as probes:
                for offset in range(_PORTS + 1):
                    probes.enter_context(socket.create_server(("127.0.0.1", port + offset)))
        except (OSError, OverflowError):
            continue
        return f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + _PORTS}"


@contextmanager
def _server(address: str, directory: Path, kind: str, processor: int) -> Iterator[int]:
    """Run a server on one processor, and return its process id."""
    command = [sys.executable, "-m", "benchmarks.control_curve", address, str(directory), kind]
    process = subprocess.Popen([*command, str(processor)])
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def _measure(connected: "zmq.Socket[bytes]", pid: int) -> Round:
    """Send a round with `OUTSTANDING` requests in flight to the server with this process id."""
    frame = REQUESTS.encode((HoldAdapter("client-1234567", "upper"),))
    connected.send(frame)
    connected.recv()
    used_s, started = _processor_s(pid), time.perf_counter()
    for _ in range(OUTSTANDING):
        connected.send(frame)
    for _ in range(REQUESTS_PER_ROUND - OUTSTANDING):
        connected.recv()
        connected.send(frame)
    for _ in range(OUTSTANDING):
        connected.recv()
    seconds, used_s = time.perf_counter() - started, _processor_s(pid) - used_s
    return Round(REQUESTS_PER_ROUND / seconds, used_s / REQUESTS_PER_ROUND * 1e6)


def _processor_s(pid: int) -> float:
    """Return the processor time of this process and of another one so far."""
    # The number of the clock that `clock_getcpuclockid(3)` returns, which Python lacks.
    return time.process_time() + time.clock_gettime((~pid << 3) | 2)


def main() -> None:
    """Run `python -m benchmarks.control_curve ADDRESS DIRECTORY curve|plain PROCESSOR`."""
    address, directory, kind, processor = sys.argv[1:]
    # Before the threads of the sockets are started.
    os.sched_setaffinity(0, {int(processor)})
    if kind == "curve":
        store = KeyStore(Path(directory))
        listener = Listener(
            remote_addresses(address), store.server_pair(), Access(store), is_remote=True
        )
        # No connection is accepted before its monitor is read.
        guard = RemoteGuard(_DESCRIPTORS_MAX, listener.unread_bytes_max(), listener.read)
        GuardThread((guard,), listener.accepted().wait)
        while listener.requests.poll():
            for peer, _, frame in listener.receive_requests():
                _answer(listener.requests, peer, frame)
    bare = zmq.Context().socket(zmq.ROUTER)
    bare.bind(address)
    while bare.poll():
        for peer, _, frame in receive(bare):
            _answer(bare, peer, frame)


def _answer(router: "zmq.Socket[bytes]", peer: bytes, frame: bytes) -> None:
    [request] = REQUESTS.decode(frame).message
    reply = AdapterDone(request.request_id, "upper", "gpu-slot", 0, 1)
    router.send(peer, zmq.SNDMORE)
    router.send(REPLIES.encode((reply,)))


if __name__ == "__main__":
    main()
