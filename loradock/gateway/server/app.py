"""The ASGI application: all endpoints with their access, and the framework's errors as ours."""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loradock.gateway.adapters.endpoints import AdapterUpdates, Residency
from loradock.gateway.http.endpoint import Endpoint, EndpointApp, Limits, endpoints_of, header_of
from loradock.gateway.http.errors import HttpError, Shape, error_response, unauthorized_response
from loradock.gateway.http.openapi import openapi_document
from loradock.gateway.http.security import ApiKeys, allowed_hosts, configured_keys, with_cors
from loradock.gateway.http.streams import json_response
from loradock.gateway.inference.anthropic import AnthropicMessages
from loradock.gateway.inference.chat import Chats
from loradock.gateway.inference.completions import Completions
from loradock.gateway.inference.pooling import Pooling
from loradock.gateway.inference.prompts import ChatPrompts
from loradock.gateway.inference.responses import Responses
from loradock.gateway.inference.tokens import TokenizerInfo, Tokens
from loradock.gateway.metrics import Metrics, Scrape
from loradock.gateway.options import UPDATING_VARIABLE, GatewayConfig
from loradock.gateway.page import Page, Past
from loradock.gateway.server.gateway import Gateway
from loradock.gateway.server.health import Health, Info

_TRUE: Final = ("1", "true", "yes", "on")

_HOST_CHARACTERS: Final = 253
"""The length of the longest name of a host."""


def create_app(gateway: Gateway, environment: Mapping[str, str] | None = None) -> ASGIApp:
    """Return the application of a gateway; raises `OSError` and `ValueError` for wrong keys."""
    environment = os.environ if environment is None else environment
    config = gateway.config
    keys = ApiKeys(configured_keys(config, environment))
    updating = allows_updating(config, environment)
    table = [one for owner in _owners(gateway) for one in endpoints_of(owner)]
    root = root_path_of(config)
    document = json_response(openapi_document(table, updating=updating, root_path=root)).body

    async def openapi(_: Request) -> Response:
        return Response(document, media_type="application/json")

    apps = [(one, _app_of(one, gateway, keys, updating=updating)) for one in table]
    routes = [Route(one.path, app, methods=[one.method]) for one, app in apps]
    app = Starlette(
        routes=[*routes, Route("/openapi.json", openapi)],
        exception_handlers={HTTPException: _on_http_exception, Exception: _on_exception},
    )
    exact: dict[tuple[str, str], ASGIApp]
    exact = {(one.method, one.path): app for one, app in apps if "{" not in one.path}
    served = with_cors(ExactPaths(exact, app), config)
    if root:
        served = RootPath(root, served)
    hosts = allowed_hosts(config, keys)
    if hosts is not None:
        served = AllowedHosts(served, hosts)
    return HeaderLimit(served, config.header_bytes_max)


def _owners(gateway: Gateway) -> list[object]:
    """Return the objects whose methods are the endpoints."""
    config, service, client = gateway.config, gateway.service, gateway.client
    table, names = gateway.table, gateway.names
    prompts = ChatPrompts(config.allowed_media_domains)
    chats = Chats(service, prompts)
    metrics = Metrics(
        table,
        gateway.recorder,
        lambda: names.base,
        config.metrics_adapters_max,
        has_vllm=not config.disable_vllm_metrics,
    )
    return [
        Completions(service),
        chats,
        Responses(service, chats),
        AnthropicMessages(service, chats, prompts),
        Pooling(service),
        Tokens(service, ChatPrompts(())),
        *((TokenizerInfo(service),) if config.enable_tokenizer_info_endpoint else ()),
        Residency(client, table, names, service.context),
        AdapterUpdates(client, table, names),
        Health(client, gateway.recorder),
        Info(config),
        Scrape(gateway.follower, metrics),
        Page(),
        gateway.live,
        Past(client),
    ]


def root_path_of(config: GatewayConfig) -> str:
    """Return `--root-path` without a final slash; raises `ValueError` for one that is no path."""
    root = config.root_path.rstrip("/")
    if root and (not root.startswith("/") or "//" in root or set(root) & set("?#% ")):
        raise ValueError(f"--root-path must be a path like /llm, got {config.root_path!r}")
    return root


def allows_updating(config: GatewayConfig, environment: Mapping[str, str]) -> bool:
    """Whether clients may change adapters."""
    variable = environment.get(UPDATING_VARIABLE, "").strip().lower()
    return config.allow_runtime_lora_updating or variable in _TRUE


class RootPath:
    """An application around another: the prefix of a proxy is removed from paths that have it."""

    def __init__(self, root: str, app: ASGIApp) -> None:
        self._root = root
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"].removeprefix(self._root)
        await self._app(scope, receive, send)


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
                await _failure()(scope, receive, send)
            raise


class KeyedApp:
    """An endpoint that is served to requests with a valid key alone."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, shape: Shape) -> None:
        self._app = app
        self._keys = keys
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._keys.accept(scope):
            await self._app(scope, receive, send)
        else:
            await unauthorized_response(self._shape)(scope, receive, send)


class RefusingApp:
    """An endpoint that answers every request with one error."""

    def __init__(self, error: HttpError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await error_response(self._error)(scope, receive, send)


def _host_name(header: str) -> str:
    """Return the host in `HOST`, `HOST:PORT` or `[IPV6]:PORT`."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower()


class AllowedHosts:
    """An application around another: requests to a name that is not this host's are refused."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; one without a host is no browser's."""
        host = _host_name(header_of(scope, b"host")) if scope["type"] == "http" else ""
        if host and host not in self._hosts:
            message = (
                f"the host {host[:_HOST_CHARACTERS]!r} is not served; address the gateway as "
                "localhost, or start it with --allowed-host HOST or with an API key"
            )
            await error_response(HttpError(403, message))(scope, receive, send)
            return
        await self._app(scope, receive, send)


class HeaderLimit:
    """An application around another: requests whose head is too long are refused."""

    def __init__(self, app: ASGIApp, bytes_max: int) -> None:
        self._app = app
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and _head_bytes(scope) > self._bytes_max:
            error = HttpError(
                431, f"the head is too long; at most {self._bytes_max} bytes are read"
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    size = len(scope["raw_path"] or b"") + len(scope["query_string"])
    for name, value in scope["headers"]:
        size += len(name) + len(value) + 4
    return size


def _app_of(endpoint: Endpoint, gateway: Gateway, keys: ApiKeys, *, updating: bool) -> ASGIApp:
    config = gateway.config
    limits = Limits(config.body_bytes_max, float(config.receive_timeout_s))
    app: ASGIApp = EndpointApp(endpoint, limits, gateway.spans)
    if endpoint.access == "updating" and not updating:
        message = (
            "adapters can't be changed over HTTP; start the gateway with "
            f"--allow-runtime-lora-updating or {UPDATING_VARIABLE}=1"
        )
        app = RefusingApp(HttpError(403, message))
    if endpoint.access != "public" and keys.are_needed:
        app = KeyedApp(app, keys, endpoint.shape)
    return app


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that does not exist."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = {404: f"no endpoint {request.url.path!r}", 405: f"{request.method} is not served"}
    response = error_response(HttpError(status, message.get(status, "the request failed")))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


async def _on_exception(_: Request, __: Exception) -> Response:
    """Answer for an internal error, which the server logs."""
    return _failure()


def _failure() -> Response:
    response = error_response(HttpError(500, "the gateway failed; its log contains the reason"))
    # The server closes the connection after it has logged the exception.
    response.headers["connection"] = "close"
    return response
