"""Configurations of the controller's process and of `loradock serve`, and their exit statuses."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from loradock.controller.core.limits import Limits
from loradock.controller.log.settings import (
    LOG_KEEP_HOURS,
    SEGMENT_BYTES_MAX,
    SNAPSHOT_INTERVAL,
    SYNC_INTERVAL_MS,
    SyncPolicy,
)
from loradock.controller.server.hang_watch import HANG_TIMEOUT_MS, STEP_TIMEOUT_MS
from loradock.controller.server.preloads import PRELOADS_MAX, DefaultPaths
from loradock.messages.engine_options import EngineOptions, LogFormat, LogLevel
from loradock.messages.ids import AdapterName, Path

EXIT_FAILED: Final = 1
"""The disk failed: a restart reads what it holds."""
EXIT_CONFIG: Final = 2
"""No process can be started with these options."""
EXIT_SOCKET: Final = 6
"""A socket can't be opened."""
EXIT_LOG: Final = 7
"""The log is damaged, foreign, in use or diverges: a restart does not help."""

EngineKind = Literal["managed", "external"]
"""Whether `serve` starts the engine, or waits for one that is started elsewhere."""


class ServerConfig(Struct, frozen=True):
    """Configuration of a controller process; durations in milliseconds, sizes in bytes."""

    directory: str
    limits: Limits = Limits()
    policy: str = "lru"
    sync: SyncPolicy = "group"
    sync_interval_ms: int = SYNC_INTERVAL_MS
    segment_bytes_max: int = SEGMENT_BYTES_MAX
    engine_timeout_ms: int = 10_000
    checked: bool = False
    """Verify every invariant after every input; slow, for tests and for debugging."""
    listen: str = ""
    """Where clients and engines connect over a network: `tcp://HOST:PORT`; empty: nowhere."""
    default_mm_loras: DefaultPaths = {}
    """Modality -> path of the adapter for requests that contain it and name no adapter."""
    snapshot_interval: int = SNAPSHOT_INTERVAL
    """Inputs between two snapshots."""
    log_retention: str = "drop"
    """What is done with files of the log that no restart needs: drop, archive:DIRECTORY or keep."""
    log_keep_hours: int = LOG_KEEP_HOURS
    """How long such files are kept before."""
    preloads: Annotated[tuple[tuple[AdapterName, Path], ...], Meta(max_length=PRELOADS_MAX)] = ()
    """Names and paths of adapters that are loaded at the start."""


class Supervision(Struct, frozen=True):
    """What a controller process shares with its supervisor; the defaults are for one without.

    `parent_fd` closes when the supervisor ends. The controller writes to `restart_fd` which engine
    has to be restarted. `progress` and `engine_progress` are the paths of the pages in which the
    controller and its engine report their steps. `engine_key`: the public key of the engine that
    the supervisor starts, made for this run. `launch_id`: how the ids of such engines begin.
    """

    parent_fd: int = -1
    restart_fd: int = -1
    progress: str = ""
    engine_progress: str = ""
    engine_key: str = ""
    launch_id: str = ""
    log_format: LogFormat = "console"
    log_level: LogLevel = "info"


class ServeConfig(Struct, frozen=True):
    """Configuration of `loradock serve`."""

    server: ServerConfig
    model: str = ""
    adapter_roots: tuple[str, ...] = ()
    engine: EngineKind = "managed"
    engine_options: EngineOptions = EngineOptions()
    tensor_parallel_size: int = 1
    hang_timeout_ms: int = HANG_TIMEOUT_MS
    """A child that is stopped is killed and restarted within this time."""
    log_format: LogFormat = "console"
    log_level: LogLevel = "info"
    step_timeout_ms: int = STEP_TIMEOUT_MS
    """An engine whose main loop is in one step for longer is killed and restarted."""
    gateway: tuple[str, ...] = ()
    """Arguments of Python for an HTTP gateway's process; empty for none."""
