"""The controller's runtime directory and its sockets, and the socket options of both clients."""

import os
import socket as os_socket
from pathlib import Path
from typing import Any, Final, TypeVar

import zmq

from messages.wire import EVENTS, REPLY_BYTES_MAX

Socket = TypeVar("Socket", bound="zmq.Socket[Any]")

DIRECTORY_VARIABLE: Final = "LORADOCK_DIR"
DIRECTORY_DEFAULT: Final = ".loradock"

SOCKET_PATH_BYTES_MAX: Final = 107
"""`sun_path` holds 108 bytes on Linux, the last of them NUL."""

_RECONNECT_MS: Final = 50
_RECONNECT_MS_MAX: Final = 1000
_QUEUE_FRAMES_MAX: Final = 100_000
# How long a closed socket may still send: a cancellation whose answer is not awaited.
_LINGER_MS: Final = 100


def runtime_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return the controller's directory: the argument, `$LORADOCK_DIR` or `./.loradock`."""
    return Path(directory or os.environ.get(DIRECTORY_VARIABLE) or DIRECTORY_DEFAULT)


def requests_endpoint(directory: Path) -> str:
    """Return the address for requests; raises `ValueError` for a path that is too long."""
    return _endpoint(directory, "requests.sock")


def events_endpoint(directory: Path) -> str:
    """Return the address of published events; raises `ValueError` for a path that is too long."""
    return _endpoint(directory, "events.sock")


def open_requests(context: "zmq.Context[Socket]", directory: Path) -> Socket:
    """Return a DEALER that is connected to the controller's ROUTER, which may be bound later.

    Raises `ValueError` for a path that is too long.
    """
    endpoint = requests_endpoint(directory)
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    socket.connect(endpoint)
    return socket


def open_events(context: "zmq.Context[Socket]", directory: Path) -> Socket:
    """Return a SUB that is connected to the controller's PUB; raises as `open_requests`."""
    endpoint = events_endpoint(directory)
    socket = context.socket(zmq.SUB)
    _set_options(socket)
    socket.setsockopt(zmq.SUBSCRIBE, EVENTS.prefix)
    socket.connect(endpoint)
    return socket


def unserved_reason(directory: Path) -> str:
    """Return why no process accepts connections for requests; empty if one does.

    Raises `ValueError` for a path that is too long.
    """
    path = requests_endpoint(directory).removeprefix("ipc://")
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


def _set_options(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_FRAMES_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_FRAMES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, REPLY_BYTES_MAX)


def _endpoint(directory: Path, name: str) -> str:
    path = os.fspath(directory / "run" / name)
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"the socket path {path} has {size} bytes and Unix allows {SOCKET_PATH_BYTES_MAX}; "
            "use a shorter directory, or a relative one"
        )
    return f"ipc://{path}"
