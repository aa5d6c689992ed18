"""What precedes every endpoint: API keys, clients, the names of this host, and CORS.

Keys are compared by their digests in constant time.
"""

import hashlib
import hmac
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loradock.gateway.http.endpoint import Endpoint, header_of
from loradock.gateway.http.errors import (
    CODE_HEADER,
    HttpError,
    error_response,
    failure,
    unauthorized_response,
)
from loradock.gateway.options import (
    KEYS_VARIABLES,
    UPDATING_VARIABLE,
    GatewayConfig,
    GatewayOptions,
)


def configured_keys(options: GatewayOptions, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the API keys of options, file and environment; raises `OSError` and `ValueError`.

    Without any key, requests need none.
    """
    keys = [*options.api_keys]
    if options.api_key_file:
        lines = Path(options.api_key_file).read_text().splitlines()
        of_file = [line.strip() for line in lines if line.strip()]
        if not of_file:
            raise ValueError(
                f"{options.api_key_file} must contain an API key per line, and has none"
            )
        keys += of_file
    keys += [environment[name] for name in KEYS_VARIABLES if environment.get(name)]
    if not all(keys):
        raise ValueError("an API key must have at least 1 character, got an empty one")
    return tuple(keys)


class AccessCheck:
    """The access of requests to endpoints: with a valid key, and while adapters can be changed.

    `keys`: those that requests can send; without any, they need none. `client_header`: the header
    that tells clients apart if keys don't; empty for none.
    """

    def __init__(self, keys: Iterable[str], client_header: str, *, updating: bool) -> None:
        self._digests: Final = tuple(_digest(key.encode()) for key in keys)
        self._client_header = client_header.lower().encode()
        self._updating = updating

    def refusal(self, endpoint: Endpoint, scope: Scope) -> Response | None:
        """Return the answer to a request without access; None if it has access."""
        if endpoint.access == "public":
            return None
        if not self._accepts(scope):
            return unauthorized_response(endpoint.shape)
        if endpoint.access == "updating" and not self._updating:
            message = (
                "adapters can't be changed over HTTP; start the gateway with "
                f"--allow-runtime-lora-updating or {UPDATING_VARIABLE}=1"
            )
            return error_response(HttpError(403, message))
        return None

    def _accepts(self, scope: Scope) -> bool:
        """Return whether the request has a valid key, or none is needed."""
        if not self._digests:
            return True
        digest = _digest(_key_of(scope))
        # All keys are compared, so that the time does not depend on which one matches.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def client_of(self, scope: Scope) -> str:
        """Return the name of a request's client: of its key, header or address, the first it has.

        No key or address can be read from the name.
        """
        header = self._client_header
        if self._digests:
            told = b"key " + _key_of(scope)
        elif value := header and header_of(scope, header):
            told = b"header " + value.encode("latin-1")
        else:
            # A socket of the file system has no address.
            told = b"address " + str((scope.get("client") or ("",))[0]).encode()
        return hashlib.sha256(told).hexdigest()[:_NAME_CHARACTERS]


_NAME_CHARACTERS: Final = 16


def _key_of(scope: Scope) -> bytes:
    """Return the key that a request sends; empty if it sends none."""
    scheme, _, key = header_of(scope, b"authorization").partition(" ")
    if scheme.lower() != "bearer":
        # The header of Anthropic's protocol.
        key = header_of(scope, b"x-api-key")
    # Headers were decoded as Latin-1, which keeps their bytes.
    return key.strip().encode("latin-1")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
ANY_HOST: Final = "*"


def allowed_hosts(config: GatewayConfig, *, needs_key: bool) -> frozenset[str] | None:
    """Return the hosts that requests can name; None: any. Raises `OSError` for an unknown host.

    Without a key, a page in a browser of this machine can reach a gateway on a loopback address: it
    has its own name resolve to that address. With HTTPS the certificate excludes that.
    """
    named = frozenset(host.lower() for host in config.allowed_hosts)
    is_exposed = not needs_key and not config.ssl_certfile and _is_loopback(config.host)
    if ANY_HOST in named or not (named or is_exposed):
        return None
    return named.union(LOCAL_HOSTS, (config.host.lower(),))


def is_open(config: GatewayConfig, *, needs_key: bool) -> bool:
    """Return whether other machines can use a gateway without any key or certificate."""
    return not (needs_key or config.ssl_ca_certs or _is_loopback(config.host))


def _is_loopback(host: str) -> bool:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    address = str(found[0][4][0])
    return ip_address(address.partition("%")[0]).is_loopback


def with_cors(app: ASGIApp, options: GatewayOptions) -> ASGIApp:
    """Return an application whose answers pages of other web sites can read, if any can.

    A preflight has no key, and is answered here. Raises `ValueError` for options without effect.
    """
    origins = _items("--allowed-origins", options.allowed_origins)
    methods = _items("--allowed-methods", options.allowed_methods)
    headers = _items("--allowed-headers", options.allowed_headers)
    if not origins:
        if methods or headers or options.allow_credentials:
            raise ValueError(
                "--allowed-methods, --allowed-headers and --allow-credentials are about the pages "
                "of --allowed-origins, and that names none; add it, or leave them out"
            )
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=methods or ["*"],
        allow_headers=headers or ["*"],
        allow_credentials=options.allow_credentials,
        expose_headers=(CODE_HEADER, "Retry-After"),
    )


def _items(flag: str, values: Iterable[str]) -> list[str]:
    """Return the values of an option, of which each can be a JSON list, as vLLM has them."""
    items: list[str] = []
    for value in values:
        if not value.startswith("["):
            items.append(value)
            continue
        try:
            items += msgspec.json.decode(value, type=list[str])
        except msgspec.MsgspecError as error:
            raise ValueError(f"{flag} {value}: {error}; a JSON list of strings") from error
    return items


_HOST: Final = re.compile(r"(?:\[(?P<ip>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\[\]:/?#@\s]*))(?::[0-9]*)?")
"""`HOST`, `HOST:PORT` or `[IPV6]:PORT`."""

_HOST_CHARACTERS: Final = 253
"""The length of the longest name of a host."""


class ExactPaths:
    """An application around another: requests with these methods and paths bypass its routes.

    A route is found by trying one after another, which costs as much as the rest of the framework.
    """

    def __init__(self, apps: Mapping[tuple[str, str], ASGIApp], app: ASGIApp) -> None:
        self._apps = apps
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an internal error is answered, and raised for the server's log."""
        app = self._apps.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if app is None:
            await self._app(scope, receive, send)
            return
        try:
            await app(scope, receive, send)
        except Exception:
            # An answer that has begun can't be replaced by another.
            with suppress(RuntimeError):
                await failure()(scope, receive, send)
            raise


class Entrance:
    """An application around another, for what does not depend on the endpoint.

    A request whose head is too long, or to a name that is not in `hosts`, is refused; None: any
    name is served. The prefix `root` of a proxy is removed from paths that have it.
    """

    def __init__(
        self, app: ASGIApp, head_bytes_max: int, hosts: Collection[str] | None, root: str
    ) -> None:
        self._app = app
        self._head_bytes_max = head_bytes_max
        self._hosts = hosts
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        refused = self._refused(scope) if scope["type"] == "http" else None
        if refused is not None:
            await error_response(refused)(scope, receive, send)
            return
        if self._root and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"].removeprefix(self._root)
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> HttpError | None:
        if _head_bytes(scope) > self._head_bytes_max:
            return HttpError(
                431, f"the head is too long; at most {self._head_bytes_max} bytes are read"
            )
        named = [value for name, value in scope["headers"] if name == b"host"]
        if len(named) > 1 or (not named and scope["http_version"] == "1.1"):
            return HttpError(400, f"a request must have one Host header, got {len(named)}")
        match = _HOST.fullmatch(named[0].decode("latin-1")) if named else None
        if match is None:
            return HttpError(400, "the Host header is malformed") if named else None
        # A request without a host is not from a browser.
        host = (match["ip"] or match["name"]).rstrip(".").lower()
        if not host or self._hosts is None or host in self._hosts:
            return None
        message = (
            f"the host {host[:_HOST_CHARACTERS]!r} is not served; address the gateway as "
            "localhost, or start it with --allowed-host HOST or with an API key"
        )
        return HttpError(403, message)


def _head_bytes(scope: Scope) -> int:
    size = len(scope["raw_path"] or b"") + len(scope["query_string"])
    for name, value in scope["headers"]:
        size += len(name) + len(value) + 4
    return size
