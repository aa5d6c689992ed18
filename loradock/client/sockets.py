"""The sockets of a client: a controller's addresses, local or remote, and the `Port` on them.

A port is what the two clients differ in: the one of `AsyncClient` waits on the event loop, the one
of `Client` blocks its thread.
"""

import math
import os
import secrets
import shlex
import socket as os_socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from loradock.client.calls import ClientCall, GenerationCall, Timing
from loradock.client.session import Session
from loradock.client.streams import Subscription
from loradock.messages.addresses import (
    EVENTS_PORT_OFFSET,
    REVOKED_STATUS,
    endpoint,
    with_port_offset,
)
from loradock.messages.errors import EngineGone, NotAllowed
from loradock.messages.wire import EVENTS, REPLY_BYTES_MAX, TOKEN_BYTES
from loradock.processes.key_files import KeyPair, read_key_pair, read_public_key

C = TypeVar("C", bound=ClientCall)
R = TypeVar("R")
Socket = TypeVar("Socket", bound="zmq.Socket[Any]")

DIRECTORY_VARIABLE: Final = "LORADOCK_DIR"
DIRECTORY_DEFAULT: Final = ".loradock"

_RECONNECT_MS: Final = 50
_RECONNECT_MS_MAX: Final = 1000
_QUEUE_FRAMES_MAX: Final = 100_000
# How long a closed socket can still send: a cancellation whose answer is not awaited.
_LINGER_MS: Final = 100
REMOTE_S: Final = 2.0
"""Time in which a remote server accepts or refuses a connection."""

_REBIND_S: Final = 0.5

FIRST_START_S = 2.0
"""Time in which a server that is being started for the first time makes its directory."""

_SERVER_FILES: Final = frozenset({"keys", "run", "log"})

_DECISIVE: Final = frozenset(
    {
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_CONNECT_RETRIED,
    }
)
# A remote controller that has vanished is connected to again after this time.
_REMOTE_SILENCE_MS: Final = 30_000


def runtime_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return the controller's directory: the argument, `$LORADOCK_DIR` or `./.loradock`."""
    return Path(directory or os.environ.get(DIRECTORY_VARIABLE) or DIRECTORY_DEFAULT)


class Keys(NamedTuple):
    """A client's own key pair and its controller's public key."""

    own: KeyPair
    server: str


class Connection(NamedTuple):
    """The two addresses of a controller, and the keys of a remote controller."""

    requests: str
    events: str
    keys: Keys | None = None


def connection_to(
    directory: str | os.PathLike[str] | None = None,
    address: str = "",
    key: str | os.PathLike[str] = "",
    server_key: str | os.PathLike[str] = "",
) -> Connection:
    """Return the connection to the controller of a directory, or to the one at `address`.

    `address` is `tcp://HOST:PORT`, `key` the file of the client's key pair, `server_key` that of
    the controller's public key. Raises `ValueError` for a path that is too long, another address,
    or files without keys.
    """
    if not address:
        if key or server_key:
            raise ValueError("keys need an address: they are for remote controllers")
        local = runtime_directory(directory)
        return Connection(endpoint(local, "requests.sock"), endpoint(local, "events.sock"))
    if directory is not None:
        raise ValueError("a controller is reached by its directory or by its address, not by both")
    if not key or not server_key:
        raise ValueError(
            f"{address} needs the file of your key (`loradock keys new`) and the file of the "
            "server's public key (keys/server.key.pub in its directory)"
        )
    keys = Keys(read_key_pair(key), read_public_key(server_key))
    events = with_port_offset(address, EVENTS_PORT_OFFSET)
    return Connection(with_port_offset(address, 0), events, keys)


def open_requests(context: "zmq.Context[Socket]", connection: Connection) -> Socket:
    """Return a DEALER that is connected to the controller's ROUTER, which may be bound later."""
    socket = context.socket(zmq.DEALER)
    _set_options(socket, connection.keys)
    socket.connect(connection.requests)
    return socket


def open_events(context: "zmq.Context[Socket]", connection: Connection) -> Socket:
    """Return a SUB that is connected to the controller's PUB, which may be bound later."""
    socket = context.socket(zmq.SUB)
    _set_options(socket, connection.keys)
    socket.setsockopt(zmq.SUBSCRIBE, EVENTS.prefix)
    socket.connect(connection.events)
    return socket


def unserved_reason(connection: Connection) -> str:
    """Return why no process accepts connections for requests; empty if one does.

    A remote address is not tried: a connection to it can take long.
    """
    if connection.keys is not None:
        return ""
    path = connection.requests.removeprefix("ipc://")
    with os_socket.socket(os_socket.AF_UNIX, os_socket.SOCK_STREAM) as probe:
        # A local connection is made or refused at once, unless the listener's queue is full.
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return ""
        except FileNotFoundError:
            # The controller renames its socket while it refuses connections.
            is_full = Path(f"{path}.full").exists()
            return "too many clients are connected" if is_full else "no socket there"
        except ConnectionRefusedError:
            return "nothing listens on its socket"
        except OSError as error:
            return error.strerror or str(error)
    return ""


def remote_failure(connection: Connection) -> EngineGone | NotAllowed | None:
    """Return why a connection to a remote server can't be made within `REMOTE_S`; None if it can.

    `NotAllowed`: the server is there, and another attempt with these keys fails too.
    """
    with zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        _set_options(socket, connection.keys)
        monitor = socket.get_monitor_socket()
        socket.connect(connection.requests)
        try:
            event, value = _first_event(monitor)
        finally:
            socket.disable_monitor()
            context.destroy(linger=0)
    address = connection.requests
    match event:
        case zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return None
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH if value == REVOKED_STATUS:
            return NotAllowed(f"the server at {address} has revoked this key")
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return NotAllowed(f"the server at {address} does not know this key")
        case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            other = "its key is not the one of --server-key, or it is no LoRADock server"
            return NotAllowed(f"{address} is another server: {other}")
        case zmq.EVENT_CONNECT_RETRIED:
            known = f"nothing listens at {address}"
            unknown = f"the host of {address} is not known: its name can't be resolved"
            return EngineGone(known if _has_host(address) else unknown)
    return EngineGone(f"{address} did not answer within {REMOTE_S:g} s")


def _has_host(address: str) -> bool:
    """Return whether the host of `tcp://HOST:PORT` has an address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        return bool(os_socket.getaddrinfo(host.strip("[]"), port))
    except OSError:
        return False


def _first_event(monitor: "zmq.Socket[Any]") -> tuple[int, int]:
    """Return the first event of a connection that decides about it; zeros if none comes in time."""
    ends_s, event, value = time.monotonic() + REMOTE_S, 0, 0
    while monitor.poll(max(0, math.ceil(1000 * (ends_s - time.monotonic())))):
        message = parse_monitor_message(monitor.recv_multipart())
        if message["event"] not in _DECISIVE:
            continue
        event, value = message["event"], message["value"]
        if event != zmq.EVENT_CONNECT_RETRIED:
            break
        # A server that has revoked a key binds its sockets again.
        ends_s = min(ends_s, time.monotonic() + _REBIND_S)
    return event, value


def check_place(connection: Connection) -> None:
    """Raise an error for a place where no server can answer this client.

    `NotAllowed` for a remote server that refuses the keys, `EngineGone` for an address without a
    server after `FIRST_START_S`, and for a directory without a server's files: at once if it
    contains others, otherwise after that time.
    """
    end_s = time.monotonic() + FIRST_START_S
    if connection.keys is not None:
        # One that is started again refuses connections for a moment.
        while failure := remote_failure(connection):
            if isinstance(failure, NotAllowed) or time.monotonic() >= end_s:
                raise failure
            time.sleep(_RECONNECT_MS / 1000)
        return
    directory = _directory_of(connection)
    while not _SERVER_FILES & (found := _names_in(directory)):
        if found or time.monotonic() >= end_s:
            raise EngineGone(silence_reason(connection))
        time.sleep(_RECONNECT_MS / 1000)


def _names_in(directory: Path) -> set[str]:
    return {*os.listdir(directory)} if directory.is_dir() else set()


def silence_reason(connection: Connection) -> str:
    """Return why no server answers, and the command that starts one; empty if one can."""
    if connection.keys is not None:
        failure = remote_failure(connection)
        return "" if failure is None else failure.message
    reason = unserved_reason(connection)
    if not reason:
        return ""
    directory = _directory_of(connection)
    command = f"loradock --dir {shlex.quote(str(directory))} serve"
    return (
        f"no LoRADock server answers at {directory} ({reason}); start one: {command} --model MODEL "
        "--adapter-root ADAPTERS"
    )


def _directory_of(connection: Connection) -> Path:
    return Path(connection.requests.removeprefix("ipc://")).parent.parent


def _set_options(socket: "zmq.Socket[Any]", keys: Keys | None) -> None:
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        socket.setsockopt(zmq.HEARTBEAT_IVL, _REMOTE_SILENCE_MS // 3)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _REMOTE_SILENCE_MS)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_FRAMES_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_FRAMES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, REPLY_BYTES_MAX)


def forked_error(pid: int) -> RuntimeError:
    """Return the error for the use of a client in a fork of the process that made it."""
    return RuntimeError(
        f"this client was made in process {pid} and does not work in its fork {os.getpid()}; make "
        "a client in each process"
    )


class Timeouts(NamedTuple):
    """Default time limits of requests and of inference, in seconds; when frames are repeated."""

    timeout_s: float
    generation_timeout_s: float
    timing: Timing


class Port(ABC):
    """A session with its socket, and how a client waits for it."""

    def __init__(self, connection: Connection, limits: Timeouts) -> None:
        self.connection: Final = connection
        self.session: Final = Session(
            secrets.token_bytes(TOKEN_BYTES),
            limits.timing,
            limits.timeout_s,
            limits.generation_timeout_s,
            silence=self.silence_reason,
            on_change=self._on_change,
        )
        self._socket: zmq.Socket[bytes] = open_requests(zmq.Context.instance(), connection)

    def silence_reason(self) -> str:
        """Return why no server answers; empty if one can."""
        return silence_reason(self.connection)

    @abstractmethod
    def use(self) -> AbstractContextManager[None]:
        """Return the context in which the session is used.

        Entering it raises `RuntimeError` if this client can't be used: in a forked process, in
        another thread or on another event loop.
        """

    @abstractmethod
    def flush(self) -> None:
        """Send the frames that are due, now or when other tasks have had their turn."""

    @abstractmethod
    async def wait(self, call: ClientCall, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns true, which is called after every change of the call."""

    @abstractmethod
    async def in_background(self, function: Callable[[], R]) -> R:
        """Return the result of a function that blocks."""

    @abstractmethod
    def drop(self, call: GenerationCall) -> None:
        """Cancel a generation that nothing refers to; any thread can call this."""

    @abstractmethod
    def subscribe(self) -> Subscription:
        """Return a new subscription to the events."""

    @abstractmethod
    def _on_change(self, call: ClientCall) -> None:
        """Process that a call has received output, or is settled."""
