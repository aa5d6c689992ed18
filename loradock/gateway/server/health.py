"""`/health`, `/ping`, `/version`, `/load` and `/server_info`."""

import os
import platform
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loradock.client import AsyncClient, LoradockError
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import json_response
from loradock.gateway.metrics.recorder import Recorder
from loradock.gateway.options import GatewayConfig
from loradock.messages import VERSION

TIMEOUT_S: Final = 2.0

_SECRETS: Final = ("api_keys", "key", "server_key")
"""Fields of the configuration that are not shown."""


class Version(Struct, frozen=True):
    """The version of LoRADock."""

    version: str


class Load(Struct, frozen=True):
    """The inference requests that this gateway executes."""

    server_load: int


class ServerInfo(Struct, frozen=True):
    """The gateway's configuration without keys, as JSON or as a text, under vLLM's name for it.

    `vllm_env` has the variables `LORADOCK_*` and `VLLM_*` of its process without keys.
    """

    vllm_config: dict[str, Any] | str
    vllm_env: dict[str, str]
    system_env: dict[str, str]


class Info:
    """`GET /server_info`."""

    def __init__(self, config: GatewayConfig) -> None:
        fields = msgspec.to_builtins(config)
        self._config: Final = {name: fields[name] for name in fields if name not in _SECRETS}

    async def info(self, request: Request) -> Response:
        """Answer with a text, or with JSON for `?config_format=json`."""
        form = request.query_params.get("config_format", "text")
        if form not in ("text", "json"):
            raise HttpError(
                400, f"config_format must be text or json, got {form!r}", "config_format"
            )
        as_text = ", ".join(f"{name}={value!r}" for name, value in self._config.items())
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("LORADOCK_", "VLLM_")) and "KEY" not in name
        }
        system = {
            "loradock_version": VERSION,
            "python_version": platform.python_version(),
            "os": platform.platform(),
        }
        shown = self._config if form == "json" else as_text
        return json_response(ServerInfo(shown, environment, system))


class Health:
    """The endpoints about the state of the server."""

    def __init__(self, client: AsyncClient, recorder: Recorder) -> None:
        self._client = client
        self._recorder = recorder

    async def health(self, _: Request) -> Response:
        """Answer 200 while an engine serves, else 503."""
        try:
            status = await self._client.status(timeout_s=TIMEOUT_S)
        except LoradockError:
            return Response(status_code=503)
        return Response(status_code=200 if status.engine_id else 503)

    async def version(self, _: Request) -> Response:
        """Answer `GET /version`."""
        return json_response(Version(VERSION))

    async def load(self, _: Request) -> Response:
        """Answer `GET /load`."""
        return json_response(Load(self._recorder.active))
