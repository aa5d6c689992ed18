"""`python -m benchmarks.bare_endpoint PORT`: a Starlette endpoint that echoes its body."""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loradock.gateway.server.process import KEEP_ALIVE_S


async def _echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


def main() -> None:
    """Serve with the settings of the gateway."""
    app = Starlette(routes=[Route("/v1/completions", _echo, methods=["POST"])])
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
    )


if __name__ == "__main__":
    main()
