"""The ASGI application: all endpoints with their access, and the framework's errors as ours."""

import asyncio
import os

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from loradock.gateway.adapters.endpoints import AdapterEndpoints
from loradock.gateway.http.endpoint import (
    BodyLimits,
    EndpointApp,
    endpoints_of,
    json_response,
)
from loradock.gateway.http.errors import (
    HttpError,
    error_response,
    failure,
)
from loradock.gateway.http.openapi import openapi_document
from loradock.gateway.http.security import (
    AccessCheck,
    Entrance,
    ExactPaths,
    allowed_hosts,
    configured_keys,
    is_open,
    with_cors,
)
from loradock.gateway.inference.anthropic import AnthropicMessages
from loradock.gateway.inference.chat import Chats
from loradock.gateway.inference.completions import Completions
from loradock.gateway.inference.pooling import PoolingEndpoints
from loradock.gateway.inference.prompts import ChatPrompts
from loradock.gateway.inference.responses import Responses
from loradock.gateway.inference.tokens import TokenizerInfo, Tokens
from loradock.gateway.metrics import Metrics
from loradock.gateway.options import GatewayConfig, allows_updating
from loradock.gateway.page import Page
from loradock.gateway.server.gateway import Gateway
from loradock.gateway.server.health import Health

log = structlog.get_logger("gateway")


def create_app(gateway: Gateway) -> ASGIApp:
    """Return the application of a gateway; raises `OSError` and `ValueError` for wrong keys."""
    config = gateway.config
    named = configured_keys(config, os.environ)
    # Without any key, requests need none, and a fleet does not change that.
    keys = (*named, config.fleet_key) if named and config.fleet_key else named
    if is_open(config, needs_key=bool(keys)):
        log.warning(
            "anyone who reaches this address can use the server: no API key is set",
            host=config.host,
            hint="set LORADOCK_API_KEY, or name a file with --api-key-file",
        )
    updating = allows_updating(config, os.environ)
    table = [one for owner in _owners(gateway) for one in endpoints_of(owner)]
    root = root_path_of(config)
    document = json_response(openapi_document(table, updating=updating, root_path=root)).body

    async def openapi(_: Request) -> Response:
        return Response(document, media_type="application/json")

    access = AccessCheck(keys, config.client_header, updating=updating)
    limits = BodyLimits(config.body_bytes_max, float(config.receive_timeout_s), asyncio.Lock())
    apps = [(one, EndpointApp(one, limits, access, gateway.spans)) for one in table]
    routes = [Route(one.path, app, methods=[one.method]) for one, app in apps]
    app = Starlette(
        routes=[*routes, Route("/openapi.json", openapi)],
        exception_handlers={HTTPException: _on_http_exception, Exception: _on_exception},
    )
    exact: dict[tuple[str, str], ASGIApp]
    exact = {(one.method, one.path): app for one, app in apps if "{" not in one.path}
    served = with_cors(ExactPaths(exact, app), config)
    hosts = allowed_hosts(config, needs_key=bool(keys))
    return Entrance(served, config.header_bytes_max, hosts, root)


def _owners(gateway: Gateway) -> list[object]:
    """Return the objects whose methods are the endpoints."""
    config, service, client = gateway.config, gateway.service, gateway.client
    names = gateway.names
    prompts = ChatPrompts(config.allowed_media_domains, service.workers)
    chats = Chats(service, prompts)
    metrics = Metrics(
        gateway.follower,
        gateway.recorder,
        names,
        config.metrics_adapters_max,
        has_vllm=not config.disable_vllm_metrics,
    )
    return [
        Completions(service),
        chats,
        Responses(service, chats),
        AnthropicMessages(service, chats, prompts),
        PoolingEndpoints(service),
        Tokens(service, prompts),
        *((TokenizerInfo(service),) if config.enable_tokenizer_info_endpoint else ()),
        AdapterEndpoints(client, gateway.follower, names, service.context),
        Health(gateway.follower, gateway.recorder, config),
        metrics,
        Page(client),
        gateway.live,
    ]


def root_path_of(config: GatewayConfig) -> str:
    """Return `--root-path` without a final slash; raises `ValueError` for one that is no path."""
    root = config.root_path.rstrip("/")
    if root and (not root.startswith("/") or "//" in root or set(root) & set("?#% ")):
        raise ValueError(f"--root-path must be a path like /llm, got {config.root_path!r}")
    return root


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
    return failure()
