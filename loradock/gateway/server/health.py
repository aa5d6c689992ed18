"""`/health`, `/ping`, `/ready`, `/live`, `/version`, `/load` and `/server_info`.

An orchestrator restarts what is not alive, and sends no requests to what is not ready. `/health` is
vLLM's: whether an engine serves.
"""

import os
import platform
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loradock.gateway.adapters.follower import Follower
from loradock.gateway.http.endpoint import get, json_response, post
from loradock.gateway.http.errors import HttpError
from loradock.gateway.options import GatewayConfig
from loradock.gateway.recorder import Recorder
from loradock.messages import VERSION

TIMEOUT_S: Final = 2.0

_SECRETS: Final = ("api_keys", "key", "server_key", "fleet_key")
"""Fields of the configuration that are not shown."""


class Version(Struct, frozen=True):
    """The version of LoRADock."""

    version: str


class Readiness(Struct, frozen=True):
    """Whether new work is taken, and why not; the reason is empty if it is."""

    ready: bool
    reason: str = ""


class Load(Struct, frozen=True):
    """The inference requests that this gateway executes."""

    server_load: int


class ServerInfo(Struct, frozen=True):
    """The gateway's configuration without keys, an object or a string, under vLLM's name for it.

    `vllm_env` has the variables `LORADOCK_*` and `VLLM_*` of its process without keys.
    """

    vllm_config: dict[str, Any] | str
    vllm_env: dict[str, str]
    system_env: dict[str, str]


class Health:
    """The endpoints about the state of the server."""

    def __init__(self, follower: Follower, recorder: Recorder, config: GatewayConfig) -> None:
        self._follower = follower
        self._recorder = recorder
        fields = msgspec.to_builtins(config)
        self._config: Final = {name: fields[name] for name in fields if name not in _SECRETS}

    @get("/health", "/ping", errors=(503,), access="public")
    @post("/ping", errors=(503,), access="public")
    async def health(self) -> Response:
        """Return whether an engine serves."""
        status = await self._follower.status_now(TIMEOUT_S)
        return Response(status_code=200 if status is not None and status.engine_id else 503)

    @get("/ready", answer=Readiness, failure=Readiness, errors=(503,), access="public")
    async def ready(self) -> Response:
        """Return whether new work is taken, with the reason if it is not."""
        status = await self._follower.status_now(TIMEOUT_S)
        reason = "the controller does not answer" if status is None else status.unready
        return json_response(Readiness(not reason, reason), 503 if reason else 200)

    @get("/live", access="public")
    async def live(self) -> Response:
        """Return whether this process answers, whatever the others do."""
        return Response(status_code=200)

    @get("/version", access="public")
    async def version(self) -> Version:
        """The version."""
        return Version(VERSION)

    @get("/load", access="public")
    async def load(self) -> Load:
        """Requests in progress."""
        return Load(self._recorder.active)

    @get("/server_info", errors=(400,))
    async def info(self, request: Request) -> ServerInfo:
        """Configuration without keys.

        It is a string, or an object for `?config_format=json`.
        """
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
        return ServerInfo(shown, environment, system)
