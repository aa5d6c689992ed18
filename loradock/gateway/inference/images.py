"""Images of chats: from data URLs, and from hosts that the operator allows.

Nothing is fetched from an address that is not public, also if an allowed name leads there, and no
redirection is followed. The connection is made to the address that was checked.
"""

import base64
import binascii
import contextlib
import http.client
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import urlsplit

from loradock.gateway.http.errors import HttpError
from loradock.messages.prompts import IMAGE_BYTES_MAX, IMAGES_BYTES_MAX, IMAGES_MAX

FETCH_TIMEOUT_S: Final = 10.0
_HEAD_CHARACTERS_MAX: Final = 1024
"""Bound on what precedes the content of a data URL."""
_PIECE_CHARACTERS: Final = 1 << 20
"""The characters that are decoded without letting other threads run; a multiple of 4."""
_PARAM: Final = "messages"


def is_remote(url: str) -> bool:
    """Return whether an image has to be fetched."""
    return not url.startswith("data:")


def check_urls(urls: Sequence[str]) -> None:
    """Raise `HttpError` for more or longer images than a prompt can have, before any is decoded."""
    if len(urls) > IMAGES_MAX:
        raise HttpError(
            400, f"a chat can have at most {IMAGES_MAX} images, got {len(urls)}", _PARAM
        )
    sizes = [_decoded_size(url) for url in urls if not is_remote(url)]
    if any(size > IMAGE_BYTES_MAX for size in sizes):
        raise _too_large()
    if sum(sizes) > IMAGES_BYTES_MAX:
        raise _refused(f"images of more than {IMAGES_BYTES_MAX} bytes together")


def image_of_data_url(url: str) -> bytes:
    """Return the bytes in a data URL that `check_urls` accepts; raises `HttpError`.

    Other threads run between its pieces.
    """
    data = url[url.index(",") + 1 :]
    if "=" in data[:-2]:
        raise _refused("a data URL that is not Base64: padding before its end")
    pieces = range(0, len(data), _PIECE_CHARACTERS)
    try:
        content = b"".join(
            base64.b64decode(data[first : first + _PIECE_CHARACTERS], validate=True)
            for first in pieces
        )
    except (binascii.Error, ValueError) as error:
        raise _refused(f"a data URL that is not Base64: {error}") from error
    return _checked(content)


def _decoded_size(url: str) -> int:
    """Return the bytes of the image in a data URL, up to its padding."""
    comma = url.find(",", 0, _HEAD_CHARACTERS_MAX)
    if comma < 0:
        raise _refused("a data URL without a comma")
    if not url.endswith(";base64", 0, comma):
        raise _refused("a data URL that is not Base64; send data:image/png;base64,...")
    return (len(url) - comma - 1) // 4 * 3 - 2


def fetch_image(url: str, allowed_hosts: Iterable[str]) -> bytes:
    """Return the bytes at an http or https URL; blocks, and raises `HttpError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise _refused(f"an image URL that can't be read: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise _refused(f"an image URL of scheme {parts.scheme!r}; data, http and https are read")
    if host not in {allowed.lower() for allowed in allowed_hosts}:
        raise _refused(f"images from {host!r}; allow it with --allowed-media-domain")
    is_tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        return _checked(_get(host, port or (443 if is_tls else 80), target, is_tls))
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise _refused(f"an image at {host!r} that can't be fetched: {error}") from error


def _get(host: str, port: int, target: str, is_tls: bool) -> bytes:
    connection = http.client.HTTPConnection(host, port, timeout=FETCH_TIMEOUT_S)
    connection.sock = _connect(host, port, is_tls)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise _refused(f"an image at {host!r} that is answered with status {response.status}")
        return response.read(IMAGE_BYTES_MAX + 1)
    finally:
        connection.close()


def _connect(host: str, port: int, is_tls: bool) -> socket.socket:
    """Connect to a public address of the host; raises `HttpError` if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global:
            continue
        with contextlib.ExitStack() as stack:
            plain = stack.enter_context(socket.socket(family, kind, protocol))
            plain.settimeout(FETCH_TIMEOUT_S)
            plain.connect(address)
            connected = plain
            if is_tls:
                connected = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            # Only a socket that can't be used is closed here.
            stack.pop_all()
        return connected
    raise _refused(f"images from {host!r}, which has no public address")


def _checked(content: bytes) -> bytes:
    if not content:
        raise _refused("an empty image")
    if len(content) > IMAGE_BYTES_MAX:
        raise _too_large()
    return content


def _too_large() -> HttpError:
    return _refused(f"an image of more than {IMAGE_BYTES_MAX} bytes")


def _refused(what: str) -> HttpError:
    return HttpError(400, f"the messages contain {what}", _PARAM)
