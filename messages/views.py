"""Parts of the replies to queries."""

from typing import Literal

from messages.base import Value
from messages.ids import AdapterName, AdapterState, Bytes, Generation, Path, Slot


class AdapterView(Value, frozen=True):
    """State of one adapter; sizes in bytes, times in nanoseconds (UTC)."""

    adapter: AdapterName
    adapter_id: int
    state: AdapterState
    goal: AdapterState
    path: Path
    fingerprint: str
    rank: int
    slot: Slot
    generation: Generation
    held: bool
    retired: bool
    leases: int
    waiting: int
    host_bytes: Bytes
    pinned_bytes: Bytes
    device_bytes: Bytes
    uses: int
    loads: int
    hits: int
    evictions: int
    failures: int
    last_used_ns: int


class TierView(Value, frozen=True):
    """Usage and bounds of a tier; `count` is adapters on the host or slots on the device."""

    name: Literal["host", "pinned", "device"]
    count: int
    count_max: int
    size_bytes: Bytes
    size_bytes_max: Bytes
