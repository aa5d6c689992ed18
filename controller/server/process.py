"""The start and the end of a controller process: configuration, log, sockets, signals, status."""

import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from loradock.controller.core.limits import RULES, LimitsError, check_limits, limits_to
from loradock.controller.log.format import LogError, LogSyncFailed
from loradock.controller.log.policies import PolicyUnknownError, check_policy
from loradock.controller.log.retention import retention_from
from loradock.controller.log.writer import Log
from loradock.controller.server.access import OWN_ENGINE, Access
from loradock.controller.server.admin import SettingsFile
from loradock.controller.server.config import ServerConfig, Supervision
from loradock.controller.server.keys import (
    AllowedKey,
    DirectoryRefused,
    KeyListError,
    KeyStore,
    check_controller_directory,
)
from loradock.controller.server.server import Server
from loradock.controller.server.supervision import SupervisorLink
from loradock.controller.server.transport import Transport, TransportError
from loradock.messages.options import check_options
from loradock.messages.records import FORMAT, Header
from loradock.processes import process_log
from loradock.processes.key_files import KeyFileError
from loradock.processes.progress import Progress
from loradock.processes.subprocesses import EXIT_CONFIG, EXIT_FAILED, EXIT_LOG, EXIT_SOCKET

_THREAD_SWITCH_S: Final = 0.001
RECOVERY_S_MIN: Final = 300.0
RECOVERY_BYTES_PER_S: Final = 100_000

log = structlog.get_logger("controller")


class ConfigError(Exception):
    """Options that contradict one another or exceed their bounds."""


def main() -> int:
    """Run the process with a `ServerConfig` as JSON in `sys.argv`; return its exit status."""
    process_log.configure(name="controller")
    supervision = Supervision()
    try:
        config = _decoded(sys.argv[1:])
        supervision = config.supervision
        process_log.configure(supervision.log_format, "controller", supervision.log_level)
        _check_config(config)
        _serve(config)
    except LogSyncFailed as error:
        return _end(supervision, "the disk failed", error, EXIT_FAILED)
    except (LogError, LimitsError) as error:
        return _end(supervision, "the log can't be used", error, EXIT_LOG)
    except (ConfigError, KeyFileError, KeyListError) as error:
        return _end(supervision, "wrong configuration", error, EXIT_CONFIG)
    except (TransportError, DirectoryRefused) as error:
        return _end(supervision, "a socket can't be opened", error, EXIT_SOCKET)
    return 0


def _end(supervision: Supervision, event: str, error: Exception, status: int) -> int:
    """Log why the process ends, also for the supervisor's last message; return `status`."""
    log.error(event, error=str(error))
    Progress(supervision.progress).end(f"{event}: {error}")
    return status


def _decoded(arguments: Sequence[str]) -> ServerConfig:
    try:
        return msgspec.json.decode(arguments[0], type=ServerConfig)
    except (IndexError, msgspec.MsgspecError) as error:
        raise ConfigError(str(error)) from error


def _check_config(config: ServerConfig) -> None:
    """Raise `ConfigError` for values that contradict one another or that nothing implements."""
    try:
        check_options(config)
        check_limits(config.limits)
        check_policy(config.policy)
        retention_from(config.log_retention)
    except (PolicyUnknownError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _serve(config: ServerConfig) -> None:
    supervision = config.supervision
    parent_fd, progress = supervision.parent_fd, Progress(supervision.progress)
    # Each connection is a file descriptor, and ZeroMQ aborts the process when none is left.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # The thread that guards the descriptors has to run soon after a connection was accepted.
    sys.setswitchinterval(_THREAD_SWITCH_S)
    progress.enter("recover", _recovery_bound_s(Path(config.directory)))
    directory = Path(config.directory)
    check_controller_directory(directory)
    access = _access(config)
    settings = SettingsFile(directory, config.limits, config.policy)
    opened = _open_log(config, settings)
    with Transport(directory, access, config.listen) as transport:
        link = SupervisorLink(
            progress,
            Progress(supervision.engine_progress),
            supervision.restart_fd,
            supervision.launch_id,
        )
        server = Server(config, transport, opened, supervisor=link)
        signal.signal(signal.SIGTERM, server.stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN if parent_fd >= 0 else server.stop)
        server.run(parent_fd)


def _access(config: ServerConfig) -> Access:
    """Return the allowed keys; raises `ConfigError` if remote clients would have none."""
    store = KeyStore(Path(config.directory))
    store.read()
    own = config.supervision.engine_key
    engine = (AllowedKey(OWN_ENGINE, own, "engine"),) if own else ()
    access = Access(store, engine)
    if config.listen and not access.clients:
        raise ConfigError(
            f"{config.listen}: no client is allowed, so none could connect; allow one with "
            "`loradock keys allow`"
        )
    return access


def _recovery_bound_s(directory: Path) -> float:
    """Return the bound of reading and replaying the log, a tenth of the usual rate or less."""
    size_bytes = sum(path.stat().st_size for path in (directory / "log").glob("*.log"))
    return RECOVERY_S_MIN + size_bytes / RECOVERY_BYTES_PER_S


def _open_log(config: ServerConfig, settings: SettingsFile) -> Log:
    """Open the log for writing; its lock makes this the only controller of the directory."""
    limits, policy = settings.read()
    header = Header(FORMAT, RULES, policy, limits_to(limits), 0)
    opened = Log(
        Path(config.directory) / "log",
        header,
        sync=config.sync,
        sync_interval_ms=config.sync_interval_ms,
        segment_bytes_max=config.segment_bytes_max,
    )
    if opened.recovered.cut_bytes:
        log.warning(
            "an unfinished record was cut from the log's end: a crash leaves one that was not "
            "acknowledged, a disk that lost bytes also one that was",
            seq=opened.recovered.next_seq,
            bytes=opened.recovered.cut_bytes,
            file=str(opened.recovered.cut_from),
            kept_in=str(opened.recovered.kept_in),
        )
    return opened


if __name__ == "__main__":
    sys.exit(main())
