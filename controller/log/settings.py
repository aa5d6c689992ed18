"""Settings of the log's writer and their defaults, without the modules that a log needs."""

from typing import Final, Literal

SyncPolicy = Literal["group", "always", "interval", "never"]
"""Time of the fsync: once per group, after every record, in intervals, or never."""

SEGMENT_BYTES_MAX: Final = 64 << 20
SYNC_INTERVAL_MS: Final = 100
SNAPSHOT_INTERVAL: Final = 50_000
LOG_KEEP_HOURS: Final = 168
