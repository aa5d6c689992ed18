"""Configurations of the controller's process and of `loradock serve`, and their exit statuses."""

from typing import Final, Literal

from msgspec import Struct

from controller.core.limits import Limits
from controller.log.settings import SEGMENT_BYTES_MAX, SYNC_INTERVAL_MS, SyncPolicy
from controller.shell.default_adapters import DefaultPaths
from messages.engine_options import EngineOptions

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
    default_mm_loras: DefaultPaths = {}
    """Modality -> path of the adapter for requests that contain it and name no adapter."""


class ServeConfig(Struct, frozen=True):
    """Configuration of `loradock serve`."""

    server: ServerConfig
    model: str = ""
    adapter_roots: tuple[str, ...] = ()
    engine: EngineKind = "managed"
    engine_options: EngineOptions = EngineOptions()
    tensor_parallel_size: int = 1
