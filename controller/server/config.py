"""The configuration of a controller process, of which a part are options of `loradock serve`."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from loradock.controller.core.limits import Limits
from loradock.controller.log.settings import (
    LOG_KEEP_HOURS,
    SEGMENT_BYTES_MAX,
    SNAPSHOT_INTERVAL,
    SYNC_INTERVAL_MS,
    SyncPolicy,
)
from loradock.controller.server.preloads import PRELOADS_MAX, DefaultPaths
from loradock.messages.engine_options import LogFormat, LogLevel
from loradock.messages.ids import AdapterName, Path
from loradock.messages.options import option

_HOUR_MS = 3_600_000
_COUNT_MAX = 10_000_000


class ServerOptions(Struct, frozen=True, kw_only=True):
    """The options of a controller besides its limits; durations in milliseconds, sizes in bytes."""

    PANEL: ClassVar = "Log and recovery"

    policy: Annotated[
        str,
        option(
            "Which adapter is evicted when space is needed: lru (the least recently used), "
            "adaptive (fewest expected uses x load time / size, learned from the requests), gdsf "
            "(the same with the uses so far), sieve, fifo, cheapest-first "
            "(the least recently used of those that are cheapest to load again: slots last) or "
            "none (evict nothing).",
            metavar="NAME",
            panel="Bounds",
            is_common=True,
        ),
    ] = "lru"
    prefetch_history: Annotated[
        bool,
        option(
            "Prefetch adapters that are used at even intervals, as by jobs of a schedule, a second "
            "before their next use. It takes no slot that is in use.",
            panel="Bounds",
        ),
    ] = False
    sync: Annotated[
        SyncPolicy,
        option(
            "When to fsync the log: group (once per group of requests), always (after every "
            "record), interval (see --sync-interval) or never."
        ),
    ] = "group"
    sync_interval_ms: Annotated[
        int,
        option("Time between fsyncs with --sync interval.", ge=1, le=_HOUR_MS, unit="seconds"),
    ] = SYNC_INTERVAL_MS
    segment_bytes_max: Annotated[
        int,
        option("Start a new log file when one reaches this size.", ge=1, unit="bytes"),
    ] = SEGMENT_BYTES_MAX
    engine_timeout_ms: Annotated[
        int,
        option(
            "The engine counts as lost after this time without a message from it; the time of a "
            "step that is in progress is not counted (see --step-timeout).",
            ge=1,
            le=_HOUR_MS,
            unit="seconds",
        ),
    ] = 10_000
    checked: Annotated[
        bool, option("For debugging: verify every invariant after every input (slow).")
    ] = False
    snapshot_interval: Annotated[
        int,
        option(
            "Make a snapshot of the state once per this number of records; a restart reads the "
            "last snapshot and the records after it.",
            ge=1,
            le=_COUNT_MAX,
        ),
    ] = SNAPSHOT_INTERVAL
    log_retention: Annotated[
        str,
        option(
            "What is done with log files that no restart needs, once they are --log-keep-hours "
            "old: drop, archive:DIRECTORY (move them there) or keep.",
            metavar="ACTION",
        ),
    ] = "drop"
    log_keep_hours: Annotated[
        int,
        option(
            "How long log files are kept that no restart needs, in hours of the server's running "
            "time; 0 keeps none.",
            ge=0,
            le=_COUNT_MAX,
        ),
    ] = LOG_KEEP_HOURS


class Supervision(Struct, frozen=True):
    """Resources shared by a controller process and its supervisor; the defaults are for none.

    `parent_fd` closes when the supervisor ends. The controller writes to `restart_fd` which engine
    has to be restarted. `progress` and `engine_progress` are the paths of the memory in which the
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


class ServerConfig(ServerOptions, frozen=True):
    """The configuration of a controller process.

    `listen`: where clients and engines connect over a network, `tcp://HOST:PORT`; empty: nowhere.
    `default_mm_loras`: modality -> path of the adapter for requests that contain it and name no
    adapter. `preloads`: names and paths of adapters that are loaded at the start.
    """

    directory: str
    limits: Limits = Limits()
    listen: str = ""
    default_mm_loras: DefaultPaths = {}
    preloads: Annotated[tuple[tuple[AdapterName, Path], ...], Meta(max_length=PRELOADS_MAX)] = ()
    supervision: Supervision = Supervision()
