"""`/health`, `/ping`, `/version` and `/load`."""

from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from controller.client import AsyncClient, LoradockError
from gateway.http.streams import json_response
from gateway.metrics.recorder import Recorder
from messages import VERSION

TIMEOUT_S: Final = 2.0


class Version(Struct, frozen=True):
    """The version of LoRADock."""

    version: str


class Load(Struct, frozen=True):
    """The inference requests that this gateway executes."""

    server_load: int


class Health:
    """The endpoints."""

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
