"""Adapters in host memory: those that are loaded, and those that were checked for a load."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import structlog

from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.residency.staging import Blob
from loradock.messages.commands import CheckAdapter, LoadWeights
from loradock.messages.ids import (
    CPU_CACHED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    AdapterId,
    AdapterState,
)
from loradock.messages.reports import InventoryAdapter

_log = structlog.get_logger()

CHECKED_BYTES_MAX: Final = 512 << 20
"""The most bytes of checked adapters that wait for their load; the newest is not counted."""

CHECKED_S_MAX: Final = 10.0
"""The longest wait of a checked adapter; a load that has room follows its check at once."""


@dataclass
class HostAdapter:
    """An adapter on the host, and its slot, if any.

    `weights`: the model that was read; a blob once it was staged, also after it was unstaged.
    Nothing else may reference them, so that dropping or replacing them frees their memory.
    `warnings`: from its check.
    """

    source: LoadWeights
    rank: int
    host_bytes: int
    blob_bytes: int
    weights: LoRAModel | Blob
    is_staged: bool = False
    slot: int = NO_SLOT
    generation: int = 0
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: LoadWeights, loaded: LoadedAdapter) -> "HostAdapter":
        """Return the record of an adapter that was just read."""
        return cls(
            source,
            loaded.rank,
            loaded.host_bytes,
            loaded.blob_bytes,
            loaded.model,
            warnings=loaded.warnings,
        )

    @property
    def state(self) -> AdapterState:
        """The life-cycle state, derived from the other fields and never stored."""
        if self.slot != NO_SLOT:
            return GPU_SLOT
        return PINNED if self.is_staged else CPU_CACHED

    def inventory(self) -> InventoryAdapter:
        """Return the record as it is reported to the controller."""
        return InventoryAdapter(
            adapter_id=self.source.adapter_id,
            adapter=self.source.adapter,
            path=self.source.path,
            fingerprint=self.source.fingerprint,
            rank=self.rank,
            state=self.state,
            slot=self.slot,
            generation=self.generation,
            host_bytes=self.host_bytes,
            blob_bytes=self.blob_bytes,
            warnings=self.warnings,
        )


@dataclass
class _CheckedAdapter:
    check: CheckAdapter
    loaded: LoadedAdapter
    since_s: float | None = None


class CheckedAdapters:
    """Adapters that were checked and not loaded yet, so that no load reads what a check has read.

    Their key is the adapter's id, which names one version and is never given twice. At most
    `size_bytes_max` bytes are kept beside the newest, each for `wait_s_max` seconds at most; what
    is dropped is logged, and its load reads and checks the files again.

    Of several ranks each keeps its own part, and all drop the same: commands and reports have the
    same order on all, sizes are equal, and the time is rank 0's.
    """

    def __init__(
        self, size_bytes_max: int = CHECKED_BYTES_MAX, wait_s_max: float = CHECKED_S_MAX
    ) -> None:
        self._size_bytes_max = size_bytes_max
        self._wait_s_max = wait_s_max
        self._by_id: OrderedDict[AdapterId, _CheckedAdapter] = OrderedDict()
        # The host memory of all of them.
        self.size_bytes = 0

    def add(self, check: CheckAdapter, loaded: LoadedAdapter) -> None:
        """Keep what a check has read, and drop the oldest others that have no room beside it."""
        self.take(check.adapter_id)
        while self.size_bytes > self._size_bytes_max:
            self._drop(next(iter(self._by_id)), "bytes", self._size_bytes_max)
        self._by_id[check.adapter_id] = _CheckedAdapter(check, loaded)
        self.size_bytes += loaded.host_bytes

    def take(self, adapter_id: AdapterId) -> LoadedAdapter | None:
        """Return what the last check of an adapter has read, once; None if it is not there."""
        found = self._by_id.pop(adapter_id, None)
        if found is None:
            return None
        self.size_bytes -= found.loaded.host_bytes
        return found.loaded

    def expire(self, now_s: float) -> None:
        """Drop those that have waited for too long; a wait begins with the first call after it."""
        for adapter_id, checked in list(self._by_id.items()):
            if checked.since_s is None:
                checked.since_s = now_s
            elif now_s - checked.since_s > self._wait_s_max:
                self._drop(adapter_id, "seconds", self._wait_s_max)

    def clear(self) -> None:
        """Drop all, because no load follows."""
        self._by_id.clear()
        self.size_bytes = 0

    def _drop(self, adapter_id: AdapterId, unit: str, most: float) -> None:
        check = self._by_id[adapter_id].check
        self.take(adapter_id)
        _log.info(
            "a checked adapter is dropped; its load will read and check it again",
            adapter=check.adapter,
            op=check.op,
            bound=f"{most:g} {unit}",
        )
