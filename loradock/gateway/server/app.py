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

from loradock.gateway.adapters.endpoints import AdapterUpdates, ModelEndpoints
from loradock.gateway.http.endpoint import (
    BodyLimits,
    Endpoint,
    EndpointApp,
    endpoints_of,
    header_of,
)
from loradock.gateway.http.errors import HttpError, error_response, unauthorized_response
from loradock.gateway.http.openapi import openapi_document
from loradock.gateway.http.security import ApiKeys, allowed_hosts, configured_keys, with_cors
from loradock.gateway.http.streams import json_response
from loradock.gateway.inference.anthropic import AnthropicMessages
from loradock.gateway.inference.chat import Chats
from loradock.gateway.inference.completions import Completions
from loradock.gateway.inference.pooling import PoolingEndpoints
from loradock.gateway.inference.prompts import ChatPrompts
from loradock.gateway.inference.responses import Responses
from loradock.gateway.inference.tokens import TokenizerInfo, Tokens
from loradock.gateway.metrics import Metrics, Scrape
from loradock.gateway.options import UPDATING_VARIABLE, GatewayConfig, allows_updating
from loradock.gateway.page import Page, Past
from loradock.gateway.server.gateway import Gateway
from loradock.gateway.server.health import Health, Info

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

    refusal = AccessCheck(keys, updating=updating).refusal
    limits = BodyLimits(config.body_bytes_max, float(config.receive_timeout_s))
    apps = [(one, EndpointApp(one, limits, refusal, gateway.spans)) for one in table]
    routes = [Route(one.path, app, methods=[one.method]) for one, app in apps]
    app = Starlette(
        routes=[*routes, Route("/openapi.json", openapi)],
        exception_handlers={HTTPException: _on_http_exception, Exception: _on_exception},
    )
    exact: dict[tuple[str, str], ASGIApp]
    exact = {(one.method, one.path): app for one, app in apps if "{" not in one.path}
    served = with_cors(ExactPaths(exact, app), config)
    return Entrance(served, config.header_bytes_max, allowed_hosts(config, keys), root)


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
        PoolingEndpoints(service),
        Tokens(service, ChatPrompts(())),
        *((TokenizerInfo(service),) if config.enable_tokenizer_info_endpoint else ()),
        ModelEndpoints(client, table, names, service.context),
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


class AccessCheck:
    """The access of requests to endpoints: with a valid key, and while adapters can be changed."""

    def __init__(self, keys: ApiKeys, *, updating: bool) -> None:
        self._keys = keys if keys.are_needed else None
        self._updating = updating

    def refusal(self, endpoint: Endpoint, scope: Scope) -> Response | None:
        """Return the answer to a request without access; None if it has access."""
        if endpoint.access == "public":
            return None
        if self._keys is not None and not self._keys.accept(scope):
            return unauthorized_response(endpoint.shape)
        if endpoint.access == "updating" and not self._updating:
            message = (
                "adapters can't be changed over HTTP; start the gateway with "
                f"--allow-runtime-lora-updating or {UPDATING_VARIABLE}=1"
            )
            return error_response(HttpError(403, message))
        return None


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
        # A request without a host is not from a browser.
        host = "" if self._hosts is None else _host_name(header_of(scope, b"host"))
        if not host or host in (self._hosts or ()):
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


def _host_name(header: str) -> str:
    """Return the host in `HOST`, `HOST:PORT` or `[IPV6]:PORT`."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower()


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
