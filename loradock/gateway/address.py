"""The address that a gateway serves at."""

import socket
from typing import Final

HOST_DEFAULT: Final = "127.0.0.1"
BACKLOG: Final = 2048


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[IPV6]:PORT` or `PORT`; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is not an address; HOST:PORT is needed, like 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]") or HOST_DEFAULT, int(port)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises `OSError`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
