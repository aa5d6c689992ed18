"""Where the controller is, and how a client's sockets are set.

What it is: the runtime directory, its socket paths, and socket options. What it is not: a
conversation. One rule: both clients open their sockets here, so that they behave alike.
"""

import os
from pathlib import Path
from typing import Any, Final

import zmq

from messages.wire import EVENTS, REPLY_BYTES_MAX

DIRECTORY_VARIABLE: Final = "LORADOCK_DIR"
DIRECTORY_DEFAULT: Final = ".loradock"

SOCKET_PATH_BYTES_MAX: Final = 107
"""`sun_path` holds 108 bytes on Linux, the last of them NUL."""

_RECONNECT_MS: Final = 50
_RECONNECT_MS_MAX: Final = 1000
_QUEUE_FRAMES_MAX: Final = 100_000
# What a closed socket may still take to send: a cancellation that nobody waits for.
_LINGER_MS: Final = 100


def runtime_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """The controller's directory: the argument, else `$LORADOCK_DIR`, else `./.loradock`."""
    return Path(directory or os.environ.get(DIRECTORY_VARIABLE) or DIRECTORY_DEFAULT)


def requests_endpoint(directory: Path) -> str:
    """Where the controller takes requests; raises `ValueError` for a path that is too long."""
    return _endpoint(directory, "requests.sock")


def events_endpoint(directory: Path) -> str:
    """Where the controller publishes events; raises `ValueError` for a path that is too long."""
    return _endpoint(directory, "events.sock")


def connect_requests(socket: "zmq.Socket[Any]", directory: Path) -> None:
    """Connect a DEALER to the controller's ROUTER; a missing one is waited for."""
    _set_options(socket)
    socket.connect(requests_endpoint(directory))


def connect_events(socket: "zmq.Socket[Any]", directory: Path) -> None:
    """Connect a SUB to the controller's PUB."""
    _set_options(socket)
    socket.setsockopt(zmq.SUBSCRIBE, EVENTS.prefix)
    socket.connect(events_endpoint(directory))


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
