"""Peers of a controller that listens on a network: right ones, and sockets of any kind."""

import contextlib
import secrets
import socket
import threading
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from loradock.messages import requests
from loradock.messages.addresses import ENGINE_PORT_OFFSET
from loradock.messages.wire import REPLIES, REQUESTS, TOKEN_BYTES
from loradock.processes.key_files import KeyPair, read_key_pair
from tests.support.simulation.key_examples import server_key, use_keys
from tests.support.waiting import HANG_S, wait_until

_PORTS: Final = 3
_LOWEST_PORT: Final = 10_000
_PORTS_END: Final = 1 << 16
_OUTGOING_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RETRY_MS: Final = 2000
_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


def free_address() -> str:
    """Return an address of this machine whose ports are free at the moment.

    No outgoing connection of another process is made from one of them before the controller binds
    it: the controller would end, and a test would wait for it.
    """
    first_outgoing = int(_OUTGOING_PORTS.read_text().split()[0])
    end = first_outgoing if first_outgoing > 2 * _LOWEST_PORT else _PORTS_END
    while True:
        port = _LOWEST_PORT + secrets.randbelow(end - _LOWEST_PORT - _PORTS)
        try:
            for offset in range(_PORTS):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return f"tcp://127.0.0.1:{port}"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def engine_address(address: str) -> str:
    return f"tcp://127.0.0.1:{port_of(address) + ENGINE_PORT_OFFSET}"


class Remote:
    """One socket to an address, with keys or without; `is_admitted` waits for the handshake."""

    def __init__(
        self, address: str, pair: KeyPair | None = None, server: str = "", kind: int = zmq.DEALER
    ) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger = 0
        self._monitor = self.socket.get_monitor_socket()
        if pair is not None:
            use_keys(self.socket, pair, server)
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        self._address = address
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._replies: list[requests.Reply] = []

    def connect(self) -> None:
        self.socket.connect(self._address)

    def is_admitted(self, *frames: bytes) -> bool:
        """Connect and send, and return whether the handshake succeeds."""
        self.connect()
        for frame in frames:
            self.socket.send(frame)
        while True:
            event = self.next_event()
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
            if event in (*_FAILED, zmq.EVENT_DISCONNECTED):
                return False

    def next_event(self) -> int:
        assert self._monitor.poll(HANG_S * 1000), "nothing happens to the connection"
        found: Any = parse_monitor_message(self._monitor.recv_multipart())
        return int(found["event"])

    def send(self, request: requests.Request) -> None:
        self.socket.send(REQUESTS.encode((request,), token=self._token))

    def send_if_possible(self, request: requests.Request) -> None:
        """Send, unless the socket has no connection to send to."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(REQUESTS.encode((request,), token=self._token), zmq.NOBLOCK)

    def call(self, request: requests.Request) -> Any:
        """Send until a reply comes: a revocation of any key closes all remote connections."""
        self.send(request)

        def is_answered() -> bool:
            if self._replies or self.socket.poll(_RETRY_MS):
                return True
            self.send(request)
            return False

        wait_until(is_answered, what="no reply")
        return self.reply()

    def reply(self) -> Any:
        while not self._replies:
            assert self.socket.poll(HANG_S * 1000), "no reply"
            self._replies += REPLIES.decode(self.socket.recv()).message
        return self._replies.pop(0)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._context.destroy(linger=0)

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remote_client(directory: Path, address: str, key: Path, kind: int = zmq.DEALER) -> Remote:
    """Return a client with an allowed key; it is connected."""
    remote = Remote(address, read_key_pair(key), server_key(directory), kind)
    assert remote.is_admitted()
    return remote


class RecordingProxy:
    """Forwards one connection, and keeps the bytes that the client sent."""

    def __init__(self, port: int) -> None:
        self.sent = b""
        self._target = socket.create_connection(("127.0.0.1", port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        back = threading.Thread(target=_copy, args=(self._target, client), daemon=True)
        back.start()
        while data := client.recv(65_536):
            self.sent += data
            self._target.sendall(data)
        self._target.close()

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            target.sendall(data)
    except OSError:
        return


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Read until the peer closes the connection."""
    connection.settimeout(HANG_S)
    try:
        while connection.recv(65_536):
            continue
    except ConnectionError:
        return True
    return True
