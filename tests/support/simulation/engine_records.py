"""What a simulated engine has: contents of files, adapters and running operations."""

from dataclasses import dataclass
from typing import Any

from loradock.messages import reports
from loradock.messages.ids import CPU_CACHED, NO_SLOT, AdapterState


@dataclass(frozen=True)
class Content:
    """The content of an adapter's path: its identity and its bytes as read and as packed."""

    fingerprint: str
    load_bytes: int
    blob_bytes: int
    rank: int = 8
    warnings: tuple[str, ...] = ()


@dataclass
class EngineAdapter:
    """One adapter's weights in the engine's memory; `packed` after they were staged once."""

    adapter_id: int
    name: str
    path: str
    content: Content
    state: AdapterState = CPU_CACHED
    packed: bool = False
    slot: int = NO_SLOT
    generation: int = 0

    def inventory(self) -> reports.InventoryAdapter:
        return reports.InventoryAdapter(
            self.adapter_id,
            self.name,
            self.path,
            self.content.fingerprint,
            self.content.rank,
            self.state,
            self.slot,
            self.generation,
            self.content.load_bytes,
            self.content.blob_bytes,
            self.content.warnings,
        )


@dataclass
class RunningOperation:
    """An operation that has begun; `stopped`: an inference that was ordered to end.

    `suspended`: a generation that has no slot.
    """

    command: Any
    content: Content | None = None
    stopped: bool = False
    suspended: bool = False
