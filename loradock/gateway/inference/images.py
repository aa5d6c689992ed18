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
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from loradock.gateway.http.errors import HttpError
from loradock.messages.prompts import IMAGE_BYTES_MAX

FETCH_TIMEOUT_S: Final = 10.0
_PARAM: Final = "messages"


def is_remote(url: str) -> bool:
    """Return whether an image has to be fetched."""
    return not url.startswith("data:")


def image_of_data_url(url: str) -> bytes:
    """Return the bytes in a data URL; raises `HttpError`."""
    head, separator, data = url.partition(",")
    if not separator:
        raise _refused("a data URL without a comma")
    if not head.endswith(";base64"):
        content = unquote_to_bytes(data)
    else:
        try:
            content = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _refused(f"a data URL that is not Base64: {error}") from error
    return _checked(content)


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
        raise _refused(f"an image of more than {IMAGE_BYTES_MAX} bytes")
    return content


def _refused(what: str) -> HttpError:
    return HttpError(400, f"the messages contain {what}", _PARAM)
