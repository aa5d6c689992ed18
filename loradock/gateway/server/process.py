"""The start and the end of a gateway process: configuration, socket, signals, exit status.

The process ends when its supervisor does, and ends its requests before that within a bound.
"""

import asyncio
import gc
import logging
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec
import structlog
import uvicorn

from loradock.gateway.adapters.sources import ResolverError
from loradock.gateway.address import open_listener
from loradock.gateway.options import GatewayConfig
from loradock.gateway.server.app import create_app
from loradock.gateway.server.gateway import Gateway, StartError
from loradock.gateway.server.protocol import BoundedProtocol, Bounds
from loradock.processes import process_log
from loradock.processes.event_loop import loop_runner
from loradock.processes.progress import Progress
from loradock.processes.subprocesses import EXIT_CONFIG, EXIT_SOCKET

KEEP_ALIVE_S: Final = 75
HEAD_TIMEOUT_S: Final = 20.0
UNREAD_TIMEOUT_S: Final = 60.0
"""Bound on the time in which a client reads nothing of an answer that waits for it."""

LINGER_S: Final = 2.0
"""Bound on the time in which the rest of a body is read after its answer."""

STEP_BOUND_S: Final = 60.0
"""Bound on a turn of the loop; the supervisor ends a process that takes longer."""

GARBAGE_OBJECTS: Final = 20_000
"""Objects that are made, and not freed, between two collections of garbage."""

_THREAD_SWITCH_S: Final = 0.001
"""The time for which a thread that computes keeps the loop from its next turn."""

LOG_LINES: Final = 10
LOG_INTERVAL_S: Final = 60.0
"""The HTTP server logs this many lines in this time: anyone can send malformed requests."""

log = structlog.get_logger("gateway")


def main() -> int:
    """Run the process with a `GatewayConfig` as JSON in `sys.argv`; return its exit status."""
    process_log.configure(name="gateway")
    try:
        config = msgspec.json.decode(sys.argv[1], type=GatewayConfig)
    except (IndexError, msgspec.MsgspecError) as error:
        log.error("wrong configuration", error=str(error))
        return EXIT_CONFIG
    process_log.configure(config.log_format, "gateway")
    # Each connection is a file descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _collect_less_garbage()
    sys.setswitchinterval(_THREAD_SWITCH_S)
    return run(config)


def run(config: GatewayConfig) -> int:
    """Serve until a signal or the supervisor's end; return the exit status."""
    progress = Progress(config.progress)
    try:
        listener = open_listener(config.host, config.port)
    except OSError as error:
        reason = error.strerror or str(error)
        log.error("the address can't be used", host=config.host, port=config.port, error=reason)
        progress.end(f"--http {config.host}:{config.port} can't be used: {reason}")
        return EXIT_SOCKET
    with listener:
        try:
            loop_runner()(serve(config, listener, progress))
        except (StartError, ResolverError, OSError, ValueError) as error:
            log.error("can't serve with these options", error=str(error))
            progress.end(f"can't serve with these options: {error}")
            return EXIT_CONFIG
    return 0


async def serve(
    config: GatewayConfig,
    listener: socket.socket,
    progress: Progress | None = None,
) -> None:
    """Serve on a socket until a signal; raises `StartError` if the gateway can't serve."""
    _log_http_server()
    gateway = Gateway(config)
    # What can be refused precedes the wait for a server.
    http = uvicorn_config(config, create_app(gateway))
    http.load()
    async with gateway.running() as failed:
        server = _Server(http, gateway.live.close, progress or Progress())
        _end_with_supervisor(config.parent_fd, server)
        failed.add_done_callback(lambda _: _stop(server))
        log.info("the gateway serves", url=url_of(config, listener))
        await server.serve(sockets=[listener])
        if failed.done():
            failed.result()
    log.info("the gateway ended")


class _Server(uvicorn.Server):
    """A server that reports its steps.

    It ends the streams that have no end before it waits for requests to end.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        end_streams: Callable[[], Awaitable[None]],
        progress: Progress,
    ) -> None:
        super().__init__(config)
        self._end_streams = end_streams
        self._progress = progress

    async def on_tick(self, counter: int) -> bool:
        """Report that the loop runs, in which this is called ten times per second."""
        self._progress.enter("serve", STEP_BOUND_S)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and wait for requests within the configured bound."""
        self._progress.enter("stop", STEP_BOUND_S + (self.config.timeout_graceful_shutdown or 0))
        await self._end_streams()
        await super().shutdown(sockets)


class ServerLog(logging.Handler):
    """Writes the HTTP server's lines to the process's log within a bound, and counts the rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since = clock()
        self._lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it."""
        if self._clock() - self._since >= LOG_INTERVAL_S:
            omitted = max(0, self._lines - LOG_LINES)
            self._since, self._lines = self._clock(), 0
            if omitted:
                log.warning("further lines of the HTTP server were not logged", lines=omitted)
        self._lines += 1
        if self._lines <= LOG_LINES:
            log.log(record.levelno, record.getMessage().strip(), exc_info=record.exc_info)


def _log_http_server() -> None:
    logger = logging.getLogger("uvicorn.error")
    logger.handlers, logger.propagate = [ServerLog()], False


def uvicorn_config(config: GatewayConfig, app: Any) -> uvicorn.Config:
    """Return the settings of the HTTP server."""
    return uvicorn.Config(
        app,
        http=_protocol(config),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=config.drain_timeout_s,
        ssl_keyfile=config.ssl_keyfile or None,
        ssl_certfile=config.ssl_certfile or None,
        ssl_ca_certs=config.ssl_ca_certs or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    )


def url_of(config: GatewayConfig, listener: socket.socket) -> str:
    """Return the address of the page."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}/"


def _protocol(config: GatewayConfig) -> Any:
    """Return what makes the protocol of a connection."""
    bounds = Bounds(
        connections=config.connections_max,
        head_bytes=config.header_bytes_max,
        head_s=HEAD_TIMEOUT_S,
        unread_s=UNREAD_TIMEOUT_S,
        linger_s=LINGER_S,
    )
    return partial(BoundedProtocol, bounds)


def _collect_less_garbage() -> None:
    """Look for unreachable cycles less often, and not among the objects that stay.

    A request makes hundreds of objects and hardly a cycle; looking for them took a tenth of it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 20, 50)


def _stop(server: uvicorn.Server) -> None:
    server.should_exit = True


def _end_with_supervisor(parent_fd: int, server: uvicorn.Server) -> None:
    """End when the pipe closes, whose other end the supervisor holds."""
    if parent_fd >= 0:
        asyncio.get_running_loop().add_reader(parent_fd, _on_parent_end, parent_fd, server)


def _on_parent_end(parent_fd: int, server: uvicorn.Server) -> None:
    asyncio.get_running_loop().remove_reader(parent_fd)
    os.close(parent_fd)
    _stop(server)
