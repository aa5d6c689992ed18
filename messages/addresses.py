"""The addresses of a controller: sockets in its directory, or three ports of one host."""

import os
import re
from pathlib import Path
from typing import Final

SOCKET_PATH_BYTES_MAX: Final = 107
"""`sun_path` holds 108 bytes on Linux, the last of them NUL."""

EVENTS_PORT_OFFSET: Final = 1
ENGINE_PORT_OFFSET: Final = 2

REVOKED_STATUS: Final = 500
"""The ZAP status of a key that was allowed before; any other refused key has 400."""

_ADDRESS: Final = re.compile(r"tcp://([^:/\s]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})\Z")
_PORT_MAX: Final = 65_535 - ENGINE_PORT_OFFSET


def endpoint(directory: Path, name: str) -> str:
    """Return the address of a socket in a directory; raises `ValueError` if it is too long."""
    path = os.fspath(directory / "run" / name)
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"the socket path {path} has {size} bytes and Unix allows {SOCKET_PATH_BYTES_MAX}; use "
            "a shorter directory, or in a client a relative one"
        )
    return f"ipc://{path}"


def with_port_offset(address: str, offset: int) -> str:
    """Return `tcp://HOST:PORT` with a higher port; raises `ValueError` for another address.

    Clients send requests to the port itself, events are published at the next port, and the port
    after that is for engines.
    """
    matched = _ADDRESS.match(address)
    if not matched or not 0 < int(matched[2]) <= _PORT_MAX:
        raise ValueError(
            f"{address!r} is not an address: tcp://HOST:PORT, with a port from 1 to {_PORT_MAX}"
        )
    return f"tcp://{matched[1]}:{int(matched[2]) + offset}"
