"""The start and the end of a controller process: configuration, log, sockets, signals, status."""

import resource
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec
import structlog

from controller.core.eviction import POLICIES
from controller.core.limits import RULES, LimitsError, check_limits, limits_to
from controller.log.format import LogError, LogSyncFailed
from controller.log.writer import Log
from controller.shell import stderr_logging
from controller.shell.config import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_LOG,
    EXIT_SOCKET,
    ServerConfig,
)
from controller.shell.server import Server
from controller.shell.transport import Transport, TransportError
from messages.records import FORMAT, Header

_THREAD_SWITCH_S: Final = 0.001

log = structlog.get_logger("controller")


class ConfigError(Exception):
    """Options that contradict one another or exceed their bounds."""


def main() -> int:
    """Run `python -m controller.shell.process CONFIG_JSON [PARENT_FD]`; return the exit status."""
    stderr_logging.configure()
    parent_fd = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    try:
        _serve(_read_config(sys.argv[1]), parent_fd)
    except LogSyncFailed as error:
        log.error("the disk failed", error=str(error))
        return EXIT_FAILED
    except (LogError, LimitsError) as error:
        log.error("the log can't be used", error=str(error))
        return EXIT_LOG
    except ConfigError as error:
        log.error("wrong configuration", error=str(error))
        return EXIT_CONFIG
    except TransportError as error:
        log.error("a socket can't be opened", error=str(error))
        return EXIT_SOCKET
    return 0


def _read_config(text: str) -> ServerConfig:
    try:
        config = msgspec.json.decode(text, type=ServerConfig)
        check_limits(config.limits)
    except (msgspec.MsgspecError, LimitsError) as error:
        raise ConfigError(str(error)) from error
    if config.policy not in POLICIES:
        raise ConfigError(f"policy {config.policy!r} is not known; known are {sorted(POLICIES)}")
    return config


def _serve(config: ServerConfig, parent_fd: int) -> None:
    # Each connection is a file descriptor, and ZeroMQ aborts the process when none is left.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # The thread that guards the descriptors has to run soon after a connection was accepted.
    sys.setswitchinterval(_THREAD_SWITCH_S)
    opened = _open_log(config)
    with Transport(Path(config.directory)) as transport:
        server = Server(config, transport, opened)
        signal.signal(signal.SIGTERM, server.stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN if parent_fd >= 0 else server.stop)
        server.run(parent_fd)


def _open_log(config: ServerConfig) -> Log:
    """Open the log for writing; its lock makes this the only controller of the directory."""
    header = Header(FORMAT, RULES, config.policy, limits_to(config.limits), 0)
    opened = Log.open(
        Path(config.directory) / "log",
        header,
        sync=config.sync,
        sync_interval_ms=config.sync_interval_ms,
        segment_bytes_max=config.segment_bytes_max,
    )
    if opened.recovered.cut_bytes:
        log.warning(
            "a torn tail was cut: nothing in it had been acknowledged",
            bytes=opened.recovered.cut_bytes,
            file=str(opened.recovered.cut_from),
        )
    return opened


if __name__ == "__main__":
    sys.exit(main())
