"""The ASGI application: routes with their access, and errors of the framework in our shape."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loradock.gateway.http.endpoints import Endpoint, EndpointApp, Limits
from loradock.gateway.http.errors import HttpError, error_response
from loradock.gateway.http.security import (
    AllowedHosts,
    ApiKeys,
    HeaderLimit,
    KeyedApp,
    RefusingApp,
    allowed_hosts,
    configured_keys,
    with_cors,
)
from loradock.gateway.http.streams import json_response
from loradock.gateway.options import UPDATING_VARIABLE, GatewayConfig
from loradock.gateway.server.gateway import Gateway
from loradock.gateway.server.openapi import openapi_document
from loradock.gateway.server.routes import endpoints

_TRUE: Final = ("1", "true", "yes", "on")


def create_app(gateway: Gateway, environment: Mapping[str, str] | None = None) -> ASGIApp:
    """Return the application of a gateway; raises `OSError` and `ValueError` for wrong keys."""
    environment = os.environ if environment is None else environment
    config = gateway.config
    keys = ApiKeys(configured_keys(config, environment))
    updating = allows_updating(config, environment)
    table = endpoints(gateway)
    limits = Limits(config.body_bytes_max, float(config.receive_timeout_s))
    root = root_path_of(config)
    document = json_response(openapi_document(table, updating=updating, root_path=root)).body

    async def openapi(_: Request) -> Response:
        return Response(document, media_type="application/json")

    apps = [(one, _app_of(one, limits, keys, updating=updating)) for one in table]
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
        """Serve one request; a mistake of ours is answered, and raised for the server's log."""
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


def _app_of(endpoint: Endpoint, limits: Limits, keys: ApiKeys, *, updating: bool) -> ASGIApp:
    app: ASGIApp = EndpointApp(endpoint, limits)
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
    """Answer for a mistake of ours, which the server logs."""
    return _failure()


def _failure() -> Response:
    response = error_response(HttpError(500, "the gateway failed; its log contains the reason"))
    # The server closes the connection after it has logged the exception.
    response.headers["connection"] = "close"
    return response
